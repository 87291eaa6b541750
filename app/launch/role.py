"""Becomes one role of an engine of several hosts: `topspin scheduler`, `gateway`, `node`.

Owns the arguments and the environment that this role gets from the plan, and the groups of keys
that it lets in. The process is replaced by the role's own, since OpenMP and the heap read their
environment when a process starts. Knows roles by module name only. Called by app.cli.role.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from app.launch.child_process import RoleCommand
from app.launch.commands import import_path, module_argv, node_command
from topspin.errors import ConfigError
from topspin.plan.network import NetworkSpec
from topspin.plan.spec import EnginePlan, NodeSpec, ServeConfig
from topspin.processes.listening import address_of, in_url
from topspin.processes.node_network import NodeNetwork, argv_of
from topspin.processes.secure_channel import check_protected


def scheduler_command(
    config: ServeConfig, config_fd: int, *, keys: Path | None, bind: str | None
) -> RoleCommand:
    """Return the scheduler's command; `bind` HOST takes the place of the address's own."""
    control = network_of(config.plan, keys).control
    if bind is not None:
        control = f"tcp://{in_url(bind)}:{control.rpartition(':')[2]}"
    return _server("scheduler", config_fd, control, keys)


def gateway_command(config: ServeConfig, config_fd: int, *, keys: Path | None) -> RoleCommand:
    """Return the command of a gateway."""
    return _server("gateway", config_fd, network_of(config.plan, keys).control, keys)


def _server(role: str, config_fd: int, control: str, keys: Path | None) -> RoleCommand:
    own = argv_of(NodeNetwork(), keys=keys, group=role)
    argv = module_argv(
        f"server.{role}", "--config", f"/dev/fd/{config_fd}", "--control", control, *own
    )
    return RoleCommand(name=role, argv=argv, environment=import_path(os.environ))


def one_node_command(
    plan: EnginePlan, node: NodeSpec, *, keys: Path | None, advertise: str | None
) -> RoleCommand:
    """Return the command of `node`, which others reach at `advertise` (None: its `host`).

    Raises ConfigError for a host whose address is not known.
    """
    network = network_of(plan, keys)
    host = advertise  # a draft node listens at its address, unless it is told
    if node.role != "draft":
        receives = plan.link.transport in ("tcp", "nixl") and node.role in ("expert", "stage")
        host = advertise or node.host if receives else None
    own_network = NodeNetwork(
        host=None if host is None else _address_of(host),
        peers=None if keys is None else peer_groups(plan, node),
        trusted_network=network.trusted,
    )
    own = argv_of(own_network, keys=keys, group=node.key_group)
    return node_command(plan, node, network.control, further=own)


def peer_groups(plan: EnginePlan, node: NodeSpec) -> tuple[str, ...]:
    """Return the groups of the nodes that exchange rows, or drafts, with `node`."""
    others: dict[str, Sequence[NodeSpec]] = {
        "attention": [*plan.experts, *plan.stages],
        "stage": [*plan.experts, *plan.attention],
        "expert": [*plan.attention, *plan.stages],
        "draft": plan.attention,
    }
    return tuple(sorted({each.key_group for each in others[node.role]}))


def network_of(plan: EnginePlan, keys: Path | None) -> NetworkSpec:
    """Return the network of a plan. Raises ConfigError if it has none, or needs `keys`."""
    if plan.network is None:
        raise ConfigError(
            "the plan has no `network`: `topspin serve --plan` starts all its processes; give "
            "network.control to start them one by one"
        )
    if keys is None:
        check_protected(plan.network.control, None)
    return plan.network


def find_node(plan: EnginePlan, role: str, index: int) -> NodeSpec:
    """Return a node of a plan. Raises ConfigError if there is none."""
    for node in plan.nodes:
        if (node.role, node.index) == (role, index):
            return node
    known = ", ".join(str(node) for node in plan.nodes)
    raise ConfigError(f"the plan has no {role} {index}; it has {known}")


def index_of(text: str, hostname: str) -> int:
    """Return the number in `text`: N, or what it makes of the numbers in the host's name.

    "ordinal" or "ordinal+N" on NAME-ORDINAL: so the pods of a Kubernetes StatefulSet are nodes N,
    N + 1, ... "worker*S" or "worker*S+N" on NAME-GROUP-WORKER, where workers begin with 1: so those
    of a LeaderWorkerSet are, with S of them to a group. Raises ConfigError.
    """
    found = re.fullmatch(
        r"(?:(ordinal)|worker\*(\d{1,9}))(?:\+(\d{1,9}))?|(\d{1,9})", text, re.ASCII
    )
    numbers = re.search(r"(?:-(\d{1,9}))?-(\d{1,9})$", hostname, re.ASCII)
    if found is not None:
        is_ordinal, workers, first, number = found.groups(default="")
        if number:
            return int(number)
        if numbers and is_ordinal:
            return int(numbers[2]) + int(first or 0)
        if numbers and numbers[1] and int(numbers[2]) > 0:
            return int(numbers[1]) * int(workers) + int(numbers[2]) - 1 + int(first or 0)
    raise ConfigError(
        f"--index {text}: give N, or ordinal or ordinal+N on a host whose name ends with -N, or "
        f"worker*S or worker*S+N on one whose name ends with -GROUP-WORKER (this one is "
        f"{hostname!r})"
    )


def _address_of(host: str) -> str:
    try:
        return address_of(host)
    except OSError as error:
        raise ConfigError(
            f"host {host!r} has no IPv4 address and no IPv6 one: {error.strerror}"
        ) from error


def become(command: RoleCommand) -> NoReturn:
    """Replace this process by that of `command`."""
    sys.stdout.flush()
    os.execve(command.argv[0], command.argv, {**os.environ, **command.environment})

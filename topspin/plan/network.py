"""Several hosts: the part of an engine plan that says how its processes find each other.

Owns the checks of what an engine of several hosts needs, and of one host cannot have. Knows the
plan's nodes by their fields only; called by topspin.plan.spec.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from topspin.errors import ConfigError
from topspin.plan.settings import Section

if TYPE_CHECKING:
    from topspin.plan.spec import EnginePlan

LOCALHOST = "localhost"
# They join memory, not networks.
_ON_ONE_HOST = ("shm", "cuda_ipc", "local")


class NetworkSpec(Section, frozen=True, kw_only=True):
    """The engine's processes are started one by one (`topspin scheduler`, `gateway`, `node`).

    `control` is tcp://HOST:PORT, where the scheduler listens. Each node's `host` is where the
    others reach it. `trusted`: nobody else can send to the network, so rows may travel by nixl,
    which cannot authenticate them.
    """

    control: str
    trusted: bool = False


def place_of(address: str, *, name: str) -> tuple[str, int]:
    """Return host and port of tcp://HOST:PORT; an IPv6 address stands in brackets.

    Raises ConfigError with `name` for another form.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) < 2**16
    if not (address.startswith("tcp://") and host and is_port):
        raise ConfigError(f"{name} {address!r} is not tcp://HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether `host`, a name or an address, is this host only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_network(plan: EnginePlan) -> None:
    """Raise ConfigError, naming the field, for hosts that cannot work together."""
    network = plan.network
    if network is None:
        _check_one_host(plan)
        return
    _, port = place_of(network.control, name="network.control")
    if port == 0:
        raise ConfigError(f"network.control {network.control!r} is not tcp://HOST:PORT")
    transport = plan.link.transport
    nodes = [*plan.attention, *plan.stages, *plan.experts]
    hosts = list(dict.fromkeys(node.host for node in nodes))
    if transport == "local":
        raise ConfigError("links[0]: transport local: it joins threads; use shm or tcp")
    if transport in _ON_ONE_HOST and len(hosts) > 1:
        raise ConfigError(
            f"links[0]: transport {transport} joins processes of one host, and the nodes are on "
            f"{', '.join(hosts)}; use tcp or nixl"
        )
    if transport == "nixl" and len(hosts) > 1 and not network.trusted:
        raise ConfigError(
            "links[0]: transport nixl: one-sided writes between hosts carry no authentication; set "
            "network.trusted if nobody else can send to this network, or use tcp"
        )
    for node in plan.drafts:
        if node.address is None or not node.address.startswith("tcp://"):
            raise ConfigError(f"{node}: address {node.address}: give tcp://HOST:PORT")


def _check_one_host(plan: EnginePlan) -> None:
    neutral = {
        "host": (LOCALHOST, "all nodes run on this host"),
        "address": (None, "nodes of one host find each other by themselves"),
        "key": (None, "nodes of one host need no keys"),
    }
    for idx, node in enumerate(plan.nodes):
        for name, (only, reason) in neutral.items():
            value = getattr(node, name)
            if value != only:
                shown = "null" if only is None else only
                raise ConfigError(
                    f"nodes[{idx}] ({node}): {name} {value!r}: {reason} without `network`; leave "
                    f"it at {shown}"
                )

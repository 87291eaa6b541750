"""The commands of an engine's node processes: modules, arguments and environments.

Owns the mapping from a plan to what is executed for each node, and the configuration that the
scheduler and gateways inherit; knows roles by module name only and imports none of them. Starts
nothing: app.launch.engine supervises these commands on one host, app.launch.role becomes
one of them.
"""

from __future__ import annotations

import fcntl
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

import topspin
from app.launch.child_process import Part, RoleCommand
from topspin.cores import node_environment
from topspin.plan.spec import EnginePlan, NodeSpec, ServeConfig

# The modules of all nodes' processes: what takes long to import, they share.
NODE_IMPORTS = (
    "attention_nodes.command",
    "attention_nodes.stages.command",
    "draft_nodes.command",
    "draft_nodes.drafter",
    "expert_nodes.command",
)

# Python has no name for it yet. F_SEAL_WRITE fails while the kernel itself holds a page.
_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


def node_commands(plan: EnginePlan, control: str) -> list[RoleCommand]:
    """Return the commands of all nodes of an engine on this host, in starting order."""
    if not plan.is_one_process:
        return [
            node_command(plan, node, control)
            for node in (*plan.drafts, *plan.experts, *plan.attention, *plan.stages)
        ]
    argv = module_argv(
        "app.launch.local_node",
        *("--control", control, "--model", plan.model.path),
        *("--attention-nodes", str(len(plan.attention))),
        *("--expert-nodes", str(len(plan.experts))),
        *(("--failover",) if plan.failover.restart else ()),
    )
    environment = _environment(plan, plan.attention[0])
    local = RoleCommand(
        name="local node",
        argv=argv,
        environment=environment,
        imports=_imports(plan, plan.attention[0]),
    )
    return [local, *(node_command(plan, node, control) for node in plan.drafts)]


def spare_commands(plan: EnginePlan, control: str) -> list[RoleCommand]:
    """Return the commands of the spare nodes that the plan asks for, which may end at any time.

    Each is the node's own: the scheduler makes a spare of the one that comes second.
    """
    if plan.failover.standby != "weights":
        return []
    return [
        replace(node_command(plan, node, control), name=f"spare {node}", part="helper")
        for node in (*plan.experts, *plan.attention)
        if not node.optional
    ]


def node_command(
    plan: EnginePlan, node: NodeSpec, control: str, *, further: Sequence[str] = ()
) -> RoleCommand:
    """Return the command of one node; `further` are more arguments (processes.node_network).

    The engine starts without an optional node, and goes on without a draft node.
    """
    is_draft = node.role == "draft"
    part: Part = "optional" if node.optional else "helper" if is_draft else "worker"
    argv = module_argv(
        _module_of(plan, node),
        *("--control", control, "--model", plan.model.path, "--index", str(node.index)),
        *(("--transport", plan.link.transport) if node.role in ("expert", "stage") else ()),
        *(("--failover",) if plan.failover.restart and not is_draft else ()),
        *further,
    )
    return RoleCommand(
        name=str(node),
        argv=argv,
        environment=_environment(plan, node),
        part=part,
        imports=_imports(plan, node),
    )


def _imports(plan: EnginePlan, node: NodeSpec) -> tuple[str, ...]:
    """Return what a standby process imports for a node; (): it is executed, as on a device.

    No process with a device was ever forked.
    """
    is_forked = plan.failover.standby != "none" and not node.place.is_device
    return NODE_IMPORTS if is_forked else ()


def _module_of(plan: EnginePlan, node: NodeSpec) -> str:
    if node.role == "stage":
        return "attention_nodes.stages"
    if node.role == "attention" and plan.speculation and plan.speculation.computes:
        return "draft_nodes.beside_attention"
    return f"{node.role}_nodes"


def _environment(plan: EnginePlan, node: NodeSpec) -> dict[str, str]:
    """Return the environment of the process of `node`.

    A node on a device is not counted among those that share the cores: it computes on the host only
    while it loads.
    """
    on_device = node.place.is_device
    if plan.is_one_process and node.role != "draft":
        on_device = plan.shares_device or (on_device and not plan.experts)
    environment = node_environment(
        os.environ,
        num_threads=node.num_threads,
        spin_count=plan.execution.spin_count,
        cores=node.cores,
        takes_turns=not (plan.is_one_process or node.cores or on_device),
        on_device=on_device,
    )
    return {**import_path(os.environ), **environment}


def inherited_config(config: ServeConfig) -> int:
    """Return a descriptor of `config` as JSON, which processes started with it inherit.

    It is read by load_serve_config(), has no path in a file system, and cannot be changed.
    """
    fd = os.memfd_create("topspin-config", os.MFD_ALLOW_SEALING)
    os.write(fd, msgspec.json.encode(config))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd


def module_argv(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs module `name`."""
    # -P: do not import a folder called `models` or `server` in the user's directory.
    return (sys.executable, "-P", "-m", name, *arguments)


def import_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return PYTHONPATH such that roles import the folders beside this package.

    A source checkout is put first (an editable install would come after site-packages);
    an installed Topspin is found as it is.
    """
    root = Path(topspin.__file__).resolve().parent.parent
    if root == Path(sysconfig.get_path("purelib")).resolve():
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(root), environment.get("PYTHONPATH")]))}

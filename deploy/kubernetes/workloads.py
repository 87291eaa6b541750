"""The workloads of an engine: what starts its pods, replaces them, and how many there are.

Owns the choice of workload per role. Our failover replaces single nodes, so nodes that are alike
are pods of one StatefulSet, whose numbers are their indices; a group that is restarted together
would lose what the others hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.kubernetes.needs import Needs
from deploy.kubernetes.objects import Object, own, selector
from deploy.kubernetes.pods import pod
from deploy.services.engine import JOINED, SCHEDULER, Engine, Group, Node
from deploy.services.processes import (
    Process,
    gateway_process,
    node_process,
    scheduler_process,
    whole_process,
)


def workloads(engine: Engine) -> dict[str, list[Object]]:
    """Return all workloads of an engine, by the file that they are in."""
    if engine.is_whole:
        # GPUs for one more than there are would stay idle, or are not there.
        surge = 0 if engine.num_gpus else 1
        return {"engine": [_deployment(engine, whole_process(engine), surge=surge)]}
    files = {
        "scheduler": [_scheduler(engine)],
        # A new one is ready before an old one ends.
        "gateway": [_deployment(engine, gateway_process(), surge=1)],
    }
    groups = list(engine.groups)
    if engine.shares_memory:
        joined = [group for group in groups if group.role != "draft"]
        files["nodes"] = [_nodes_in_one_pod(engine, joined)]
        groups = [group for group in groups if group.role == "draft"]
    for group in groups:
        files.setdefault(group.role, []).append(_group_of_pods(engine, group))
    return files


def _scheduler(engine: Engine) -> Object:
    """Return the scheduler: one, with a name that the others find again when it is replaced."""
    name = SCHEDULER.pods
    template = pod(engine, name, [scheduler_process()], kind=name, more_labels=group_label(name))
    return _stateful_set(engine, name, name, 1, template)


def _nodes_in_one_pod(engine: Engine, groups: Sequence[Group]) -> Object:
    """Return the one pod of nodes that share memory; each is a container, restarted by itself."""
    processes = [
        _process(engine, node, name=f"{node.role}-{node.index}", index=str(node.index))
        for group in groups
        for node in group.nodes
    ]
    name = JOINED.pods
    template = pod(engine, name, processes, kind="node", more_labels=group_label(name))
    return _stateful_set(engine, name, name, 1, template)


def _group_of_pods(engine: Engine, group: Group) -> Object:
    """Return the pods of nodes that are alike."""
    index = f"ordinal+{group.first}" if group.first else "ordinal"
    template = node_pod(engine, group.nodes[0], index, group=group.name)
    return _stateful_set(engine, group.name, group.role, len(group.nodes), template)


def node_pod(
    engine: Engine, node: Node, index: str, *, group: str, needs: Needs | None = None
) -> Object:
    """Return the pod of one node of a group, which asks for what that needs, or for `needs`."""
    process = _process(engine, node, name=node.role, index=index)
    labels = group_label(group)
    return pod(
        engine,
        node.role,
        [process],
        kind="node",
        needs=needs,
        more_labels=labels,
        product=node.product,
    )


def _process(engine: Engine, node: Node, *, name: str, index: str) -> Process:
    return node_process(engine, node, name=name, index=index, address="$(POD_IP)")


def _stateful_set(
    engine: Engine, name: str, component: str, replicas: int, template: Object
) -> Object:
    """Return pods NAME-0, NAME-1, ... that all start at once: nodes wait for each other."""
    spec = {
        "replicas": replicas,
        "serviceName": engine.name,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate"},
        "selector": {"matchLabels": selector(engine, component) | group_label(name)},
        "template": template,
    }
    return own(engine, "StatefulSet", name, component, spec)


def _deployment(engine: Engine, process: Process, *, surge: int) -> Object:
    """Return pods that answer HTTP. While they are replaced there are `surge` (0, 1) more."""
    name = process.name
    spec = {
        "replicas": engine.replicas,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": surge, "maxUnavailable": 1 - surge},
        },
        "selector": {"matchLabels": selector(engine, name)},
        "template": pod(engine, name, [process], kind="server"),
    }
    return own(engine, "Deployment", name, name, spec)


def group_label(name: str) -> dict[str, str]:
    """Return the label that tells several StatefulSets of a role apart."""
    return {"topspin/group": name}


def optional_groups(engine: Engine) -> Iterator[Group]:
    """Yield the groups whose pods may be fewer: the engine serves without them."""
    if not engine.shares_memory:
        yield from (group for group in engine.groups if group.is_optional)

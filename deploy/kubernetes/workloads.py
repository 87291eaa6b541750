"""The workloads of an engine: what starts its pods, replaces them, and how many there are.

Owns the choice of workload per role. Our failover replaces single nodes, so nodes that are alike
are pods of one StatefulSet, whose numbers are their indices; a group that is restarted together
would lose what the others hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deploy.kubernetes.pods import (
    DRAIN_S,
    HTTP,
    Needs,
    Object,
    api_keys_mount,
    container,
    exec_probes,
    http_probes,
    keys_mount,
    metadata,
    models_mount,
    plan_mount,
    pod,
    run_mount,
    selector,
    shared_memory_mount,
    spill_mount,
    volumes_of,
)
from deploy.services.arguments import (
    GRACE_S,
    SHUTDOWN_TIMEOUT_S,
    gateway_arguments,
    node_arguments,
    progress_file,
    scheduler_arguments,
    whole_arguments,
)
from deploy.services.engine import CONTROL_PORT, Engine, Group, Node, threads_of
from deploy.services.memory import SERVER_BYTES


def workloads(engine: Engine) -> dict[str, list[Object]]:
    """Return all workloads of an engine, by the file that they are in."""
    if engine.is_whole:
        return {"engine": [whole(engine)]}
    files = {"scheduler": [scheduler(engine)], "gateway": [gateway(engine)]}
    groups = list(engine.groups)
    if engine.shares_memory:
        joined = [group for group in groups if group.role != "draft"]
        files["nodes"] = [nodes_in_one_pod(engine, joined)]
        groups = [group for group in groups if group.role == "draft"]
    for group in groups:
        files.setdefault(group.role, []).append(group_of_pods(engine, group))
    return files


def scheduler(engine: Engine) -> Object:
    """Return the scheduler: one, with a name that the others find again when it is replaced."""
    mounts = [plan_mount(), models_mount(), keys_mount("scheduler"), run_mount()]
    own = container(
        engine,
        "scheduler",
        scheduler_arguments(),
        Needs(cpus=1, memory=SERVER_BYTES),
        mounts=mounts,
        probes=exec_probes(engine, progress_file("scheduler")),
        port=("control", CONTROL_PORT),
    )
    volumes = volumes_of(engine, mounts)
    template = pod(engine, "scheduler", [own], volumes, grace_s=GRACE_S, kind="scheduler")
    return stateful_set(engine, "scheduler", "scheduler", 1, template)


def gateway(engine: Engine) -> Object:
    """Return the gateways. A new one is ready before an old one ends."""
    mounts = [plan_mount(), models_mount(), keys_mount("gateway"), api_keys_mount()]
    own = container(
        engine,
        "gateway",
        gateway_arguments(),
        Needs(cpus=1, memory=SERVER_BYTES),
        mounts=mounts,
        probes=http_probes(),
        port=HTTP,
    )
    return deployment(engine, "gateway", own, volumes_of(engine, mounts), surge=1)


def whole(engine: Engine) -> Object:
    """Return engines that are one container each, gateway and all; more of them serve more."""
    mounts = [plan_mount(), models_mount(), api_keys_mount(), shared_memory_mount()]
    mounts += _spill_mounts(engine, engine.plan.nodes)
    own = container(
        engine,
        "engine",
        whole_arguments(),
        _needs_of_all(engine),
        mounts=mounts,
        probes=http_probes(),
        port=HTTP,
    )
    volumes = volumes_of(engine, mounts, nodes=engine.plan.nodes)
    # GPUs for one more than there are would stay idle, or are not there.
    return deployment(engine, "engine", own, volumes, surge=0 if engine.num_gpus else 1)


def _needs_of_all(engine: Engine) -> Needs:
    nodes = engine.plan.nodes
    memory = [engine.memory_of(node) for node in nodes]
    known = [each for each in memory if each is not None]
    threads = [threads_of(node) for node in nodes]
    return Needs(
        # Nodes of one process take turns on the same cores.
        cpus=1 + max(threads) if engine.plan.is_one_process else 1 + sum(threads),
        memory=sum(known) + 2 * SERVER_BYTES if len(known) == len(memory) else None,
        disk=engine.spill_bytes(nodes),
        gpus=engine.num_gpus,
    )


def nodes_in_one_pod(engine: Engine, groups: Sequence[Group]) -> Object:
    """Return the one pod of nodes that share memory; each is a container, restarted by itself."""
    nodes = [node for group in groups for node in group.nodes]
    containers, mounts = [], []
    for node in nodes:
        own = _node_mounts(engine, node)
        containers.append(
            _node_container(engine, node, str(node), index=str(node.index), mounts=own)
        )
        mounts += own
    template = pod(
        engine,
        "nodes",
        containers,
        volumes_of(engine, mounts, nodes=nodes),
        grace_s=_node_grace_s(engine),
        kind="node",
    )
    return stateful_set(engine, "nodes", "nodes", 1, template)


def group_of_pods(engine: Engine, group: Group) -> Object:
    """Return the pods of nodes that are alike."""
    first = group.nodes[0]
    index = f"ordinal+{group.first}" if group.first else "ordinal"
    return stateful_set(
        engine, group.name, group.role, len(group.nodes), node_pod(engine, first, index)
    )


def node_pod(engine: Engine, node: Node, index: str, needs: Needs | None = None) -> Object:
    """Return the pod of one node, which asks for what that needs, or for `needs`."""
    mounts = _node_mounts(engine, node)
    own = _node_container(engine, node, node.role, index=index, mounts=mounts, needs=needs)
    volumes = volumes_of(engine, mounts, nodes=[node])
    return pod(engine, node.role, [own], volumes, grace_s=_node_grace_s(engine), kind="node")


def _node_container(
    engine: Engine,
    node: Node,
    name: str,
    *,
    index: str,
    mounts: Sequence[Object],
    needs: Needs | None = None,
) -> Object:
    return container(
        engine,
        name.replace(" ", "-"),
        node_arguments(node.role, index, "$(POD_IP)" if engine.listens(node) else None),
        needs or needs_of(engine, node),
        mounts=mounts,
        probes=exec_probes(engine, progress_file(node.role, index)),
    )


def needs_of(engine: Engine, node: Node) -> Needs:
    """Return what a node's container asks for."""
    return Needs(
        cpus=threads_of(node),
        memory=engine.memory_of(node),
        disk=engine.spill_bytes([node]),
        gpus=1 if node.place.is_gpu else 0,
        has_rdma=engine.plan.link.transport == "nixl" and node.role != "draft",
    )


def _node_mounts(engine: Engine, node: Node) -> list[Object]:
    mounts = [plan_mount(), models_mount(), keys_mount(node.key_group), run_mount()]
    mounts.append(shared_memory_mount())
    return mounts + _spill_mounts(engine, [node])


def _spill_mounts(engine: Engine, nodes: Sequence[Node]) -> list[Object]:
    return [spill_mount()] if engine.spill_bytes(nodes) else []


def _node_grace_s(engine: Engine) -> float:
    return engine.plan.failover.halt_deadline_s + GRACE_S


def stateful_set(
    engine: Engine, name: str, component: str, replicas: int, template: Object
) -> Object:
    """Return pods NAME-0, NAME-1, ... that all start at once: nodes wait for each other."""
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(engine, name, component),
        "spec": {
            "replicas": replicas,
            "serviceName": engine.name,
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "selector": {"matchLabels": selector(engine, component) | group_label(name)},
            "template": labelled(template, group_label(name)),
        },
    }


def deployment(
    engine: Engine, component: str, own: Object, volumes: Sequence[Object], *, surge: int
) -> Object:
    """Return pods that answer HTTP. While they are replaced there are `surge` (0, 1) more."""
    template = pod(
        engine,
        component,
        [own],
        volumes,
        grace_s=DRAIN_S + SHUTDOWN_TIMEOUT_S + GRACE_S,
        kind="server",
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(engine, component, component),
        "spec": {
            "replicas": engine.replicas,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": surge, "maxUnavailable": 1 - surge},
            },
            "selector": {"matchLabels": selector(engine, component)},
            "template": template,
        },
    }


def group_label(name: str) -> dict[str, str]:
    """Return the label that tells several StatefulSets of a role apart."""
    return {"topspin/group": name}


def labelled(template: Object, more: dict[str, str]) -> Object:
    """Return a pod's template with more labels."""
    meta = template["metadata"]
    return {**template, "metadata": {**meta, "labels": {**meta["labels"], **more}}}


def optional_groups(engine: Engine) -> Iterator[Group]:
    """Yield the groups whose pods may be fewer: the engine serves without them."""
    if not engine.shares_memory:
        yield from (group for group in engine.groups if group.is_optional)

"""Cores, memory, disk and devices that a container asks for.

Owns the sums; the memory of a node is deploy.services.memory's. Knows no pod.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.kubernetes.objects import Object
from deploy.services.engine import Engine, Node, threads_of
from deploy.services.memory import SERVER_BYTES
from deploy.services.processes import Process


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a container asks for; `memory` (None: it is not known) and `disk` in bytes."""

    cpus: int
    memory: int | None
    disk: int = 0
    gpus: int = 0
    has_rdma: bool = False


def needs_of(engine: Engine, process: Process) -> Needs:
    """Return what a process needs. Raises ConfigError if the plan does not say."""
    if engine.is_whole:
        return _needs_of_all(engine)
    if not process.nodes:
        return Needs(cpus=1, memory=SERVER_BYTES)
    (node,) = process.nodes
    return node_needs(engine, node)


def node_needs(engine: Engine, node: Node) -> Needs:
    """Return what a node's process needs. Raises ConfigError if the plan does not say."""
    return Needs(
        cpus=threads_of(node),
        memory=engine.memory_of(node),
        disk=engine.spill_bytes([node]),
        gpus=1 if node.place.is_gpu else 0,
        has_rdma=engine.plan.link.transport == "nixl" and node.role != "draft",
    )


def _needs_of_all(engine: Engine) -> Needs:
    nodes = engine.plan.nodes
    known = [each for node in nodes if (each := engine.memory_of(node)) is not None]
    threads = [threads_of(node) for node in nodes]
    return Needs(
        # Nodes of one process take turns on the same cores.
        cpus=1 + max(threads) if engine.plan.is_one_process else 1 + sum(threads),
        memory=sum(known) + 2 * SERVER_BYTES if len(known) == len(nodes) else None,
        disk=engine.spill_bytes(nodes),
        gpus=engine.num_gpus,
    )


def resources(engine: Engine, needs: Needs) -> Object:
    """Return what a container asks for.

    Cores and memory have no limit: a node that loads uses more for a while, and one that is slowed
    down or ended slows down or halts all others.
    """
    requests = {"cpu": str(needs.cpus)}
    if needs.memory is not None:
        requests["memory"] = mebibytes(needs.memory)
    if needs.disk:
        requests["ephemeral-storage"] = mebibytes(needs.disk)
    devices: dict[str, str] = {}
    if needs.gpus:
        devices["nvidia.com/gpu"] = str(needs.gpus)
    if needs.has_rdma:
        devices[engine.asked.rdma_resource] = "1"
    return {"requests": requests | devices, **({"limits": devices} if devices else {})}


def mebibytes(size: int) -> str:
    """Return a size in bytes as Kubernetes writes it, rounded up."""
    return f"{-(-size // 2**20)}Mi"

"""The names by which pods are reached."""

from __future__ import annotations

from deploy.services.engine import Group, Hosts
from topspin.plan.spec import NodeSpec


def hosts(*, share_memory: bool) -> Hosts:
    """Return how pods are reached: by their own names, below the headless Service's.

    Nodes that `share_memory` are one pod, but for those that draft.
    """

    def node_host(engine: str, group: Group, node: NodeSpec) -> str:
        if share_memory and node.role != "draft":
            return f"{engine}-nodes-0.{engine}"
        return f"{engine}-{group.name}-{node.index - group.first}.{engine}"

    return Hosts(scheduler=lambda engine: f"{engine}-scheduler-0.{engine}", node=node_host)

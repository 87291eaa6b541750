"""LeaderWorkerSets: an attention node and the stages that compute its later layers, as one group.

Owns which attention nodes have stages that form such groups. A group is scheduled, scaled and
rolled as one; a lost pod of it is replaced alone, as the engine goes on with the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deploy.kubernetes.needs import Needs, node_needs
from deploy.kubernetes.objects import Object, own
from deploy.kubernetes.workloads import node_pod
from deploy.services.engine import Engine, Group, Node


class LeaderGroup(NamedTuple):
    """Attention nodes that are alike, with as many stages each, in their order."""

    leaders: Group
    stages: tuple[Node, ...]

    @property
    def num_stages(self) -> int:
        """Return how many stages an attention node has."""
        return len(self.stages) // len(self.leaders.nodes)


def leader_groups(engine: Engine) -> Iterator[LeaderGroup]:
    """Yield the attention nodes whose stages follow each other; none where nodes share a pod."""
    if engine.shares_memory or engine.is_whole:
        return
    for group in engine.groups:
        if group.role != "attention":
            continue
        owners = [node.index for node in group.nodes]
        stages = [stage for stage in engine.plan.stages if stage.of in owners]
        each = len(stages) // len(owners)
        in_order = [(owner, number) for owner in owners for number in range(each)]
        if stages and [stage.of for stage in stages] == [owner for owner, _ in in_order]:
            yield LeaderGroup(group, tuple(stages))


def leader_worker_set(engine: Engine, group: LeaderGroup) -> Object:
    """Return the groups of pods. All stages of a group ask for the most that one of them needs."""
    leaders, stages = group.leaders, group.stages
    index = f"ordinal+{leaders.first}" if leaders.first else "ordinal"
    first = stages[0].index
    stage_index = f"worker*{group.num_stages}" + (f"+{first}" if first else "")
    leader = node_pod(engine, leaders.nodes[0], index, group=leaders.name)
    worker = node_pod(
        engine, stages[0], stage_index, group=leaders.name, needs=_most(engine, stages)
    )
    spec = {
        "replicas": len(leaders.nodes),
        "startupPolicy": "LeaderCreated",
        "networkConfig": {"subdomainPolicy": "Shared"},
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"maxUnavailable": 1},
        },
        "leaderWorkerTemplate": {
            "size": 1 + group.num_stages,
            "restartPolicy": "None",
            "leaderTemplate": leader,
            "workerTemplate": worker,
        },
    }
    return own(engine, "LeaderWorkerSet", leaders.name, "attention", spec)


def _most(engine: Engine, stages: Sequence[Node]) -> Needs:
    needs = [node_needs(engine, stage) for stage in stages]
    memory = [each.memory for each in needs if each.memory is not None]
    return Needs(
        cpus=max(each.cpus for each in needs),
        memory=max(memory) if len(memory) == len(needs) else None,
        disk=max(each.disk for each in needs),
        gpus=max(each.gpus for each in needs),
        has_rdma=any(each.has_rdma for each in needs),
    )


def replaced(engine: Engine, group: LeaderGroup) -> list[str]:
    """Return the StatefulSets whose pods are the group's."""
    indices = {stage.index for stage in group.stages}
    names = [each.name for each in engine.groups if each.role == "stage" and each.first in indices]
    return [f"{engine.name}-{name}" for name in (group.leaders.name, *names)]

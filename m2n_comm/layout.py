"""Routing by an expert table: the slot of every replica on each expert node.

Pure: no memory of a transport, no clock. The host's attention side reads it in each dispatch. A
token goes at most once to a node; a choice whose expert is elsewhere has slot -1 there. For experts
with several replicas, replicas.py assigns the choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m2n_comm.replicas import ReplicaChoice, replica_choice
from topspin.errors import FrameError
from topspin.expert_table import ExpertTable


@dataclass(frozen=True, slots=True)
class RouteMap:
    """An expert table as tensors.

    slot_of[layer] is [N, P] int32: the slot of replica p on node n, -1 where it is elsewhere;
    replicas are numbered by expert, then node, so without redundancy p is the expert.
    `choices[layer]` is None in that case.
    """

    version: int
    num_nodes: int
    num_experts: int
    slot_of: tuple[torch.Tensor, ...]
    choices: tuple[ReplicaChoice | None, ...]


def route_map(table: ExpertTable) -> RouteMap:
    """Return `table` as tensors."""
    slot_of: list[torch.Tensor] = []
    choices: list[ReplicaChoice | None] = []
    for layer in range(len(table.slots)):
        if layer in table.local:  # none of its rows travels
            slot_of.append(torch.empty((table.num_nodes, 0), dtype=torch.int32))
            choices.append(None)
            continue
        replicas = table.replicas(layer)
        everywhere = [replica for found in replicas for replica in found]
        slots = [[-1] * len(everywhere) for _ in range(table.num_nodes)]
        for column, replica in enumerate(everywhere):
            slots[replica.node][column] = replica.slot
        slot_of.append(torch.tensor(slots, dtype=torch.int32))
        choices.append(replica_choice(replicas, num_nodes=table.num_nodes, speeds=table.speeds))
    return RouteMap(
        version=table.version,
        num_nodes=table.num_nodes,
        num_experts=table.num_experts,
        slot_of=tuple(slot_of),
        choices=tuple(choices),
    )


def check_known(route: RouteMap, layer: int, experts: torch.Tensor) -> None:
    """Raise FrameError unless all of experts, logical ids of any shape, are in the table."""
    if not experts.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(experts))
    if low < 0 or high >= route.num_experts:
        raise FrameError(
            f"layer {layer}: routed to experts {low}..{high}, there are 0..{route.num_experts - 1}"
        )

"""Routing by an expert table: the rows that go to each expert node, and their slots.

Pure: no memory of a transport, no clock. Called once per dispatch by the host's attention side. A
token goes at most once to a node; a choice whose expert is elsewhere has slot -1 there. For experts
with several replicas, replicas.py assigns the choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

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


class SendPlan(NamedTuple):
    """The rows of one dispatch that go to each expert node.

    slots [N, T, K] integers, -1 elsewhere; `rows[n]` the ascending token rows of node n,
    int64, or None for all T in order; `counts[n]` their number.
    """

    slots: torch.Tensor
    rows: tuple[torch.Tensor | None, ...]
    counts: tuple[int, ...]


def route_map(table: ExpertTable) -> RouteMap:
    """Return `table` in the form that plan_sends reads."""
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


def plan_sends(route: RouteMap, layer: int, experts: torch.Tensor) -> SendPlan:
    """Plan the sends of experts [T, K] int64, logical ids. Raises FrameError for unknown ids."""
    num_rows, top_k = experts.shape
    nodes = route.num_nodes
    chosen = experts.reshape(-1)
    choice = route.choices[layer]
    if choice is not None:
        check_known(route, layer, chosen)
        chosen = choice.choose(chosen)
    try:
        # The look-up is the check: it fails for every id that has no column.
        flat = torch.index_select(route.slot_of[layer], 1, chosen)
    except (IndexError, RuntimeError):
        check_known(route, layer, chosen)
        raise
    slots = flat.view(nodes, num_rows, top_k)
    if nodes == 1 or num_rows == 0:
        return SendPlan(slots, (None,) * nodes, (num_rows,) * nodes)
    held = slots.amax(dim=2) >= 0
    counts = held.sum(dim=1).tolist()
    rows = held.view(-1).nonzero().view(-1).remainder_(num_rows)
    ends = tuple(accumulate(counts))
    return SendPlan(
        slots,
        tuple(
            None if count == num_rows else rows[end - count : end]
            for count, end in zip(counts, ends, strict=True)
        ),
        tuple(counts),
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


def num_parts(count: int, window_rows: int) -> int:
    """Return the number of windows that `count` rows take; 0 rows take one."""
    return max(1, -(-count // window_rows))

"""The replica of an expert that serves each choice of a micro-batch's tokens.

Pure: a function of the routing and of the table, so that every run of the same step sends the same
rows to the same nodes. Knows no transport and only the load of the micro-batch. layout.py calls
`choose` once per dispatch in layers that hold an expert twice.

The model of a node's time: each active expert reads its weights once, which costs as much as
ACTIVATION_ROWS rows (fewer do not justify reading them on a second node), and each row adds one;
divided by the node's speed. Choices of experts with one home are fixed; the others
are spread, the busiest expert first, to minimise the time of the busiest node.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from topspin.expert_table import ACTIVATION_ROWS, Replica


class SharedExpert(NamedTuple):
    """An expert with several homes: its id, its first replica's number, its nodes."""

    expert: int
    first: int
    nodes: tuple[int, ...]


class ReplicaChoice:
    """The replicas of one layer, numbered by expert, then node."""

    def __init__(
        self,
        replicas: Sequence[Sequence[Replica]],
        *,
        num_nodes: int,
        speeds: Sequence[float] = (),
    ) -> None:
        """`replicas[expert]` lists its copies in node order; see ExpertTable, also for `speeds`."""
        self._num_nodes = num_nodes
        self._speeds = tuple(speeds) or (1.0,) * num_nodes
        self._num_experts = len(replicas)
        self._homes: list[tuple[int, int]] = []
        self._shared: list[SharedExpert] = []
        self._first: list[int] = []
        first = 0
        for expert, found in enumerate(replicas):
            self._first.append(first)
            if len(found) == 1:
                self._homes.append((expert, found[0].node))
            else:
                nodes = tuple(replica.node for replica in found)
                self._shared.append(SharedExpert(expert, first, nodes))
            first += len(found)
        self._num_replicas = first

    def choose(self, experts: Tensor) -> Tensor:
        """Return, for choices [P] int64 of logical ids, the numbers [P] of their replicas.

        The first choices of an expert, in row order, go to its first replica, and so on.
        """
        counts = torch.bincount(experts, minlength=self._num_experts).tolist()
        quotas = torch.tensor(self.quotas(counts))
        order = experts.argsort(stable=True)
        chosen = torch.empty_like(experts)
        chosen[order] = torch.repeat_interleave(quotas)
        return chosen

    def quotas(self, counts: Sequence[int]) -> list[int]:
        """Return the number of choices that each replica serves if expert e has counts[e]."""
        quotas = [0] * self._num_replicas
        load = [0] * self._num_nodes
        for expert, node in self._homes:
            count = counts[expert]
            if count:
                quotas[self._first[expert]] = count
                load[node] += count + ACTIVATION_ROWS
        busy = [shared for shared in self._shared if counts[shared.expert]]
        busy.sort(key=lambda shared: (-counts[shared.expert], shared.expert))
        for shared in busy:
            spread = spread_rows(
                counts[shared.expert],
                [load[node] for node in shared.nodes],
                [self._speeds[node] for node in shared.nodes],
            )
            for idx, (node, rows) in enumerate(zip(shared.nodes, spread, strict=True)):
                quotas[shared.first + idx] = rows
                load[node] += rows + ACTIVATION_ROWS if rows else 0
        return quotas


def spread_rows(
    count: int, loads: Sequence[int], speeds: Sequence[float] | None = None
) -> list[int]:
    """Split `count` > 0 rows over nodes so that the longest time of the nodes used is shortest.

    A node's time is its load with the rows, divided by its speed (None: 1). Tried are the node that
    alone is done first, and the first 2, 3, ... by the time at which they could begin, then by
    position; of equal ones the first.
    """
    speeds = speeds or (1.0,) * len(loads)
    begun = [(load + ACTIVATION_ROWS) / speed for load, speed in zip(loads, speeds, strict=True)]
    order = sorted(range(len(loads)), key=lambda idx: (begun[idx], idx))
    alone = min(order, key=lambda idx: begun[idx] + count / speeds[idx])
    best = [count if idx == alone else 0 for idx in range(len(loads))]
    best_peak = begun[alone] + count / speeds[alone]
    total, speed = loads[order[0]] + ACTIVATION_ROWS, speeds[order[0]]
    for used, idx in enumerate(order[1:], start=2):
        if begun[idx] >= best_peak:
            break  # using it would not lower the peak
        total, speed = total + loads[idx] + ACTIVATION_ROWS, speed + speeds[idx]
        level, left = (total + count) / speed, count
        rows = [0] * len(loads)
        for mine in order[:used]:
            fitting = ceil(level * speeds[mine] - loads[mine] - ACTIVATION_ROWS)
            rows[mine] = max(0, min(left, fitting))
            left -= rows[mine]
        peak = max(begun[mine] + rows[mine] / speeds[mine] for mine in order[:used] if rows[mine])
        if peak < best_peak:
            best_peak, best = peak, rows
    return best


def replica_choice(
    replicas: Sequence[Sequence[Replica]], *, num_nodes: int, speeds: Sequence[float] = ()
) -> ReplicaChoice | None:
    """Return the choice of one layer, None if every expert has one home."""
    if all(len(found) == 1 for found in replicas):
        return None
    return ReplicaChoice(replicas, num_nodes=num_nodes, speeds=speeds)

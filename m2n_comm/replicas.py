"""The replica of an expert that serves each choice of a micro-batch's tokens.

Pure: a function of the routing and of the table, so that every run of the same step sends the same
rows to the same nodes. Knows no transport and only the load of the micro-batch. layout.py calls
`choose` once per dispatch in layers that hold an expert twice.

The model of a node's time: each active expert reads its weights once, which costs as much as
ACTIVATION_ROWS rows, and each row adds one. Choices of experts with one home are fixed; the others
are spread, the busiest expert first, to minimise the time of the busiest node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from topspin.expert_table import Replica

# An expert's time is nearly constant up to about this many rows: reading its weights dominates.
# Fewer rows than this do not justify reading the weights on a second node.
ACTIVATION_ROWS = 8


class SharedExpert(NamedTuple):
    """An expert with several homes: its id, its first replica's number, its nodes."""

    expert: int
    first: int
    nodes: tuple[int, ...]


class ReplicaChoice:
    """The replicas of one layer, numbered by expert, then node."""

    def __init__(self, replicas: Sequence[Sequence[Replica]], *, num_nodes: int) -> None:
        """`replicas[expert]` lists its copies in node order; see ExpertTable.replicas."""
        self._num_nodes = num_nodes
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
            spread = spread_rows(counts[shared.expert], [load[node] for node in shared.nodes])
            for idx, (node, rows) in enumerate(zip(shared.nodes, spread, strict=True)):
                quotas[shared.first + idx] = rows
                load[node] += rows + ACTIVATION_ROWS if rows else 0
        return quotas


def spread_rows(count: int, loads: Sequence[int]) -> list[int]:
    """Split `count` > 0 rows over nodes so that the highest load of the nodes used is lowest.

    The number of nodes used is the one with the lowest peak, the smaller one if equal;
    nodes are taken by load, then position.
    """
    order = sorted(range(len(loads)), key=lambda idx: (loads[idx], idx))
    total = loads[order[0]] + ACTIVATION_ROWS
    best_peak, best_used = total + count, 1
    for used, idx in enumerate(order[1:], start=2):
        if loads[idx] + ACTIVATION_ROWS >= best_peak:
            break  # using it would not lower the peak
        total += loads[idx] + ACTIVATION_ROWS
        peak = -(-(total + count) // used)
        if peak < best_peak:
            best_peak, best_used = peak, used
    rows = [0] * len(loads)
    left = count
    for idx in order[:best_used]:
        rows[idx] = min(left, best_peak - loads[idx] - ACTIVATION_ROWS)
        left -= rows[idx]
    return rows


def replica_choice(
    replicas: Sequence[Sequence[Replica]], *, num_nodes: int
) -> ReplicaChoice | None:
    """Return the choice of one layer, None if every expert has one home."""
    if all(len(found) == 1 for found in replicas):
        return None
    return ReplicaChoice(replicas, num_nodes=num_nodes)

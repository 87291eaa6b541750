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

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil

import numpy as np
from torch import Tensor

from topspin.expert_table import ACTIVATION_ROWS, Replica


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
        # By expert: the nodes of its replicas, and the first one's number.
        self._nodes = [tuple(replica.node for replica in found) for found in replicas]
        self._first = [0, *accumulate(map(len, replicas))]

    def choose(self, experts: Tensor, out: Tensor) -> None:
        """Fill out [P] int64 with the numbers of the replicas of choices [P] int64 of logical ids.

        The first choices of an expert, in row order, go to its first replica, and so on.
        """
        found, counts = np.unique(experts.numpy(), return_counts=True)
        quotas = self.quotas(dict(zip(found.tolist(), counts.tolist(), strict=True)))
        order = experts.numpy().argsort(kind="stable")
        out.numpy()[order] = np.repeat([*quotas], [*quotas.values()])

    def quotas(self, counts: Mapping[int, int]) -> dict[int, int]:
        """Return the number of choices that each replica serves if expert e has counts[e] > 0.

        Replicas without choices are left out; the others are in ascending order.
        """
        quotas: dict[int, int] = {}
        load = [0] * self._num_nodes
        shared: list[int] = []
        for expert, count in counts.items():
            if len(self._nodes[expert]) > 1:
                shared.append(expert)
                continue
            quotas[self._first[expert]] = count
            load[self._nodes[expert][0]] += count + ACTIVATION_ROWS
        for expert in sorted(shared, key=lambda each: (-counts[each], each)):
            nodes = self._nodes[expert]
            spread = spread_rows(
                counts[expert],
                [load[node] for node in nodes],
                [self._speeds[node] for node in nodes],
            )
            for replica, (node, rows) in enumerate(
                zip(nodes, spread, strict=True), start=self._first[expert]
            ):
                if rows:
                    quotas[replica] = rows
                    load[node] += rows + ACTIVATION_ROWS
        return dict(sorted(quotas.items()))


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

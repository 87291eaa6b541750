"""How fast each expert node computes, learnt from its reports.

Owns the averages. A node's work is what m2n_comm.replicas takes for its time: a row for each pair,
and ACTIVATION_ROWS for each expert whose weights were read. Pure. Called by load.py.

Nodes of about the same speed count as equal, and so do nodes whose batches are so short that most
of them is no work: a mistaken difference would move experts for nothing.
"""

from __future__ import annotations

from typing import Final

from topspin.expert_table import ACTIVATION_ROWS

EQUAL: Final = 1.25
"""Below this ratio of the fastest to the slowest node all are equal."""
KEEP: Final = 0.75
"""What a report leaves of the weight of those before it."""
# A batch takes about this long without any work, and must take LEAST_S to say something.
OVERHEAD_S: Final = 3e-5
LEAST_S: Final = 1e-4


class NodeSpeeds:
    """The work and the time of each expert node, newer ones with more weight."""

    def __init__(self, num_nodes: int) -> None:
        self._work = [0.0] * num_nodes
        self._seconds = [0.0] * num_nodes
        self._batches = [0.0] * num_nodes

    def add(
        self, node: int, *, num_pairs: int, activations: int, batches: int, compute_s: float
    ) -> None:
        """Learn from a report of node `node`; one without work or time says nothing."""
        if not num_pairs or not compute_s > 0:
            return
        work = num_pairs + ACTIVATION_ROWS * activations
        for sums, value in (
            (self._work, work),
            (self._seconds, compute_s),
            (self._batches, batches),
        ):
            sums[node] = KEEP * sums[node] + value

    def relative(self) -> tuple[float, ...] | None:
        """Return each node's speed as a share of the fastest one's; None: all are equal.

        Nodes that have not been measured are as fast as the fastest.
        """
        found: dict[int, float] = {}
        for node, (work, seconds, batches) in enumerate(
            zip(self._work, self._seconds, self._batches, strict=True)
        ):
            if seconds <= 0:
                continue
            if seconds < LEAST_S * batches:
                return None
            found[node] = work / (seconds - OVERHEAD_S * batches)
        if not found or max(found.values()) < EQUAL * min(found.values()):
            return None
        best = max(found.values())
        return tuple(round(found.get(node, best) / best, 2) for node in range(len(self._work)))

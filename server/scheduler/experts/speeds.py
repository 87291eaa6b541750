"""The speed of each expert node, learnt from its reports.

Owns the last few reports. A node's work is what m2n_comm.replicas takes for its time: a row for
each pair, and ACTIVATION_ROWS for each expert whose weights were read. Pure. Called by load.py.

A node's speed is that of its fastest report: whatever else a host does only slows a node down, and
on shared cores by more than nodes differ. Nodes of about the same speed count as equal, and so do
nodes whose batches are so short that most of them is no work: a mistaken difference would move
experts for nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from topspin.expert_table import ACTIVATION_ROWS

EQUAL: Final = 1.25
"""Below this ratio of the fastest to the slowest node all are equal."""
SLOWEST: Final = 0.01
"""A node's least share: loads are divided by it, and speeds are rounded to this."""
NUM_REPORTS: Final = 8
"""Reports of a node that are remembered: about a second each."""
# A batch takes about this long without any work (several times that on a busy host), and must take
# LEAST_S to say something.
OVERHEAD_S: Final = 3e-5
LEAST_S: Final = 5e-4


class _Report(NamedTuple):
    work: float
    seconds: float
    batches: int

    @property
    def is_short(self) -> bool:
        return self.seconds < LEAST_S * self.batches

    @property
    def speed(self) -> float:
        """Return the work per second of computing."""
        return self.work / max(self.seconds - OVERHEAD_S * self.batches, 1e-9)


class NodeSpeeds:
    """The last reports of each expert node."""

    def __init__(self, num_nodes: int) -> None:
        self._reports: list[deque[_Report]] = [deque(maxlen=NUM_REPORTS) for _ in range(num_nodes)]

    def add(
        self, node: int, *, num_pairs: int, activations: int, batches: int, compute_s: float
    ) -> None:
        """Learn from a report of node `node`; one without work or time says nothing."""
        if num_pairs and compute_s > 0:
            work = num_pairs + ACTIVATION_ROWS * activations
            self._reports[node].append(_Report(work, compute_s, batches))

    def relative(self) -> tuple[float, ...] | None:
        """Return each node's speed as a share of the fastest one's; None: all are equal.

        Nodes that have not been measured are as fast as the fastest.
        """
        fastest = [max(each, key=lambda report: report.speed) for each in self._reports if each]
        if not fastest or any(report.is_short for report in fastest):
            return None
        best = max(report.speed for report in fastest)
        if best < EQUAL * min(report.speed for report in fastest):
            return None
        speeds = (max((report.speed for report in each), default=best) for each in self._reports)
        return tuple(max(SLOWEST, round(speed / best, 2)) for speed in speeds)

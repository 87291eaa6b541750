"""The waiting queue: requests without a node, by priority and then in order of arrival.

Owns the order only: a preempted request gets its old place back. Knows no limits and no
nodes. Called by admission.py, which owns it, and policy.py.
"""

from __future__ import annotations

import heapq

from server.scheduler.planning.sequence import Request

MIN_COMPACTED = 64


class WaitingQueue:
    """A heap by rank. Ended requests are dropped at the front, and all before it would double."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._compact_at = MIN_COMPACTED

    def push(self, request: Request) -> None:
        """Insert `request` by its rank."""
        if len(self._heap) >= self._compact_at:
            self._heap = [entry for entry in self._heap if not entry[1].ended]
            heapq.heapify(self._heap)
            self._compact_at = max(MIN_COMPACTED, 2 * len(self._heap))
        heapq.heappush(self._heap, (request.rank, request))

    def first(self) -> Request | None:
        """Return the first request that has not ended, and leave it in the queue."""
        while self._heap and self._heap[0][1].ended:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Remove and return the request of first()."""
        return heapq.heappop(self._heap)[1]

    def count(self) -> int:
        """Return how many requests wait, in time linear in the queue."""
        return sum(not request.ended for _, request in self._heap)

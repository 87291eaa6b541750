"""The waiting queue: requests without a node, by priority and then in order of arrival.

Owns the order only: a preempted request gets its old place back. Knows no limits and no
nodes. Called by policy.py.
"""

from __future__ import annotations

import heapq

from server.scheduler.planning.sequence import Request


class WaitingQueue:
    """A heap by rank; ended requests are dropped when they come to the front."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []

    def push(self, request: Request) -> None:
        """Insert `request` by its rank."""
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

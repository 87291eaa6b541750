"""Requests in the order of a key, without those that have ended.

Owns the heap, and the limit of what it keeps. Knows no meaning of a key; called by tenants.py (by
rank) and entrance.py (by deadline).
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.scheduler.planning.sequence import Request

MIN_COMPACTED = 64

Key = tuple[float, ...]
"""Of equal keys, `Request.number` must be the last part: requests have no order of their own."""


class RequestHeap:
    """A heap of requests. Ended ones are dropped at the front, and all before it would double."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Request]] = []
        self._compact_at = MIN_COMPACTED

    def push(self, key: Key, request: Request) -> None:
        """Insert `request` by `key`."""
        if len(self._heap) >= self._compact_at:
            self._heap = [entry for entry in self._heap if not entry[1].ended]
            heapq.heapify(self._heap)
            self._compact_at = max(MIN_COMPACTED, 2 * len(self._heap))
        heapq.heappush(self._heap, (key, request))

    def first(self) -> Request | None:
        """Return the request of the lowest key that has not ended, and leave it there."""
        while self._heap and self._heap[0][1].ended:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Request:
        """Remove and return the request of first()."""
        return heapq.heappop(self._heap)[1]

    def pop_until(self, limit: float) -> Request | None:
        """Remove and return the request of first() if its key begins with `limit` at most."""
        is_due = self.first() is not None and self._heap[0][0][0] <= limit
        return self.pop() if is_due else None

    def count(self) -> int:
        """Return how many requests have not ended, in time linear in the heap."""
        return sum(not request.ended for _, request in self._heap)

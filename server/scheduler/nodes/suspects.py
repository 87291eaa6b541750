"""The requests with which nodes died, and the search for the one that is the cause.

Owns the requests that were given up until the engine goes on, and how often nodes have died with
each since its last token. From the second time on a request is suspected. One that was suspected
alone is the cause; of several, each runs without the others until it has a token, which clears it.
So a cause is found at the third death at the latest, and nobody else ends. Pure: no queue, no step,
no time. Called by policy.py.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from server.scheduler.planning.sequence import Request

# Deaths without a token in between, from which on a request may be their cause.
SUSPICIOUS = 2


class _Deaths(NamedTuple):
    """How many nodes died with a request when it had `num_tokens` tokens."""

    num: int
    num_tokens: int


class Suspects:
    """The suspected requests of one engine; `held` are held back.

    Invariant: of those that are suspected at most one is neither given up nor held back, while the
    engine goes on.
    """

    def __init__(self) -> None:
        self._given_up: list[Request] = []
        self._at_work: list[Request] = []
        self._deaths: dict[Request, _Deaths] = {}
        self._before: dict[Request, _Deaths] = {}
        self.held: list[Request] = []
        self._trial: Request | None = None

    def give_up(self, request: Request, *, was_at_work: bool) -> None:
        """Take a request of a lost generation; `was_at_work`: a step in flight had its rows."""
        self._given_up.append(request)
        if was_at_work:
            self._at_work.append(request)
        if request is self._trial:
            self._trial = None

    def died(self) -> Request | None:
        """Note the death of a node; returns the request that is its cause, if that is known.

        What was given up since go_on() was at work then; it is counted once for all deaths.
        """
        at_work = [request for request in self._at_work if not request.ended]
        self._at_work.clear()
        if not at_work:
            return None
        self._before = {each: deaths for each, deaths in self._deaths.items() if not each.ended}
        self._deaths = self._before.copy()
        for request in at_work:
            self._deaths[request] = _Deaths(self._count(request) + 1, len(request.tokens))
        suspected = [request for request in at_work if self._is_suspected(request)]
        return suspected[0] if len(suspected) == 1 else None

    def lives(self) -> None:
        """Note that the last one that died has not."""
        self._deaths = self._before.copy()

    def go_on(self) -> list[Request]:
        """Return the requests that were given up and may run at once; the others are held back."""
        given_up = [request for request in self._given_up if not request.ended]
        self._given_up.clear()
        self._at_work.clear()
        self.held += filter(self._is_suspected, given_up)
        self.held.sort(key=attrgetter("rank"))
        return [request for request in given_up if not self._is_suspected(request)]

    def take_next(self) -> Request | None:
        """Return the suspected request that may run now, if the one before has been cleared."""
        if self._trial is not None and self._is_suspected(self._trial):
            return None
        self.held = [request for request in self.held if not request.ended]
        self._trial = self.held.pop(0) if self.held else None
        return self._trial

    def count(self) -> int:
        """Return how many requests are given up or held back, and have not ended."""
        return sum(not request.ended for request in (*self._given_up, *self.held))

    def _count(self, request: Request) -> int:
        deaths = self._deaths.get(request)
        return deaths.num if deaths and deaths.num_tokens == len(request.tokens) else 0

    def _is_suspected(self, request: Request) -> bool:
        return not request.ended and self._count(request) >= SUSPICIOUS

"""The notes for somebody who watches the engine: its last steps, one of them in full, its news.

Owns who watches, and until when: nothing is noted of steps while nobody does. Pure: times are
arguments. Knows no node and no gateway; gateways.py asks nodes for the stamps of the step that is
due, and answers.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping

from server.scheduler.planning.in_flight import RunningStep
from topspin.messages import FeedNews, FeedStep, StepTimings, Trace

# A watch ends so long after the last request.
WATCHED_S = 5.0
# How often a step is shown in full.
SAMPLE_S = 1.0
MAX_STEPS = 100
MAX_NEWS = 50


class Watch:
    """The notes, each with a number: the cursor of a request is that of the last one it has."""

    def __init__(self, wall_clock: Callable[[], float] = time.time) -> None:
        # Read in every turn of the scheduler.
        self.is_on = False
        self._wall_clock = wall_clock
        self._until_s = -math.inf
        self._cursor = 0
        self._steps: deque[tuple[int, FeedStep]] = deque(maxlen=MAX_STEPS)
        self._news: deque[tuple[int, FeedNews]] = deque(maxlen=MAX_NEWS)
        self._sample: tuple[int, Trace] | None = None
        self._newest = 0
        self._sampled = 0
        self._sample_after_s = -math.inf
        self._is_sampling = False

    def renew(self, now: float) -> None:
        """Begin to watch, or go on."""
        self.is_on = True
        self._until_s = now + WATCHED_S

    def ends(self, now: float) -> bool:
        """Say whether nobody watches any more, and forget what was noted of steps."""
        if now <= self._until_s:
            return False
        self.is_on = False
        self._steps.clear()
        self._sample = None
        self._is_sampling = False
        return True

    def told(self, text: str, *, is_warning: bool = False) -> None:
        """Note a line of the log; these are few, and kept for those who come later."""
        news = FeedNews(at_s=self._wall_clock(), is_warning=is_warning, text=text)
        self._news.append((self._next(), news))

    def stepped(self, step: RunningStep, timings: Mapping[int, StepTimings]) -> None:
        """Note a step that has ended."""
        self._newest = step.ticket.step
        noted = FeedStep(
            step=step.ticket.step,
            num_micro_batches=step.ticket.num_micro_batches,
            num_tokens=sum(load.num_tokens for load in step.loads.values()),
            took_s=step.took_s,
            nodes=dict(timings),
        )
        self._steps.append((self._next(), noted))

    def due(self, now: float) -> int | None:
        """Return the step to be shown in full, whose stamps sampled() is to get; None: none now."""
        if self._is_sampling or now < self._sample_after_s or self._newest == self._sampled:
            return None
        self._sample_after_s, self._sampled = now + SAMPLE_S, self._newest
        self._is_sampling = True
        return self._newest

    def sampled(self, trace: Trace) -> None:
        """Note the stamps of the step that was due."""
        self._is_sampling = False
        if self.is_on:
            self._sample = (self._next(), trace)

    @property
    def cursor(self) -> int:
        """Return the number of the last note."""
        return self._cursor

    def steps(self, after: int) -> tuple[FeedStep, ...]:
        """Return the steps noted after a cursor, be it another scheduler's."""
        after = self._known(after)
        return tuple(step for number, step in self._steps if number > after)

    def news(self, after: int) -> tuple[FeedNews, ...]:
        """Return the news as steps() does."""
        after = self._known(after)
        return tuple(news for number, news in self._news if number > after)

    def sample(self, after: int) -> Trace | None:
        """Return the stamps of the newest step that was due, if they came after a cursor."""
        if self._sample is None or self._sample[0] <= self._known(after):
            return None
        return self._sample[1]

    def _known(self, after: int) -> int:
        return after if after <= self._cursor else 0

    def _next(self) -> int:
        self._cursor += 1
        return self._cursor

"""The number of tokens to draft for each request of a step: what speeds it up most, or none.

Owns the estimates of acceptance, by request and depth, and of a step's time by its rows, and the
choice that maximises expected tokens over expected time (goodput, arXiv 2406.14066). What a row
costs is measured, whatever the reason: a MoE layer's newly woken experts, attention, sampling.
Pure: counts and durations come in, numbers of tokens go out. Knows no tokens and no plan.

A draft's row of depth d pays if a path of d tokens is accepted. That a drafter may have nothing to
offer does not matter to the choice of a depth, since then there is neither cost nor gain, but to
the sum over a step's requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from spec_decode.draft import num_excess, row_step

FORGET: Final = 0.95
"""Of the weight of a draft's outcome, what is left after the next one of the request."""
FORGET_SHARED: Final = 0.99
"""The same for all requests together, which are what is known of a new one."""
PRIOR_WEIGHT: Final = 3.0
"""What is known of others counts as so many outcomes."""
FIRST_GUESS: Final = 0.6
"""The acceptance of a token after an accepted one, before anything was drafted."""
ROW_SHARE: Final = 0.05
"""Before more rows were measured, one more is assumed to cost this share of the step."""
MARGIN: Final = 0.1
"""Drafting begins if it promises so much more than it costs; it ends if it promises less."""
MIN_WAIT: Final = 16
MAX_WAIT: Final = 512
"""Steps without drafts before one is tried, first and at most."""
MAX_LATE: Final = 8
"""The outcome of a try that is not known after so many steps never will be."""
REFRESH: Final = 64
"""Steps with drafts in which plain ones were not measured, until one is."""
TRUSTED: Final = 4
"""A step's time is believed from so many on."""
HOPE: Final = 0.5
"""Rows beyond the most that were measured are assumed to cost this share of those before: what
looks too dear is never measured."""
FIRST_LIFE: Final = 512
MAX_LIFE: Final = 8192
"""A time that was not measured for so many steps is forgotten, first and at most."""
_UP_RATE: Final = 0.1
_DOWN_RATE: Final = 0.3
_OUTLIER: Final = 2.0


@dataclass(slots=True)
class _Size:
    """Steps of one number of rows: the shortest of the first ones, then a running mean.

    They are believed from the TRUSTED-th on, until none has come for `life` steps.
    """

    mean_s: float = math.inf
    count: int = 0
    last: int = 0
    life: int = FIRST_LIFE

    def add(self, took_s: float) -> None:
        self.count += 1
        if self.count <= TRUSTED:
            self.mean_s = min(self.mean_s, took_s)
            return
        # A stall of the machine says nothing about rows: what is shorter is believed sooner.
        rate = _UP_RATE if took_s > self.mean_s else _DOWN_RATE
        self.mean_s += rate * (min(took_s, _OUTLIER * self.mean_s) - self.mean_s)


class RowTimes:
    """The time of a step by its token rows: running means, linear between those that are known.

    A number of rows is known from the TRUSTED-th step on, at first with the shortest time: the
    first steps of a shape are longer, since something is compiled or recorded. It is forgotten when
    it is not met any more, later and later: a time that was too long by accident would keep the
    number from being chosen, and so from being measured, for ever.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._num_steps = 0
        self._rows: list[int] = []
        self._times: list[float] = []

    def add(self, num_rows: int, took_s: float) -> None:
        """Learn that a step of `num_rows` took `took_s`."""
        self._num_steps += 1
        size = self._sizes.setdefault(_bucket(num_rows), _Size())
        size.add(took_s)
        size.last = self._num_steps
        self._forget()
        known = sorted((r, each.mean_s) for r, each in self._sizes.items() if each.count >= TRUSTED)
        self._rows = [num_rows for num_rows, _ in known]
        self._times = [mean_s for _, mean_s in known]

    def _forget(self) -> None:
        """Begin again with those that were not met for long; never with the fewest rows."""
        fewest = min(self._sizes)
        for num_rows, each in self._sizes.items():
            if num_rows != fewest and self._num_steps - each.last > each.life:
                again = _Size(last=self._num_steps, life=min(2 * each.life, MAX_LIFE))
                self._sizes[num_rows] = again

    @property
    def least_rows(self) -> float:
        """Return the fewest rows that were seen, infinity before."""
        return self._rows[0] if self._rows else math.inf

    @property
    def most_rows(self) -> int:
        """Return the most rows that were seen, 0 before."""
        return self._rows[-1] if self._rows else 0

    def after(self, num_rows: int, count: int) -> list[float]:
        """Return the expected times of num_rows + 1 to num_rows + count."""
        end = num_rows + count
        corners = [each for each in self._rows if num_rows < each < end]
        times: list[float] = []
        begin = num_rows
        for corner in [*corners, end]:
            low, high = self.of(begin), self.of(corner)
            slope = (high - low) / (corner - begin)
            times += [low + slope * each for each in range(1, corner - begin + 1)]
            begin = corner
        return times

    def of(self, num_rows: float) -> float:
        """Return the expected time of `num_rows`, no less than that of fewer.

        Before anything was seen the unit is a step without rows.
        """
        rows, times = self._rows, self._times
        if not rows:
            return 1.0 + ROW_SHARE * num_rows
        idx = bisect_left(rows, num_rows)
        if idx == 0:
            return times[0]
        low = max(times[:idx])
        if idx < len(rows):
            share = (num_rows - rows[idx - 1]) / (rows[idx] - rows[idx - 1])
            return low + share * max(0.0, times[idx] - low)
        slope = ROW_SHARE * times[0]
        if len(rows) > 1:
            # The upper half's: each row wakes fewer new experts than the one before.
            mid = (len(rows) - 1) // 2
            slope = HOPE * max(0.0, times[-1] - times[mid]) / (rows[-1] - rows[mid])
        return low + slope * (num_rows - rows[-1])


def _bucket(num_rows: int) -> int:
    """Return the size under which a step is counted: within 6 %, exact up to 16."""
    step = row_step(num_rows)
    return (num_rows + step // 2) // step * step


class _Outcomes:
    """Fading counts by depth: drafts that got so far, and those whose token there was accepted."""

    def __init__(self, most: int) -> None:
        self.tried = [0.0] * most
        self.accepted = [0.0] * most

    def add(self, length: int, accepted: int, keep: float) -> None:
        for depth in range(min(length, accepted + 1, len(self.tried))):
            self.tried[depth] = keep * self.tried[depth] + 1.0
            self.accepted[depth] = keep * self.accepted[depth] + (depth < accepted)

    def shares(self) -> list[float]:
        """Return, by depth, the share that was accepted; FIRST_GUESS of what nobody tried."""
        return [
            (accepted + PRIOR_WEIGHT * FIRST_GUESS) / (tried + PRIOR_WEIGHT)
            for accepted, tried in zip(self.accepted, self.tried, strict=True)
        ]


class _Speculator:
    """What is known of one request; `depth` is what it is drafted in the step that is planned."""

    def __init__(self, most: int) -> None:
        self.outcomes = _Outcomes(most)
        self.offer_share = 1.0
        self.depth = most
        self.wait = MIN_WAIT
        self.idle_steps = 0
        self.is_trying = False
        self.gains: list[float] | None = None


class _Promise(NamedTuple):
    """What drafts are expected to add to a step, as shares of its tokens and of its time."""

    tokens: float
    time: float


class Controller:
    """Chooses depths of up to `most` tokens. Requests are numbers, of which each is used once.

    Of more than `most_requests` in a step (None: no such limit) none is drafted for.
    """

    def __init__(self, most: int, *, most_requests: int | None = None) -> None:
        self._most = most
        self._most_requests = math.inf if most_requests is None else most_requests
        self._shared = _Outcomes(most)
        self._times = RowTimes()
        self._speculators: dict[int, _Speculator] = {}
        self._is_on = True
        self._steps_on = 0
        self.num_steps = 0
        self.num_steps_off = 0

    def plan(self, requests: Sequence[int], num_rows: int, *, room: int) -> dict[int, int]:
        """Return how many tokens to draft for each of `requests` in the next step.

        The step has `num_rows` rows without them, one per request and those of prompts, and `room`
        for so many more.
        """
        if room <= 0 or len(requests) > self._most_requests:
            return {}
        known = [self._of(each) for each in requests]
        for each in known:
            each.depth = 0
        if not known:
            return {}
        promise = self._choose(known, num_rows, room)
        worth = promise.tokens / (1.0 if self._is_on else 1.0 + MARGIN)
        self._is_on = worth > promise.time
        self.num_steps += 1
        self.num_steps_off += not self._is_on
        # Without the time of a plain step nothing can be said.
        must_refresh = self._steps_on >= REFRESH or num_rows < self._times.least_rows
        if must_refresh:
            self._steps_on = 0
        if must_refresh or not self._is_on:
            for each in known:
                each.depth = 0
        if not must_refresh:
            for each in known:
                self._try(each)
        return {key: each.depth for key, each in zip(requests, known, strict=True)}

    def _choose(self, known: Sequence[_Speculator], num_rows: int, room: int) -> _Promise:
        """Set the depths with which tokens come fastest; return what they promise."""
        others = self._shared.shares()
        rows = [
            (gain, -depth, idx)
            for idx, each in enumerate(known)
            for depth, gain in enumerate(self._gains(each, others), 1)
        ]
        rows.sort(reverse=True)
        plain_s = self._times.of(num_rows)
        # Longer steps than those that were seen are approached by doubling.
        room = min(room, 2 * max(num_rows, self._times.most_rows) - num_rows)
        shares = [each.offer_share for each in known]
        more, offered, num_known = 0.0, 0.0, len(known)
        best, best_count, promise = 1.0, 0, _Promise(0.0, 0.0)
        longer_s = self._times.after(num_rows, max(0, min(room, len(rows))))
        for count, took_s in enumerate(longer_s, 1):
            gain, _, idx = rows[count - 1]
            more += shares[idx] * gain
            offered += shares[idx]
            if num_excess(num_rows + count):
                continue  # drafts would be trimmed
            # Drafts that are not offered leave the step as it is.
            longer = offered / count * (took_s / plain_s - 1.0)
            speed = (1.0 + more / num_known) / (1.0 + longer)
            if speed > best:
                best, best_count = speed, count
                promise = _Promise(more / num_known, longer)
        for _, depth, idx in rows[:best_count]:
            known[idx].depth = max(known[idx].depth, -depth)
        return promise

    def _try(self, each: _Speculator) -> None:
        """Plan a token now and then where none is worth it, more and more rarely."""
        if each.depth:
            each.idle_steps = 0
            return
        each.idle_steps += 1
        due = each.wait + (MAX_LATE if each.is_trying else 0)
        if each.idle_steps >= due:
            each.depth, each.idle_steps, each.is_trying = 1, each.wait, True

    def _gains(self, each: _Speculator, others: Sequence[float]) -> list[float]:
        """Return, by depth, the probability that a draft is accepted so far; falls with depth.

        Few outcomes at a depth are filled up with those at all depths, these with `others`.
        """
        if each.gains is None:
            own = each.outcomes
            tried = sum(own.tried) + PRIOR_WEIGHT
            accepted = sum(own.accepted)
            product, each.gains = 1.0, []
            for good, some, prior in zip(own.accepted, own.tried, others, strict=True):
                usual = (accepted + PRIOR_WEIGHT * prior) / tried
                product *= (good + PRIOR_WEIGHT * usual) / (some + PRIOR_WEIGHT)
                each.gains.append(product)
        return each.gains

    def _of(self, request: int) -> _Speculator:
        each = self._speculators.get(request)
        if each is None:
            each = self._speculators[request] = _Speculator(self._most)
        return each

    def drafted(self, request: int, *, planned: int, length: int, accepted: int) -> None:
        """Learn that of `planned` tokens a draft had `length`, and `accepted` were kept."""
        each = self._speculators.get(request)
        if each is None or not planned:
            return
        each.offer_share += (1.0 - FORGET) * (min(1.0, length / planned) - each.offer_share)
        if not length:
            if each.is_trying:  # there was nothing to learn from: try again at once
                each.is_trying, each.idle_steps = False, each.wait
            return
        each.outcomes.add(length, accepted, FORGET)
        self._shared.add(length, accepted, FORGET_SHARED)
        each.gains = None
        if each.is_trying:
            each.is_trying, each.idle_steps = False, 0
            each.wait = min(2 * each.wait, MAX_WAIT)
        elif accepted:
            each.wait = max(each.wait // 2, MIN_WAIT)

    def stepped(self, num_rows: int, took_s: float, *, num_drafted: int) -> None:
        """Learn that a step of `num_rows`, `num_drafted` of them of drafts, took `took_s`."""
        if not (math.isfinite(took_s) and took_s > 0.0):
            return
        self._times.add(num_rows, took_s)
        self._steps_on = self._steps_on + 1 if num_drafted else 0

    def forget(self, requests: Iterable[int]) -> None:
        """Drop what is known of requests that have ended."""
        for request in requests:
            self._speculators.pop(request, None)

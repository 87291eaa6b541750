"""The pace of an engine: how soon waiting requests get their first tokens, and how many should run.

Owns two measurements. The rate of first tokens fades: how many requests got theirs while others
waited, how long their prompts take by the cost model, and how long that was. What prompts do not
explain (seats that running requests hold, steps that decode) counts per request. The number of
requests that run at once follows the time between tokens of requests that have ended: it falls by
one while that is long and a larger batch hardly raises throughput, and rises by one while it is
short. The gain of a larger batch is the share of a step that does not grow with it, by the cost
model. Pure: times are arguments. Knows no tenants and no limits; called by entrance.py and by
server.scheduler.planning.
"""

from __future__ import annotations

import math
from typing import Final

# The past fades by a factor of e in so many seconds in which requests waited.
MEMORY_S: Final = 10.0
# With less of it than this, only prompts are known to take time.
LEAST_S: Final = 0.5
# People read faster than one token in this time.
LONG_TOKEN_S: Final = 0.15
SHORT_TOKEN_S: Final = 0.12
# One per cent more requests must bring so many per cent more tokens per second.
LEAST_GAIN: Final = 0.3
LEAST_SEATS: Final = 8
MIN_TOKENS: Final = 4
_RATE: Final = 0.1


class DrainRate:
    """The measured rate of one engine's first tokens."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._num_begun = 0.0
        self._prompts_s = 0.0
        self._seen_s: float | None = None
        self._is_waited = False

    def note(self, now: float, *, is_waited: bool) -> None:
        """Note that from `now` on requests wait, or that none does."""
        if self._is_waited and self._seen_s is not None:
            took_s = now - self._seen_s
            kept = math.exp(-took_s / MEMORY_S)
            self._num_begun *= kept
            self._prompts_s *= kept
            self._busy_s = self._busy_s * kept + took_s
        self._seen_s, self._is_waited = now, is_waited

    def begun(self, prompt_s: float) -> None:
        """Count a request that has its first token; its prompt takes `prompt_s` by the model."""
        if self._is_waited:
            self._num_begun += 1.0
            self._prompts_s += prompt_s

    def time_s(self, num_requests: int, prompts_s: float) -> float:
        """Return the time until so many requests, one after another, have their first tokens."""
        if self._busy_s < LEAST_S:
            return prompts_s
        rest_s = max(0.0, self._busy_s - self._prompts_s) / max(1.0, self._num_begun)
        factor = min(1.0, self._busy_s / self._prompts_s) if self._prompts_s else 1.0
        return num_requests * rest_s + prompts_s * factor


class SeatLimit:
    """The limit of one engine with `num_seats` places for requests."""

    def __init__(self, num_seats: int) -> None:
        self._num_seats = num_seats
        self._limit = num_seats
        self._step_s = 0.0

    @property
    def limit(self) -> int:
        """Return how many requests may run."""
        return self._limit

    def stepped(self, took_s: float) -> None:
        """Note how long a step took."""
        self._step_s += _RATE * (took_s - self._step_s) if self._step_s else took_s

    def finished(
        self, *, decoding_s: float, num_tokens: int, num_running: int, fixed_s: float
    ) -> None:
        """Note a request's time from its first token to its last one.

        `num_running` ran beside it; `fixed_s` of a step do not grow with the batch.
        """
        if num_tokens < MIN_TOKENS:
            return
        token_s = decoding_s / (num_tokens - 1)
        gains = fixed_s >= LEAST_GAIN * self._step_s
        if token_s > LONG_TOKEN_S and not gains:
            least = min(LEAST_SEATS, self._num_seats)
            self._limit = max(least, min(self._limit, num_running) - 1)
        elif token_s < SHORT_TOKEN_S or gains:
            self._limit = min(self._num_seats, self._limit + 1)

"""The number of requests that run at once where more of them only slow each other down.

Owns the limit, which follows the time between tokens of requests that have ended: it falls by one
while that is long and a larger batch hardly raises throughput, and rises by one while it is short.
The gain of a larger batch is the share of a step that does not grow with it, by the cost model.
Pure; called by server.scheduler.planning.policy.
"""

from __future__ import annotations

from typing import Final

# People read faster than one token in this time.
LONG_TOKEN_S: Final = 0.15
SHORT_TOKEN_S: Final = 0.12
# One per cent more requests must bring so many per cent more tokens per second.
LEAST_GAIN: Final = 0.3
LEAST_SEATS: Final = 8
MIN_TOKENS: Final = 4
_RATE: Final = 0.1


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

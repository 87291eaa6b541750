"""The rate at which waiting requests get their first tokens, and the time that more would take.

Owns a measurement that fades: how many requests got their first token while others waited, how long
their prompts take by the cost model, and how long that was. What prompts do not explain (seats that
running requests hold, steps that decode) counts per request. Pure: times are arguments. Knows no
tenants and no limits; called by entrance.py.
"""

from __future__ import annotations

import math
from typing import Final

# The past fades by a factor of e in so many seconds in which requests waited.
MEMORY_S: Final = 10.0
# With less of it than this, only prompts are known to take time.
LEAST_S: Final = 0.5


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

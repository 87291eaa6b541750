"""Is the engine making progress? Health that a hung engine cannot fake.

Owns the rule: ready, answering, and either nothing to do, or a step finished or got on
within the deadline. Pure but for the clock value handed in; called by the /health route.
"""

from __future__ import annotations

from topspin.messages import Stats


class ProgressWatch:
    """Compares the engine's step counter between probes.

    Invariant: a stall is reported only after `deadline_s` of observed work in which no step
    ended and no node said that it gets on with the one in flight.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._num_steps: int | None = None
        self._since_s = 0.0

    def stalled_for_s(self, stats: Stats, now_s: float) -> float | None:
        """Return how long the engine has had work and made no progress, if that is too long."""
        idle = stats.num_running == 0 and stats.num_waiting == 0
        if idle or stats.num_steps != self._num_steps:
            self._num_steps = stats.num_steps
            self._since_s = now_s
            return None
        stalled_s = now_s - self._since_s
        if stats.progress_age_s is not None:
            stalled_s = min(stalled_s, stats.progress_age_s)
        return stalled_s if stalled_s > self._deadline_s else None

"""The health check: reports an engine that has work but makes no progress.

Owns the rule: ready, answering, and either idle or with a step that finished or progressed
within the deadline. Pure: the time is passed in; called by the /health route.
"""

from __future__ import annotations

from topspin.messages import Stats


class ProgressWatch:
    """Compares the engine's step counter between probes.

    Invariant: a stall is reported only after `deadline_s` of observed work in which no step
    ended and no node reported progress of the step in flight.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._num_steps: int | None = None
        self._since_s = 0.0

    def stalled_for_s(self, stats: Stats, now_s: float) -> float | None:
        """Return the time that the engine has had work without progress; None if not too long."""
        idle = stats.num_running == 0 and stats.num_waiting == 0
        if idle or stats.num_steps != self._num_steps:
            self._num_steps = stats.num_steps
            self._since_s = now_s
            return None
        stalled_s = now_s - self._since_s
        if stats.progress_age_s is not None:
            stalled_s = min(stalled_s, stats.progress_age_s)
        return stalled_s if stalled_s > self._deadline_s else None

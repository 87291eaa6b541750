"""Is the client itself keeping up? Its CPU share, its event loop's lag, its late sends.

Owns the measuring and the verdict: a saturated client measures itself, and must report that
instead of blaming the server. Knows no HTTP. benchmarks.load.client.runner runs one Monitor beside
the requests, in the same event loop, whose delays affect the timer and the requests alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.load.contracts import ClientHealth, MeasuredRequest

# One thread does all the work, so the ceiling is one core; beyond this, queueing begins.
CPU_SHARE_LIMIT = 0.85
# Shorter runs are mostly the client's start, and say nothing about its share.
SHORTEST_S = 1.0
# A p99 above this is visible in all reported latencies.
LAG_LIMIT_S = 0.05
PERIOD_S = 0.02


class Monitor:
    """Measures lag and CPU between `start` and `stop`, both called in the event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._lags: list[float] = []

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._start = self._clock()
        self._cpu_start = self._cpu_clock()
        self._due = self._start + PERIOD_S
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(PERIOD_S, self._tick)

    def _tick(self) -> None:
        self.note_tick(self._clock())
        self._timer = self._loop.call_later(max(self._due - self._clock(), 0), self._tick)

    def note_tick(self, now: float) -> None:
        """Record that the timer fired at `now`, and all ticks that it missed before.

        A loop that was blocked for 1 s missed 50 ticks: all 50 were late. Counting only the
        one that finally fired would hide a stall among many good ticks.
        """
        while self._due <= now:
            self._lags.append(now - self._due)
            self._due += PERIOD_S

    def stop(self, records: Sequence[MeasuredRequest]) -> ClientHealth:
        """End, and return the health over the time since the start."""
        self._timer.cancel()
        now = self._clock()
        self.note_tick(now)
        lateness = [
            record.sent_s - record.admitted_s
            for record in records
            if record.sent_s is not None and record.admitted_s is not None
        ]
        cpu_s = self._cpu_clock() - self._cpu_start
        return judge(now - self._start, cpu_s, self._lags, lateness)


def judge(
    wall_s: float, cpu_s: float, lags_s: Sequence[float], lateness_s: Sequence[float]
) -> ClientHealth:
    """Return the health for these figures, with the reasons if the client is saturated."""
    cpu_share = cpu_s / max(wall_s, 1e-9)
    lag = _quantiles(lags_s)
    late = _quantiles(lateness_s)
    reasons = []
    if wall_s >= SHORTEST_S and cpu_share > CPU_SHARE_LIMIT:
        reasons.append(
            f"The client used {cpu_share:.0%} of a core; its one thread is the limit "
            f"above {CPU_SHARE_LIMIT:.0%}."
        )
    if lag[1] > LAG_LIMIT_S:
        reasons.append(
            f"The client's event loop was {lag[1] * 1000:.0f} ms late at p99 "
            f"(limit {LAG_LIMIT_S * 1000:.0f} ms), and so is every time it measured."
        )
    if late[1] > LAG_LIMIT_S:
        reasons.append(
            f"Requests were sent {late[1] * 1000:.0f} ms after they were due at p99 "
            f"(limit {LAG_LIMIT_S * 1000:.0f} ms)."
        )
    return ClientHealth(cpu_share, *lag, *late, reasons=tuple(reasons))


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return median, 99th percentile and maximum; zeros if there is nothing."""
    if not values:
        return 0.0, 0.0, 0.0
    median, high, highest = np.percentile(values, [50, 99, 100])
    return float(median), float(high), float(highest)

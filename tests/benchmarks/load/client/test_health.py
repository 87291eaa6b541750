"""The verdict on the client itself: a stall is seen even if few timers fired."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from benchmarks.load.client.health import CPU_SHARE_LIMIT, LAG_LIMIT_S, PERIOD_S, Monitor, judge
from benchmarks.load.contracts import MeasuredRequest


class Clocks:
    """Wall and CPU time that a test moves by hand."""

    def __init__(self) -> None:
        self.wall_s, self.cpu_s = 100.0, 7.0

    def monitor(self) -> Monitor:
        monitor = Monitor(clock=lambda: self.wall_s, cpu_clock=lambda: self.cpu_s)
        monitor.start()
        return monitor


def test_a_healthy_client_has_no_reasons() -> None:
    health = judge(10.0, 5.0, [0.001] * 100, [0.002] * 10)
    assert not health.saturated
    assert health.reasons == ()
    assert (health.loop_lag_p50_s, health.send_lateness_max_s) == (0.001, 0.002)


@pytest.mark.parametrize(
    ("cpu_share", "lag_s", "late_s", "said"),
    [
        (CPU_SHARE_LIMIT + 0.01, 0.0, 0.0, "of a core"),
        (0.1, LAG_LIMIT_S * 1.01, 0.0, "event loop was"),
        (0.1, 0.0, LAG_LIMIT_S * 1.01, "after they were due"),
    ],
)
def test_each_limit_is_a_reason(cpu_share: float, lag_s: float, late_s: float, said: str) -> None:
    health = judge(10.0, 10 * cpu_share, [lag_s] * 9, [late_s] * 9)
    assert health.saturated
    assert len(health.reasons) == 1
    assert said in health.reasons[0]


def test_the_share_of_a_very_short_run_is_no_reason() -> None:
    health = judge(0.5, 0.5, [], [])
    assert (health.cpu_share, health.saturated) == (1.0, False)


def test_quantiles_are_numpys() -> None:
    lags = [0.001 * number for number in range(1, 28)]
    health = judge(10.0, 0.0, lags, [])
    assert health.loop_lag_p50_s == pytest.approx(np.percentile(lags, 50))
    assert health.loop_lag_p99_s == pytest.approx(np.percentile(lags, 99))
    assert health.loop_lag_max_s == pytest.approx(0.027)
    assert health.send_lateness_p99_s == 0


def test_a_stall_counts_for_every_tick_that_it_swallowed() -> None:
    async def run() -> None:
        clocks = Clocks()
        monitor = clocks.monitor()
        # One second on time, then one second during which no timer fired at all.
        for _ in range(50):
            clocks.wall_s += PERIOD_S
            monitor.note_tick(clocks.wall_s)
        clocks.wall_s += 1.0
        clocks.cpu_s += 1.0
        health = monitor.stop([])
        assert health.loop_lag_max_s == pytest.approx(1.0 - PERIOD_S)
        # Half of all ticks were late, evenly from 0 to 1 s: p99 is near the full second.
        assert health.loop_lag_p99_s == pytest.approx(0.96, abs=0.02)
        assert health.cpu_share == pytest.approx(0.5)
        assert health.saturated

    asyncio.run(run())


def test_lateness_is_from_the_time_when_a_place_was_free() -> None:
    async def run() -> None:
        records = [
            MeasuredRequest(index=0, intended_s=1.0, admitted_s=3.0, sent_s=3.25),
            MeasuredRequest(index=1, intended_s=1.0),
        ]
        assert Clocks().monitor().stop(records).send_lateness_max_s == 0.25

    asyncio.run(run())

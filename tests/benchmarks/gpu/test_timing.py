"""The clock of the GPU benchmarks: calls per replay, and the substitute for a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.gpu.timing import (
    MAX_CALLS,
    calls_for,
    copy_bandwidth,
    matmul_rate,
    read_bandwidth,
    time_call,
)
from kernels.runtime import HostRuntime, Replay


class Clock:
    """Seconds of an imaginary device."""

    def __init__(self) -> None:
        self.now_s = 0.0


class Event:
    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Event) -> float:
        return self.at_s - earlier.at_s


class Stream:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def record(self, *, timed: bool = False) -> Event:
        assert timed
        return Event(self._clock.now_s)


class Device(HostRuntime):
    """A device whose launches take 10 us by themselves and 1 us in a graph."""

    is_asynchronous = True  # type: ignore[misc]

    def __init__(self, *, has_graphs: bool) -> None:
        self.clock = Clock()
        self._has_graphs = has_graphs
        self.call_s = 10e-6

    def current_stream(self) -> Stream:  # type: ignore[override]
        return Stream(self.clock)

    def launch(self, idx: int) -> None:
        self.clock.now_s += self.call_s

    def capture(self, body: Callable[[], None]) -> Replay:
        if not self._has_graphs:
            raise RuntimeError("no graph can hold it")

        def replay() -> None:
            self.call_s = 1e-6
            body()
            self.call_s = 10e-6

        return replay


def test_a_replay_is_long_enough_for_the_clock_and_uses_every_copy() -> None:
    assert calls_for(1.0, 1) == 1
    assert calls_for(1e-3, 1) == 3
    assert calls_for(1e-9, 1) == MAX_CALLS
    assert calls_for(1.0, 7) == 7


@pytest.mark.parametrize("has_graphs", [True, False])
def test_calls_are_timed_in_a_graph_if_one_can_hold_them(has_graphs: bool) -> None:
    device = Device(has_graphs=has_graphs)
    timed = time_call(device, device.launch, copies=3)
    assert timed.median_s == pytest.approx(1e-6 if has_graphs else 10e-6)
    assert timed.by == ("graph" if has_graphs else "stream")
    assert timed.calls == MAX_CALLS


def test_ceilings_are_measured_on_the_host_too() -> None:
    runtime = HostRuntime()
    assert copy_bandwidth(runtime, is_quick=True) > 0
    assert read_bandwidth(runtime, is_quick=True) > 0
    assert matmul_rate(runtime, torch.bfloat16, is_quick=True) > 0

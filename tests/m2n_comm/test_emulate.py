"""Link emulation: the delivery time of a frame, and that no node reads it earlier."""

from __future__ import annotations

import time

import pytest

from m2n_comm.emulate import LinkEmulation, LinkShaper, wait_delivery
from topspin.errors import ConfigError


def test_latency_comes_after_the_bytes() -> None:
    shaper = LinkShaper(LinkEmulation(latency_us=5.0, gbps=8.0))  # 1 ns per byte
    assert shaper.deliver_ns(1000, now_ns=10_000) == 10_000 + 1000 + 5000


def test_frames_leave_one_after_the_other() -> None:
    shaper = LinkShaper(LinkEmulation(latency_us=5.0, gbps=8.0))
    assert shaper.deliver_ns(1000, now_ns=0) == 6000
    assert shaper.deliver_ns(500, now_ns=100) == 6500
    # The link is idle again at 1500; a later frame starts when it is sent.
    assert shaper.deliver_ns(10, now_ns=9000) == 9000 + 10 + 5000


def test_no_bandwidth_limit_is_no_serialisation() -> None:
    shaper = LinkShaper(LinkEmulation(latency_us=1.0))
    assert shaper.deliver_ns(10**9, now_ns=0) == 1000
    assert shaper.deliver_ns(10**9, now_ns=0) == 1000


def test_a_link_that_delays_nothing_is_no_link() -> None:
    assert LinkEmulation().shaper is None
    assert LinkEmulation(latency_us=0.1).shaper is not None
    assert LinkEmulation(gbps=400.0).shaper is not None


@pytest.mark.parametrize(("delay_s", "spins"), [(0.0, False), (0.00003, False), (0.002, True)])
def test_a_frame_is_not_seen_before_its_time(delay_s: float, spins: bool) -> None:
    deliver_ns = time.monotonic_ns() + round(delay_s * 1e9)
    assert wait_delivery(deliver_ns, deadline_s=time.monotonic() + 10, spins=spins)
    assert time.monotonic_ns() >= deliver_ns


def test_only_a_node_that_may_sleep_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    for spins in (True, False):
        deliver_ns = time.monotonic_ns() + 2_000_000
        assert wait_delivery(deliver_ns, deadline_s=time.monotonic() + 10, spins=spins)
        assert bool(naps) is not spins


@pytest.mark.parametrize("spins", [False, True])
def test_a_deadline_that_comes_first_ends_the_wait(spins: bool) -> None:
    start_s = time.monotonic()
    deliver_ns = time.monotonic_ns() + 10**12
    assert not wait_delivery(deliver_ns, deadline_s=start_s + 0.01, spins=spins)
    assert 0.01 <= time.monotonic() - start_s < 5


@pytest.mark.parametrize(
    ("latency_us", "gbps"),
    [(-1.0, None), (float("nan"), None), (1e9, None), (0.0, 0.0), (0.0, -1.0), (0.0, float("nan"))],
)
def test_a_link_that_can_not_be_is_refused(latency_us: float, gbps: float | None) -> None:
    with pytest.raises(ConfigError):
        LinkEmulation(latency_us=latency_us, gbps=gbps)

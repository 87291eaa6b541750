"""Arrival times: the requested distribution, from a seed; contradictory settings are refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from benchmarks.load.client.arrivals import arrival_times, check_load, replayed_times, request_rates
from benchmarks.load.contracts import BenchRequest, LoadPattern
from topspin.errors import ConfigError

RAMP: dict[str, Any] = {"ramp_up": "linear", "ramp_up_start_rps": 2, "ramp_up_end_rps": 10}


def gaps(load: LoadPattern, num_requests: int = 20000) -> np.ndarray:
    return np.diff(np.array([0.0, *arrival_times(num_requests, load)]))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_of_the_gamma_distribution(burstiness: float) -> None:
    found = gaps(LoadPattern(request_rate=5, burstiness=burstiness))
    assert found.min() >= 0
    assert found.mean() == pytest.approx(0.2, rel=1e-9)
    # The coefficient of variation of a gamma distribution is 1/sqrt(shape).
    assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_the_last_request_arrives_exactly_when_the_rate_says() -> None:
    for seed in range(5):
        times = arrival_times(100, LoadPattern(request_rate=4, seed=seed))
        assert times[-1] == pytest.approx(25)
        assert times == sorted(times)


def test_the_seed_decides() -> None:
    load = LoadPattern(request_rate=4, seed=3)
    assert arrival_times(50, load) == arrival_times(50, load)
    assert arrival_times(50, load) != arrival_times(50, dataclasses.replace(load, seed=4))


def test_infinite_burstiness_is_a_clock() -> None:
    assert gaps(LoadPattern(request_rate=8, burstiness=math.inf), 16) == pytest.approx([0.125] * 16)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_times(3, LoadPattern()) == [0.0, 0.0, 0.0]
    assert arrival_times(0, LoadPattern(request_rate=1)) == []


def test_ramps_go_from_the_start_rate_to_the_end_rate() -> None:
    linear = LoadPattern(**RAMP)
    assert request_rates(5, linear) == [2, 4, 6, 8, 10]
    exponential = LoadPattern(ramp_up="exponential", ramp_up_start_rps=1, ramp_up_end_rps=16)
    assert request_rates(5, exponential) == pytest.approx([1, 2, 4, 8, 16])
    clocked = dataclasses.replace(linear, burstiness=math.inf)
    assert gaps(clocked, 5) == pytest.approx([1 / 2, 1 / 4, 1 / 6, 1 / 8, 1 / 10])
    assert request_rates(1, linear) == [2]


def test_replayed_timestamps_are_stretched() -> None:
    requests = [BenchRequest(max_tokens=1, prompt="a", arrival_s=t) for t in (0.0, 1.5, 1.0)]
    assert replayed_times(requests, 2) == [0.0, 3.0, 2.0]
    with pytest.raises(ConfigError, match="request 1 has none"):
        replayed_times([requests[0], BenchRequest(max_tokens=1, prompt="a")], 1)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"request_rate": 0}, "--request-rate is 0"),
        ({"request_rate": math.nan}, "--request-rate is nan"),
        ({"request_rate": 1, "burstiness": -1}, "--burstiness"),
        ({"burstiness": 2}, "--burstiness needs"),
        ({"replay": True, "burstiness": 2}, "--burstiness needs"),
        ({"max_concurrency": 0}, "--max-concurrency is 0"),
        ({"replay": True, "request_rate": 2}, "--request-rate and --replay"),
        ({"time_scale": 2}, "--time-scale.*--replay"),
        ({"time_scale": 0, "replay": True}, "--time-scale is 0"),
        ({"time_scale": math.inf, "replay": True}, "--time-scale is infinite"),
        ({"request_timeout_s": 0}, "--request-timeout"),
        (RAMP | {"ramp_up_end_rps": None}, "needs --ramp-up-start-rps and"),
        ({"ramp_up_end_rps": 1}, "need --ramp-up-strategy"),
        (RAMP | {"ramp_up_start_rps": 0}, "--ramp-up-start-rps is 0"),
        (RAMP | {"request_rate": 3}, "--request-rate and --ramp-up-strategy"),
    ],
)
def test_contradictions_are_refused_by_the_flags_names(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_load(LoadPattern(**fields))


def test_what_makes_sense_is_accepted() -> None:
    check_load(LoadPattern(max_concurrency=4))
    check_load(LoadPattern(request_rate=2, burstiness=0.5, max_concurrency=8))
    check_load(LoadPattern(replay=True, time_scale=0.5))
    check_load(LoadPattern(**RAMP, burstiness=math.inf))

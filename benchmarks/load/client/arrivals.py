"""The arrival times of requests: rates, gamma gaps, ramps and replayed timestamps.

Owns the arithmetic and the check that a LoadPattern makes sense; pure, seeded, sends nothing. The
gaps follow the convention of `vllm bench serve`: gamma with shape `burstiness` and mean
1/rate, so 1 is a Poisson process and infinity a clock. benchmarks.load.client.runner calls it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.load.contracts import BenchRequest, LoadPattern
from benchmarks.load.flags import check_bounds
from topspin.errors import ConfigError


def check_load(load: LoadPattern) -> None:
    """Raise ConfigError, naming the flags, if `load` contradicts itself."""
    check_bounds(load)
    _check_ramp(load)
    open_loop = {
        "--request-rate": not math.isinf(load.request_rate),
        "--ramp-up-strategy": load.ramp_up is not None,
        "--replay": load.replay,
    }
    chosen = [flag for flag, on in open_loop.items() if on]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} both say when requests arrive; give one")
    if load.burstiness != 1 and (load.replay or (not chosen)):
        raise ConfigError("--burstiness needs a finite --request-rate or a ramp")
    if load.time_scale != 1 and not load.replay:
        raise ConfigError("--time-scale stretches replayed timestamps; it needs --replay")
    if math.isinf(load.time_scale):
        raise ConfigError("--time-scale is infinite")


def _check_ramp(load: LoadPattern) -> None:
    start, end = load.ramp_up_start_rps, load.ramp_up_end_rps
    if load.ramp_up is None:
        if start is not None or end is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return
    if start is None or end is None:
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    for flag, value in (("--ramp-up-start-rps", start), ("--ramp-up-end-rps", end)):
        if not 0 < value < math.inf:
            raise ConfigError(f"{flag} is {value}; it must be above 0 and finite")


def request_rates(num_requests: int, load: LoadPattern) -> list[float]:
    """Return the rate, in requests/s, at which each of `num_requests` arrives.

    A ramp goes by the request's index: the first arrives at the start rate, the last at the
    end rate, between them on a straight line (linear) or by a constant factor (exponential).
    """
    start, end = load.ramp_up_start_rps, load.ramp_up_end_rps
    if load.ramp_up is None or start is None or end is None:
        return [load.request_rate] * num_requests
    shares = [index / max(num_requests - 1, 1) for index in range(num_requests)]
    if load.ramp_up == "linear":
        return [start + (end - start) * share for share in shares]
    return [start * (end / start) ** share for share in shares]


def arrival_times(num_requests: int, load: LoadPattern) -> list[float]:
    """Return the arrival times of `num_requests` requests, in seconds from the start, ascending.

    The same seed gives the same times. At a constant rate the times are scaled so that the last is
    exactly num_requests / rate: the offered load is then exact, and seeds change only the bursts
    (as in `vllm bench serve`).
    """
    rates = np.array(request_rates(num_requests, load))
    if num_requests == 0 or np.isinf(rates).any():
        return [0.0] * num_requests
    if math.isinf(load.burstiness):
        gaps = 1 / rates
    else:
        generator = np.random.default_rng(load.seed)
        gaps = generator.gamma(load.burstiness, 1 / (rates * load.burstiness))
    times = np.cumsum(gaps)
    if load.ramp_up is None and times[-1] > 0:
        times *= num_requests / load.request_rate / times[-1]
    return [float(time) for time in times]


def replayed_times(requests: Sequence[BenchRequest], time_scale: float) -> list[float]:
    """Return the requests' recorded arrival times in seconds, times `time_scale`.

    Raises ConfigError if a request has none.
    """
    times = []
    for index, request in enumerate(requests):
        if request.arrival_s is None:
            raise ConfigError(f"--replay needs timestamps, and request {index} has none")
        times.append(request.arrival_s * time_scale)
    return times

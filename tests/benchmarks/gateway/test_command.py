"""The figures of the gateway benchmark, from made-up times."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gateway.command import summarise


def test_latency_is_from_send_to_arrival_after_the_first_tenth() -> None:
    sent = {seed: [0.01 * step for step in range(100)] for seed in range(2)}
    late_s = [[0.002] * 100, [0.004] * 100]
    late_s[0][:10] = [1.0] * 10  # the beginning, which is not counted
    arrivals = [
        [at_s + by_s for at_s, by_s in zip(sent[seed], late_s[seed], strict=True)]
        for seed in range(2)
    ]
    arrivals[0] = sorted(arrivals[0])
    figures = summarise(sent, arrivals)
    expected = [x for seed in range(2) for x in (np.array(arrivals[seed]) - sent[seed])[10:]]
    assert figures["latency_ms"]["p99"] == pytest.approx(np.percentile(expected, 99) * 1e3)
    assert figures["latency_ms"]["max"] == pytest.approx(max(expected) * 1e3)


def test_the_rate_counts_while_every_stream_is_running() -> None:
    # Stream 1 starts 5 s after stream 0 and ends 5 s after it, each with 10 tokens a second.
    times = [[start_s + 0.1 * step for step in range(101)] for start_s in (0.0, 5.0)]
    figures = summarise(dict(enumerate(times)), times)
    assert figures["achieved"] == pytest.approx(20.0, rel=0.02)


def test_a_lost_token_ends_the_benchmark() -> None:
    with pytest.raises(SystemExit, match="stream 0: 2 tokens came of 3"):
        summarise({0: [0.0, 1.0, 2.0]}, [[0.0, 1.0]])

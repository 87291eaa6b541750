"""Series over time from hand-made records whose answers can be computed on paper."""

from __future__ import annotations

import pytest

from benchmarks.load.figures import series
from tests.benchmarks.load.records import record, run_of


def test_concurrency_counts_requests_that_are_with_the_server() -> None:
    curve = series.concurrency(
        [
            record(0, 1.0, [(2.0, 1), (4.0, 1)]),
            record(1, 3.0, [(5.0, 1)]),
            record(2, 4.0, [(4.5, 1)]),
            record(3, None, []),
        ]
    )
    assert curve.times_s.tolist() == [0.0, 1.0, 3.0, 4.0, 4.5, 5.0]
    assert curve.values.tolist() == [0, 1, 2, 2, 1, 0]


def test_decode_rate_leaves_out_every_time_with_a_prefill_or_a_stream_missing() -> None:
    # Both decode from 2.0 to 4.0; then one is alone until 6.0, while the third is in prefill.
    first = record(0, 0.0, [(1.0, 1), (1.5, 1), (2.5, 1), (3.0, 2), (4.0, 1)])
    second = record(1, 0.0, [(2.0, 1), (3.0, 4), (6.5, 1), (8.0, 1)])
    third = record(2, 4.0, [(6.0, 1), (7.0, 1)])
    # From 2.0 to 4.0: 1 + 2 + 1 + 4 tokens; from 6.0 to 7.0: 1 + 1.
    rate = series.decode_rate([first, second, third], streams=2)
    assert rate == pytest.approx((8 + 2) / 3.0)
    assert series.decode_rate([first, second, third], streams=3) is None
    assert series.decode_rate([], streams=1) is None


def test_throughput_loses_no_token_also_at_the_end_of_the_run() -> None:
    run = run_of([record(0, 0.0, [(0.5, 2), (1.0, 3), (3.0, 4)])], duration_s=3.0)
    curve = series.throughput(run, bins=3)
    assert curve.times_s.tolist() == pytest.approx([0.0, 1.0, 2.0])
    assert curve.values.tolist() == pytest.approx([2.0, 3.0, 4.0])

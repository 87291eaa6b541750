"""Series over time from hand-made records whose answers can be computed on paper."""

from __future__ import annotations

import pytest

from benchmarks.load import series
from tests.benchmarks.load.records import record, run_of


def test_a_bar_splits_queue_prefill_and_decode() -> None:
    good = record(1, 2.0, [(3.0, 1), (5.0, 1)], intended_s=1.0)
    unsent = record(0, None, [], intended_s=4.0, end_s=6.0, error_kind="turn_skipped")
    hung = record(2, 0.5, [], first_token_s=None, end_s=None, error_kind="interrupted")
    found = series.bars(run_of([good, unsent, hung], duration_s=9.0))
    assert [tuple(bar) for bar in found] == [
        (0.5, 0.5, 9.0, 9.0, False),
        (1.0, 2.0, 3.0, 5.0, True),
        (4.0, 6.0, 6.0, 6.0, False),
    ]


def test_the_distribution_is_the_share_of_values_up_to_each() -> None:
    curve = series.cdf([3.0, 1.0, 2.0, 2.0])
    assert curve.times_s.tolist() == [1.0, 2.0, 2.0, 3.0]
    assert curve.values.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert len(series.cdf([]).values) == 0


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


def test_throughput_loses_no_token_and_divides_the_last_bin_by_its_own_width() -> None:
    run = run_of([record(0, 0.0, [(0.5, 2), (1.0, 3), (2.5, 4)])], duration_s=2.5)
    curve = series.throughput(run, 1.0)
    assert curve.times_s.tolist() == [0.0, 1.0, 2.0]
    assert curve.values.tolist() == [2.0, 3.0, 8.0]


@pytest.mark.parametrize(
    ("duration_s", "width_s"), [(60.0, 1.0), (61.0, 2.0), (6.0, 0.1), (2.9, 0.05), (900.0, 20.0)]
)
def test_bins_have_round_widths(duration_s: float, width_s: float) -> None:
    assert series.bin_width_s(duration_s) == pytest.approx(width_s)
    assert duration_s / series.bin_width_s(duration_s) <= 60.001


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


def test_averages_weigh_values_by_their_time() -> None:
    curve = series.concurrency([record(0, 0.5, [(2.0, 1)]), record(1, 1.0, [(1.25, 1)])])
    found = series.averages(curve, 1.0, 2.5)
    assert found.times_s.tolist() == [0.0, 1.0, 2.0]
    assert found.values.tolist() == pytest.approx([0.5, 1.25, 0.0])

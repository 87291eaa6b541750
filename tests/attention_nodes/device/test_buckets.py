"""Sizes of recorded steps: few, never too small, never far too large."""

from __future__ import annotations

import pytest

from attention_nodes.device.buckets import bucket_of, row_buckets


def test_sizes_of_a_usual_limit() -> None:
    assert row_buckets(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert row_buckets(256)[-13:-10] == (64, 80, 96)
    assert row_buckets(320)[-3:] == (256, 288, 320)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8, 20, 64, 100, 256, 300, 1000])
def test_every_number_of_rows_has_the_least_size_that_holds_it(max_rows: int) -> None:
    buckets = row_buckets(max_rows)
    assert buckets[-1] == max_rows
    for num_rows in range(max_rows + 1):
        bucket = bucket_of(num_rows, buckets)
        assert bucket == min(size for size in buckets if size >= num_rows)
        # At least half of the computed rows are wanted, and three quarters if there are many rows.
        assert bucket <= max(1, 2 * num_rows)
        assert num_rows <= 32 or 3 * bucket <= 4 * num_rows
    assert bucket_of(max_rows + 1, buckets) is None


def test_nothing_fits_where_nothing_is_recorded() -> None:
    assert bucket_of(1, ()) is None

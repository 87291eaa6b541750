"""The rows that cover a matrix."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.pairwise import cover_pairs


@pytest.mark.parametrize("sizes", [(2, 3), (4, 4, 4), (9, 3, 3, 4, 2), (8, 3, 3, 4, 2)])
def test_every_pair_is_there_and_rows_are_few(sizes: tuple[int, ...]) -> None:
    factors = [[f"{factor}-{value}" for value in range(size)] for factor, size in enumerate(sizes)]
    rows = cover_pairs(*factors)
    assert all(value in factor for row in rows for value, factor in zip(row, factors, strict=True))
    for first, second in combinations(range(len(sizes)), 2):
        met = {(row[first], row[second]) for row in rows}
        assert met == set(product(factors[first], factors[second]))
    largest, next_largest, *_ = sorted(sizes, reverse=True)
    assert len(rows) <= 1.35 * largest * next_largest
    assert rows == cover_pairs(*factors)

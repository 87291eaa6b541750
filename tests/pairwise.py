"""A few rows of a large matrix: each pair of values of two factors is in some row.

A full product repeats itself: most faults need only one or two settings together. Knows no test;
deterministic, so that a row's name means the same in every run. And parameters of tests of which
few run by default, the others with `make test-slow`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

# (factor, index of its value) twice, the lower factor first.
Pair = tuple[tuple[int, int], tuple[int, int]]


def cover_pairs(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows of one value per factor that cover all pairs, chosen greedily.

    Takes two or more factors. There are at least as many rows as the two largest factors' product,
    and rarely many more.
    """
    uncovered: set[Pair] = {
        ((first, a), (second, b))
        for first, second in combinations(range(len(factors)), 2)
        for a, b in product(range(len(factors[first])), range(len(factors[second])))
    }
    rows = []
    while uncovered:
        row = _next_row([len(factor) for factor in factors], uncovered)
        uncovered -= set(combinations(row, 2))
        rows.append(tuple(factors[factor][value] for factor, value in row))
    return rows


def _next_row(sizes: Sequence[int], uncovered: set[Pair]) -> list[tuple[int, int]]:
    """Return a row that begins with the first uncovered pair and covers as many as it can."""
    chosen = dict(min(uncovered))
    for factor in range(len(sizes)):
        if factor not in chosen:
            chosen[factor] = max(
                range(sizes[factor]),
                key=lambda value: _gain((factor, value), chosen.items(), uncovered),
            )
    return sorted(chosen.items())


def _gain(
    entry: tuple[int, int], chosen: Iterable[tuple[int, int]], uncovered: set[Pair]
) -> tuple[int, int]:
    """Return the number of pairs that `entry` covers with those chosen, and may cover later."""
    now = sum((min(entry, other), max(entry, other)) in uncovered for other in chosen)
    return now, sum(entry in pair for pair in uncovered)


def cover_values(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return as many rows as the longest factor has values; each value of each factor occurs."""
    longest = max(map(len, factors))
    return [tuple(factor[row % len(factor)] for factor in factors) for row in range(longest)]


def few(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return `values`, with all but those that are `fast` marked slow."""
    return [each if each in fast else pytest.param(each, marks=pytest.mark.slow) for each in values]


def slow_rows(rows: Iterable[tuple[Any, ...]], *, beside: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the rows `beside`, and those of `rows` that are not among them marked slow."""
    others = (row for row in rows if row not in beside)
    return [*beside, *(pytest.param(*row, marks=pytest.mark.slow) for row in others)]

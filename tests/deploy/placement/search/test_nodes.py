"""Experts are divided so that the slowest node is as fast as can be."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from deploy.placement.search.nodes import minmax_shares

group = st.tuples(
    st.integers(1, 3),
    st.integers(0, 6),
    st.integers(0, 3),
    st.lists(st.integers(0, 4), min_size=7, max_size=7),
)


@given(st.integers(1, 8), st.lists(group, min_size=1, max_size=3))
def test_shares_are_the_best_of_all(
    total: int, groups: list[tuple[int, int, int, list[int]]]
) -> None:
    counts = [count for count, _, _, _ in groups]
    caps = [cap for _, cap, _, _ in groups]
    tables = [list(itertools.accumulate(steps, initial=first)) for _, _, first, steps in groups]
    if sum(cap * count for cap, count in zip(caps, counts, strict=True)) < total:
        return
    held = minmax_shares(total, counts, caps, [lambda n, t=t: float(t[n]) for t in tables])
    assert sum(n * count for n, count in zip(held, counts, strict=True)) >= total
    assert all(n <= cap for n, cap in zip(held, caps, strict=True))
    slowest = max(table[n] for table, n in zip(tables, held, strict=True))
    best = min(
        max(table[n] for table, n in zip(tables, way, strict=True))
        for way in itertools.product(*(range(cap + 1) for cap in caps))
        if sum(n * count for n, count in zip(way, counts, strict=True)) >= total
    )
    assert slowest == best


def test_a_node_of_twice_the_speed_holds_twice_as_many() -> None:
    assert minmax_shares(12, [1, 1], [12, 12], [lambda n: 2.0 * n, lambda n: 1.0 * n]) == (4, 8)

"""Placement of one layer's experts: invariants on random cases, and brute force on small ones."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.scheduler.experts.balance import (
    balance,
    node_loads,
    pack,
    place_global,
    place_hierarchical,
    refine,
    replicate,
)
from topspin.expert_table import ExpertTable

LOADS = st.one_of(st.just(0), st.integers(1, 4), st.integers(1, 1000))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Draw expert loads and capacities that hold each expert at least once."""
    num_experts = draw(st.integers(1, 12))
    num_nodes = draw(st.integers(1, 5))
    capacities = draw(
        st.lists(st.integers(0, num_experts), min_size=num_nodes, max_size=num_nodes).filter(
            lambda sizes: sum(sizes) >= num_experts
        )
    )
    loads = draw(st.lists(LOADS, min_size=num_experts, max_size=num_experts))
    return loads, capacities


@given(clusters())
@settings(max_examples=50)
def test_a_placement_fills_every_slot_and_holds_every_expert(
    cluster: tuple[list[int], list[int]],
) -> None:
    loads, capacities = cluster
    bins = place_global(loads, capacities)
    assert [len(held) for held in bins] == capacities  # sets: never two copies on a node
    assert set().union(*bins) == set(range(len(loads)))
    assert sum(node_loads(bins, loads)) == pytest.approx(sum(loads))
    assert bins == place_global(loads, capacities)


@given(clusters())
@settings(max_examples=50)
def test_a_refinement_never_raises_the_peak_and_keeps_sizes(
    cluster: tuple[list[int], list[int]],
) -> None:
    loads, capacities = cluster
    num_nodes = sum(capacity > 0 for capacity in capacities)
    copies = replicate(loads, num_slots=sum(capacities), max_copies=num_nodes)
    before = pack(loads, copies, capacities)
    after = refine(before, loads)
    assert max(node_loads(after, loads)) <= max(node_loads(before, loads)) + 1e-6
    assert [len(held) for held in after] == [len(held) for held in before]
    assert set().union(*after) == set(range(len(loads)))


@given(
    loads=st.lists(st.integers(1, 100), min_size=1, max_size=8),
    extra=st.integers(0, 12),
    max_copies=st.integers(1, 4),
)
@settings(max_examples=50)
def test_copies_minimise_the_highest_load_per_copy(
    loads: list[int], extra: int, max_copies: int
) -> None:
    num_slots = len(loads) + extra
    copies = replicate(loads, num_slots=num_slots, max_copies=max_copies)
    assert sum(copies) == min(num_slots, len(loads) * max_copies)
    assert all(1 <= count <= max_copies for count in copies)
    if len(loads) <= 4:
        worst = max(load / count for load, count in zip(loads, copies, strict=True))
        every = product(range(1, max_copies + 1), repeat=len(loads))
        assert worst == min(
            max(load / count for load, count in zip(loads, counts, strict=True))
            for counts in every
            if sum(counts) <= num_slots
        )


def test_replicas_break_a_peak_that_no_packing_can() -> None:
    loads = [90, 10, 10, 10]
    alone = place_global(loads, [2, 2])
    assert max(node_loads(alone, loads)) == 100
    doubled = place_global(loads, [3, 3])
    assert max(node_loads(doubled, loads)) == 60
    assert all(0 in held for held in doubled)


def test_capacities_that_leave_no_place_for_a_copy() -> None:
    # Expert 0 is worth four copies, but then node 1 could not be filled without a duplicate.
    bins = place_global([100, 10, 1], [3, 3, 1, 1])
    assert [len(held) for held in bins] == [3, 3, 1, 1]
    assert bins[0] == bins[1] == {0, 1, 2}


def test_a_group_of_experts_stays_on_its_host() -> None:
    loads = [50, 1, 1, 50, 20, 20, 20, 20]
    hosts = [[0, 1], [2, 3]]
    bins = place_hierarchical(loads, [3, 2, 3, 2], num_groups=4, hosts=hosts)
    for nodes in hosts:
        held = set().union(*(bins[node] for node in nodes))
        assert len(held) == 4
        for group in ({0, 1}, {2, 3}, {4, 5}, {6, 7}):
            assert group <= held or not group & held
    assert [len(held) for held in bins] == [3, 2, 3, 2]
    # Groups 0 and 1 with 51 each are put on different hosts if possible.
    totals = node_loads(bins, loads)
    assert totals[0] + totals[1] == totals[2] + totals[3] == 91


@pytest.mark.parametrize(
    ("num_groups", "hosts"),
    [(3, [[0, 1], [2, 3]]), (4, [[0], [1], [2, 3]]), (2, [[0], [1], [2], [3]])],
)
def test_groups_that_do_not_divide_are_placed_globally(
    num_groups: int, hosts: list[list[int]]
) -> None:
    loads = [50, 1, 1, 50, 20, 20, 20, 20]
    bins = place_hierarchical(loads, [2, 2, 2, 2], num_groups=num_groups, hosts=hosts)
    assert bins == place_global(loads, [2, 2, 2, 2])


def test_balance_is_the_time_lost_to_the_busiest_node_of_each_layer() -> None:
    slots = (((0, 1), (2,)), ((0, 2), (1, 2)))
    table = ExpertTable(version=1, num_experts=3, slots=slots)
    # Layer 0: 40 and 20, layer 1: 10 + 30 / 2 and 5 + 30 / 2.
    assert balance(table, [[30, 10, 20], [10, 5, 30]]) == pytest.approx((40 + 25) / (30 + 22.5))
    assert balance(table, [[0, 0, 0], [0, 0, 0]]) == 1.0
    # A node without experts (a lost one) does not make the others unbalanced.
    lost = ExpertTable(version=1, num_experts=2, slots=(((0,), (1,), ()),))
    assert balance(lost, [[5, 5]]) == 1.0

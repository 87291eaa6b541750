"""Changing a table: few experts move, slots stay, and only for a gain."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.scheduler.experts.balance import balance
from server.scheduler.experts.placement import (
    Hierarchy,
    keep_slots,
    match_contents,
    match_nodes,
    migrations,
    place_layer,
    plan_table,
)
from topspin.expert_table import ExpertTable, contiguous_table, even_shares, uniform_table


def plan(
    old: ExpertTable, loads: list[list[float]], *, min_gain: float = 0.05, **settings: Any
) -> ExpertTable | None:
    """Return the table that is planned, a layer a turn."""
    turns = plan_table(old, loads, min_gain=min_gain, **settings)
    for _ in range(len(old.slots) - len(old.local)):
        next(turns)
    with pytest.raises(StopIteration) as stop:
        next(turns)
    found: ExpertTable | None = stop.value.value
    return found


@st.composite
def tables_and_loads(draw: st.DrawFn) -> tuple[ExpertTable, list[list[float]]]:
    num_experts, num_nodes = draw(st.integers(2, 10)), draw(st.integers(1, 4))
    num_nodes = min(num_nodes, num_experts)
    table = uniform_table(
        num_layers=2,
        num_experts=num_experts,
        num_nodes=num_nodes,
        num_redundant=draw(st.integers(0, num_experts * (num_nodes - 1))),
    )
    load = st.floats(0, 1000, allow_subnormal=False)
    return table, [draw(st.lists(load, min_size=num_experts, max_size=num_experts)) for _ in "ab"]


@given(tables_and_loads())
@settings(max_examples=80)
def test_a_new_table_is_valid_better_and_stable(
    case: tuple[ExpertTable, list[list[float]]],
) -> None:
    old, loads = case
    new = plan(old, loads)
    if new is None:
        return
    new.validate()
    assert new.version == old.version + 1
    assert balance(new, loads) * 1.05 < balance(old, loads)
    for old_layer, new_layer in zip(old.slots, new.slots, strict=True):
        for before, after in zip(old_layer, new_layer, strict=True):
            assert len(before) == len(after)
            for slot, expert in enumerate(before):
                assert after[slot] == expert or expert not in after


@st.composite
def tables_with_optional_nodes(draw: st.DrawFn) -> tuple[ExpertTable, list[list[float]], int]:
    """Return also how many nodes, the first ones, hold every expert; others may hold nothing."""
    num_experts, num_required = draw(st.integers(2, 8)), draw(st.integers(1, 2))
    copies = draw(st.integers(0, num_experts * (num_required - 1)))
    shares = even_shares(num_experts + copies, num_required)
    shares += draw(st.lists(st.integers(0, num_experts), min_size=1, max_size=2))
    table = contiguous_table(num_layers=1, num_experts=num_experts, capacities=shares)
    load = st.floats(0, 1000, allow_subnormal=False)
    loads = draw(st.lists(load, min_size=num_experts, max_size=num_experts))
    return table, [loads], num_required


@given(tables_with_optional_nodes())
@settings(max_examples=80)
def test_the_required_nodes_keep_every_expert(
    case: tuple[ExpertTable, list[list[float]], int],
) -> None:
    old, loads, num_required = case
    new = plan(old, loads, required=list(range(num_required)))
    if new is None:
        return
    new.validate()
    held = [set(experts) for experts in new.slots[0]]
    assert set().union(*held[:num_required]) == set(range(old.num_experts))
    assert [len(each) for each in held] == [len(each) for each in old.slots[0]]


def test_an_expert_does_not_move_to_a_node_that_may_leave() -> None:
    old = ExpertTable(1, 4, (((0, 1), (2, 3), (2, 3)),))
    loads = [[90.0, 90.0, 1.0, 1.0]]
    anywhere = plan(old, loads)
    assert anywhere is not None
    assert 3 not in {expert for experts in anywhere.slots[0][:2] for expert in experts}
    new = plan(old, loads, required=[0, 1])
    assert new is not None
    first, second = map(set, new.slots[0][:2])
    assert first | second == {0, 1, 2, 3}
    assert (0 in first) != (1 in first)  # the two that are busy are apart


def test_a_small_gain_is_not_worth_a_new_table() -> None:
    old = uniform_table(num_layers=1, num_experts=4, num_nodes=2)
    loads = [[52.0, 50.0, 50.0, 48.0]]
    assert plan(old, loads) is None
    assert plan(old, loads, min_gain=0.0) is None  # the migrations cost more than the gain of 2 %
    assert plan(old, [[80.0, 80.0, 20.0, 20.0]]) is not None


def test_an_untouched_layer_stays_and_one_exchange_is_enough_for_the_other() -> None:
    old = uniform_table(num_layers=2, num_experts=8, num_nodes=2)
    even, skewed = [10.0] * 8, [40.0, 40.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0]
    new = plan(old, [even, skewed])
    assert new is not None
    assert new.slots[0] == old.slots[0]
    assert migrations(old, new) == 2
    assert balance(new, [even, skewed]) < 1.01


def test_layers_that_are_local_stay_as_they_are() -> None:
    apart = uniform_table(num_layers=2, num_experts=4, num_nodes=2)
    old = msgspec.structs.replace(apart, slots=(((), ()), apart.slots[1]), local=(0,))
    new = plan(old, [[80.0, 80.0, 20.0, 20.0]] * 2)
    assert new is not None
    assert (new.slots[0], new.local) == (((), ()), (0,))
    assert new.slots[1] != old.slots[1]


def test_a_hot_expert_gets_the_spare_slot() -> None:
    old = uniform_table(num_layers=1, num_experts=4, num_nodes=2, num_redundant=1)
    assert old.slots == (((0, 1), (2, 3, 0)),)
    new = plan(old, [[10.0, 10.0, 100.0, 10.0]])
    assert new is not None
    assert all(2 in experts for experts in new.slots[0])
    assert new.slots[0][1][0] == 2


@pytest.mark.parametrize(
    ("old", "experts", "slots"),
    [
        ((3, 1, 2), {1, 2, 3}, (3, 1, 2)),
        ((3, 1, 2), {0, 1, 5}, (0, 1, 5)),
        ((3, 1, 2), {2, 4}, (2, 4)),  # one slot fewer: expert 2 had the last one
        ((3, 1), {1, 3, 7, 9}, (3, 1, 7, 9)),
        ((), {1}, (1,)),
    ],
)
def test_keep_slots(old: tuple[int, ...], experts: set[int], slots: tuple[int, ...]) -> None:
    assert keep_slots(old, experts) == slots


@given(st.lists(st.sets(st.integers(0, 5), min_size=2, max_size=2), min_size=8, max_size=8))
@settings(max_examples=60)
def test_matched_contents_keep_nearly_the_most(sets: list[set[int]]) -> None:
    old, new = sets[:4], sets[4:]
    order = match_contents(old, new, [0] * 4)
    assert sorted(order) == [0, 1, 2, 3]

    def kept(choice: tuple[int, ...] | list[int]) -> int:
        return sum(len(old[place] & new[idx]) for place, idx in enumerate(choice))

    best = max(kept(choice) for choice in permutations(range(4)))
    assert kept(order) >= best - 1


def test_contents_of_another_size_stay_with_their_node() -> None:
    old = [{0, 1}, {2}, {3, 4}]
    bins = [{3, 4}, {0}, {1, 2}]
    assert match_nodes(old, bins, [[0], [1], [2]]) == [{1, 2}, {0}, {3, 4}]


def test_hosts_change_places_as_a_whole() -> None:
    old = [{0}, {1}, {2}, {3}]
    bins = [{3}, {2}, {0}, {1}]
    assert match_nodes(old, bins, [[0, 1], [2, 3]]) == [{0}, {1}, {2}, {3}]
    mixed = [{0}, {2}, {1}, {3}]  # experts 1 and 2 may not leave their new hosts
    assert match_nodes(old, mixed, [[0, 1], [2, 3]]) == [{0}, {2}, {1}, {3}]


def test_the_hierarchical_policy_moves_groups() -> None:
    hierarchy = Hierarchy(num_groups=4, hosts=((0, 1), (2, 3)))
    old = ((0, 1), (2, 3), (4, 5), (6, 7))
    loads = [90.0, 30, 90, 30, 10, 10, 10, 10]
    new = place_layer(old, loads, capacities=[2, 2, 2, 2], hierarchy=hierarchy)
    for nodes in hierarchy.hosts:
        held = {expert for node in nodes for expert in new[node]}
        assert all(expert ^ 1 in held for expert in held)
    assert max(sum(loads[e] for e in experts) for experts in new) == 100


def test_nodes_that_lose_or_gain_slots() -> None:
    old = ((0, 1), (2, 3), (0, 2))
    new = place_layer(old, [1.0, 1.0, 1.0, 1.0], capacities=[2, 0, 3])
    assert [len(experts) for experts in new] == [2, 0, 3]
    assert {expert for experts in new for expert in experts} == {0, 1, 2, 3}
    assert set(new[2]) >= {0, 2}

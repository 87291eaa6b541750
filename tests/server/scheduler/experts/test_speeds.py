"""Nodes of unequal speed: what is learnt of them, and placements that equalise times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.scheduler.experts.balance import balance, node_times, place_global
from server.scheduler.experts.balancer import ExpertBalancer
from server.scheduler.experts.load import ExpertLoad
from server.scheduler.experts.speeds import NodeSpeeds
from server.scheduler.nodes.formation import Formation
from server.scheduler.nodes.roster import Member
from tests.server.scheduler.experts.test_placement import plan, tables_and_loads
from topspin.errors import ProtocolError
from topspin.expert_table import ACTIVATION_ROWS, ExpertTable, shares_by_speed, uniform_table
from topspin.messages import ExpertCounts, pack_ints
from topspin.plan.settings import BalancePolicy

HALF = (1.0, 0.5)


def learnt(*nodes: tuple[int, int, int, float]) -> tuple[float, ...] | None:
    """Return what is learnt of (pairs, activations, batches, seconds) of each node."""
    speeds = NodeSpeeds(len(nodes))
    for node, (pairs, activations, batches, compute_s) in enumerate(nodes):
        for _ in range(3):
            speeds.add(
                node,
                num_pairs=pairs,
                activations=activations,
                batches=batches,
                compute_s=compute_s,
            )
    return speeds.relative()


def test_a_speed_is_work_over_time() -> None:
    # 22 experts and 10 that take equally long.
    assert learnt((440, 220, 10, 0.02), (200, 100, 10, 0.02)) == (1.0, 0.45)
    assert learnt((100, 100, 10, 0.04), (100, 100, 10, 0.02)) == (0.5, 1.0)
    # Loads are divided by speeds: none is zero, however slow a node is.
    assert learnt((100, 100, 10, 20.0), (100, 100, 10, 0.02)) == (0.01, 1.0)
    # Rows and weights count.
    assert learnt((ACTIVATION_ROWS, 1, 1, 0.01), (0, 0, 1, 0.0), (1, 2, 1, 0.02)) == (
        *(1.0, 1.0),
        pytest.approx(0.53, abs=0.01),
    )


@pytest.mark.parametrize(
    "nodes",
    [
        ((100, 100, 10, 0.02), (100, 100, 10, 0.0245)),  # as equal as measurements are
        ((100, 100, 10, 0.0009), (100, 100, 10, 0.0003)),  # most of it is no work
        ((0, 0, 0, 0.0), (0, 0, 0, 0.0)),
        ((100, 100, 10, 0.0), (100, 100, 10, 0.02)),  # one node is not measured
    ],
)
def test_what_says_too_little_is_no_difference(
    nodes: tuple[tuple[int, int, int, float], ...],
) -> None:
    assert learnt(*nodes) is None


def test_a_node_that_becomes_slow_is_noticed() -> None:
    speeds = NodeSpeeds(2)
    for compute_s in (*[0.02] * 20, *[0.08] * 12):
        speeds.add(0, num_pairs=100, activations=50, batches=10, compute_s=0.02)
        speeds.add(1, num_pairs=100, activations=50, batches=10, compute_s=compute_s)
    found = speeds.relative()
    assert found is not None
    assert found[1] == pytest.approx(0.25, abs=0.02)


@given(tables_and_loads(), st.sampled_from([0.25, 1.0, 8.0]))
@settings(max_examples=60)
def test_equal_speeds_change_no_table(
    case: tuple[ExpertTable, list[list[float]]], speed: float
) -> None:
    old, loads = case
    plain = plan(old, loads, min_gain=0.0)
    found = plan(old, loads, min_gain=0.0, speeds=[speed] * old.num_nodes)
    assert (found and found.slots) == (plain and plain.slots)


def least_peak(loads: Sequence[float], capacities: Sequence[int], speeds: Sequence[float]) -> float:
    """Return the shortest time of the slowest node, of all placements."""
    every = [combinations(range(len(loads)), capacity) for capacity in capacities]
    return min(
        max(node_times(bins, loads, speeds))
        for bins in product(*map(list, every))
        if len(set().union(*map(set, bins))) == len(loads)
    )


def test_placements_are_near_the_best() -> None:
    rng, ratios = Random(7), []
    for _ in range(60):
        loads = [rng.paretovariate(1.2) for _ in range(6)]
        slow = [1.0, rng.choice([0.5, 0.25, 0.8]), rng.choice([0.5, 1.0])]
        speeds = rng.choice([slow, [1.0, 1.0, 1.0]])
        capacities = rng.choice([[2, 2, 2], [4, 1, 1], [3, 2, 2], [3, 3, 3], [6, 2, 4]])
        bins = place_global(loads, capacities, speeds)
        assert [len(held) for held in bins] == capacities
        found = max(node_times(bins, loads, speeds))
        ratios.append(found / least_peak(loads, capacities, speeds))
    assert sum(ratios) / len(ratios) < 1.06
    assert max(ratios) < 1.6


def test_the_fast_node_gets_the_busy_experts() -> None:
    table = uniform_table(num_layers=1, num_experts=4, num_nodes=2)
    loads = [[40.0, 10.0, 40.0, 10.0]]
    assert plan(table, loads) is None  # even, for equal nodes
    found = plan(table, loads, speeds=HALF)
    assert found is not None
    assert found.speeds == HALF
    assert [set(experts) for experts in found.slots[0]] == [{0, 2}, {1, 3}]
    assert balance(table, loads, HALF) == pytest.approx(100 / (100 / 1.5))
    assert balance(found, loads, HALF) == pytest.approx(80 / (100 / 1.5))


def test_where_all_experts_are_twice_speeds_alone_are_reason_for_a_table() -> None:
    table = uniform_table(num_layers=2, num_experts=3, num_nodes=2, num_redundant=3)
    loads = [[5.0, 5.0, 5.0]] * 2
    found = plan(table, loads, speeds=HALF)
    assert found is not None
    assert found.slots == table.slots
    assert balance(found, loads, HALF) == pytest.approx(1.0)
    assert plan(found, loads, speeds=HALF) is None


def report(load: ExpertLoad, table: ExpertTable, pairs: Sequence[int], *seconds: float) -> None:
    """Report `pairs` by expert of each layer; both nodes' times are given."""
    for node, compute_s in enumerate(seconds):
        held = table.experts_of(node)
        load.add(
            ExpertCounts(
                index=node,
                table_version=table.version,
                counts=tuple(pack_ints(pairs[expert] for expert in layer) for layer in held),
                activations=sum(map(len, held)),
                batches=len(held),
                compute_s=compute_s,
            )
        )


def test_a_balancer_moves_load_to_the_node_that_takes_less_time() -> None:
    table = uniform_table(num_layers=2, num_experts=4, num_nodes=2)
    formation = Formation(table)
    balancer = ExpertBalancer(formation, BalancePolicy(interval_s=0.0))
    members = [Member("expert", 0), Member("expert", 1)]
    report(balancer.load, table, [300, 100, 300, 100], 0.01, 0.03)
    assert balancer.load.speeds() == (1.0, 0.33)
    served = balancer.load.balance()
    assert served == pytest.approx(1.33 / 0.66, abs=0.01)
    balancer.ask()
    found = balancer.turn(0.0, members)
    while found is None:
        assert balancer.is_planning
        found = balancer.turn(0.0, members)
    assert all(set(layer[0]) == {0, 2} for layer in found.slots)
    for member in members:
        balancer.prepared(member, found.version)
    assert formation.table.speeds == (1.0, 0.33)
    assert balancer.stats().balance < served


def test_a_negative_time_is_refused() -> None:
    table = uniform_table(num_layers=1, num_experts=2, num_nodes=2)
    with pytest.raises(ProtocolError, match="negative"):
        report(ExpertLoad(Formation(table)), table, [1, 1], -0.5)


def test_shares_let_all_nodes_take_equally_long() -> None:
    assert shares_by_speed(32, [1.0, 1.0]) == [16, 16]
    assert shares_by_speed(32, [1.0, 0.5]) == [22, 10]
    assert shares_by_speed(7, [1.0, 1.0, 2.0]) == [2, 1, 4]
    for speeds in ([1.0, 0.3, 0.7], [0.2, 1.0]):
        shares = shares_by_speed(8, speeds)
        longest = max(share / speed for share, speed in zip(shares, speeds, strict=True))
        every = product(range(9), repeat=len(speeds))
        assert longest == min(
            max(share / speed for share, speed in zip(each, speeds, strict=True))
            for each in every
            if sum(each) == 8
        )


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.0), (1.0, -1.0)])
def test_a_table_with_impossible_speeds_is_refused(speeds: tuple[float, ...]) -> None:
    table = uniform_table(num_layers=1, num_experts=2, num_nodes=2)
    with pytest.raises(ProtocolError, match="speeds"):
        ExpertTable(1, 2, table.slots, speeds).validate()

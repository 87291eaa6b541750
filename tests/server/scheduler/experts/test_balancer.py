"""The course of a table change: when it is planned, which nodes must answer, which are counted."""

from __future__ import annotations

import msgspec
import pytest

from server.scheduler.experts.balancer import ExpertBalancer
from server.scheduler.experts.load import ExpertLoad
from server.scheduler.nodes.formation import Formation
from server.scheduler.nodes.roster import Member
from topspin.expert_table import ExpertTable, uniform_table
from topspin.messages import ExpertCounts, pack_ints
from topspin.plan.settings import BalancePolicy

NODES = [Member("attention", 0), Member("expert", 0), Member("expert", 1)]
TABLE = uniform_table(num_layers=2, num_experts=4, num_nodes=2)
SKEWED = [[90, 60, 6, 4], [90, 60, 6, 4]]


def make(formation: Formation | None = None, **changes: float) -> ExpertBalancer:
    config = msgspec.structs.replace(BalancePolicy(interval_s=10.0, half_life_pairs=64), **changes)
    return ExpertBalancer(formation or Formation(TABLE), config)


def report(load: ExpertLoad, table: ExpertTable, loads: list[list[int]]) -> None:
    """Report `loads`; each expert's first replica serves all of its load."""
    for node in range(2):
        counts = []
        for layer, experts in enumerate(table.experts_of(node)):
            first = [found[0].node for found in table.replicas(layer)]
            counts.append(pack_ints(loads[layer][e] * (first[e] == node) for e in experts))
        load.add(ExpertCounts(index=node, table_version=table.version, counts=tuple(counts)))


def plan(balancer: ExpertBalancer, now: float) -> ExpertTable | None:
    """Turn until there is a table or nothing more to plan."""
    table = balancer.turn(now, NODES)
    turns = 1
    while table is None and balancer.is_planning:
        table = balancer.turn(now, NODES)
        turns += 1
    assert turns <= 1 + len(TABLE.slots)
    return table


def test_a_table_is_used_when_every_node_has_prepared_it() -> None:
    formation = Formation(TABLE)
    balancer = make(formation)
    report(balancer.load, TABLE, SKEWED)
    assert plan(balancer, 0.0) is None  # the interval begins with the first turn
    assert plan(balancer, 9.0) is None
    table = plan(balancer, 10.0)
    assert table is not None
    assert table.version == 2
    assert balancer.is_changing
    assert balancer.stats().table_version == 1
    assert plan(balancer, 100.0) is None  # one at a time
    assert balancer.prepared(NODES[0], 2) is None
    assert balancer.prepared(NODES[1], 1) is None  # an answer to another table
    assert balancer.prepared(NODES[1], 2) is None
    assert formation.table is TABLE
    assert balancer.prepared(NODES[2], 2) == table
    assert formation.table == formation.full_table == table
    stats = balancer.stats()
    assert (stats.table_version, stats.migrations) == (2, 4)
    assert stats.balance_before == pytest.approx(150 / 80)
    assert stats.balance == pytest.approx(94 / 80)  # expected, until counts come
    report(balancer.load, table, [[40, 40, 40, 40]] * 2)
    assert balancer.stats().balance == pytest.approx(1.0)


def test_few_counts_or_a_balanced_table_are_no_reason() -> None:
    balancer = make()
    report(balancer.load, TABLE, [[20, 20, 1, 1]] * 2)
    assert plan(balancer, 0.0) is None
    assert plan(balancer, 20.0) is None
    balancer = make()
    report(balancer.load, TABLE, [[41, 40, 39, 40]] * 2)
    assert plan(balancer, 0.0) is None
    assert plan(balancer, 20.0) is None
    assert not balancer.is_changing


def test_an_interval_of_0_never_comes_but_who_asks_is_answered() -> None:
    balancer = make(interval_s=0.0)
    report(balancer.load, TABLE, SKEWED)
    assert plan(balancer, 0.0) is None
    assert plan(balancer, 1e9) is None
    balancer.ask()
    assert plan(balancer, 1e9) is not None


def test_a_given_table_gets_the_next_version() -> None:
    balancer = make()
    swapped = ExpertTable(version=1, num_experts=4, slots=(((2, 1), (0, 3)),) * 2)
    balancer.ask(swapped)
    table = balancer.turn(0.0, NODES)
    assert table is not None
    assert (table.version, table.slots) == (2, swapped.slots)


def test_a_table_that_a_node_refuses_is_given_up_when_all_have_answered() -> None:
    balancer = make()
    report(balancer.load, TABLE, SKEWED)
    balancer.ask()
    first = plan(balancer, 0.0)
    assert first is not None
    assert balancer.prepared(NODES[1], 2, is_refused=True) is None
    assert balancer.prepared(NODES[0], 2) is None
    assert balancer.is_changing  # an answer of the last node must not count for the next table
    assert balancer.prepared(NODES[2], 2) is None
    assert not balancer.is_changing
    assert balancer.stats().table_version == 1
    assert balancer.stats().migrations == 0
    # The next one has its version, and comes after twice the interval.
    assert plan(balancer, 19.0) is None
    second = plan(balancer, 20.0)
    assert second is not None
    assert second.version == 2
    assert [balancer.prepared(node, 2) for node in NODES] == [None, None, second]
    on_one_node = [[9000 * (e in layer[0]) for e in range(4)] for layer in second.slots]
    report(balancer.load, second, on_one_node)
    assert plan(balancer, 29.0) is None
    third = plan(balancer, 30.0)
    assert third is not None
    assert third.version == 3


def test_what_is_given_up_is_not_used_and_its_version_not_used_again() -> None:
    formation = Formation(TABLE)
    balancer = make(formation)
    report(balancer.load, TABLE, SKEWED)
    balancer.ask()
    first = plan(balancer, 0.0)
    assert first is not None
    balancer.cancel()
    for node in NODES:
        assert balancer.prepared(node, first.version) is None
    balancer.ask()
    second = plan(balancer, 0.0)
    assert second is not None
    assert second.version == 3
    # Meanwhile a recovery makes another table.
    formation.use_part(msgspec.structs.replace(TABLE, version=7))
    balancer.cancel()
    assert not balancer.is_changing
    balancer.ask()
    third = plan(balancer, 0.0)
    assert third is not None
    assert third.version == 8


def test_one_expert_node_leaves_no_choice() -> None:
    table = uniform_table(num_layers=1, num_experts=4, num_nodes=1)
    balancer = ExpertBalancer(Formation(table), BalancePolicy(interval_s=0.001))
    balancer.ask()
    assert balancer.turn(0.0, NODES) is None
    assert not balancer.is_planning

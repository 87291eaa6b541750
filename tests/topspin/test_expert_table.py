"""The expert table: its default form, its replicas, and the tables that are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topspin.errors import ProtocolError
from topspin.expert_table import (
    ExpertTable,
    Replica,
    contiguous_table,
    even_shares,
    uniform_table,
)


@given(
    st.integers(min_value=1, max_value=4),
    st.integers(min_value=1, max_value=70),
    st.integers(min_value=1, max_value=9),
)
def test_uniform_table_gives_every_expert_one_home(
    num_layers: int, num_experts: int, num_nodes: int
) -> None:
    table = uniform_table(num_layers=num_layers, num_experts=num_experts, num_nodes=num_nodes)
    table.validate()
    assert (table.version, table.num_nodes, len(table.slots)) == (1, num_nodes, num_layers)
    for layer in range(num_layers):
        in_node_order = [e for node in range(num_nodes) for e in table.experts_of(node)[layer]]
        assert in_node_order == list(range(num_experts))
        sizes = {len(table.experts_of(node)[layer]) for node in range(num_nodes)}
        assert max(sizes) - min(sizes) <= 1
        for expert, replicas in enumerate(table.replicas(layer)):
            assert [table.slots[layer][r.node][r.slot] for r in replicas] == [expert]


def test_replicas_of_a_hot_expert_come_in_node_order() -> None:
    table = ExpertTable(version=3, num_experts=3, slots=(((0, 2), (2, 1)), ((1,), (0, 1, 2))))
    table.validate()
    assert table.replicas(0) == [[Replica(0, 0)], [Replica(1, 1)], [Replica(0, 1), Replica(1, 0)]]
    assert table.replicas(1) == [[Replica(1, 0)], [Replica(0, 0), Replica(1, 1)], [Replica(1, 2)]]
    assert table.experts_of(0) == [(0, 2), (1,)]


def test_a_broken_table_is_refused() -> None:
    cases: list[tuple[tuple[tuple[tuple[int, ...], ...], ...], str]] = [
        ((((0, 1), (2,)), ((0, 1, 2),)), "layer 1 has 1 nodes"),
        ((((0, 1, 1), (2,)),), "layer 0 node 0: a second copy"),
        ((((0, 1), ()),), r"missing \[2\], unknown \[\]"),
        ((((0, 1), (2, 3)),), r"missing \[\], unknown \[3\]"),
        ((((0, 1), (2, -1)),), r"unknown \[-1\]"),
    ]
    for slots, reason in cases:
        with pytest.raises(ProtocolError, match=reason):
            ExpertTable(version=1, num_experts=3, slots=slots).validate()


def test_a_model_without_experts_has_an_empty_table() -> None:
    table = uniform_table(num_layers=0, num_experts=0, num_nodes=1)
    table.validate()
    assert table.num_nodes == 0


def test_redundant_slots_hold_second_copies_spread_over_the_nodes() -> None:
    cases: list[tuple[int, int, int]] = [(4, 2, 1), (7, 3, 5), (4, 3, 8), (5, 2, 5)]
    for num_experts, num_nodes, num_redundant in cases:
        table = uniform_table(
            num_layers=2, num_experts=num_experts, num_nodes=num_nodes, num_redundant=num_redundant
        )
        table.validate()
        copies = [len(found) for found in table.replicas(1)]
        assert sum(copies) == num_experts + num_redundant
        assert max(copies) - min(copies) <= 1
        sizes = [len(table.experts_of(node)[0]) for node in range(num_nodes)]
        assert max(sizes) - min(sizes) <= 1


def test_unequal_nodes_hold_runs_of_their_own_lengths() -> None:
    cases: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = [
        ((3, 1), ((0, 1, 2), (3,))),
        ((1, 4, 2), ((0,), (1, 2, 3, 0), (1, 2))),  # second copies begin with the first expert
        ((4, 4), ((0, 1, 2, 3), (0, 1, 2, 3))),
    ]
    for capacities, layer in cases:
        table = contiguous_table(num_layers=2, num_experts=4, capacities=capacities)
        table.validate()
        assert table.slots == (layer, layer)
    with pytest.raises(AssertionError, match="twice on a node"):
        contiguous_table(num_layers=1, num_experts=4, capacities=(5,))


def test_even_shares_differ_by_one_at_most() -> None:
    for total, num_nodes, shares in ((8, 3, [2, 3, 3]), (6, 3, [2, 2, 2]), (1, 2, [0, 1])):
        assert even_shares(total, num_nodes) == shares

"""The send plan against a brute-force walk over every (token, expert) pair."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2n_comm.host.parts import write_part
from m2n_comm.host.windows import PairLayout, private_memory
from m2n_comm.layout import num_parts, plan_sends, route_map
from tests.m2n_comm.harness import make_shape
from topspin.errors import FrameError
from topspin.expert_table import ExpertTable, Replica, uniform_table


@st.composite
def routings(draw: st.DrawFn) -> tuple[ExpertTable, int, list[list[int]]]:
    """Draw a table (replicas, any slot order), a layer, and distinct experts per token."""
    num_experts, nodes = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    layers = []
    for _ in range(2):
        holders = [draw(st.sets(st.integers(0, nodes - 1), min_size=1)) for _ in range(num_experts)]
        layers.append(
            tuple(
                tuple(draw(st.permutations([e for e in range(num_experts) if node in holders[e]])))
                for node in range(nodes)
            )
        )
    table = ExpertTable(version=3, num_experts=num_experts, slots=tuple(layers))
    table.validate()
    top_k = draw(st.integers(1, num_experts))
    tokens = draw(
        st.lists(
            st.permutations(range(num_experts)).map(lambda order: list(order[:top_k])),
            max_size=12,
        )
    )
    return table, draw(st.integers(0, 1)), [*tokens, list(range(top_k))][: max(1, len(tokens))]


@given(routings())
@settings(max_examples=60, deadline=None)
def test_a_plan_sends_every_pair_once_to_one_of_its_replicas(
    routing: tuple[ExpertTable, int, list[list[int]]],
) -> None:
    table, layer, tokens = routing
    plan = plan_sends(route_map(table), layer, torch.tensor(tokens, dtype=torch.int64))
    served: list[list[list[Replica]]] = [[[] for _ in experts] for experts in tokens]
    for node in range(table.num_nodes):
        rows = plan.rows[node]
        got = list(range(len(tokens))) if rows is None else rows.tolist()
        assert plan.counts[node] == len(got)
        slots = plan.slots[node].tolist()
        if table.num_nodes > 1:
            assert got == [t for t, row in enumerate(slots) if max(row) >= 0]
        for token in got:
            for choice, slot in enumerate(slots[token]):
                if slot >= 0:
                    served[token][choice].append(Replica(node, slot))
    replicas = table.replicas(layer)
    for experts, choices in zip(tokens, served, strict=True):
        for expert, found in zip(experts, choices, strict=True):
            assert len(found) == 1
            assert found[0] in replicas[expert]


@given(
    routing=routings(),
    window_rows=st.integers(1, 5),
    seed=st.integers(0, 2**31),
    half=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_the_parts_hold_exactly_the_planned_rows(
    routing: tuple[ExpertTable, int, list[list[int]]], window_rows: int, seed: int, half: bool
) -> None:
    table, layer, tokens = routing
    experts = torch.tensor(tokens, dtype=torch.int64)
    payload = torch.bfloat16 if half else torch.float32
    shape = make_shape(
        top_k=experts.shape[1], window_rows=window_rows, payload=payload, num_micro_batches=1
    )
    layout = PairLayout(shape)
    window = layout.map(private_memory(layout)).requests[0]
    assert window.slots is not None
    assert window.weights is not None
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(tokens), 24, generator=generator).to(payload)
    weights = torch.rand(experts.shape, generator=generator)
    plan = plan_sends(route_map(table), layer, experts)
    for node in range(table.num_nodes):
        rows = plan.rows[node]
        order = range(len(tokens)) if rows is None else rows.tolist()
        seen = 0
        for part in range(num_parts(plan.counts[node], window_rows)):
            low, high = part * window_rows, min((part + 1) * window_rows, plan.counts[node])
            write_part(window, plan, node, low=low, high=high, hidden=hidden, weights=weights)
            for position, token in enumerate(order[low:high]):
                assert torch.equal(window.hidden[position], hidden[token])
                assert torch.equal(window.weights[position], weights[token])
                assert window.slots[position].tolist() == plan.slots[node, token].tolist()
                seen += 1
        assert seen == plan.counts[node]


@pytest.mark.parametrize("nodes", [1, 3])
def test_no_tokens_is_a_plan_too(nodes: int) -> None:
    table = uniform_table(num_layers=1, num_experts=6, num_nodes=nodes)
    plan = plan_sends(route_map(table), 0, torch.empty((0, 2), dtype=torch.int64))
    assert plan.counts == (0,) * nodes


@pytest.mark.parametrize(("count", "parts"), [(0, 1), (1, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_num_parts(count: int, parts: int) -> None:
    assert num_parts(count, 8) == parts


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("unknown", [6, -1])
def test_an_unknown_expert_is_refused(nodes: int, unknown: int) -> None:
    route = route_map(uniform_table(num_layers=1, num_experts=6, num_nodes=nodes))
    with pytest.raises(FrameError, match=rf"{unknown}.*there are 0\.\.5"):
        plan_sends(route, 0, torch.tensor([[2, unknown]]))


def test_a_single_node_gets_all_rows_in_order_without_indices() -> None:
    route = route_map(uniform_table(num_layers=1, num_experts=6, num_nodes=1))
    plan = plan_sends(route, 0, torch.tensor([[3, 1], [5, 0]]))
    assert plan.slots.tolist() == [[[3, 1], [5, 0]]]
    assert (plan.rows, plan.counts) == ((None,), (2,))

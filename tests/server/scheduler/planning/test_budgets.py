"""The tokens per step of nodes of different speed."""

from __future__ import annotations

from server.scheduler.micro_batching.cost import CostModel
from server.scheduler.planning.budgets import Speed, token_budgets


def speed(slowness: float, *, seats: int = 4) -> Speed:
    """Return a node of 512 tokens whose every token takes `slowness` times 20 us."""
    cost = CostModel(attention_token_s=slowness * 20e-6 - 4e-6, expert_token_s=4e-6)
    return Speed(512, seats, cost)


def test_equal_nodes_have_their_whole_budgets() -> None:
    assert token_budgets([speed(1.0), speed(1.2), speed(1.0)]) == [512, 512, 512]


def test_a_slow_node_gets_what_it_computes_in_the_time_of_the_fastest() -> None:
    assert token_budgets([speed(1.0), speed(4.0)]) == [512, 128]


def test_every_running_sequence_may_advance() -> None:
    assert token_budgets([speed(1.0), speed(100.0, seats=64)]) == [512, 64]

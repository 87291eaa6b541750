"""The tokens per step of nodes of different speed."""

from __future__ import annotations

from server.scheduler.micro_batching.cost import CostModel
from server.scheduler.planning.budgets import token_budgets
from topspin.plan.spec import AttentionNode


def budgets(*slowness: float, seats: int = 4) -> list[int]:
    """Return the budgets of nodes of 512 tokens, of which each takes `slowness` times 20 us."""
    nodes = [
        AttentionNode(
            index=index,
            device="cpu",
            kernels="cpu",
            wait="block",
            max_num_seqs=seats,
            max_num_batched_tokens=512,
        )
        for index in range(len(slowness))
    ]
    found = token_budgets(
        nodes,
        lambda index: CostModel(
            attention_token_s=slowness[index] * 20e-6 - 4e-6, expert_token_s=4e-6
        ),
    )
    return [found[index] for index in range(len(nodes))]


def test_equal_nodes_have_their_whole_budgets() -> None:
    assert budgets(1.0, 1.2, 1.0) == [512, 512, 512]


def test_a_slow_node_gets_what_it_computes_in_the_time_of_the_fastest() -> None:
    assert budgets(1.0, 4.0) == [512, 128]


def test_every_running_sequence_may_advance() -> None:
    assert budgets(1.0, 100.0, seats=64) == [512, 64]

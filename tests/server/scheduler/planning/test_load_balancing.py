"""The choice of an attention node, prefix hits against load, and the tokens of unequal nodes."""

from __future__ import annotations

from server.scheduler.micro_batching.cost import CostModel
from server.scheduler.planning.load_balancing import Candidate, choose_replica, token_budgets
from topspin.plan.spec import AttentionNode


def chosen(*candidates: Candidate) -> int:
    """Return the index of the node chosen for a request of 100 tokens."""
    return choose_replica(candidates, num_tokens=100).replica_idx


def node(idx: int, hit: int, pending: int, running: int, *, slowness: float = 1.0) -> Candidate:
    """Return a node whose attention takes `slowness` times as long as the default."""
    default = CostModel()
    cost = CostModel(
        attention_token_s=slowness * default.attention_token_s,
        attention_pair_s=slowness * default.attention_pair_s,
    )
    return Candidate(idx, hit, pending, running, cost)


def test_the_node_with_the_prefix() -> None:
    assert chosen(node(0, 0, 0, 0), node(1, 64, 0, 0)) == 1


def test_the_node_with_less_to_do() -> None:
    assert chosen(node(0, 0, 500, 0), node(1, 0, 0, 0)) == 1
    assert chosen(node(0, 0, 0, 5), node(1, 0, 0, 4)) == 1


def test_a_hit_does_not_outweigh_a_long_queue() -> None:
    assert chosen(node(0, 64, 5000, 0), node(1, 0, 0, 0)) == 1
    assert chosen(node(0, 64, 10, 0), node(1, 0, 0, 0)) == 0


def test_equal_nodes_by_index() -> None:
    assert chosen(node(0, 0, 0, 1), node(1, 0, 0, 1)) == 0


def test_a_slow_node_gets_work_once_the_fast_one_has_much() -> None:
    slow = node(1, 0, 0, 0, slowness=4.0)
    assert chosen(node(0, 0, 0, 0), slow) == 0
    assert chosen(node(0, 0, 20, 0), slow) == 0
    assert chosen(node(0, 0, 500, 0), slow) == 1


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

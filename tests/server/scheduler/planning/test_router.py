"""The choice of an attention node: prefix hits against load."""

from __future__ import annotations

from server.scheduler.micro_batching.cost import CostModel
from server.scheduler.planning.router import Candidate, choose_replica


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

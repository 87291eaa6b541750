"""The choice of an attention node: prefix hits against load."""

from __future__ import annotations

from server.scheduler.micro_batching.cost import CostModel
from server.scheduler.planning.router import Candidate, choose_replica


def chosen(*candidates: Candidate, num_tokens: int = 100) -> int:
    """Return the index of the node chosen for a request of `num_tokens`."""
    return choose_replica(candidates, num_tokens=num_tokens, cost=CostModel()).replica_idx


def test_the_node_with_the_prefix() -> None:
    assert chosen(Candidate(0, 0, 0, 0), Candidate(1, 64, 0, 0)) == 1


def test_the_node_with_less_to_do() -> None:
    assert chosen(Candidate(0, 0, 500, 0), Candidate(1, 0, 0, 0)) == 1
    assert chosen(Candidate(0, 0, 0, 5), Candidate(1, 0, 0, 4)) == 1


def test_a_hit_does_not_outweigh_a_long_queue() -> None:
    assert chosen(Candidate(0, 64, 5000, 0), Candidate(1, 0, 0, 0)) == 1
    assert chosen(Candidate(0, 64, 10, 0), Candidate(1, 0, 0, 0)) == 0


def test_equal_nodes_by_index() -> None:
    assert chosen(Candidate(0, 0, 0, 1), Candidate(1, 0, 0, 1)) == 0

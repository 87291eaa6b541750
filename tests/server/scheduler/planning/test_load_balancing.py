"""The choice of an attention node, prefix hits against load, and the tokens of unequal nodes."""

from __future__ import annotations

import pytest

from server.scheduler.micro_batching.cost import CostModel
from server.scheduler.planning.load_balancing import ReplicaCandidate, choose_replica, token_budgets
from tests.server.scheduler.engine import make_config


def node(
    idx: int, hit: int, pending: int, running: int, *, slowness: float = 1.0
) -> ReplicaCandidate:
    """Return a node whose attention takes `slowness` times as long as the default."""
    default = CostModel()
    cost = CostModel(
        attention_token_s=slowness * default.attention_token_s,
        attention_pair_s=slowness * default.attention_pair_s,
    )
    return ReplicaCandidate(idx, hit, pending, running, cost)


SLOW = node(1, 0, 0, 0, slowness=4.0)


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        (node(0, 0, 0, 0), node(1, 64, 0, 0), 1),  # it has the prefix
        (node(0, 0, 500, 0), node(1, 0, 0, 0), 1),  # it has less to do
        (node(0, 0, 0, 5), node(1, 0, 0, 4), 1),
        (node(0, 0, 0, 1), node(1, 0, 0, 1), 0),  # equal nodes, by index
        (node(0, 64, 5000, 0), node(1, 0, 0, 0), 1),  # a hit does not outweigh a long queue
        (node(0, 64, 10, 0), node(1, 0, 0, 0), 0),
        (node(0, 0, 0, 0), SLOW, 0),  # a slow node gets work once the fast one has much
        (node(0, 0, 20, 0), SLOW, 0),
        (node(0, 0, 500, 0), SLOW, 1),
    ],
)
def test_a_request_of_100_tokens_goes_to(
    first: ReplicaCandidate, second: ReplicaCandidate, chosen: int
) -> None:
    assert choose_replica([first, second], num_tokens=100).replica_idx == chosen


@pytest.mark.parametrize(
    ("slowness", "seats", "budgets"),
    [
        ((1.0, 1.2, 1.0), 4, [512, 512, 512]),
        ((1.0, 4.0), 4, [512, 128]),  # as many as it computes in the time of the fastest
        ((1.0, 100.0), 64, [512, 64]),  # every running sequence may advance
    ],
)
def test_the_tokens_of_nodes_whose_times_are_in_this_relation(
    slowness: tuple[float, ...], seats: int, budgets: list[int]
) -> None:
    plan = make_config(num_nodes=len(slowness), max_num_seqs=seats, max_num_batched_tokens=512)

    def cost(index: int) -> CostModel:
        token_s = slowness[index] * 20e-6 - 4e-6
        return CostModel(attention_token_s=token_s, expert_token_s=4e-6)

    assert token_budgets(plan.attention, cost) == dict(enumerate(budgets))

"""Experts that a batch touches, against enumeration and simulation."""

from __future__ import annotations

import itertools
import random

import pytest

from deploy.placement.routing import (
    choice_probabilities,
    from_frequencies,
    rows_reached,
    shares_of_nodes,
    touched,
)
from tests.pairwise import slow_rows


def drawn(weights: list[float], top_k: int, rng: random.Random) -> list[int]:
    """Draw `top_k` different experts by successive sampling: the least exponential clocks."""
    clocks = [(rng.expovariate(weight), idx) for idx, weight in enumerate(weights)]
    return [idx for _, idx in sorted(clocks)[:top_k]]


@pytest.mark.parametrize(("experts", "top_k", "rows"), [(4, 2, 3), (5, 1, 4), (4, 3, 2)])
def test_touched_experts_of_even_routing_are_those_of_all_outcomes(
    experts: int, top_k: int, rows: int
) -> None:
    choices = list(itertools.combinations(range(experts), top_k))
    outcomes = list(itertools.product(choices, repeat=rows))
    exact = sum(len(set().union(*outcome)) for outcome in outcomes) / len(outcomes)
    assert touched(choice_probabilities(experts, top_k), rows) == pytest.approx(exact)


@pytest.mark.parametrize("skew", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(
    ("experts", "top_k", "rows"), slow_rows([(128, 8, 16)], beside=[(16, 8, 2), (32, 4, 6)])
)
def test_touched_experts_of_skewed_routing_are_the_simulations(
    experts: int, top_k: int, rows: int, skew: float
) -> None:
    rng = random.Random(1)
    weights = [(idx + 1) ** -skew for idx in range(experts)]
    rounds = 400
    mean = (
        sum(
            len({each for _ in range(rows) for each in drawn(weights, top_k, rng)})
            for _ in range(rounds)
        )
        / rounds
    )
    assert touched(choice_probabilities(experts, top_k, skew), rows) == pytest.approx(
        mean, rel=0.03
    )


@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_probabilities_are_of_top_k_choices_and_fall(skew: float) -> None:
    found = choice_probabilities(16, 4, skew)
    assert sum(found) == pytest.approx(4.0)
    assert list(found) == sorted(found, reverse=True)
    assert all(0 < each <= 1 for each in found)


def test_one_row_touches_as_many_as_it_chooses_and_many_rows_all() -> None:
    assert touched(choice_probabilities(16, 8, 1.2), 1) == pytest.approx(8.0)
    assert touched(choice_probabilities(16, 8, 1.2), 10_000) == pytest.approx(16.0)
    assert touched(choice_probabilities(16, 8)[:4], 1) == pytest.approx(2.0)


def test_measured_frequencies_keep_their_order() -> None:
    found = from_frequencies([1.0, 5.0, 2.0], 1)
    assert sum(found) == pytest.approx(1.0)
    assert found[1] > found[2] > found[0]


def test_rows_that_reach_a_node_are_nearly_the_simulations() -> None:
    rng, held, rounds = random.Random(2), set(range(4)), 4000
    hits = sum(bool(held & set(drawn([1.0] * 16, 4, rng))) for _ in range(rounds))
    found = rows_reached(choice_probabilities(16, 4)[:4], 1.0)
    # A token's choices exclude each other, so that a few more reach the node.
    assert 0.9 < found / (hits / rounds) <= 1.02
    assert touched(choice_probabilities(16, 4)[:4], 1.0) == pytest.approx(1.0)


def test_nodes_get_experts_up_to_their_places_and_even_load() -> None:
    shares = shares_of_nodes(16, 4, [4, 12], 1.0)
    assert [len(each) for each in shares] == [4, 12]
    assert sum(map(sum, shares)) == pytest.approx(4.0)
    even = shares_of_nodes(16, 4, [8, 8], 1.0)
    loads = [sum(each) for each in even]
    assert max(loads) / min(loads) < 1.1

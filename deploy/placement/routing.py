"""Numbers of experts, rows and pairs that a batch brings to a node.

Owns the law of a router: for each expert the probability that a token chooses it among its top k.
Pure arithmetic; tokens are taken as independent. Called by cost.py and the planner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache


def touched(probabilities: Sequence[float], rows: float) -> float:
    """Return the expected number of different experts that `rows` tokens choose.

    E[distinct] = sum over experts of 1 - (1 - p)^rows, by linearity of expectation: exact.
    """
    # Experts chosen alike, as most are, are computed once.
    found = {p: 1.0 if p >= 1.0 else -math.expm1(rows * math.log1p(-p)) for p in set(probabilities)}
    if len(found) == 1:
        return len(probabilities) * found[probabilities[0]]
    return math.fsum(map(found.__getitem__, probabilities))


def rows_reached(probabilities: Sequence[float], rows: float) -> float:
    """Return how many of `rows` tokens choose at least one of these experts, roughly.

    Choices of different experts are taken as independent; as a token's are different ones, it is up
    to a tenth too few.
    """
    found = {p: math.log1p(-p) if p < 1.0 else -math.inf for p in set(probabilities)}
    missed = math.fsum(map(found.__getitem__, probabilities))
    return rows * -math.expm1(missed)


@lru_cache(maxsize=256)
def choice_probabilities(num_experts: int, top_k: int, skew: float = 0.0) -> tuple[float, ...]:
    """Return for each expert, the most popular first, how likely a token chooses it.

    They sum to `top_k`. With `skew` s, expert i has weight i^-s, and k are drawn without
    replacement: in a race of exponential clocks with these rates, the first k to ring. Their
    probabilities are taken as 1 - exp(-rate t) at the time t when k rang on average.
    """
    if top_k >= num_experts:
        return (1.0,) * num_experts
    if skew == 0.0:
        return (top_k / num_experts,) * num_experts
    return from_frequencies([(idx + 1) ** -skew for idx in range(num_experts)], top_k)


def from_frequencies(weights: Sequence[float], top_k: int) -> tuple[float, ...]:
    """Return choice_probabilities() for any weights, in their order."""

    def total(time: float) -> float:
        return math.fsum(-math.expm1(-weight * time) for weight in weights)

    low, high = 0.0, 1.0 / max(weights)
    while total(high) < top_k:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if total(middle) < top_k else (low, middle)
    return tuple(-math.expm1(-weight * high) for weight in weights)


def shares_of_nodes(
    num_experts: int, top_k: int, num_held: Sequence[int], skew: float = 0.0
) -> list[list[float]]:
    """Return per node the probabilities of its experts, handed out as a balancer does.

    Each expert, by falling popularity, goes to the node with the least load per place that has
    a place left; `num_held` are the places and must suffice for all experts.
    """
    held: list[list[float]] = [[] for _ in num_held]
    assert sum(num_held) >= num_experts, (num_held, num_experts)
    for probability in choice_probabilities(num_experts, top_k, skew):
        free = [node for node, places in enumerate(num_held) if len(held[node]) < places]
        held[min(free, key=lambda node: (sum(held[node]) / num_held[node], node))].append(
            probability
        )
    return held

"""The tokens that each attention node gets in a step, when nodes differ in speed.

Pure. All nodes of a step wait for the slowest, so a node that needs longer per token gets fewer
prompt tokens. Called by policy.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from server.scheduler.micro_batching.cost import CostModel

# Fitted times of equal nodes vary by less: their budgets stay whole.
EQUAL = 1.25


class Speed(NamedTuple):
    """A node's most tokens per step, its seats (every running sequence may advance), its times."""

    max_tokens: int
    max_num_seqs: int
    cost: CostModel


def token_budgets(nodes: Sequence[Speed]) -> list[int]:
    """Return each node's budget: its most tokens, or what it computes in the fastest one's time."""
    token_s = [each.cost.attention_token_s + each.cost.expert_token_s for each in nodes]
    fastest_s = min(token_s)
    return [
        each.max_tokens
        if own_s <= EQUAL * fastest_s
        else max(min(each.max_num_seqs, each.max_tokens), int(each.max_tokens * fastest_s / own_s))
        for each, own_s in zip(nodes, token_s, strict=True)
    ]

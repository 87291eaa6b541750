"""The tokens that each attention node gets in a step, when nodes differ in speed.

Pure. All nodes of a step wait for the slowest, so a node that needs longer per token gets fewer
prompt tokens. Called by policy.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.scheduler.micro_batching.cost import CostModel
from topspin.plan.spec import AttentionNode

# Fitted times of equal nodes vary by less: their budgets stay whole.
EQUAL = 1.25


def token_budgets(
    nodes: Sequence[AttentionNode], cost_of: Callable[[int], CostModel]
) -> dict[int, int]:
    """Return the budgets of `nodes`, which step together, by index; `cost_of` has their times.

    A budget is the node's most tokens, or as many as it computes in the fastest one's time, and
    never less than every running sequence needs to advance.
    """
    costs = {node.index: cost_of(node.index) for node in nodes}
    token_s = {idx: each.attention_token_s + each.expert_token_s for idx, each in costs.items()}
    fastest_s = min(token_s.values(), default=0.0)
    budgets = {}
    for node in nodes:
        own_s, most = token_s[node.index], node.max_num_batched_tokens
        if own_s > EQUAL * fastest_s:
            most = max(node.max_num_seqs, int(most * fastest_s / own_s))
        budgets[node.index] = most
    return budgets

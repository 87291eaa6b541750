"""A linear model of the time that one MoE layer takes on each side.

Owns the coefficients and the arithmetic. Knows no plans and no requests. The defaults are
those of a 215M-parameter model on two CPU cores; splits and routing depend on their ratios
only, so they are usable, not exact, elsewhere. Called by split.py, plans.py and router.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Seconds per layer: a fixed part (reading weights) and parts per token.

    `attention_pair_s` is per (query token, key position) pair, `link_s` one way.
    """

    attention_fixed_s: float = 4.3e-4
    attention_token_s: float = 4.5e-6
    attention_pair_s: float = 6.0e-9
    expert_fixed_s: float = 3.1e-4
    expert_token_s: float = 1.4e-5
    link_s: float = 2.1e-5
    link_token_s: float = 0.0

    def slice_s(self, num_tokens: int, start: int) -> float:
        """Return the time that `num_tokens` positions from `start` on add to a micro-batch."""
        pairs = num_tokens * (start + 0.5 * (num_tokens + 1))
        token_s = self.attention_token_s + self.expert_token_s
        return token_s * num_tokens + self.attention_pair_s * pairs


def linked_cost_model(*, latency_us: float, gbps: float | None, hidden_size: int) -> CostModel:
    """Return the default model with the link that the configuration describes (2-byte payload)."""
    default = CostModel()
    return CostModel(
        link_s=default.link_s + latency_us * 1e-6,
        link_token_s=0.0 if gbps is None else hidden_size * 2 * 8 / (gbps * 1e9),
    )

"""The routed experts of one MoE layer on a node: their formats, packing and computing.

Owns what every holder of experts does alike, so that an expert gives the same rows wherever it is
computed. Knows no layers beside the one, no file and no transport. Used by expert nodes, and by
attention nodes for layers that stay local. Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import deterministic
from kernels.contracts import Biases, ExpertOutput, Matrix, PackedExperts
from kernels.dispatch import Ops
from topspin.expert_activation import SWIGLU, ExpertActivation
from topspin.plan.precision import Format, Rules, format_of


class LayerExperts(NamedTuple):
    """The routed experts of decoder layer `layer`, and the `rules` of their formats."""

    layer: int
    num_experts: int
    top_k: int
    rules: Rules
    activation: ExpertActivation = SWIGLU

    def formats(self, experts: Iterable[int]) -> list[Format]:
        """Return the formats of logical `experts`."""
        return [format_of(self.rules, "experts", self.layer, expert) for expert in experts]

    @property
    def share_per_row(self) -> float:
        """Return the argument of pack_experts; 0 if the layer's experts differ in format.

        The same on every node, so that copies of an expert have one layout.
        """
        is_mixed = len(set(self.formats(range(self.num_experts)))) > 1
        return 0.0 if is_mixed else self.top_k / self.num_experts

    def pack(
        self,
        ops: Ops,
        gate_up: Iterable[Matrix],
        down: Iterable[Matrix],
        held: Sequence[int],
        *,
        biases: Biases | None = None,
    ) -> PackedExperts:
        """Pack the logical experts `held`, whose matrices and biases come in that order."""
        return ops.pack_experts(
            gate_up,
            down,
            formats=self.formats(held),
            share_per_row=self.share_per_row,
            biases=biases,
            activation=self.activation,
        )


def compute(
    ops: Ops,
    hidden: Tensor,
    slots: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    *,
    per_expert: bool = False,
    out: Tensor | None = None,
) -> ExpertOutput:
    """Return the weighted sums [R, H] of hidden [R, H] over slots i32[R, K] that are not negative.

    With `per_expert`, for the deterministic ops: the rows [P, H] of the pairs, without weights.
    Else `out` is as in `kernels.reference.grouped_mlp`. Enqueues work only.
    """
    if per_expert:
        assert ops.name == deterministic.name
        return deterministic.pair_mlp(hidden, slots, experts)
    return ops.grouped_mlp(hidden, slots, weights, experts, out=out)


def warm_up(
    ops: Ops,
    experts: PackedExperts,
    num_rows: int,
    *,
    top_k: int,
    device: torch.device,
    per_expert: bool = False,
) -> None:
    """Compute `num_rows` rows of zeros, so that the first request finds code and memory."""
    hidden = torch.zeros(num_rows, experts.hidden_size, dtype=experts.dtype, device=device)
    pairs = torch.arange(num_rows * top_k, dtype=torch.int32, device=device)
    slots = (pairs % experts.num_experts).view(num_rows, top_k)
    weights = torch.zeros(num_rows, top_k, device=device)
    found = compute(ops, hidden, slots, weights, experts, per_expert=per_expert)
    unread = torch.zeros(experts.num_experts + 2, dtype=torch.int64, device=device)
    ops.add_counts(unread, found.counts)


def rows_to_warm_up(most: int) -> tuple[int, ...]:
    """Return numbers of rows that cover all kernel variants, up to `most`."""
    powers = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*powers, most)

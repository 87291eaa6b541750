"""Experts of one layer in several formats: groups of formats, whose sums are added.

Owns the places of a layer's slots in the groups. A group is what the implementation computes with
alone, of one format or of several; experts that are one group pay nothing. Knows no format's
layout.
Used by `kernels.cpu.quantised` and `kernels.triton.ops`. Dimension letters as in
`kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from kernels.contracts import Biases, ExpertOutput, LinearWeight, PackedExperts
from kernels.experts.slots import Collect
from topspin.expert_activation import ExpertActivation
from topspin.plan.precision import Format


@dataclass(frozen=True, eq=False)
class MixedExperts(PackedExperts):
    """Experts by slot, in more than one kind of formats."""

    groups: tuple[PackedExperts, ...] = field(kw_only=True)
    """One per kind of formats."""
    members: tuple[Tensor, ...] = field(kw_only=True)
    """i64[E of the group], per group the layer's slots of its experts."""
    places: tuple[Tensor, ...] = field(kw_only=True)
    """i32[1 + E], per group: entry 1 + slot is the slot in the group, -1 in others; entry 0 -1."""

    def completed(self, biases: Biases | None, activation: ExpertActivation) -> Self:
        """Return these experts, and those of each group, with biases and an activation."""
        groups = []
        for group, slots in zip(self.groups, self.members, strict=True):
            own = None if biases is None else (biases[0][slots], biases[1][slots])
            groups.append(group.completed(own, activation))
        return replace(super().completed(biases, activation), groups=tuple(groups))


def collect_by_format(
    gate_up: list[LinearWeight],
    down: list[LinearWeight],
    dtype: torch.dtype,
    collect: Collect,
    kind: Callable[[Format], Any] = str,
) -> PackedExperts:
    """Return experts by slot; `collect` makes those whose formats are of one `kind`."""
    by_kind: dict[Any, list[int]] = {}
    for slot, weight in enumerate(down):
        by_kind.setdefault(kind(weight.weight_format), []).append(slot)
    if len(by_kind) <= 1:
        return collect(gate_up, down, dtype)
    slots = [by_kind[each] for each in sorted(by_kind)]
    groups = [collect([gate_up[s] for s in each], [down[s] for s in each], dtype) for each in slots]
    device = down[0].data.device
    places = [[-1] * (1 + len(down)) for _ in groups]
    for place, each in zip(places, slots, strict=True):
        for group_slot, slot in enumerate(each):
            place[1 + slot] = group_slot
    return MixedExperts(
        gate_up,
        down,
        len(down),
        groups[0].hidden_size,
        groups[0].ffn_size,
        dtype,
        groups=tuple(groups),
        members=tuple(torch.tensor(each, device=device) for each in slots),
        places=tuple(torch.tensor(each, dtype=torch.int32, device=device) for each in places),
    )


def mixed_mlp(
    hidden: Tensor,
    slots: Tensor,
    weights: Tensor,
    experts: MixedExperts,
    *,
    out: Tensor | None,
    grouped_mlp: Callable[..., ExpertOutput],
) -> ExpertOutput:
    """Sum each row's local experts, group by group; see `kernels.reference.grouped_mlp`.

    `grouped_mlp` computes a group. The groups' fp32 sums are added in the groups' order.
    Does not wait for the device.
    """
    shifted = slots.clamp(min=-1).long() + 1
    counts = torch.empty(experts.num_experts, dtype=torch.int64, device=slots.device)
    sums = []
    for group, members, places in zip(experts.groups, experts.members, experts.places, strict=True):
        part = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
        found = grouped_mlp(hidden, places[shifted], weights, group, out=part)
        counts.index_copy_(0, members, found.counts)
        sums.append(part)
    total = sums[0]
    for part in sums[1:]:
        total += part
    return ExpertOutput(total.to(hidden.dtype) if out is None else out.copy_(total), counts)

"""Counts of a batch's rows per expert, added to those of the batches before in one launch.

Called by `kernels.triton.ops`; a CUDA graph can replay it. Letters as in `kernels.contracts`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


# Of a layer's totals only some begin at 16 bytes.
@triton.jit(do_not_specialize_on_alignment=["totals", "counts"])
def _add_counts(
    totals: tl.tensor, counts: tl.tensor, num_experts: tl.tensor, BLOCK: tl.constexpr
) -> None:
    slot = tl.arange(0, BLOCK)
    count = tl.load(counts + slot, mask=slot < num_experts, other=0)
    woken = tl.sum((count != 0).to(tl.int64), axis=0)
    added = tl.where(slot == num_experts, woken, count)
    added = tl.where(slot == num_experts + 1, (woken != 0).to(tl.int64), added)
    inside = slot < num_experts + 2
    tl.store(totals + slot, tl.load(totals + slot, mask=inside) + added, mask=inside)


def add_counts(totals: Tensor, counts: Tensor) -> None:
    """Add counts i64[E] to totals i64[E + 2]; see `kernels.reference.add_counts`."""
    num_experts = counts.numel()
    _add_counts[(1,)](
        totals, counts, num_experts, BLOCK=triton.next_power_of_2(num_experts + 2), num_warps=1
    )

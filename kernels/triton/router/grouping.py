"""A Triton kernel that groups some thousand (row, choice) pairs by local expert in one launch.

A program per expert scans all pairs, which are in the cache: more work in total than sorting
them in one program, but spread over the device. Launched by
`kernels.triton.router.launches`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_keys(
    slots_ptr: tl.tensor,
    pairs: tl.tensor,
    num_pairs: tl.tensor,
    num_slots: tl.tensor,
) -> tl.tensor:
    """Return the slots of pairs; num_slots for experts elsewhere, a greater number for no pair."""
    slots = tl.load(slots_ptr + pairs, mask=pairs < num_pairs, other=num_slots + 1)
    return tl.where(slots < 0, num_slots, slots)


@triton.jit(do_not_specialize=["num_pairs"])
def group_slot(
    slots_ptr: tl.tensor,
    order_ptr: tl.tensor,
    row_of_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_slots: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the pairs of slot program_id(0), ascending, after those of the slots before.

    The program num_slots writes the pairs of experts elsewhere.
    """
    slot = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    before = slot * 0
    for start in range(0, num_pairs, BLOCK):
        keys = _load_keys(slots_ptr, start + column, num_pairs, num_slots)
        before += tl.sum((keys < slot).to(tl.int32), axis=0)
    place = before
    for start in range(0, num_pairs, BLOCK):
        pairs = start + column
        is_mine = _load_keys(slots_ptr, pairs, num_pairs, num_slots) == slot
        ranks = tl.cumsum(is_mine.to(tl.int32), axis=0)
        tl.store(order_ptr + place + ranks - 1, pairs.to(tl.int64), mask=is_mine)
        tl.store(row_of_ptr + place + ranks - 1, (pairs // K).to(tl.int64), mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32), axis=0)
    tl.store(offsets_ptr + slot, before.to(tl.int64))
    if slot < num_slots:
        tl.store(counts_ptr + slot, (place - before).to(tl.int64))

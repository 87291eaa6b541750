"""Triton kernels of the router: choosing experts, and grouping pairs by local expert.

Launched by `kernels.triton.router.launches`, which documents their sequence. A tile has a row per
token and a column per expert or slot; padding columns are never chosen. Pairs of experts
elsewhere have the slot -1 and are placed last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.runtime import rounded

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _count_pairs(
    slots: tl.tensor,
    choices: tl.tensor,
    S_PAD: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> tl.tensor:
    """Count each row's pairs per slot, i32[BLOCK_R, S_PAD]; slots are i32[BLOCK_R, K_PAD]."""
    columns = tl.arange(0, S_PAD)[None, :]
    counts = tl.zeros((BLOCK_R, S_PAD), tl.int32)
    for k in range(K):
        slot = tl.sum(tl.where(choices == k, slots, 0), axis=1)
        counts += (columns == slot[:, None]).to(tl.int32)
    return counts


@triton.jit
def _place_pairs(
    slots: tl.tensor,
    choices: tl.tensor,
    rows: tl.tensor,
    R: tl.tensor,
    first_of: tl.tensor,
    first_absent: tl.tensor,
    counts: tl.tensor,
    order_ptr: tl.tensor,
    row_of_ptr: tl.tensor,
    S_PAD: tl.constexpr,
    K: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Write the pairs of a block; its first one of slot s goes to first_of[s]."""
    columns = tl.arange(0, S_PAD)[None, :]
    # The place of the next pair of each row and slot: after those of the rows above.
    place = first_of[None, :] + tl.cumsum(counts, axis=0) - counts
    absent = tl.where(rows < R, K - tl.sum(counts, axis=1), 0)
    absent_place = first_absent + tl.cumsum(absent, axis=0) - absent
    for k in range(K):
        slot = tl.sum(tl.where(choices == k, slots, 0), axis=1)
        here = columns == slot[:, None]
        target = tl.sum(tl.where(here, place, 0), axis=1)
        target = tl.where(slot < 0, absent_place, target)
        place += here.to(tl.int32)
        absent_place += (slot < 0).to(tl.int32)
        tl.store(order_ptr + target, rows.to(tl.int64) * K + k, mask=rows < R)
        tl.store(row_of_ptr + target, rows.to(tl.int64), mask=rows < R)


@triton.jit
def _store_sums(
    total: tl.tensor,
    num_slots: tl.tensor,
    counts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    S_PAD: tl.constexpr,
) -> None:
    """Write the number of pairs and the first index of each slot."""
    columns = tl.arange(0, S_PAD)
    offsets = tl.cumsum(total, axis=0) - total
    tl.store(counts_ptr + columns, total.to(tl.int64), mask=columns < num_slots)
    tl.store(offsets_ptr + columns, offsets.to(tl.int64), mask=columns < num_slots)
    tl.store(offsets_ptr + num_slots, tl.sum(total, axis=0).to(tl.int64))


@triton.jit
def _choose(
    scores: tl.tensor,
    columns: tl.tensor,
    choices: tl.tensor,
    K: tl.constexpr,
    E_PAD: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> tl.tensor:
    """Return the K experts of each row by descending score, i32[BLOCK_R, K_PAD].

    Choices are sequential, so their latency matters. Integers in the order of the scores are
    compared, because a warp has one instruction for their maximum.
    """
    # Turns -0 into +0, so that equal zeros have equal bits.
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    experts = tl.zeros((BLOCK_R, K_PAD), tl.int32)
    for k in range(K):
        is_best = keys == tl.max(keys, axis=1)[:, None]
        best = tl.min(tl.where(is_best, columns, E_PAD), axis=1)
        experts = tl.where(choices == k, best[:, None], experts)
        keys = tl.where(columns == best[:, None], -2147483648, keys)
    return experts


@triton.jit
def _keep_best_groups(
    scores: tl.tensor,
    columns: tl.tensor,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    E_PAD: tl.constexpr,
) -> tl.tensor:
    """Return the scores of the experts in each row's best groups, -inf for all others."""
    of_group = tl.where(columns < 0, scores, float("-inf"))
    for group in range(GROUPS):
        is_in = columns // GROUP_SIZE == group
        inside = tl.where(is_in, scores, float("-inf"))
        total = tl.max(inside, axis=1)
        if BEST_OF_GROUP == 2:
            first = tl.min(tl.where(inside == total[:, None], columns, E_PAD), axis=1)
            inside = tl.where(columns == first[:, None], float("-inf"), inside)
            # Two that come last must not add up to less than what is not there.
            total = tl.maximum(total + tl.max(inside, axis=1), LOWEST)
        of_group = tl.where(is_in, total[:, None], of_group)
    kept = tl.where(columns < 0, scores, float("-inf"))
    for _ in range(TOP_GROUPS):
        is_best = of_group == tl.max(of_group, axis=1)[:, None]
        best = tl.min(tl.where(is_best, columns, E_PAD), axis=1) // GROUP_SIZE
        is_in = columns // GROUP_SIZE == best[:, None]
        kept = tl.where(is_in, scores, kept)
        of_group = tl.where(is_in, float("-inf"), of_group)
    return kept


@triton.jit(do_not_specialize=["R"])
def route_block(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    R: tl.tensor,
    E: tl.tensor,
    row_stride: tl.tensor,
    epsilon: tl.tensor,
    least_sum: tl.tensor,
    scale: tl.tensor,
    SCORES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROUND: tl.constexpr,
    E_PAD: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Choose the experts of BLOCK_R rows and weigh them.

    SCORES 0: softmax, 1: sigmoid, 2: logits, whose weights are a softmax over the chosen ones.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, E_PAD)[None, :]
    choices = tl.arange(0, K_PAD)[None, :]
    is_expert = columns < E
    is_real = (rows < R)[:, None] & is_expert
    places = logits_ptr + rows.to(tl.int64)[:, None] * row_stride + columns
    logits = tl.load(places, mask=is_real, other=0.0).to(tl.float32)
    top = tl.max(tl.where(is_expert, logits, float("-inf")), axis=1)
    total = tl.sum(tl.where(is_expert, tl.exp(logits - top[:, None]), 0.0), axis=1)
    # Without a bias, logits are in the order of the scores, and fewer of them are equal.
    wanted = logits
    if HAS_BIAS:
        if SCORES == 0:
            wanted = tl.exp(logits - top[:, None]) / total[:, None]
        if SCORES == 1:
            wanted = 1.0 / (1.0 + tl.exp(-logits))
        wanted += tl.load(bias_ptr + columns, mask=is_expert, other=0.0)
    # A NaN or -inf is last among the real columns; it must not lead to a column beyond E.
    wanted = tl.where(wanted > LOWEST, wanted, LOWEST)
    wanted = tl.where(is_expert, wanted, float("-inf"))
    if GROUPS > 1:
        wanted = _keep_best_groups(
            wanted, columns, GROUPS, GROUP_SIZE, TOP_GROUPS, BEST_OF_GROUP, E_PAD
        )
    experts = _choose(wanted, columns, choices, K, E_PAD, K_PAD, BLOCK_R)
    pairs = rows.to(tl.int64)[:, None] * K + choices
    is_pair = (rows < R)[:, None] & (choices < K)
    # These loads hit the cache.
    places = logits_ptr + rows.to(tl.int64)[:, None] * row_stride + experts
    chosen = tl.load(places, mask=is_pair, other=0.0).to(tl.float32)
    if SCORES == 0:
        shares = tl.exp(chosen - top[:, None]) / total[:, None]
    elif SCORES == 1:
        shares = 1.0 / (1.0 + tl.exp(-chosen))
    else:
        peak = tl.max(tl.where(choices < K, chosen, float("-inf")), axis=1)
        shares = tl.where(choices < K, tl.exp(chosen - peak[:, None]), 0.0)
        shares = shares / tl.sum(shares, axis=1)[:, None]
    weights = tl.where(choices < K, shares, 0.0)
    if RENORMALISE:
        weights = weights / tl.maximum(tl.sum(weights, axis=1)[:, None] + epsilon, least_sum)
    weights = weights * scale
    if ROUND:
        weights = rounded(weights, tl.bfloat16).to(tl.float32)
    tl.store(experts_ptr + pairs, experts.to(tl.int64), mask=is_pair)
    tl.store(weights_ptr + pairs, weights, mask=is_pair)


@triton.jit
def _load_slots(
    slots_ptr: tl.tensor,
    rows: tl.tensor,
    R: tl.tensor,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
) -> tl.tensor:
    choices = tl.arange(0, K_PAD)[None, :]
    is_pair = (rows < R)[:, None] & (choices < K)
    slots = tl.load(slots_ptr + rows.to(tl.int64)[:, None] * K + choices, mask=is_pair, other=-1)
    return tl.where(slots < 0, -1, slots)


@triton.jit(do_not_specialize=["R"])
def count_block(
    slots_ptr: tl.tensor,
    hist_ptr: tl.tensor,
    order_ptr: tl.tensor,
    row_of_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    R: tl.tensor,
    num_slots: tl.tensor,
    SINGLE: tl.constexpr,
    S_PAD: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Place the pairs if there is only one block, else write the block's histogram."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    choices = tl.arange(0, K_PAD)[None, :]
    columns = tl.arange(0, S_PAD)
    slots = _load_slots(slots_ptr, rows, R, K, K_PAD)
    counts = _count_pairs(slots, choices, S_PAD, K, BLOCK_R)
    counts = tl.where((rows < R)[:, None], counts, 0)
    total = tl.sum(counts, axis=0)
    if SINGLE:
        first_of = tl.cumsum(total, axis=0) - total
        _place_pairs(
            slots, choices, rows, R, first_of, tl.sum(total, axis=0), counts,
            order_ptr, row_of_ptr, S_PAD, K, BLOCK_R,
        )  # fmt: skip
        _store_sums(total, num_slots, counts_ptr, offsets_ptr, S_PAD)
    else:
        tl.store(hist_ptr + tl.program_id(0) * S_PAD + columns, total)


@triton.jit(do_not_specialize=["R", "num_blocks"])
def place_block(
    slots_ptr: tl.tensor,
    hist_ptr: tl.tensor,
    order_ptr: tl.tensor,
    row_of_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    R: tl.tensor,
    num_slots: tl.tensor,
    num_blocks: tl.tensor,
    S_PAD: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Place the pairs of BLOCK_R rows after those of the blocks before, by their histograms."""
    block = tl.program_id(0)
    rows = block * BLOCK_R + tl.arange(0, BLOCK_R)
    choices = tl.arange(0, K_PAD)[None, :]
    columns = tl.arange(0, S_PAD)
    total = tl.zeros((S_PAD,), tl.int32)
    before = tl.zeros((S_PAD,), tl.int32)
    for start in range(0, num_blocks, CHUNK):
        blocks = start + tl.arange(0, CHUNK)[:, None]
        hist = tl.load(
            hist_ptr + blocks * S_PAD + columns[None, :], mask=blocks < num_blocks, other=0
        )
        total += tl.sum(hist, axis=0)
        before += tl.sum(tl.where(blocks < block, hist, 0), axis=0)
    if block == 0:
        _store_sums(total, num_slots, counts_ptr, offsets_ptr, S_PAD)
    slots = _load_slots(slots_ptr, rows, R, K, K_PAD)
    counts = _count_pairs(slots, choices, S_PAD, K, BLOCK_R)
    # Blocks before this one are full.
    absent_before = block * BLOCK_R * K - tl.sum(before, axis=0)
    _place_pairs(
        slots,
        choices,
        rows,
        R,
        tl.cumsum(total, axis=0) - total + before,
        tl.sum(total, axis=0) + absent_before,
        counts,
        order_ptr,
        row_of_ptr,
        S_PAD,
        K,
        BLOCK_R,
    )


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["num_rows_ptr"])
def local_slots_block(
    experts_ptr: tl.tensor,
    slot_of_ptr: tl.tensor,
    num_rows_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    num_pairs: tl.tensor,
    P: tl.tensor,
    table_stride: tl.tensor,
    K: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the slots of BLOCK pairs' experts on node program_id(1); -1: elsewhere, or padding."""
    node = tl.program_id(1).to(tl.int64)
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_real = pairs < num_pairs
    if HAS_ROWS:
        is_real &= pairs // K < tl.load(num_rows_ptr)
    experts = tl.load(experts_ptr + pairs, mask=is_real, other=0)
    is_real &= (experts >= 0) & (experts < P)
    slots = tl.load(slot_of_ptr + node * table_stride + experts, mask=is_real, other=-1)
    slots = tl.where(slots < 0, -1, slots)
    tl.store(slots_ptr + node * num_pairs + pairs, slots, mask=pairs < num_pairs)

"""Triton kernels of the router: choosing experts, and grouping pairs by local expert.

Launched by `kernels.triton.router.launches`, which says what they do together. A tile has a row per
token and a column per expert or slot; columns beyond the real ones are never chosen. Pairs
that are not here have the slot -1 and are placed after all that are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.runtime import rounded

LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _take_best(
    scores: tl.tensor,
    columns: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Give for each row the column of its greatest score, lowest first, and scores without it."""
    best = tl.argmax(scores, axis=1, tie_break_left=True)
    is_best = columns == best[:, None]
    return best, is_best, tl.where(is_best, float("-inf"), scores)


@triton.jit
def _keep_groups(
    scores: tl.tensor,
    columns: tl.tensor,
    E: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    E_PAD: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> tl.tensor:
    """Mask the scores of all but the TOP_GROUPS groups with the greatest two scores' sum."""
    group_of = columns // (E // NUM_GROUPS)
    groups = tl.arange(0, GROUPS_PAD)[None, :]
    sums = tl.full((BLOCK_R, GROUPS_PAD), float("-inf"), tl.float32)
    for group in range(NUM_GROUPS):
        inside = tl.where((group_of == group) & (columns < E), scores, float("-inf"))
        first = tl.max(inside, axis=1)
        _, _, rest = _take_best(inside, columns)
        sums = tl.where(groups == group, (first + tl.max(rest, axis=1))[:, None], sums)
    kept = tl.zeros((BLOCK_R, E_PAD), tl.int1)
    for _ in range(TOP_GROUPS):
        best, _, sums = _take_best(sums, groups)
        kept = kept | (group_of == best[:, None])
    return tl.where(kept, scores, float("-inf"))


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
    # Where the next pair of each row and slot goes: after those of the rows above.
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
    """Write the pairs per slot, and where each slot's begin."""
    columns = tl.arange(0, S_PAD)
    offsets = tl.cumsum(total, axis=0) - total
    tl.store(counts_ptr + columns, total.to(tl.int64), mask=columns < num_slots)
    tl.store(offsets_ptr + columns, offsets.to(tl.int64), mask=columns < num_slots)
    tl.store(offsets_ptr + num_slots, tl.sum(total, axis=0).to(tl.int64))


@triton.jit
def _finish_block(
    slots: tl.tensor,
    rows: tl.tensor,
    R: tl.tensor,
    num_slots: tl.tensor,
    hist_ptr: tl.tensor,
    order_ptr: tl.tensor,
    row_of_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    SINGLE: tl.constexpr,
    S_PAD: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Place the pairs of the only block, or leave the block's histogram."""
    choices = tl.arange(0, K_PAD)[None, :]
    columns = tl.arange(0, S_PAD)
    counts = _count_pairs(slots, choices, S_PAD, K, BLOCK_R)
    counts = tl.where((rows < R)[:, None], counts, 0)
    total = tl.sum(counts, axis=0)
    if SINGLE:
        _place_pairs(
            slots,
            choices,
            rows,
            R,
            tl.cumsum(total, axis=0) - total,
            tl.sum(total, axis=0),
            counts,
            order_ptr,
            row_of_ptr,
            S_PAD,
            K,
            BLOCK_R,
        )
        _store_sums(total, num_slots, counts_ptr, offsets_ptr, S_PAD)
    else:
        tl.store(hist_ptr + tl.program_id(0) * S_PAD + columns, total)


@triton.jit
def _score(
    logits: tl.tensor,
    columns: tl.tensor,
    E: tl.tensor,
    bias_ptr: tl.tensor,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    """Give the scores by which experts are chosen."""
    scores = logits
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        if HAS_BIAS:
            bias = tl.load(bias_ptr + columns, mask=columns < E, other=0.0)
            scores += bias.to(tl.float32)
    # A NaN or -inf must never lead to a column beyond E: it only goes last among the real.
    scores = tl.where(scores > LOWEST, scores, LOWEST)
    return tl.where(columns < E, scores, float("-inf"))


@triton.jit
def _share_of(
    logits: tl.tensor, top: tl.tensor, total: tl.tensor, SIGMOID: tl.constexpr
) -> tl.tensor:
    """Give the shares by which experts weigh; `top` and `total` [rows] are those of a softmax."""
    if SIGMOID:
        shares = 1.0 / (1.0 + tl.exp(-logits))
    else:
        shares = tl.exp(logits - top[:, None]) / total[:, None]
    return shares


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
    """Give the K experts of each row by descending score, i32[BLOCK_R, K_PAD].

    One choice follows the other, so what counts is the latency of each. Integers in the order
    of the scores are compared, because a warp has one instruction for their maximum.
    """
    # Of equal zeros the sum has one sign.
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    experts = tl.zeros((BLOCK_R, K_PAD), tl.int32)
    for k in range(K):
        is_best = keys == tl.max(keys, axis=1)[:, None]
        best = tl.min(tl.where(is_best, columns, E_PAD), axis=1)
        experts = tl.where(choices == k, best[:, None], experts)
        keys = tl.where(columns == best[:, None], -2147483648, keys)
    return experts


@triton.jit(do_not_specialize=["R"])
def route_block(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    slot_of_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    hist_ptr: tl.tensor,
    order_ptr: tl.tensor,
    row_of_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    R: tl.tensor,
    E: tl.tensor,
    num_slots: tl.tensor,
    row_stride: tl.tensor,
    scale: tl.tensor,
    SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROUND: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PERMUTE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    SINGLE: tl.constexpr,
    E_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """Choose the experts of BLOCK_R rows, and count or place them."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, E_PAD)[None, :]
    choices = tl.arange(0, K_PAD)[None, :]
    is_real = (rows < R)[:, None] & (columns < E)
    places = logits_ptr + rows.to(tl.int64)[:, None] * row_stride + columns
    logits = tl.load(places, mask=is_real, other=0.0).to(tl.float32)
    scores = _score(logits, columns, E, bias_ptr, SIGMOID, HAS_BIAS)
    if NUM_GROUPS > 1:
        scores = _keep_groups(
            scores, columns, E, NUM_GROUPS, TOP_GROUPS, E_PAD, GROUPS_PAD, BLOCK_R
        )
    top = tl.max(tl.where(columns < E, logits, float("-inf")), axis=1)
    total = tl.sum(tl.where(columns < E, tl.exp(logits - top[:, None]), 0.0), axis=1)
    experts = _choose(scores, columns, choices, K, E_PAD, K_PAD, BLOCK_R)
    pairs = rows.to(tl.int64)[:, None] * K + choices
    is_pair = (rows < R)[:, None] & (choices < K)
    # The cache has just delivered them.
    places = logits_ptr + rows.to(tl.int64)[:, None] * row_stride + experts
    chosen = tl.load(places, mask=is_pair, other=0.0).to(tl.float32)
    weights = tl.where(choices < K, _share_of(chosen, top, total, SIGMOID), 0.0)
    if RENORMALISE:
        whole = tl.sum(weights, axis=1)[:, None]
        if SIGMOID:
            whole += 1e-20
        weights = weights / whole
    weights = weights * scale
    if ROUND:
        weights = rounded(weights, tl.bfloat16).to(tl.float32)
    tl.store(experts_ptr + pairs, experts.to(tl.int64), mask=is_pair)
    tl.store(weights_ptr + pairs, weights, mask=is_pair)
    if PERMUTE:
        slots = experts
        if HAS_SLOTS:
            slots = tl.load(slot_of_ptr + experts, mask=is_pair, other=-1)
            slots = tl.where(slots < 0, -1, slots)
        tl.store(slots_ptr + pairs, slots, mask=is_pair)
        _finish_block(
            slots,
            rows,
            R,
            num_slots,
            hist_ptr,
            order_ptr,
            row_of_ptr,
            counts_ptr,
            offsets_ptr,
            SINGLE,
            S_PAD,
            K,
            K_PAD,
            BLOCK_R,
        )


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
    """Count, or place if they are all, the pairs of BLOCK_R rows of slots."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    slots = _load_slots(slots_ptr, rows, R, K, K_PAD)
    _finish_block(
        slots,
        rows,
        R,
        num_slots,
        hist_ptr,
        order_ptr,
        row_of_ptr,
        counts_ptr,
        offsets_ptr,
        SINGLE,
        S_PAD,
        K,
        K_PAD,
        BLOCK_R,
    )


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
    """Write where BLOCK pairs' experts are on node program_id(1); -1: elsewhere, or padding."""
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

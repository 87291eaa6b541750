"""Attention of packed query rows over paged keys: the kernels that `launches` calls.

A program holds the (query, head) pairs of one key/value head as rows of one tile, flat index
query * GROUP + head, so that each key is read once for all heads that share it. It walks a
range of keys in blocks with an online softmax in base 2 (Dao et al., FlashAttention,
algorithm 1; Flash-Decoding's split of the keys for short slices). Blocks that all rows see
completely need no mask; those at the edges of the causal triangle, the window or the tree do.

A key has DIM numbers, in two tiles: VALUES numbers padded to BLOCK_D, the others to BLOCK_T. That
is 0 where there are no others. Else keys are latents, and the first tile, read once, is that of the
values too.

Numbers about the batch are read from device memory: a launch depends on shapes alone. Rows of a
sequence whose context_len is 0 are left as they are: another launch writes them.
Arguments that differ from batch to batch are not specialised: a kernel is compiled once.
Letters as in `kernels.contracts`; `start` is a sequence's first query row, `num_tree` its
positions that may be on branches, `committed` those before, `table` its row of the block table, of
its own for each key/value head if `table_head` is not 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.runtime import dot, rounded


@triton.jit
def _num_ancestors(
    tree: tl.tensor, query: tl.tensor, is_row: tl.tensor, end: tl.tensor, tree_row: tl.tensor
) -> tl.tensor:
    """Count, for each row [M], the nodes before node `end` on its branch, itself included."""
    column = tl.arange(0, 16)
    count = query * 0
    for first in range(0, end, 16):
        inside = is_row[:, None] & (first + column < end)[None, :]
        place = query[:, None] * tree_row + (first + column)[None, :]
        count += tl.sum(tl.load(tree + place, mask=inside, other=0).to(tl.int32), axis=1)
    return count


@triton.jit
def _seen(
    first: tl.tensor, end: tl.tensor, query: tl.tensor, position: tl.tensor, is_row: tl.tensor,
    tree: tl.tensor, tree_row: tl.tensor, num_tree: tl.tensor, committed: tl.tensor,
    window: tl.tensor, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the mask of the keys first .. first + BLOCK_N - 1 that each row [BLOCK_M] sees."""
    keys = first + tl.arange(0, BLOCK_N)
    key_position = keys[None, :]
    if TREE:
        node = keys - committed
        place = query[:, None] * tree_row + node[None, :]
        inside = is_row[:, None] & ((node >= 0) & (node < num_tree))[None, :]
        is_ancestor = tl.load(tree + place, mask=inside, other=0) != 0
        seen = ((node < 0)[None, :] & is_row[:, None]) | is_ancestor
        if WINDOW:
            # The row's own mask says how deep an ancestor is: a node in the cache has no row.
            before = _num_ancestors(tree, query, is_row, first - committed, tree_row)
            rank = before[:, None] + tl.cumsum(is_ancestor.to(tl.int32), axis=1)
            key_position = tl.where((node >= 0)[None, :], committed - 1 + rank, key_position)
    else:
        seen = keys[None, :] <= position[:, None]
    seen &= (keys < end)[None, :]
    if WINDOW:
        seen &= position[:, None] - key_position < window
    return seen


@triton.jit
def _cache_blocks(
    table: tl.tensor, first: tl.tensor, end: tl.tensor,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the cache blocks of keys first ..; for keys past end - 1 the block of key end - 1.

    One number if all BLOCK_N keys lie in one cache block, else [BLOCK_N].
    """
    keys = first if BLOCK_SIZE % BLOCK_N == 0 else first + tl.arange(0, BLOCK_N)
    listed = tl.minimum(keys, tl.maximum(end - 1, 0)) // BLOCK_SIZE
    return tl.load(table + listed).to(tl.int64)


@triton.jit
def _load_part(
    x: tl.tensor, place: tl.tensor, is_row: tl.tensor, FIRST: tl.constexpr, END: tl.constexpr,
    WIDTH: tl.constexpr, MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load numbers FIRST .. of each row of `x` at `place`, in a tile of WIDTH: 0 from END on.

    MASKED: 0 for what is no row too.
    """
    column = FIRST + tl.arange(0, WIDTH)
    place = place[:, None] + column[None, :]
    inside = (column < END)[None, :]
    if MASKED:
        return tl.load(x + place, mask=inside & is_row[:, None], other=0.0)
    if FIRST + WIDTH > END:
        return tl.load(x + place, mask=inside, other=0.0)
    return tl.load(x + place)


@triton.jit
def _load_queries(
    q: tl.tensor, place: tl.tensor, is_row: tl.tensor, k_cache: tl.tensor,
    FIRST: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load a part of the rows' queries, as the cache's keys are multiplied with them."""
    tile = _load_part(q, place, is_row, FIRST, END, WIDTH, True)
    if tile.dtype == tl.bfloat16 and k_cache.dtype.element_ty == tl.float8e4nv:
        # fp8 converts to fp16 in one instruction, to bf16 in three; queries should fit its range.
        tile = tl.minimum(tl.maximum(tile.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return tile


@triton.jit
def _fold_keys(
    acc: tl.tensor, best: tl.tensor, total: tl.tensor,
    q: tl.tensor, q_tail: tl.tensor, query: tl.tensor, position: tl.tensor, is_row: tl.tensor,
    k_cache: tl.tensor, v_cache: tl.tensor, table: tl.tensor, tree: tl.tensor,
    begin: tl.tensor, end: tl.tensor, num_tree: tl.tensor, committed: tl.tensor,
    window: tl.tensor, scale: tl.tensor,
    tree_row: tl.tensor, cache_block: tl.tensor, cache_slot: tl.tensor,
    DIM: tl.constexpr, VALUES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    TREE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Add keys begin .. end - 1 to the rows' sums; `begin` is a multiple of BLOCK_N.

    Of each row, `acc` [BLOCK_M, BLOCK_D] is the sum of values weighted by
    2**(score - best), `total` [BLOCK_M] that of the weights, `best` the greatest score.
    """
    block = _cache_blocks(table, begin, end, BLOCK_N, BLOCK_SIZE)
    for first in range(begin, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        place = block * cache_block + (keys % BLOCK_SIZE) * cache_slot
        # Loading addresses one block early lets the compiler copy blocks ahead.
        block = _cache_blocks(table, first + BLOCK_N, end, BLOCK_N, BLOCK_SIZE)
        # Memory past the end of a sequence was never written and may be NaN.
        is_key = keys < end
        k = _load_part(k_cache, place, is_key, 0, VALUES, BLOCK_D, MASKED)
        v = k if BLOCK_T else _load_part(v_cache, place, is_key, 0, VALUES, BLOCK_D, MASKED)
        zero = tl.zeros([q.shape[0], BLOCK_N], dtype=tl.float32)
        scores = dot(q, tl.trans(k.to(q.dtype)), zero)
        if BLOCK_T:
            k_tail = _load_part(k_cache, place, is_key, VALUES, DIM, BLOCK_T, MASKED)
            scores = dot(q_tail, tl.trans(k_tail.to(q.dtype)), scores)
        if MASKED:
            seen = _seen(
                first, end, query, position, is_row, tree, tree_row, num_tree, committed, window,
                BLOCK_N, WINDOW, TREE,
            )  # fmt: skip
            scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1) * scale)
        # A row that has seen no key yet: its weights are 0, not 2**(-inf + inf).
        shift = tl.where(new_best == float("-inf"), 0.0, new_best) if MASKED else new_best
        # One instruction scales and shifts.
        weights = tl.exp2(scores * scale - shift[:, None])
        decay = tl.exp2(best - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = dot(rounded(weights, q.dtype), v.to(q.dtype), acc * decay[:, None])
        best = new_best
    return acc, best, total


@triton.jit
def _attend_rows(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, table: tl.tensor, tree: tl.tensor,
    sinks: tl.tensor, start: tl.tensor, num_new: tl.tensor, num_tree: tl.tensor,
    committed: tl.tensor, first_row: tl.tensor, kv_head: tl.tensor,
    begin: tl.tensor, end: tl.tensor, window: tl.tensor, scale: tl.tensor, takes_sink: tl.tensor,
    q_row: tl.tensor, q_head: tl.tensor, tree_row: tl.tensor,
    cache_block: tl.tensor, cache_slot: tl.tensor, cache_head: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, TREE: tl.constexpr, SINKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Attend rows first_row .. of a sequence to the visible ones of keys begin .. end - 1."""
    row = first_row + tl.arange(0, BLOCK_M)
    is_row = row < num_new * GROUP
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    place = (start + query).to(tl.int64) * q_row + head * q_head
    tile = _load_queries(q, place, is_row, k_cache, 0, VALUES, BLOCK_D)
    tail = tile
    if BLOCK_T:
        tail = _load_queries(q, place, is_row, k_cache, VALUES, DIM, BLOCK_T)
    tree += start.to(tl.int64) * tree_row
    last_query = tl.minimum((first_row + BLOCK_M - 1) // GROUP, num_new - 1)
    position = committed + query
    # All rows see the keys before seen_end, except for the window; none sees keys from `end` on.
    if TREE:
        seen_end = committed
        if WINDOW:
            position = committed - 1 + _num_ancestors(tree, query, is_row, num_tree, tree_row)
        lowest, highest = committed, tl.max(tl.where(is_row, position, 0), axis=0)
    else:
        lowest, highest = committed + first_row // GROUP, committed + last_query
        seen_end = lowest + 1
        end = tl.minimum(end, highest + 1)
    best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
        best = tl.where(is_row & takes_sink, sink * 1.4426950408889634, best)
        total = tl.where(is_row & takes_sink, 1.0, total)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    k_cache += kv_head * cache_head
    v_cache += kv_head * cache_head
    full_begin = begin
    if WINDOW:
        oldest = tl.maximum(lowest - window + 1, 0)
        begin = tl.maximum(begin, oldest // BLOCK_N * BLOCK_N)
        full_begin = tl.maximum(begin, tl.cdiv(highest - window + 1, BLOCK_N) * BLOCK_N)
        acc, best, total = _fold_keys(
            acc, best, total, tile, tail, query, position, is_row, k_cache, v_cache, table, tree,
            begin, tl.minimum(full_begin, end), num_tree, committed, window, scale, tree_row,
            cache_block, cache_slot, DIM, VALUES, BLOCK_D, BLOCK_T, BLOCK_N, BLOCK_SIZE, True,
            WINDOW, TREE,
        )  # fmt: skip
    full_end = tl.maximum(tl.minimum(seen_end, end) // BLOCK_N * BLOCK_N, full_begin)
    acc, best, total = _fold_keys(
        acc, best, total, tile, tail, query, position, is_row, k_cache, v_cache, table, tree,
        full_begin, full_end, num_tree, committed, window, scale, tree_row,
        cache_block, cache_slot, DIM, VALUES, BLOCK_D, BLOCK_T, BLOCK_N, BLOCK_SIZE, False,
        WINDOW, TREE,
    )  # fmt: skip
    acc, best, total = _fold_keys(
        acc, best, total, tile, tail, query, position, is_row, k_cache, v_cache, table, tree,
        full_end, end, num_tree, committed, window, scale, tree_row,
        cache_block, cache_slot, DIM, VALUES, BLOCK_D, BLOCK_T, BLOCK_N, BLOCK_SIZE, True,
        WINDOW, TREE,
    )  # fmt: skip
    return acc, best, total


@triton.jit
def _store_rows(
    out: tl.tensor, acc: tl.tensor, total: tl.tensor, start: tl.tensor, num_new: tl.tensor,
    first_row: tl.tensor, kv_head: tl.tensor, out_row: tl.tensor, out_head: tl.tensor,
    GROUP: tl.constexpr, VALUES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Write weighted means of rows first_row .. that belong to the sequence."""
    row, column = first_row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    mean = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    place = (start + row // GROUP).to(tl.int64) * out_row + (
        kv_head * GROUP + row % GROUP
    ) * out_head
    inside = (row < num_new * GROUP)[:, None] & (column < VALUES)[None, :]
    place = place[:, None] + column[None, :]
    tl.store(out + place, rounded(mean, out.dtype.element_ty), mask=inside)


@triton.jit
def _tree_len(
    tree_lens: tl.tensor, seq: tl.tensor, num_new: tl.tensor, TREE_LENS: tl.constexpr
) -> tl.tensor:
    """Return the number of a sequence's last positions that may be on branches."""
    return tl.load(tree_lens + seq) if TREE_LENS else num_new


@triton.jit
def _split(
    committed: tl.tensor, context_len: tl.tensor, window: tl.tensor, min_chunk: tl.tensor,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Return the first key that any row of a sequence sees, and the number of keys per split."""
    oldest = committed * 0
    if WINDOW:
        oldest = tl.maximum(committed - window + 1, 0) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(context_len - oldest, SPLITS), BLOCK_N) * BLOCK_N
    return oldest, tl.maximum(share, min_chunk)


@triton.jit(
    do_not_specialize=["num_rows", "num_seqs", "window", "table_row", "table_head", "tree_row"]
)
def attend_short(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, out: tl.tensor,
    partial: tl.tensor, scores: tl.tensor, query_start: tl.tensor, context_lens: tl.tensor,
    block_tables: tl.tensor, tree: tl.tensor, tree_lens: tl.tensor, sinks: tl.tensor,
    num_rows: tl.tensor, num_seqs: tl.tensor, num_heads: tl.tensor, window: tl.tensor,
    scale: tl.tensor, min_chunk: tl.tensor,
    q_row: tl.tensor, q_head: tl.tensor, out_row: tl.tensor, out_head: tl.tensor,
    table_row: tl.tensor, table_head: tl.tensor, tree_row: tl.tensor,
    cache_block: tl.tensor, cache_slot: tl.tensor, cache_head: tl.tensor,
    SHORT_LEN: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    VALUES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr,
    TREE_LENS: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Attend sequences of 1 .. SHORT_LEN new rows, a share of the keys in each program.

    Grid (G, S * tiles + 1, SPLITS), tiles of BLOCK_M rows for SHORT_LEN * GROUP rows; the
    last programs zero the padding. Adjacent heads are read at the same time.
    With one split the rows of `out` are written, else the mean over each split's keys,
    `partial` f32[S * SHORT_LEN, N, SPLITS, VALUES], and the base 2 logarithm of its weight,
    `scores` f32[S * SHORT_LEN, N, SPLITS].
    """
    TILES: tl.constexpr = (SHORT_LEN * GROUP + BLOCK_M - 1) // BLOCK_M
    seq, first_row = tl.program_id(1) // TILES, tl.program_id(1) % TILES * BLOCK_M
    kv_head, split = tl.program_id(0), tl.program_id(2)
    start = tl.load(query_start + seq)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if seq == num_seqs:
        padding = num_rows - start
        for row in range(split * BLOCK_M, padding * GROUP, SPLITS * BLOCK_M):
            _store_rows(
                out, acc, total, start, padding, row, kv_head, out_row, out_head,
                GROUP, VALUES, BLOCK_M, BLOCK_D,
            )  # fmt: skip
        return
    num_new = tl.load(query_start + seq + 1) - start
    context_len = tl.load(context_lens + seq)
    num_tree = _tree_len(tree_lens, seq, num_new, TREE_LENS)
    committed = context_len - num_tree
    oldest, chunk = _split(committed, context_len, window, min_chunk, SPLITS, BLOCK_N, WINDOW)
    begin = oldest + split * chunk
    if (num_new > SHORT_LEN) | (first_row >= num_new * GROUP) | (begin >= context_len):
        return
    table = block_tables + seq.to(tl.int64) * table_row + kv_head * table_head
    acc, best, total = _attend_rows(
        q, k_cache, v_cache, table, tree, sinks, start, num_new, num_tree, committed, first_row,
        kv_head, begin, tl.minimum(begin + chunk, context_len), window, scale, split == 0,
        q_row, q_head, tree_row, cache_block, cache_slot, cache_head,
        GROUP, DIM, VALUES, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_T, BLOCK_SIZE, WINDOW, TREE, SINKS,
    )  # fmt: skip
    if SPLITS == 1:
        _store_rows(
            out, acc, total, start, num_new, first_row, kv_head, out_row, out_head,
            GROUP, VALUES, BLOCK_M, BLOCK_D,
        )  # fmt: skip
    else:
        row = first_row + tl.arange(0, BLOCK_M)
        query, head = seq.to(tl.int64) * SHORT_LEN + row // GROUP, kv_head * GROUP + row % GROUP
        place = (query * num_heads + head) * SPLITS + split
        is_row = row < num_new * GROUP
        is_empty = total == 0.0
        mean = acc / tl.where(is_empty, 1.0, total)[:, None]
        score = tl.where(is_empty, float("-inf"), best + tl.log2(tl.where(is_empty, 1.0, total)))
        column = tl.arange(0, BLOCK_D)
        inside = is_row[:, None] & (column < VALUES)[None, :]
        tl.store(partial + place[:, None] * VALUES + column[None, :], mean, mask=inside)
        tl.store(scores + place, score, mask=is_row)


@triton.jit(do_not_specialize=["window"])
def combine_splits(
    partial: tl.tensor, scores: tl.tensor, out: tl.tensor, query_start: tl.tensor,
    context_lens: tl.tensor, tree_lens: tl.tensor, num_heads: tl.tensor, window: tl.tensor,
    min_chunk: tl.tensor, out_row: tl.tensor, out_head: tl.tensor,
    SHORT_LEN: tl.constexpr, SPLITS: tl.constexpr, VALUES: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, WINDOW: tl.constexpr, TREE_LENS: tl.constexpr,
) -> None:  # fmt: skip
    """Combine the splits' results of `attend_short`; grid (S * SHORT_LEN, N, VALUES / BLOCK_D)."""
    seq, query = tl.program_id(0) // SHORT_LEN, tl.program_id(0) % SHORT_LEN
    head = tl.program_id(1)
    start = tl.load(query_start + seq)
    num_new = tl.load(query_start + seq + 1) - start
    if (num_new > SHORT_LEN) | (query >= num_new):
        return
    context_len = tl.load(context_lens + seq)
    if context_len == 0:
        return
    committed = context_len - _tree_len(tree_lens, seq, num_new, TREE_LENS)
    oldest, chunk = _split(committed, context_len, window, min_chunk, SPLITS, BLOCK_N, WINDOW)
    split, column = tl.arange(0, SPLITS), tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    was_written = oldest + split * chunk < context_len
    place = (tl.program_id(0).to(tl.int64) * num_heads + head) * SPLITS + split
    score = tl.load(scores + place, mask=was_written, other=float("-inf"))
    best = tl.max(score, axis=0)
    weight = tl.exp2(score - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weight, axis=0)
    inside = was_written[:, None] & (column < VALUES)[None, :]
    mean = tl.load(partial + place[:, None] * VALUES + column[None, :], mask=inside, other=0.0)
    result = tl.sum(mean * weight[:, None], axis=0) * (1.0 / tl.where(total > 0.0, total, 1.0))
    to = out + (start + query).to(tl.int64) * out_row + head * out_head + column
    tl.store(to, rounded(result, out.dtype.element_ty), mask=column < VALUES)


@triton.jit(do_not_specialize=["num_seqs", "window", "table_row", "table_head", "tree_row"])
def attend_long(
    q: tl.tensor, k_cache: tl.tensor, v_cache: tl.tensor, out: tl.tensor,
    query_start: tl.tensor, context_lens: tl.tensor, block_tables: tl.tensor,
    tree: tl.tensor, tree_lens: tl.tensor, sinks: tl.tensor, num_seqs: tl.tensor,
    window: tl.tensor, scale: tl.tensor,
    q_row: tl.tensor, q_head: tl.tensor, out_row: tl.tensor, out_head: tl.tensor,
    table_row: tl.tensor, table_head: tl.tensor, tree_row: tl.tensor,
    cache_block: tl.tensor, cache_slot: tl.tensor, cache_head: tl.tensor,
    SHORT_LEN: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TREE: tl.constexpr, TREE_LENS: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Attend sequences of more than SHORT_LEN new rows, all keys of a tile in one program.

    Grid (G, T * GROUP // BLOCK_M + S): sequence s owns the tiles from
    query_start[s] * GROUP // BLOCK_M + s on, which suffice for any lengths.
    """
    # The last tiles of a sequence have the most keys: they begin first.
    slot = tl.num_programs(1) - 1 - tl.program_id(1)
    seq = slot * 0
    high = seq + num_seqs
    while high - seq > 1:
        middle = (seq + high) // 2
        is_before = tl.load(query_start + middle) * GROUP // BLOCK_M + middle <= slot
        seq = tl.where(is_before, middle, seq)
        high = tl.where(is_before, high, middle)
    start = tl.load(query_start + seq)
    num_new = tl.load(query_start + seq + 1) - start
    first_row = (slot - start * GROUP // BLOCK_M - seq) * BLOCK_M
    if (num_new <= SHORT_LEN) | (first_row >= num_new * GROUP):
        return
    kv_head = tl.program_id(0)
    context_len = tl.load(context_lens + seq)
    if context_len == 0:
        return
    num_tree = _tree_len(tree_lens, seq, num_new, TREE_LENS)
    table = block_tables + seq.to(tl.int64) * table_row + kv_head * table_head
    acc, _, total = _attend_rows(
        q, k_cache, v_cache, table, tree, sinks, start, num_new, num_tree, context_len - num_tree,
        first_row, kv_head, 0, context_len, window, scale, True, q_row, q_head, tree_row,
        cache_block, cache_slot, cache_head, GROUP, DIM, VALUES, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_T,
        BLOCK_SIZE, WINDOW, TREE, SINKS,
    )  # fmt: skip
    _store_rows(
        out, acc, total, start, num_new, first_row, kv_head, out_row, out_head,
        GROUP, VALUES, BLOCK_M, BLOCK_D,
    )  # fmt: skip

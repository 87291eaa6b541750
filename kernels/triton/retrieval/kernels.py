"""Search of coded keys, and the lists of cache slots to attend to: what `launches` calls.

A key's score is the product with the key that its codes stand for, which a program puts together
from centroids: by a table of products per query head it would be looked up once for each of them,
here once for all heads that share the key, and tensor cores add the parts.
Numbers about the batch are read from device memory; arguments that differ from batch to batch are
not specialised. Letters as in `kernels.contracts`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.runtime import dot, rounded


@triton.jit(
    do_not_specialize=["first_seq", "segments_row", "scores_row"],
    do_not_specialize_on_alignment=["seqs", "segments", "coded_end"],
)
def score_keys(
    q: tl.tensor, centroids: tl.tensor, codes: tl.tensor, query_start: tl.tensor, seqs: tl.tensor,
    segments: tl.tensor, searched: tl.tensor, coded_end: tl.tensor, scores: tl.tensor,
    first_seq: tl.tensor, num_sinks: tl.tensor, q_row: tl.tensor, q_head: tl.tensor,
    segments_row: tl.tensor, scores_row: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, SUBSPACES: tl.constexpr, CENTROIDS: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Write the scores f32[grid's R, G, scores_row] of all keys of the segments that are searched.

    Grid (G, R, scores_row / BLOCK_N), sequences `first_seq` .. of the retrieval. `searched`
    i64[grid's R, G, scores_row / SEGMENT] are their segments' numbers. A score is the greatest over
    the rows and the heads that share the key; -inf for what is no key, or not searched.
    """
    kv_head, seq = tl.program_id(0), tl.program_id(1) + first_seq
    to = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + kv_head
    entry = tl.program_id(2) * BLOCK_N
    chosen = tl.load(searched + to * (scores_row // SEGMENT) + entry // SEGMENT).to(tl.int32)
    first = chosen * SEGMENT + entry % SEGMENT
    keys = first + tl.arange(0, BLOCK_N)
    end = tl.load(coded_end + seq)
    best = tl.full([BLOCK_N], -3e38, dtype=tl.float32)
    if (first < end) & (first + BLOCK_N > num_sinks):
        segment = tl.load(segments + seq.to(tl.int64) * segments_row + chosen)
        owner = segment.to(tl.int64) * tl.num_programs(0) + kv_head
        width: tl.constexpr = DIM // SUBSPACES
        column = tl.arange(0, BLOCK_D)
        part = (column // width)[None, :]
        # Codes behind the last key may be anything.
        inside = (keys < end)[:, None] & (column < DIM)[None, :]
        place = owner * SUBSPACES * SEGMENT + part * SEGMENT + (keys % SEGMENT)[:, None]
        code = tl.load(codes + place, mask=inside, other=0).to(tl.int32)
        place = (part * CENTROIDS + code) * width + (column % width)[None, :]
        decoded = tl.load(
            centroids + owner * SUBSPACES * CENTROIDS * width + place, mask=inside, other=0.0
        )
        number = tl.load(seqs + seq)
        start = tl.load(query_start + number)
        num_pairs = (tl.load(query_start + number + 1) - start) * GROUP
        for first_row in range(0, num_pairs, BLOCK_M):
            row = first_row + tl.arange(0, BLOCK_M)
            head = kv_head * GROUP + row % GROUP
            source = (start + row // GROUP).to(tl.int64)[:, None] * q_row + head[:, None] * q_head
            is_row = (row < num_pairs)[:, None]
            tile = tl.load(
                q + source + column[None, :], mask=is_row & (column < DIM)[None, :], other=0.0
            )
            zero = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            products = dot(tile, tl.trans(decoded.to(tile.dtype)), zero)
            # Never below keys that are not searched, whatever the rows hold.
            products = tl.where(is_row & (products > -3e38), products, -3e38)
            best = tl.maximum(best, tl.max(products, axis=0))
    best = tl.where((keys >= num_sinks) & (keys < end), best, float("-inf"))
    tl.store(scores + to * scores_row + entry + tl.arange(0, BLOCK_N), best)


@triton.jit(
    do_not_specialize=["first_seq", "segments_row"],
    do_not_specialize_on_alignment=["seqs", "segments", "coded_end", "summarised"],
)
def score_segments(
    q: tl.tensor, summaries: tl.tensor, query_start: tl.tensor, seqs: tl.tensor,
    segments: tl.tensor, coded_end: tl.tensor, summarised: tl.tensor, scores: tl.tensor,
    first_seq: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, segments_row: tl.tensor,
    GROUP: tl.constexpr, DIM: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Write the scores f32[grid's R, G, segments_row] of segments by their summaries.

    Grid (G, R, segments_row / BLOCK_N), as score_keys. inf for those that are searched anyway, -inf
    for what is no segment.
    """
    kv_head, seq = tl.program_id(0), tl.program_id(1) + first_seq
    number = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    competing = tl.load(summarised + seq)
    is_summarised = (number < competing)[:, None]
    place = tl.load(
        segments + seq.to(tl.int64) * segments_row + number, mask=number < competing, other=0
    )
    column = tl.arange(0, BLOCK_D)[None, :]
    source = (place.to(tl.int64) * tl.num_programs(0) + kv_head)[:, None] * 2 * DIM + column
    inside = is_summarised & (column < DIM)
    means = tl.load(summaries + source, mask=inside, other=0.0)
    spreads = tl.load(summaries + source + DIM, mask=inside, other=0.0)
    best = tl.full([BLOCK_N], -3e38, dtype=tl.float32)
    sequence = tl.load(seqs + seq)
    start = tl.load(query_start + sequence)
    num_pairs = (tl.load(query_start + sequence + 1) - start) * GROUP
    for first_row in range(0, num_pairs, BLOCK_M):
        row = first_row + tl.arange(0, BLOCK_M)
        head = kv_head * GROUP + row % GROUP
        place_of = (start + row // GROUP).to(tl.int64)[:, None] * q_row + head[:, None] * q_head
        is_row = (row < num_pairs)[:, None]
        tile = tl.load(q + place_of + column, mask=is_row & (column < DIM), other=0.0)
        tile = tile.to(tl.float32)
        zero = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        total = dot(rounded(tile, tl.bfloat16), tl.trans(means), zero)
        total = dot(rounded(tl.abs(tile), tl.bfloat16), tl.trans(spreads), total)
        # Between what is no segment and what is searched anyway, whatever the rows hold.
        total = tl.where(is_row & (total > -3e38) & (total < 3e38), total, -3e38)
        best = tl.maximum(best, tl.max(total, axis=0))
    num_segments = tl.cdiv(tl.load(coded_end + seq), SEGMENT)
    best = tl.where(number < competing, best, float("inf"))
    best = tl.where(number < num_segments, best, float("-inf"))
    to = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + kv_head
    tl.store(scores + to * segments_row + number, best, mask=number < segments_row)


@triton.jit(
    do_not_specialize=["first_seq", "num_best", "num_searched", "table_row", "lists_row"],
    do_not_specialize_on_alignment=["seqs", "coded_end", "budgets"],
)
def list_slots(
    best: tl.tensor, searched: tl.tensor, seqs: tl.tensor, coded_end: tl.tensor,
    budgets: tl.tensor, context_lens: tl.tensor, block_tables: tl.tensor, lists: tl.tensor,
    first_seq: tl.tensor, num_best: tl.tensor, num_searched: tl.tensor, num_sinks: tl.tensor,
    table_row: tl.tensor, lists_row: tl.tensor, SEGMENT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write to lists i32[S, G, lists_row] the slots of the keys that a sequence's heads attend to.

    Grid (G, R, lists_row / BLOCK). They are those of the sinks, of the first ones of `best`
    i64[grid's R, G, num_best], and of all keys from coded_end on, the new rows' last. A key k whose
    block has no place in the cache (-1) is written as -1 - k. `best` counts the keys of the
    segments `searched` i64[grid's R, G, num_searched].
    """
    kv_head, seq = tl.program_id(0), tl.program_id(1) + first_seq
    entry = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(seqs + seq).to(tl.int64)
    end = tl.load(coded_end + seq)
    count = tl.minimum(tl.load(budgets + seq), end - num_sinks)
    rank = entry - num_sinks
    own = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + kv_head
    is_best = (rank >= 0) & (rank < count)
    found = tl.load(best + own * num_best + rank, mask=is_best, other=0).to(tl.int32)
    chosen = tl.load(searched + own * num_searched + found // SEGMENT, mask=is_best, other=0)
    found = chosen.to(tl.int32) * SEGMENT + found % SEGMENT
    key = tl.where(rank < 0, entry, tl.where(is_best, found, end + rank - count))
    inside = (entry < lists_row) & (key < tl.load(context_lens + number))
    block = tl.load(block_tables + number * table_row + key // BLOCK_SIZE, mask=inside, other=0)
    to = lists + (number * tl.num_programs(0) + kv_head) * lists_row + entry
    slot = tl.where(block < 0, -1 - key, block * BLOCK_SIZE + key % BLOCK_SIZE)
    tl.store(to, slot, mask=inside)

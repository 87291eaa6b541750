"""Attention of query rows to lists of keys that lie anywhere in the caches, compiled.

A task is a part of a row's list and one key/value head, with all query heads that share it, as in
`kernels.cpu.compiled.attention.rows`; keys are found by their offsets, since next to no two of them
lie one behind the other. A second phase merges the parts of a row. Knows no codes and no positions:
the lists are written by `kernels.cpu.compiled.retrieval.search`, which launches this.
"""

from __future__ import annotations

from typing import Final

from kernels.cpu.compiled.attention.keys import (
    CACHE_IS_FP8,
    IS_BF16,
    K_CACHE,
    NUM_KV_HEADS,
    NUM_PIECES,
    PARTS,
    PIECES,
    Q_STRIDE,
    REPEAT,
    SCALE,
    V_CACHE,
    WORK,
    Q,
    bytes_in_cache,
    bytes_of_head,
    widen_listed,
    widened_pitch,
)
from kernels.cpu.compiled.attention.rows import (
    PIECE_BYTES,
    SCORE_BYTES,
    STATE_BYTES,
    TILE_HEADS,
    WIDENED,
)
from kernels.cpu.compiled.attention.states import (
    VECTOR,
    add_listed,
    clear,
    merge_parts,
    soften,
    state_vectors,
    write_out,
)
from kernels.cpu.compiled.retrieval.words import (
    FIRST_LISTED,
    LISTS,
    NUM_LISTED,
    SEARCH,
    seq_of,
)
from kernels.cpu.compiled.runtime import Kernel, inlined
from kernels.cpu.simd import attention as inner
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors
from kernels.cpu.simd.attention import CHUNK_KEYS, SCORE_PITCH, SLICE
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

# Keys that are prefetched before the first are used: less than two chunks' lines of a head.
FIRST_ASKED: Final = 32
# Behind the widened heads: their offsets, as if they were listed.
ROWS: Final = SCORE_BYTES
_scratch_scores = simd.stack(ROWS + 8 * simd.LANES)
_scratch_states = simd.stack(STATE_BYTES)


@inlined
def _list_of(block: int, piece: int, group: int) -> int:
    """Return the address of the offsets of a piece's keys."""
    seq = seq_of(block, simd.read_i64(piece + 8))
    first = simd.read_i64(seq + FIRST_LISTED) + group * simd.read_i64(seq + NUM_LISTED)
    address: int = simd.read_i64(simd.read_i64(block + SEARCH) + LISTS) + 8 * first
    return address


@inlined
def _ask(cache: int, listed: int, count: int, head_bytes: int) -> None:
    """Prefetch a head of `count` keys or values."""
    for idx in range(count):
        simd.prefetch(cache + simd.read_i64(listed + 8 * idx), head_bytes)


@inlined
def _score(
    block: int,
    query: int,
    keys: int,
    listed: int,
    count: int,
    heads: int,
    scores: int,
    values: int,
    asks: int,
    asked: int,
) -> None:
    """Write the scaled scores of up to CHUNK_KEYS keys; 16 lanes past a row may be written.

    If it `asks`, prefetches meanwhile their values, and the keys behind the first `asked`.
    """
    head_bytes, is_bf16 = bytes_of_head(block), simd.read_i64(block + IS_BF16)
    cached_bytes, is_fp8 = bytes_in_cache(block), simd.read_i64(block + CACHE_IS_FP8)
    scale = vectors.splat(simd.read_f32(block + SCALE))
    for begin in range(0, count, simd.LANES):
        here, some = min(count - begin, simd.LANES), listed + 8 * begin
        if asks:
            ahead = begin + asked
            _ask(keys, listed + 8 * ahead, min(count - ahead, simd.LANES), cached_bytes)
            _ask(values, some, here, cached_bytes)
        near = keys
        if is_fp8:
            near = scores + WIDENED
            widen_listed(block, keys, some, here, near)
            some = scores + ROWS
        for head in range(heads):
            one = query + head * head_bytes
            if is_bf16:
                found = inner.listed_scores_bf16(one, near, some, here, head_bytes)
            else:
                found = inner.listed_scores_f32(one, near, some, here, head_bytes)
            place = scores + head * SCORE_PITCH + 4 * begin
            vectors.store_f32(place, vectors.mul(found, scale))


@inlined
def _add_values(
    block: int,
    values: int,
    listed: int,
    count: int,
    heads: int,
    scores: int,
    state: int,
    keys: int,
    num_asked: int,
) -> None:
    """Add the values of up to CHUNK_KEYS keys to the states of `heads` heads.

    Prefetches the following `num_asked` keys meanwhile.
    """
    head_bytes, is_bf16 = bytes_of_head(block), simd.read_i64(block + IS_BF16)
    cached_bytes, is_fp8 = bytes_in_cache(block), simd.read_i64(block + CACHE_IS_FP8)
    for begin in range(0, count, simd.LANES):
        here, some = min(count - begin, simd.LANES), listed + 8 * begin
        asked = min(num_asked - begin, simd.LANES)
        _ask(keys, listed + 8 * (count + begin), asked, cached_bytes)
        near = values
        if is_fp8:
            near = scores + WIDENED
            widen_listed(block, values, some, here, near)
            some = scores + ROWS
        for offset in range(0, head_bytes, SLICE):
            rest = (head_bytes - offset) // 4
            sums = state + VECTOR + offset * (1 + is_bf16)
            add_listed(block, heads, sums, scores + 4 * begin, near + offset, some, here, rest)


@inlined
def _attend_piece(block: int, piece: int, group: int, states: int, scores: int) -> None:
    """Attend one piece's row to its keys with the query heads of one key/value head."""
    row, part = simd.read_i64(piece), simd.read_i64(piece + 32)
    repeat, head_bytes = simd.read_i64(block + REPEAT), bytes_of_head(block)
    num_vectors = state_vectors(block)
    pitch, first = num_vectors * VECTOR, group * repeat
    state = states
    if part >= 0:
        num_heads = repeat * simd.read_i64(block + NUM_KV_HEADS)
        parts = simd.read_i64(simd.read_i64(block + WORK) + PARTS)
        state = parts + (part * num_heads + first) * pitch
    for head in range(repeat):
        clear(state + head * pitch, num_vectors)
    query = simd.read_i64(block + Q) + row * simd.read_i64(block + Q_STRIDE) + first * head_bytes
    keys = simd.read_i64(block + K_CACHE) + group * bytes_in_cache(block)
    values = simd.read_i64(block + V_CACHE) + group * bytes_in_cache(block)
    offsets = _list_of(block, piece, group)
    start, end = simd.read_i64(piece + 16), simd.read_i64(piece + 24)
    # All else is asked for little by little, while what has come is used.
    asked = min(end - start, FIRST_ASKED)
    _ask(keys, offsets + 8 * start, asked, bytes_in_cache(block))
    while start < end:
        count = min(end - start, CHUNK_KEYS)
        following = min(end - start - count, CHUNK_KEYS)
        listed = offsets + 8 * start
        for head in range(0, repeat, TILE_HEADS):
            heads = min(repeat - head, TILE_HEADS)
            asks, own = int(head == 0), state + head * pitch
            one = query + head * head_bytes
            _score(block, one, keys, listed, count, heads, scores, values, asks, asked)
            for idx in range(heads):
                soften(count, scores + idx * SCORE_PITCH, own + idx * pitch, num_vectors)
            num_asked = following if asks else 0
            _add_values(block, values, listed, count, heads, scores, own, keys, num_asked)
        start, asked = start + count, CHUNK_KEYS
    if part < 0:
        for head in range(repeat):
            write_out(block, state + head * pitch, row, first + head)


@Kernel
def attend_lists(block: int) -> None:
    """Write the rows of WORK, whose keys the lists of SEARCH name."""
    scores, states = _scratch_scores(), _scratch_states()
    for idx in range(simd.LANES):
        simd.write_i64(scores + ROWS + 8 * idx, idx * widened_pitch(block))
    num_groups, work = simd.read_i64(block + NUM_KV_HEADS), simd.read_i64(block + WORK)
    num_tasks = simd.read_i64(work + NUM_PIECES) * num_groups
    task = claim_task(block, 0)
    while task < num_tasks:
        piece = simd.read_i64(work + PIECES) + task // num_groups * PIECE_BYTES
        _attend_piece(block, piece, task % num_groups, states, scores)
        finish_task(block, 0)
        task = claim_task(block, 0)
    wait_for_tasks(block, 0, num_tasks)
    merge_parts(block, 1, states)

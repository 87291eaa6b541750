"""Paged attention of single query rows, compiled: keys and values are read in the cache.

One task is some keys of a query row and one or more key/value heads, with all query heads that
share them or, if these have too many numbers, a tile of them: scores of 16 keys at a time, an
online softmax in fp32 over chunks of keys, the weighted sum of the values. The keys of a row are
cut into parts, which a second pass merges; the parts depend on the context's length alone, so the
result does not depend on the number of threads. Runs of keys and values in fp8 are widened first,
once for all query heads that share them. Knows no sequences: its tasks are listed in
`kernels.cpu.attention_rows.Work`. Used by `kernels.cpu.attention`, which chooses the rows.

Letters as in `kernels.contracts`. A slice is 64 bytes of a head (`kernels.cpu.simd.attention`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.contracts import MAX_FP8_DIM
from kernels.cpu.attention_rows import Work
from kernels.cpu.compiled.attention.keys import (
    CACHE_IS_FP8,
    GROUPS_PER_TASK,
    IS_BF16,
    K_CACHE,
    NUM_KV_HEADS,
    NUM_PIECES,
    NUM_TILES,
    PARTS,
    PIECES,
    Q_STRIDE,
    REPEAT,
    SCALE,
    V_CACHE,
    WIDENED_BYTES,
    WORK,
    Q,
    ask_for_run,
    bytes_in_cache,
    bytes_of_head,
    bytes_of_slot,
    bytes_of_value,
    key_offset,
    position_of,
    run_length,
    widen_run,
    widened_pitch,
)
from kernels.cpu.compiled.attention.states import (
    VECTOR,
    add_run,
    clear,
    merge_parts,
    soften,
    state_vectors,
    write_out,
)
from kernels.cpu.compiled.runtime import Kernel, float_word, inlined, launch
from kernels.cpu.simd import attention as inner
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors
from kernels.cpu.simd.attention import CHUNK_KEYS, SCORE_PITCH, SLICE
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

# Query heads computed together.
TILE_HEADS: Final = 8
PIECE_BYTES: Final = 56
# States of the query heads of one task; about half of a first-level cache.
STATE_BYTES: Final = 20 << 10


class HeadShape(NamedTuple):
    """The heads of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def fits(self) -> bool:
        """Return whether attend_rows supports them."""
        return self.head_dim % 2 == 0 and _part_bytes(self.head_dim) <= STATE_BYTES

    @property
    def num_tiles(self) -> int:
        """Return into how many tasks the query heads that share a key are divided."""
        repeat = self.num_heads // self.num_kv_heads
        return -(-repeat // (STATE_BYTES // _part_bytes(self.head_dim)))


def can_attend(q: Tensor, k_cache: Tensor, block_tables: Tensor, out: Tensor) -> bool:
    """Return whether attend_rows supports these shapes, strides and dtypes."""
    num_heads, head_dim = q.shape[1:]
    is_narrow = k_cache.dtype == torch.float8_e4m3fn and head_dim <= MAX_FP8_DIM
    return (
        q.dtype == out.dtype
        and q.dtype in (torch.float32, torch.bfloat16)
        and (k_cache.dtype == q.dtype or is_narrow)
        and HeadShape(num_heads, k_cache.shape[2], head_dim).fits
        and _lie_whole(q)
        and _lie_whole(out)
        and k_cache.is_contiguous()
        and block_tables.dtype == torch.int32
        and (block_tables.stride(-1) == 1 or block_tables.shape[-1] <= 1)
    )


def _lie_whole(x: Tensor) -> bool:
    """Return whether the heads of each row of x [T, N, D] are contiguous."""
    return x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1)


Division = Callable[[HeadShape, int], tuple[int, int]]
"""Returns GROUPS_PER_TASK and NUM_TILES of WorkWords for a number of pieces."""


def _divide_heads(heads: HeadShape, num_pieces: int) -> tuple[int, int]:
    # Heads computed together read each block once; having enough tasks, or as many for each
    # thread, matters more.
    num_threads, part_bytes = torch.get_num_threads(), _part_bytes(heads.head_dim)
    wanted = max(num_pieces * heads.num_kv_heads // (4 * num_threads), 1)
    groups_per_task = min(
        max(STATE_BYTES // (heads.num_heads // heads.num_kv_heads * part_bytes), 1),
        wanted if num_pieces % num_threads else heads.num_kv_heads,
        heads.num_kv_heads,
    )
    return groups_per_task, heads.num_tiles


class WorkWords:
    """The Work of a step in memory, for all layers with the same heads and window.

    A recorded step reads it at its address, so that each replay attends to its own keys.
    """

    def __init__(self, heads: HeadShape, divide: Division | None = None) -> None:
        """`divide` is that of the kernel which reads the words; None: that of attend_rows."""
        self._heads = heads
        self._divide = divide or _divide_heads
        self._words = torch.zeros(10, dtype=torch.int64)
        self._read: tuple[Tensor, ...] = ()

    @property
    def address(self) -> int:
        """Return the address of the words."""
        return self._words.data_ptr()

    def fill(self, work: Work, block_tables: Tensor) -> None:
        """Write the work of the next launches; keeps what they read."""
        heads = self._heads
        part_bytes = _part_bytes(heads.head_dim)
        parts = torch.empty(work.num_parts * heads.num_heads, part_bytes // 4)
        self._read = (work.pieces, work.merges, parts, work.branches, block_tables)
        self._words.numpy()[:] = (
            work.pieces.data_ptr(),
            work.pieces.shape[0],
            work.merges.data_ptr(),
            work.merges.shape[0],
            parts.data_ptr(),
            work.branches.data_ptr(),
            block_tables.data_ptr(),
            block_tables.stride(0) * 4,
            *self._divide(heads, work.pieces.shape[0]),
        )


def attend_rows(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    work: WorkWords,
    out: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> None:
    """Write the rows of `work` of out [T, N, V]; all else as in `paged_attention`.

    The heads of a row of out are contiguous, as those of q.
    """
    arguments = head_arguments(q, k_cache, v_cache, work.address, out, scale=scale, sinks=sinks)
    launch(_attend, arguments, num_threads=torch.get_num_threads())


def head_arguments(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    work: int,
    out: Tensor,
    *,
    scale: float,
    sinks: Tensor | None,
) -> tuple[int, ...]:
    """Return the arguments of `kernels.cpu.compiled.attention.keys`, in their order.

    `work` is the address of the words.
    """
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    _, block_size, num_groups, head_dim = k_cache.shape
    return (
        q.data_ptr(),
        q.stride(0) * q.itemsize,
        out.data_ptr(),
        out.stride(0) * out.itemsize,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        block_size,
        num_groups,
        q.shape[1] // num_groups,
        head_dim,
        int(q.dtype == torch.bfloat16),
        float_word(scale),
        work,
        int(k_cache.dtype == torch.float8_e4m3fn),
        0 if sinks is None else sinks.data_ptr(),
        out.shape[2],
    )


def _part_bytes(head_dim: int) -> int:
    """Return an upper bound of the size of one query head's state."""
    return VECTOR + 4 * -(-head_dim // 32) * 32


# Behind the scores of the heads computed together: the heads of a run, widened.
WIDENED: Final = TILE_HEADS * SCORE_PITCH
SCORE_BYTES: Final = WIDENED + WIDENED_BYTES
_scratch_scores = simd.stack(SCORE_BYTES)
_scratch_states = simd.stack(STATE_BYTES)


@inlined
def _score_chunk(
    block: int,
    piece: int,
    start: int,
    stop: int,
    keys: int,
    query: int,
    heads: int,
    scores: int,
    ask: int,
    ask_bytes: int,
) -> None:
    """Write the scaled scores of keys start <= k < stop; 16 lanes past a row may be written.

    Prefetches `ask_bytes` of each of their values at `ask` meanwhile; 0: none.
    """
    head_bytes, stride = bytes_of_head(block), bytes_of_slot(block)
    is_bf16, is_fp8 = simd.read_i64(block + IS_BF16), simd.read_i64(block + CACHE_IS_FP8)
    if is_fp8:
        stride = widened_pitch(block)
    scale = vectors.splat(simd.read_f32(block + SCALE))
    key = start
    while key < stop:
        position = position_of(block, piece, key)
        count = run_length(block, piece, key, position, stop)
        run = keys + key_offset(block, piece, position)
        if ask_bytes:
            ask_for_run(block, ask, piece, key, stop, ask_bytes)
        if is_fp8:
            widen_run(block, run, count, scores + WIDENED)
            run = scores + WIDENED
        for head in range(heads):
            place = scores + head * SCORE_PITCH + 4 * (key - start)
            one = query + head * head_bytes
            if is_bf16:
                found = inner.scores_bf16(one, run, stride, count, head_bytes)
            else:
                found = inner.scores_f32(one, run, stride, count, head_bytes)
            vectors.store_f32(place, vectors.mul(found, scale))
        key += count


@inlined
def _add_values(
    block: int,
    piece: int,
    start: int,
    stop: int,
    values: int,
    scores: int,
    heads: int,
    state: int,
    ask: int,
    ask_bytes: int,
) -> None:
    """Add to the states of `heads` heads the values of keys start <= k < stop.

    Prefetches `ask_bytes` of each key at `ask` of the piece's next chunk; 0: none.
    """
    value_bytes, stride = bytes_of_value(block), bytes_of_slot(block)
    is_bf16, is_fp8 = simd.read_i64(block + IS_BF16), simd.read_i64(block + CACHE_IS_FP8)
    if is_fp8:
        stride = widened_pitch(block)
    key_end = simd.read_i64(piece + 24)
    key = start
    while key < stop:
        position = position_of(block, piece, key)
        count = run_length(block, piece, key, position, stop)
        run = values + key_offset(block, piece, position)
        weights = scores + 4 * (key - start)
        if ask_bytes:
            ask_for_run(block, ask, piece, key + CHUNK_KEYS, key_end, ask_bytes)
        if is_fp8:
            widen_run(block, run, count, scores + WIDENED)
            run = scores + WIDENED
        for offset in range(0, value_bytes, SLICE):
            rest = (value_bytes - offset) // 4
            sums = state + VECTOR + offset * (1 + is_bf16)
            add_run(block, heads, sums, weights, run + offset, stride, count, rest)
        key += count


@inlined
def _do_chunk(
    block: int,
    piece: int,
    start: int,
    stop: int,
    first: int,
    last: int,
    state: int,
    pitch: int,
    scores: int,
    ask_bytes: int,
) -> int:
    """Add keys start <= k < stop of a piece to the states of up to TILE_HEADS query heads.

    `first` is the first of these heads, all below `last`; they share a key/value head. Returns
    their number. Prefetches meanwhile `ask_bytes` of each of these values and of the keys of the
    next chunk.
    """
    row = simd.read_i64(piece)
    repeat, head_bytes = simd.read_i64(block + REPEAT), bytes_of_head(block)
    group = first // repeat
    heads: int = min(repeat - first % repeat, last - first, TILE_HEADS)
    query = simd.read_i64(block + Q) + row * simd.read_i64(block + Q_STRIDE) + first * head_bytes
    keys = simd.read_i64(block + K_CACHE) + group * bytes_in_cache(block)
    values = simd.read_i64(block + V_CACHE) + group * bytes_in_cache(block)
    _score_chunk(block, piece, start, stop, keys, query, heads, scores, values, ask_bytes)
    for idx in range(heads):
        soften(stop - start, scores + idx * SCORE_PITCH, state + idx * pitch, pitch // VECTOR)
    _add_values(block, piece, start, stop, values, scores, heads, state, keys, ask_bytes)
    return heads


@inlined
def _do_piece(
    block: int,
    piece: int,
    first_head: int,
    last_head: int,
    states: int,
    scores: int,
) -> None:
    """Attend one piece's row to its keys with query heads first_head <= h < last_head."""
    row, part = simd.read_i64(piece), simd.read_i64(piece + 32)
    pitch = state_vectors(block) * VECTOR
    state = states
    if part >= 0:
        num_heads = simd.read_i64(block + REPEAT) * simd.read_i64(block + NUM_KV_HEADS)
        parts = simd.read_i64(simd.read_i64(block + WORK) + PARTS)
        state = parts + (part * num_heads + first_head) * pitch
    for idx in range(last_head - first_head):
        clear(state + idx * pitch, pitch // VECTOR)
    start, key_end = simd.read_i64(piece + 16), simd.read_i64(piece + 24)
    # A sequence's blocks may lie anywhere in memory: the keys of the first chunk are asked for now,
    # all else little by little.
    repeat = simd.read_i64(block + REPEAT)
    ask_bytes = max((last_head - first_head) // repeat, 1) * bytes_in_cache(block)
    keys = simd.read_i64(block + K_CACHE) + first_head // repeat * bytes_in_cache(block)
    for key in range(start, min(start + CHUNK_KEYS, key_end), simd.LANES):
        ask_for_run(block, keys, piece, key, key_end, ask_bytes)
    while start < key_end:
        stop = min(start + CHUNK_KEYS, key_end)
        head = first_head
        while head < last_head:
            own = state + (head - first_head) * pitch
            # Each key/value head asks for its own bytes: requests spread over all the work.
            asked = bytes_in_cache(block) if head % repeat == 0 or head == first_head else 0
            head += _do_chunk(block, piece, start, stop, head, last_head, own, pitch, scores, asked)
        start = stop
    if part < 0:
        for head in range(first_head, last_head):
            write_out(block, state + (head - first_head) * pitch, row, head)


@Kernel
def _attend(block: int) -> None:
    scores, states = _scratch_scores(), _scratch_states()
    num_groups, repeat = simd.read_i64(block + NUM_KV_HEADS), simd.read_i64(block + REPEAT)
    work = simd.read_i64(block + WORK)
    per_task = simd.read_i64(work + GROUPS_PER_TASK)
    num_tiles = simd.read_i64(work + NUM_TILES)
    num_ranges = (num_groups + per_task - 1) // per_task * num_tiles
    num_tasks = simd.read_i64(work + NUM_PIECES) * num_ranges
    task = claim_task(block, 0)
    while task < num_tasks:
        piece = simd.read_i64(work + PIECES) + task // num_ranges * PIECE_BYTES
        group = task % num_ranges // num_tiles * per_task
        end = min(group + per_task, num_groups) * repeat
        size = (per_task * repeat + num_tiles - 1) // num_tiles
        first = group * repeat + task % num_tiles * size
        _do_piece(block, piece, first, min(first + size, end), states, scores)
        finish_task(block, 0)
        task = claim_task(block, 0)
    wait_for_tasks(block, 0, num_tasks)
    merge_parts(block, 1, states)

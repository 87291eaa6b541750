"""Paged attention of a prompt's query rows, compiled: a tile of rows reads each key once.

One task is a tile of consecutive rows of a sequence and a key/value head, with all query heads that
share it. Keys and values are read in the cache, BLOCK_KEYS at a time, and packed as the products of
bf16 rows want their weights (`kernels.cpu.simd.matmul`): a block's scores are one such product, an
online softmax in fp32 turns them into bf16 weights, and the weighted values are another one
(FlashAttention 2, algorithm 1). Blocks begin at multiples of BLOCK_KEYS in the sequence, and a
row's sums do not depend on other rows: the result depends neither on the tiles nor on the number of
threads, nor on the parts in which a prompt is computed. Knows no trees. Used by
`kernels.cpu.attention`, which chooses the pieces.

Letters as in `kernels.contracts`. A vector is a row of a query head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.compiled.attention.keys import (
    HEAD_DIM,
    K_CACHE,
    NUM_KV_HEADS,
    NUM_PIECES,
    OUT,
    OUT_STRIDE,
    PIECES,
    Q_STRIDE,
    REPEAT,
    SCALE,
    SINKS,
    TABLE_STRIDE,
    TABLES,
    V_CACHE,
    VALUE_DIM,
    WORK,
    Q,
    bytes_of_head,
    bytes_of_value,
    slot_offset,
)
from kernels.cpu.compiled.attention.rows import head_arguments
from kernels.cpu.compiled.runtime import Kernel, inlined, launch
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import matmul, vectors
from kernels.cpu.simd.matmul import (
    EVEN_WIDTH,
    SUM_BYTES,
    multiply_even,
    padded_inputs,
    second_half,
    task_bytes,
)
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

BLOCK_KEYS: Final = matmul.TASK_OUTPUTS
MAX_DIM: Final = 256
"""Of keys and of values."""
TILE_VECTORS: Final = 256
# Their scores and weights stay in a first-level cache.
_STEP_VECTORS: Final = matmul.MAX_EVEN_ROWS
_MIN_TILE_ROWS: Final = 16
_WEIGHT_BYTES: Final = 2 * BLOCK_KEYS
_FLOAT: Final = 4
_VECTOR: Final = _FLOAT * simd.LANES
_NOTHING: Final = np.float32(-3e38)
_LN_2: Final = np.float32(math.log(2))
_FIELDS: Final = 5
(SEQUENCE, FIRST_ROW, NUM_ROWS, POSITION, SLIDING_WINDOW) = range(0, 8 * _FIELDS, 8)
"""Offsets in a tile: POSITION is that of the first row, SLIDING_WINDOW 0: all keys before it."""


class PromptRows(NamedTuple):
    """Consecutive rows of a sequence, the first of them at a position of it."""

    seq_idx: int
    first_row: int
    num_rows: int
    position: int


def can_attend_prompts(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether attend_prompts takes these; `rows.can_attend` does."""
    head_dim = k_cache.shape[3]
    return (
        matmul.can_multiply_blocks(BLOCK_KEYS)
        and matmul.may_use_tiles() == matmul.HAS_TILES
        and q.dtype == k_cache.dtype == torch.bfloat16
        and k_cache.shape == v_cache.shape
        and head_dim % simd.LANES == 0
        and head_dim <= MAX_DIM
        and q.shape[1] // k_cache.shape[2] <= TILE_VECTORS
    )


class PromptWords:
    """The tiles of a step in memory, for all layers with the same heads and window.

    A recorded step reads them at their address, so that each replay attends to its own keys.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, sliding_window: int | None) -> None:
        """`sliding_window`: as many keys, its own included, are seen by a row; None: all."""
        self._repeat, self._num_kv_heads = num_heads // num_kv_heads, num_kv_heads
        self._window = sliding_window or 0
        self._words = torch.zeros(10, dtype=torch.int64)
        self._read: tuple[Tensor, ...] = ()

    @property
    def address(self) -> int:
        """Return the address of the words."""
        return self._words.data_ptr()

    def fill(self, prompts: Iterable[PromptRows], block_tables: Tensor) -> None:
        """Write the rows of the next launches; keeps what they read."""
        prompts = list(prompts)
        size = self._tile_rows(sum(each.num_rows for each in prompts))
        tiles = [
            (seq_idx, first_row + at, min(size, num_rows - at), position + at, self._window)
            for seq_idx, first_row, num_rows, position in prompts
            for at in range(0, num_rows, size)
        ]
        # Those with the most keys first, so that the last tasks are short and threads end together.
        tiles.sort(key=lambda tile: -tile[3])
        table = torch.from_numpy(np.array(tiles, dtype=np.int64).reshape(-1, _FIELDS))
        self._read = (table, block_tables)
        words = self._words.numpy()
        words[PIECES // 8], words[NUM_PIECES // 8] = table.data_ptr(), len(tiles)
        words[TABLES // 8] = block_tables.data_ptr()
        words[TABLE_STRIDE // 8] = block_tables.stride(0) * 4

    def _tile_rows(self, num_rows: int) -> int:
        """Return the rows of a tile: few enough that each thread gets several tasks."""
        size = max(TILE_VECTORS // self._repeat, 1)
        wanted = 4 * torch.get_num_threads()
        while size > _MIN_TILE_ROWS and -(-num_rows // size) * self._num_kv_heads < wanted:
            size //= 2
        return size


def attend_prompts(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    words: PromptWords,
    out: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> None:
    """Write the rows of `words` of out [T, N, V]; all else as in `paged_attention`."""
    assert can_attend_prompts(q, k_cache, v_cache)
    arguments = head_arguments(q, k_cache, v_cache, words.address, out, scale=scale, sinks=sinks)
    launch(_attend_prompts, arguments, num_threads=torch.get_num_threads())


_zeros = simd.stack(2 * MAX_DIM)
_listed = simd.stack(16 * BLOCK_KEYS)
_packed_keys = simd.stack(2 * MAX_DIM * BLOCK_KEYS)
_packed_values = simd.stack(2 * MAX_DIM * BLOCK_KEYS)
_queries = simd.stack(2 * MAX_DIM * TILE_VECTORS)
_block_scores = simd.stack(SUM_BYTES * _STEP_VECTORS)
_block_weights = simd.stack(_WEIGHT_BYTES * _STEP_VECTORS)
_peaks = simd.stack(_FLOAT * _STEP_VECTORS)
_shrinks = simd.stack(_FLOAT * _STEP_VECTORS)
# For each vector the number of keys up to its own; the greatest score, in powers of 2; sums of
# exponentials, which are to be added; and the weighted sum of the values.
_seen = simd.stack(8 * TILE_VECTORS)
_greatest = simd.stack(_FLOAT * TILE_VECTORS)
_totals = simd.stack(_VECTOR * TILE_VECTORS)
_mixed = simd.stack(_FLOAT * MAX_DIM * TILE_VECTORS)


@inlined
def _column(packed: int, output: int, num_in: int) -> int:
    """Return the address of the first pair of an output of a packed task with `num_in` inputs."""
    return (
        packed
        + output // EVEN_WIDTH * (task_bytes(num_in) * EVEN_WIDTH // BLOCK_KEYS)
        + 4 * (output % EVEN_WIDTH)
    )


@inlined
def _list_keys(
    block: int,
    seq_idx: int,
    group: int,
    begin: int,
    first: int,
    last: int,
    absent: int,
    listed: int,
) -> None:
    """Write the addresses of a block's keys first <= k < last, then of its values.

    The others' are the zeros at `absent`: a weight of 0 does not remove what memory happens to
    hold.
    """
    head = group * bytes_of_head(block)
    keys, values = simd.read_i64(block + K_CACHE) + head, simd.read_i64(block + V_CACHE) + head
    for idx in range(BLOCK_KEYS):
        key = value = absent
        if first <= idx < last:
            offset = slot_offset(block, seq_idx, begin + idx)
            key, value = keys + offset, values + offset
        simd.write_i64(listed + 8 * idx, key)
        simd.write_i64(listed + 8 * (BLOCK_KEYS + idx), value)


@inlined
def _pack_keys(listed: int, dim: int, packed: int) -> None:
    """Pack the keys whose addresses are listed, for products over pairs of their numbers."""
    for idx in range(0, BLOCK_KEYS, simd.LANES):
        place = _column(packed, idx, dim)
        for pair in range(0, padded_inputs(dim) // 2, simd.LANES):
            there, left = place + 4 * EVEN_WIDTH * pair, dim // 2 - pair
            vectors.transpose(listed + 8 * idx, 4 * pair, left, there, 4 * EVEN_WIDTH)


@inlined
def _pack_values(listed: int, dim: int, packed: int) -> None:
    """Pack the values whose addresses are listed, for products over pairs of keys."""
    for idx in range(0, BLOCK_KEYS, 2):
        even, odd = simd.read_i64(listed + 8 * idx), simd.read_i64(listed + 8 * idx + 8)
        for at in range(0, dim, simd.LANES):
            place = _column(packed, at, BLOCK_KEYS) + idx // 2 * 4 * EVEN_WIDTH
            vectors.zip_numbers(place, even + 2 * at, odd + 2 * at)


@inlined
def _find_peak(scores: int, first: int, last: int) -> np.float32:
    """Return a vector's greatest score with a block's keys first <= k < last."""
    hides = first > 0 or last < BLOCK_KEYS
    peak = vectors.splat(_NOTHING)
    for at in range(0, BLOCK_KEYS, simd.LANES):
        found = vectors.load_f32(scores + _FLOAT * at)
        if hides:
            found = vectors.keep_first(found, last - at, _NOTHING)
            found = vectors.drop_first(found, first - at, _NOTHING)
        peak = vectors.greater(found, peak)
    found_peak: np.float32 = vectors.max_lanes(peak)
    return found_peak


@inlined
def _raise_peaks(
    peaks: int, shrinks: int, greatest: int, num_vectors: int, factor: np.float32
) -> None:
    """Join the peaks of a block, times `factor`, to the greatest scores so far.

    Writes the factors by which they shrink all before.
    """
    for at in range(0, _FLOAT * num_vectors, _VECTOR):
        before = vectors.load_f32(greatest + at)
        found = vectors.mul(vectors.load_f32(peaks + at), vectors.splat(factor))
        now = vectors.maximum(before, found)
        fall = vectors.mul(vectors.sub(before, now), vectors.splat(_LN_2))
        vectors.store_f32(shrinks + at, vectors.exp(fall))
        vectors.store_f32(greatest + at, now)


@inlined
def _soften(
    scores: int, weights: int, factor: np.float32, greatest: np.float32, first: int, last: int
) -> Any:
    """Write the weights of a vector's scores, 2^(factor score - greatest), of first <= k < last.

    Returns a vector of sums of them.
    """
    hides = first > 0 or last < BLOCK_KEYS
    less, mass = vectors.splat(-greatest), vectors.splat(np.float32(0))
    for at in range(0, BLOCK_KEYS, simd.LANES):
        found = vectors.load_f32(scores + _FLOAT * at)
        found = vectors.exp2(vectors.fma(found, vectors.splat(factor), less))
        if hides:
            found = vectors.keep_first(found, last - at, np.float32(0))
            found = vectors.drop_first(found, first - at, np.float32(0))
        mass = vectors.add(mass, found)
        vectors.store_weights(weights + 2 * at, found)
    return mass


@inlined
def _mix_step(
    block: int,
    tile: int,
    begin: int,
    step: int,
    num_vectors: int,
    keys: int,
    values: int,
    queries: int,
    seen: int,
    greatest: int,
    totals: int,
    mixed: int,
) -> None:
    """Add a block of keys, the first at position `begin`, to `num_vectors` vectors of a tile.

    `step` is the first of them; `queries` and all after it are those of the tile.
    """
    scores, weights, peaks, shrinks = _block_scores(), _block_weights(), _peaks(), _shrinks()
    window, dim = simd.read_i64(tile + SLIDING_WINDOW), simd.read_i64(block + VALUE_DIM)
    key_dim, scale = simd.read_i64(block + HEAD_DIM), simd.read_f32(block + SCALE)
    second = second_half(keys, key_dim, BLOCK_KEYS)
    pitch = 2 * padded_inputs(key_dim)
    here = queries + pitch * step
    multiply_even(here, pitch, num_vectors, keys, second, key_dim, BLOCK_KEYS, scores)
    for idx in range(num_vectors):
        last = simd.read_i64(seen + 8 * (step + idx)) - begin
        first = last - window if window else 0
        simd.write_f32(peaks + _FLOAT * idx, _find_peak(scores + idx * SUM_BYTES, first, last))
    factor, peaks_so_far = scale / _LN_2, greatest + _FLOAT * step
    _raise_peaks(peaks, shrinks, peaks_so_far, num_vectors, factor)
    for idx in range(num_vectors):
        last = simd.read_i64(seen + 8 * (step + idx)) - begin
        first = last - window if window else 0
        peak = simd.read_f32(peaks_so_far + _FLOAT * idx)
        found, weight = scores + idx * SUM_BYTES, weights + idx * _WEIGHT_BYTES
        mass = _soften(found, weight, factor, peak, first, last)
        total = totals + _VECTOR * (step + idx)
        shrink = vectors.splat(simd.read_f32(shrinks + _FLOAT * idx))
        vectors.store_f32(total, vectors.fma(vectors.load_f32(total), shrink, mass))
    for out in range(0, dim, BLOCK_KEYS):
        packed = values + out // BLOCK_KEYS * task_bytes(BLOCK_KEYS)
        width = min(dim - out, BLOCK_KEYS)
        second = second_half(packed, BLOCK_KEYS, width)
        multiply_even(
            weights, _WEIGHT_BYTES, num_vectors, packed, second, BLOCK_KEYS, width, scores
        )
        for idx in range(num_vectors):
            shrink = vectors.splat(simd.read_f32(shrinks + _FLOAT * idx))
            total = mixed + _FLOAT * ((step + idx) * dim + out)
            for at in range(0, _FLOAT * width, _FLOAT * simd.LANES):
                added = vectors.load_f32(scores + idx * SUM_BYTES + at)
                added = vectors.fma(vectors.load_f32(total + at), shrink, added)
                vectors.store_f32(total + at, added)


@inlined
def _write_vector(block: int, row: int, head: int, greatest: int, total: int, mixed: int) -> None:
    """Divide a vector's weighted sum by its sum of exponentials, the head's sink's included."""
    dim, sinks = simd.read_i64(block + VALUE_DIM), simd.read_i64(block + SINKS)
    out = simd.read_i64(block + OUT) + row * simd.read_i64(block + OUT_STRIDE)
    out += head * bytes_of_value(block)
    mass = vectors.sum_lanes(vectors.load_f32(total))
    if sinks:
        above = simd.read_f32(sinks + _FLOAT * head) - simd.read_f32(greatest) * _LN_2
        # The exponential's bound: a sink that is higher leaves nothing of the values either.
        mass += vectors.max_lanes(vectors.exp(vectors.splat(min(above, np.float32(87)))))
    divisor = vectors.splat(mass)
    for at in range(0, dim, simd.LANES):
        found = vectors.div(vectors.load_f32(mixed + _FLOAT * at), divisor)
        vectors.store_bf16(out + 2 * at, found)


@inlined
def _do_tile(block: int, tile: int, group: int) -> None:
    """Attend the rows of a tile with the query heads that share key/value head `group`."""
    keys, values, queries = _packed_keys(), _packed_values(), _queries()
    zeros, listed, absent = vectors.splat(np.float32(0)), _listed(), _zeros()
    for at in range(0, 2 * MAX_DIM, _VECTOR):
        vectors.store_f32(absent + at, zeros)
    seen, greatest, totals, mixed = _seen(), _greatest(), _totals(), _mixed()
    seq_idx, first_row = simd.read_i64(tile + SEQUENCE), simd.read_i64(tile + FIRST_ROW)
    num_rows, position = simd.read_i64(tile + NUM_ROWS), simd.read_i64(tile + POSITION)
    window, repeat = simd.read_i64(tile + SLIDING_WINDOW), simd.read_i64(block + REPEAT)
    dim, num_vectors = simd.read_i64(block + VALUE_DIM), num_rows * repeat
    rows = simd.read_i64(block + Q) + first_row * simd.read_i64(block + Q_STRIDE)
    key_dim = simd.read_i64(block + HEAD_DIM)
    pitch = 2 * padded_inputs(key_dim)
    for idx in range(num_vectors):
        query = rows + idx // repeat * simd.read_i64(block + Q_STRIDE)
        query += (group * repeat + idx % repeat) * bytes_of_head(block)
        for at in range(0, pitch, _VECTOR):
            numbers = vectors.load_first_f32(query + at, (2 * key_dim - at) // _FLOAT)
            vectors.store_f32(queries + idx * pitch + at, numbers)
        simd.write_i64(seen + 8 * idx, position + idx // repeat + 1)
        simd.write_f32(greatest + _FLOAT * idx, _NOTHING)
        vectors.store_f32(totals + _VECTOR * idx, zeros)
    for at in range(0, _FLOAT * num_vectors * dim, _FLOAT * simd.LANES):
        vectors.store_f32(mixed + at, zeros)
    key_end = position + num_rows
    start = max(position - window + 1, 0) if window else 0
    for begin in range(start // BLOCK_KEYS * BLOCK_KEYS, key_end, BLOCK_KEYS):
        first, last = start - begin, min(BLOCK_KEYS, key_end - begin)
        _list_keys(block, seq_idx, group, begin, first, last, absent, listed)
        _pack_keys(listed, key_dim, keys)
        _pack_values(listed + 8 * BLOCK_KEYS, dim, values)
        for step in range(0, num_vectors, _STEP_VECTORS):
            size = min(_STEP_VECTORS, num_vectors - step)
            first = position + step // repeat
            sees_some = begin <= position + (step + size - 1) // repeat
            if window and begin + BLOCK_KEYS <= first - window + 1:
                sees_some = False
            if sees_some:
                _mix_step(
                    block,
                    tile,
                    begin,
                    step,
                    size,
                    keys,
                    values,
                    queries,
                    seen,
                    greatest,
                    totals,
                    mixed,
                )
    for idx in range(num_vectors):
        at = _FLOAT * idx
        row, head = first_row + idx // repeat, group * repeat + idx % repeat
        _write_vector(block, row, head, greatest + at, totals + _VECTOR * idx, mixed + at * dim)


@Kernel
def _attend_prompts(block: int) -> None:
    work, num_groups = simd.read_i64(block + WORK), simd.read_i64(block + NUM_KV_HEADS)
    num_tasks = simd.read_i64(work + NUM_PIECES) * num_groups
    task = claim_task(block, 0)
    while task < num_tasks:
        tile = simd.read_i64(work + PIECES) + task // num_groups * 8 * _FIELDS
        _do_tile(block, tile, task % num_groups)
        finish_task(block, 0)
        task = claim_task(block, 0)
    wait_for_tasks(block, 0, num_tasks)

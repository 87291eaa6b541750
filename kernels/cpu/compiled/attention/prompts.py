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

from collections.abc import Iterable
from typing import Final, NamedTuple

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
from kernels.cpu.simd.matmul import SUM_BYTES, multiply, task_bytes
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

BLOCK_KEYS: Final = matmul.TASK_OUTPUTS
IS_FAST_HERE: Final = matmul.HAS_DOT_PAIRS and not matmul.HAS_TILES
"""Whether it is: torch's attention has AMX, and with AVX2 both take the same time."""
MAX_DIM: Final = 256
"""Of keys and of values."""
TILE_VECTORS: Final = 256
# Their scores and weights stay in a first-level cache.
_STEP_VECTORS: Final = 48
_MIN_TILE_ROWS: Final = 16
_WEIGHT_BYTES: Final = 2 * BLOCK_KEYS
_FLOAT: Final = 4
_NOTHING: Final = np.float32(-3e38)
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
        q.dtype == k_cache.dtype == torch.bfloat16
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
    arguments = head_arguments(q, k_cache, v_cache, words.address, out, scale=scale, sinks=sinks)
    launch(_attend_prompts, arguments, num_threads=torch.get_num_threads())


_packed_keys = simd.stack(2 * MAX_DIM * BLOCK_KEYS)
_packed_values = simd.stack(2 * MAX_DIM * BLOCK_KEYS)
_query_places = simd.stack(8 * TILE_VECTORS)
_weight_places = simd.stack(8 * _STEP_VECTORS)
_block_scores = simd.stack(SUM_BYTES * _STEP_VECTORS)
_block_weights = simd.stack(_WEIGHT_BYTES * _STEP_VECTORS)
_shrinks = simd.stack(_FLOAT * _STEP_VECTORS)
# For each vector the greatest score, the sum of exponentials, and the weighted sum of the values.
_greatest = simd.stack(_FLOAT * TILE_VECTORS)
_totals = simd.stack(_FLOAT * TILE_VECTORS)
_mixed = simd.stack(_FLOAT * MAX_DIM * TILE_VECTORS)


@inlined
def _pack_keys(block: int, seq_idx: int, group: int, begin: int, count: int, packed: int) -> None:
    """Pack `count` keys from position `begin` on, for products over pairs of their numbers."""
    num_pairs = simd.read_i64(block + HEAD_DIM) // 2
    cache = simd.read_i64(block + K_CACHE) + group * bytes_of_head(block)
    for idx in range(count):
        key = cache + slot_offset(block, seq_idx, begin + idx)
        place = packed + 4 * idx
        for pair in range(num_pairs):
            simd.write_i32(place + 4 * BLOCK_KEYS * pair, simd.read_i32(key + 4 * pair))


@inlined
def _pack_values(block: int, seq_idx: int, group: int, begin: int, count: int, packed: int) -> None:
    """Pack `count` values from position `begin` on, for products over pairs of keys.

    Those of the missing keys are 0: a weight of 0 does not remove what memory happens to hold.
    """
    dim, bytes_each = simd.read_i64(block + VALUE_DIM), task_bytes(BLOCK_KEYS)
    cache = simd.read_i64(block + V_CACHE) + group * bytes_of_head(block)
    zeros = vectors.splat(np.float32(0))
    for idx in range(0, BLOCK_KEYS, 2):
        even = odd = cache
        if idx < count:
            even = cache + slot_offset(block, seq_idx, begin + idx)
        if idx + 1 < count:
            odd = cache + slot_offset(block, seq_idx, begin + idx + 1)
        for at in range(0, dim, simd.LANES):
            first = second = zeros
            if idx < count:
                first = vectors.load_bf16(even + 2 * at)
            if idx + 1 < count:
                second = vectors.load_bf16(odd + 2 * at)
            place = packed + at // BLOCK_KEYS * bytes_each + 4 * (at % BLOCK_KEYS)
            place += idx // 2 * 4 * BLOCK_KEYS
            vectors.store_first_pairs(place, first, second, simd.LANES)


@inlined
def _soften(
    scores: int, weights: int, scale: np.float32, first: int, last: int, greatest: int, total: int
) -> np.float32:
    """Turn a vector's scores with a block's keys first <= k < last into weights.

    Returns the factor by which the new greatest score shrinks all before.
    """
    peak = vectors.splat(_NOTHING)
    factor = vectors.splat(scale)
    for at in range(0, BLOCK_KEYS, simd.LANES):
        found = vectors.mul(vectors.load_f32(scores + _FLOAT * at), factor)
        found = vectors.keep_first(found, last - at, _NOTHING)
        if first > at:
            found = vectors.drop_first(found, first - at, _NOTHING)
        vectors.store_f32(scores + _FLOAT * at, found)
        peak = vectors.maximum(peak, found)
    before = simd.read_f32(greatest)
    now = max(before, vectors.max_lanes(peak))
    shift, mass = vectors.splat(now), vectors.splat(np.float32(0))
    for at in range(0, BLOCK_KEYS, simd.LANES):
        found = vectors.exp(vectors.sub(vectors.load_f32(scores + _FLOAT * at), shift))
        if now == _NOTHING:
            found = vectors.splat(np.float32(0))
        mass = vectors.add(mass, found)
        vectors.store_bf16(weights + 2 * at, found)
    shrink: np.float32 = vectors.max_lanes(vectors.exp(vectors.splat(before - now)))
    simd.write_f32(greatest, now)
    simd.write_f32(total, simd.read_f32(total) * shrink + vectors.sum_lanes(mass))
    return shrink


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
    greatest: int,
    totals: int,
    mixed: int,
) -> None:
    """Add a block of keys, the first at position `begin`, to `num_vectors` vectors of a tile.

    `step` is the first of them; `queries`, `greatest`, `totals` and `mixed` are those of the tile.
    """
    scores, weights, places, factors = (
        _block_scores(),
        _block_weights(),
        _weight_places(),
        _shrinks(),
    )
    position, window = simd.read_i64(tile + POSITION), simd.read_i64(tile + SLIDING_WINDOW)
    repeat, dim = simd.read_i64(block + REPEAT), simd.read_i64(block + VALUE_DIM)
    num_pairs, scale = simd.read_i64(block + HEAD_DIM) // 2, simd.read_f32(block + SCALE)
    here = queries + 8 * step
    multiply(here, num_vectors, keys, keys, keys, BLOCK_KEYS, num_pairs, BLOCK_KEYS, scores)
    for idx in range(num_vectors):
        last = position + (step + idx) // repeat + 1 - begin
        first = last - window if window else 0
        found, weight = scores + idx * SUM_BYTES, weights + idx * _WEIGHT_BYTES
        at = _FLOAT * (step + idx)
        shrink = _soften(found, weight, scale, first, last, greatest + at, totals + at)
        simd.write_f32(factors + _FLOAT * idx, shrink)
        simd.write_i64(places + 8 * idx, weight)
    half = BLOCK_KEYS // 2
    for out in range(0, dim, BLOCK_KEYS):
        packed = values + out // BLOCK_KEYS * task_bytes(BLOCK_KEYS)
        width = min(dim - out, BLOCK_KEYS)
        multiply(places, num_vectors, packed, packed, packed, BLOCK_KEYS, half, width, scores)
        for idx in range(num_vectors):
            factor = vectors.splat(simd.read_f32(factors + _FLOAT * idx))
            total = mixed + _FLOAT * ((step + idx) * dim + out)
            for at in range(0, _FLOAT * width, _FLOAT * simd.LANES):
                added = vectors.load_f32(scores + idx * SUM_BYTES + at)
                added = vectors.fma(vectors.load_f32(total + at), factor, added)
                vectors.store_f32(total + at, added)


@inlined
def _write_vector(block: int, row: int, head: int, greatest: int, total: int, mixed: int) -> None:
    """Divide a vector's weighted sum by its sum of exponentials, the head's sink's included."""
    dim, sinks = simd.read_i64(block + VALUE_DIM), simd.read_i64(block + SINKS)
    out = simd.read_i64(block + OUT) + row * simd.read_i64(block + OUT_STRIDE)
    out += head * bytes_of_value(block)
    mass = simd.read_f32(total)
    if sinks:
        # The exponential's bound: a sink that is higher leaves nothing of the values either.
        above = min(simd.read_f32(sinks + _FLOAT * head) - simd.read_f32(greatest), np.float32(87))
        mass += vectors.max_lanes(vectors.exp(vectors.splat(above)))
    divisor = vectors.splat(mass)
    for at in range(0, dim, simd.LANES):
        found = vectors.div(vectors.load_f32(mixed + _FLOAT * at), divisor)
        vectors.store_bf16(out + 2 * at, found)


@inlined
def _do_tile(block: int, tile: int, group: int) -> None:
    """Attend the rows of a tile with the query heads that share key/value head `group`."""
    keys, values, queries = _packed_keys(), _packed_values(), _query_places()
    greatest, totals, mixed = _greatest(), _totals(), _mixed()
    seq_idx, first_row = simd.read_i64(tile + SEQUENCE), simd.read_i64(tile + FIRST_ROW)
    num_rows, position = simd.read_i64(tile + NUM_ROWS), simd.read_i64(tile + POSITION)
    window, repeat = simd.read_i64(tile + SLIDING_WINDOW), simd.read_i64(block + REPEAT)
    dim, num_vectors = simd.read_i64(block + VALUE_DIM), num_rows * repeat
    rows = simd.read_i64(block + Q) + first_row * simd.read_i64(block + Q_STRIDE)
    zeros = vectors.splat(np.float32(0))
    for idx in range(num_vectors):
        query = rows + idx // repeat * simd.read_i64(block + Q_STRIDE)
        query += (group * repeat + idx % repeat) * bytes_of_head(block)
        simd.write_i64(queries + 8 * idx, query)
        simd.write_f32(greatest + _FLOAT * idx, _NOTHING)
        simd.write_f32(totals + _FLOAT * idx, np.float32(0))
    for at in range(0, _FLOAT * num_vectors * dim, _FLOAT * simd.LANES):
        vectors.store_f32(mixed + at, zeros)
    key_end = position + num_rows
    start = max(position - window + 1, 0) if window else 0
    for begin in range(start // BLOCK_KEYS * BLOCK_KEYS, key_end, BLOCK_KEYS):
        count = min(BLOCK_KEYS, key_end - begin)
        _pack_keys(block, seq_idx, group, begin, count, keys)
        _pack_values(block, seq_idx, group, begin, count, values)
        for step in range(0, num_vectors, _STEP_VECTORS):
            size = min(_STEP_VECTORS, num_vectors - step)
            first = position + step // repeat
            sees_some = begin <= position + (step + size - 1) // repeat
            if window and begin + BLOCK_KEYS <= first - window + 1:
                sees_some = False
            if sees_some:
                _mix_step(
                    block, tile, begin, step, size, keys, values, queries, greatest, totals, mixed
                )
    for idx in range(num_vectors):
        at = _FLOAT * idx
        row, head = first_row + idx // repeat, group * repeat + idx % repeat
        _write_vector(block, row, head, greatest + at, totals + at, mixed + at * dim)


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

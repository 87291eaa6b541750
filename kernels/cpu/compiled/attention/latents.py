"""Paged attention of single query rows to latents, compiled: all heads share keys and values.

One task is some keys of a query row and some of its heads, in blocks of 16: scores, as products of
matrices; an online softmax in fp32 over chunks of keys, a lane for each head; the sums of the
values, with weights in bf16, which are normed as they are rounded. Keys are read in the cache where
16 lie one behind the other, else they are copied (widened, if they are in fp8). All else is as in
`kernels.cpu.compiled.attention.rows`, which computes the heads that this does not know. Used by
`kernels.cpu.attention`, which chooses.

Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.contracts import MAX_FP8_DIM
from kernels.cpu.compiled.attention.keys import (
    CACHE_IS_FP8,
    K_CACHE,
    NUM_PIECES,
    NUM_TILES,
    PARTS,
    PIECES,
    Q_STRIDE,
    REPEAT,
    SCALE,
    WORK,
    Q,
    bytes_of_head,
    bytes_of_slot,
    bytes_of_value,
    key_offset,
    position_of,
    run_length,
    widen_run,
    widened_pitch,
)
from kernels.cpu.compiled.attention.rows import PIECE_BYTES, HeadShape, WorkWords, head_arguments
from kernels.cpu.compiled.attention.states import (
    VECTOR,
    clear,
    merge_parts,
    state_vectors,
    write_out,
)
from kernels.cpu.compiled.runtime import Kernel, inlined, launch
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import latents as inner
from kernels.cpu.simd import vectors
from kernels.cpu.simd.attention import CHUNK_KEYS, SLICE
from kernels.cpu.simd.latents import SCORED_GROUPS, SLAB, SLAB_TILES, TILE_BYTES, TILE_KEYS
from kernels.cpu.simd.matmul import (
    HAS_TILES,
    close_tiles,
    may_use_tiles,
    open_tiles,
    tile_settings,
)
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

BLOCK_HEADS: Final = simd.LANES
MAX_BLOCKS: Final = 4
"""The most blocks of heads of a task: their sums fit into a second-level cache beside the keys."""
_MAX_HEAD_BYTES: Final = 2 * MAX_FP8_DIM
_SCORED_KEYS: Final = SCORED_GROUPS * simd.LANES
_WEIGHT_BYTES: Final = CHUNK_KEYS // TILE_KEYS * TILE_BYTES


def can_attend_to_latents(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether attend_to_latents supports what attend_rows does, too."""
    rank, latent_dim = v_cache.shape[3], k_cache.shape[3]
    return (
        rank < latent_dim <= MAX_FP8_DIM
        and may_use_tiles()
        and q.dtype == torch.bfloat16
        and k_cache.shape[2] == 1
        and 2 * rank % SLAB == 0
        and 2 * latent_dim % SLICE == 0
    )


def divide_heads(heads: HeadShape, num_pieces: int) -> tuple[int, int]:
    """Return GROUPS_PER_TASK and NUM_TILES: enough tasks for all threads, else few."""
    num_blocks = -(-heads.num_heads // BLOCK_HEADS)
    wanted = -(-2 * torch.get_num_threads() // max(num_pieces, 1))
    per_task = max(min(num_blocks // wanted, MAX_BLOCKS), 1)
    return 1, -(-num_blocks // per_task)


def attend_to_latents(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    work: WorkWords,
    out: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> None:
    """Write the rows of `work`, by divide_heads, of out [T, N, V]; as `attend_rows`."""
    assert can_attend_to_latents(q, k_cache, v_cache)
    arguments = head_arguments(q, k_cache, v_cache, work.address, out, scale=scale, sinks=sinks)
    launch(_attend_latents, arguments, num_threads=torch.get_num_threads())


# A task's memory: states and tiles of queries of its heads, keys that are copied, scores of a block
# of heads, tiles of all blocks' weights, two slabs of values, pairs of weights, addresses of groups
# of keys, and peaks.
_PEAK_BYTES: Final = 3 * VECTOR
"""Of a block of heads the greatest scores so far, the sums of the exponentials, and the factors by
which its sums are to be multiplied."""
_SIZES: Final = (
    MAX_BLOCKS * BLOCK_HEADS * (VECTOR + 2 * _MAX_HEAD_BYTES),
    MAX_BLOCKS * BLOCK_HEADS * _MAX_HEAD_BYTES,
    CHUNK_KEYS * _MAX_HEAD_BYTES,
    CHUNK_KEYS * VECTOR,
    MAX_BLOCKS * _WEIGHT_BYTES,
    2 * CHUNK_KEYS * SLAB,
    TILE_BYTES,
    CHUNK_KEYS // simd.LANES * 8,
    MAX_BLOCKS * _PEAK_BYTES,
)
(
    _STATES, _QUERIES, _COPIES, _SCORES, _WEIGHTS, _VALUES, _PAIRS, _GROUPS, _PEAKS, _SCRATCH_BYTES,
) = accumulate(_SIZES, initial=0)  # fmt: skip
_scratch = simd.stack(_SCRATCH_BYTES)


@inlined
def _copy(source: int, num_bytes: int, target: int) -> None:
    for offset in range(0, num_bytes, VECTOR):
        vectors.store_f32(target + offset, vectors.load_f32(source + offset))


@inlined
def _key_pitch(block: int) -> int:
    """Return the distance in bytes of the keys of a group."""
    pitch: int = bytes_of_slot(block)
    if simd.read_i64(block + CACHE_IS_FP8):
        pitch = widened_pitch(block)
    return pitch


@inlined
def _find_groups(block: int, piece: int, start: int, stop: int, scratch: int) -> None:
    """Write the addresses of groups of 16 keys start <= k < stop, to a multiple of SCORED_GROUPS.

    What the last key leaves of a group repeats it, further groups repeat the last one.
    """
    copies, groups = scratch + _COPIES, scratch + _GROUPS
    keys, pitch = simd.read_i64(block + K_CACHE), _key_pitch(block)
    is_fp8 = simd.read_i64(block + CACHE_IS_FP8)
    place = copies
    num_groups = (stop - start + _SCORED_KEYS - 1) // _SCORED_KEYS * SCORED_GROUPS
    for group in range(num_groups):
        first = start + group * simd.LANES
        last = min(first + simd.LANES, stop)
        if first < stop:
            place = copies + (first - start) * pitch
        key = first
        while key < last:
            position = position_of(block, piece, key)
            count = run_length(block, piece, key, position, last)
            run, target = keys + key_offset(block, piece, position), place + (key - first) * pitch
            if is_fp8:
                widen_run(block, run, count, target)
            elif count == simd.LANES:
                place = run
            else:
                _copy(run, count * pitch, target)
            key += count
            if key == last:
                for further in range(last - first, simd.LANES):
                    _copy(place + (last - first - 1) * pitch, pitch, place + further * pitch)
        simd.write_i64(groups + 8 * group, place)


@inlined
def _soften(block: int, num_keys: int, idx: int, scratch: int) -> None:
    """Turn the scores of block `idx` of the heads into tiles of weights."""
    scores, peaks = scratch + _SCORES, scratch + _PEAKS + idx * _PEAK_BYTES
    pairs, weights = scratch + _PAIRS, scratch + _WEIGHTS + idx * _WEIGHT_BYTES
    scale = vectors.splat(simd.read_f32(block + SCALE))
    before = vectors.load_f32(peaks)
    first = second = third = fourth = before
    # Scores behind the last key repeat others.
    for key in range(0, num_keys, 4):
        place = scores + key * VECTOR
        first = vectors.maximum(first, vectors.mul(vectors.load_f32(place), scale))
        second = vectors.maximum(second, vectors.mul(vectors.load_f32(place + VECTOR), scale))
        place += 2 * VECTOR
        third = vectors.maximum(third, vectors.mul(vectors.load_f32(place), scale))
        fourth = vectors.maximum(fourth, vectors.mul(vectors.load_f32(place + VECTOR), scale))
    peak = vectors.maximum(vectors.maximum(first, second), vectors.maximum(third, fourth))
    factor = vectors.exp(vectors.sub(before, peak))
    vectors.store_f32(peaks, peak)
    vectors.store_f32(peaks + 2 * VECTOR, factor)
    even_mass = odd_mass = vectors.splat(np.float32(0))
    for begin in range(0, num_keys, TILE_KEYS):
        for pair in range(TILE_KEYS // 2):
            key = begin + 2 * pair
            place = scores + key * VECTOR
            even = vectors.exp(vectors.sub(vectors.mul(vectors.load_f32(place), scale), peak))
            odd = vectors.exp(
                vectors.sub(vectors.mul(vectors.load_f32(place + VECTOR), scale), peak)
            )
            if key + 2 > num_keys:
                odd = vectors.splat(np.float32(0))
                if key >= num_keys:
                    even = odd
            vectors.store_first_pairs(pairs + pair * VECTOR, even, odd, simd.LANES)
            even_mass = vectors.add(even_mass, vectors.round_bf16(even))
            odd_mass = vectors.add(odd_mass, vectors.round_bf16(odd))
        tile = weights + begin // TILE_KEYS * TILE_BYTES
        inner.transpose(pairs, VECTOR, simd.LANES, tile)
    mass = vectors.fma(vectors.load_f32(peaks + VECTOR), factor, vectors.add(even_mass, odd_mass))
    vectors.store_f32(peaks + VECTOR, mass)


@inlined
def _rescale(block: int, idx: int, scratch: int) -> None:
    """Multiply the sums of block `idx` of the heads by their factors."""
    pitch, factors = (
        state_vectors(block) * VECTOR,
        scratch + _PEAKS + idx * _PEAK_BYTES + 2 * VECTOR,
    )
    states = scratch + _STATES + idx * BLOCK_HEADS * pitch
    for head in range(BLOCK_HEADS):
        factor = simd.read_f32(factors + 4 * head)
        if factor != np.float32(1):
            wide = vectors.splat(factor)
            for place in range(VECTOR, pitch, VECTOR):
                sums = states + head * pitch + place
                vectors.store_f32(sums, vectors.mul(vectors.load_f32(sums), wide))


@inlined
def _add_values(block: int, num_keys: int, num_blocks: int, scratch: int) -> None:
    """Add the weighted values of a chunk to the states.

    Nothing is prefetched: keys come sooner if the processor alone foresees them (measured).
    """
    pitch, stride = state_vectors(block) * VECTOR, _key_pitch(block)
    groups, weights, values = scratch + _GROUPS, scratch + _WEIGHTS, scratch + _VALUES
    num_tiles = (num_keys + TILE_KEYS - 1) // TILE_KEYS
    value_bytes, step = bytes_of_value(block), num_tiles * SLAB_TILES * TILE_BYTES
    # Of one slab more than is added: what was just written cannot be read at once.
    for offset in range(0, value_bytes + SLAB, SLAB):
        if offset < value_bytes:
            for half in range(2 * num_tiles):
                tile = offset // SLAB % 2 * step + half // 2 * SLAB_TILES * TILE_BYTES
                target = values + tile + half % 2 * (TILE_BYTES // 2)
                inner.pair_values(simd.read_i64(groups + 8 * half) + offset, stride, target)
        if offset > 0:
            near, before = values + (offset // SLAB + 1) % 2 * step, offset - SLAB
            for idx in range(num_blocks):
                sums = scratch + _STATES + idx * BLOCK_HEADS * pitch + VECTOR + 2 * before
                inner.add_values(sums, pitch, weights + idx * _WEIGHT_BYTES, near, num_tiles)


@inlined
def _deliver(block: int, piece: int, head: int, idx: int, scratch: int) -> None:
    """Write the state of a head, number `idx` of its task, to the parts or, divided, to OUT."""
    pitch = state_vectors(block) * VECTOR
    state = scratch + _STATES + idx * pitch
    peak = scratch + _PEAKS + idx // BLOCK_HEADS * _PEAK_BYTES + 4 * (idx % BLOCK_HEADS)
    simd.write_f32(state, simd.read_f32(peak))
    simd.write_f32(state + 4, simd.read_f32(peak + VECTOR))
    row, part = simd.read_i64(piece), simd.read_i64(piece + 32)
    if part < 0:
        write_out(block, state, row, head)
    else:
        parts = simd.read_i64(simd.read_i64(block + WORK) + PARTS)
        _copy(state, pitch, parts + (part * simd.read_i64(block + REPEAT) + head) * pitch)


@inlined
def _begin(block: int, piece: int, first_head: int, last_head: int, scratch: int) -> None:
    """Write the tiles of a row's queries, and states without keys."""
    head_bytes, pitch = bytes_of_head(block), state_vectors(block) * VECTOR
    query = simd.read_i64(block + Q) + simd.read_i64(piece) * simd.read_i64(block + Q_STRIDE)
    tile, peaks, states = scratch + _QUERIES, scratch + _PEAKS, scratch + _STATES
    for head in range(first_head, last_head, BLOCK_HEADS):
        count = min(last_head - head, BLOCK_HEADS)
        for offset in range(0, head_bytes, SLICE):
            inner.transpose(query + head * head_bytes + offset, head_bytes, count, tile)
            tile += TILE_BYTES
        vectors.store_f32(peaks, vectors.splat(np.float32(-np.inf)))
        vectors.store_f32(peaks + VECTOR, vectors.splat(np.float32(0)))
        clear(states, BLOCK_HEADS * pitch // VECTOR)
        peaks, states = peaks + _PEAK_BYTES, states + BLOCK_HEADS * pitch


@inlined
def _do_piece(block: int, piece: int, first_head: int, last_head: int, scratch: int) -> None:
    """Attend one piece's row to its keys with query heads first_head <= h < last_head."""
    steps, stride = bytes_of_head(block) // SLICE, _key_pitch(block)
    num_blocks = (last_head - first_head + BLOCK_HEADS - 1) // BLOCK_HEADS
    _begin(block, piece, first_head, last_head, scratch)
    first_key, key_end = simd.read_i64(piece + 16), simd.read_i64(piece + 24)
    for start in range(first_key, key_end, CHUNK_KEYS):
        num_keys = min(CHUNK_KEYS, key_end - start)
        _find_groups(block, piece, start, start + num_keys, scratch)
        for idx in range(num_blocks):
            queries = scratch + _QUERIES + idx * steps * TILE_BYTES
            for begin in range(0, num_keys, _SCORED_KEYS):
                groups = scratch + _GROUPS + begin // simd.LANES * 8
                scores = scratch + _SCORES + begin * VECTOR
                inner.score_keys(groups, stride, queries, steps, scores)
            _soften(block, num_keys, idx, scratch)
            if start > first_key:
                _rescale(block, idx, scratch)
        _add_values(block, num_keys, num_blocks, scratch)
    for head in range(first_head, last_head):
        _deliver(block, piece, head, head - first_head, scratch)


@partial(Kernel, runs_here=HAS_TILES)
def _attend_latents(block: int) -> None:
    scratch, work = _scratch(), simd.read_i64(block + WORK)
    num_heads, num_tiles = simd.read_i64(block + REPEAT), simd.read_i64(work + NUM_TILES)
    size = (num_heads + num_tiles * BLOCK_HEADS - 1) // (num_tiles * BLOCK_HEADS) * BLOCK_HEADS
    num_tasks = simd.read_i64(work + NUM_PIECES) * num_tiles
    open_tiles(tile_settings())
    task = claim_task(block, 0)
    while task < num_tasks:
        piece = simd.read_i64(work + PIECES) + task // num_tiles * PIECE_BYTES
        first = task % num_tiles * size
        _do_piece(block, piece, first, min(first + size, num_heads), scratch)
        finish_task(block, 0)
        task = claim_task(block, 0)
    close_tiles()
    wait_for_tasks(block, 0, num_tasks)
    merge_parts(block, 1, scratch)

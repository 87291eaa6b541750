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

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.contracts import MAX_FP8_DIM
from kernels.cpu.compiled.attention.keys import (
    CACHE_IS_FP8,
    K_CACHE,
    NUM_ARGUMENTS,
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
from kernels.cpu.compiled.runtime import Kernel, inlined, launch, offsets
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import latents as inner
from kernels.cpu.simd import vectors
from kernels.cpu.simd.attention import CHUNK_KEYS, SLICE
from kernels.cpu.simd.latents import SCORED_GROUPS, SLAB, SLAB_TILES, TILE_BYTES, TILE_KEYS
from kernels.cpu.simd.matmul import (
    HAS_DOT_PAIRS,
    HAS_TILES,
    close_tiles,
    may_use_tiles,
    open_tiles,
    tile_settings,
)
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

BY_TILES = offsets(NUM_ARGUMENTS + 1)[NUM_ARGUMENTS]
"""The kernel's further argument: whether it multiplies with AMX."""

BLOCK_HEADS: Final = simd.LANES
MAX_BLOCKS: Final = 4
"""The most blocks of heads of a task: their sums fit into a second-level cache beside the keys."""
_MAX_HEAD_BYTES: Final = 2 * MAX_FP8_DIM
_SCORED_KEYS: Final = SCORED_GROUPS * simd.LANES
_MAX_STATE_BYTES: Final = VECTOR + 2 * _MAX_HEAD_BYTES
_WEIGHT_BYTES: Final = CHUNK_KEYS // TILE_KEYS * TILE_BYTES


def can_attend_to_latents(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Return whether attend_to_latents supports what attend_rows does, too."""
    rank, latent_dim = v_cache.shape[3], k_cache.shape[3]
    return (
        (HAS_TILES or HAS_DOT_PAIRS)
        and q.dtype == torch.bfloat16
        and k_cache.shape[2] == 1
        and rank < latent_dim <= MAX_FP8_DIM
        and 2 * rank % SLAB == 0
        and 2 * latent_dim % SLICE == 0
    )


def divide_heads(heads: HeadShape, num_pieces: int) -> tuple[int, int]:
    """Return GROUPS_PER_TASK and NUM_TILES: enough tasks for all threads, else few."""
    num_blocks = -(-heads.num_heads // BLOCK_HEADS)
    wanted = -(-2 * torch.get_num_threads() // max(num_pieces, 1))
    return 1, max(-(-num_blocks // MAX_BLOCKS), min(wanted, num_blocks))


def attend_to_latents(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    work: WorkWords,
    out: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
    with_tiles: bool = True,
) -> None:
    """Write the rows of `work`, by divide_heads, of out [T, N, V]; as `attend_rows`.

    `with_tiles`: multiply with AMX where that is possible.
    """
    arguments = head_arguments(q, k_cache, v_cache, work, out, scale=scale, sinks=sinks)
    by_tiles = int(with_tiles and may_use_tiles())
    launch(_attend, (*arguments, by_tiles), num_threads=torch.get_num_threads())


_scratch_states = simd.stack(MAX_BLOCKS * BLOCK_HEADS * _MAX_STATE_BYTES)
_scratch_queries = simd.stack(MAX_BLOCKS * BLOCK_HEADS * _MAX_HEAD_BYTES)
_scratch_copies = simd.stack(CHUNK_KEYS * _MAX_HEAD_BYTES)
_scratch_scores = simd.stack(CHUNK_KEYS * VECTOR)
_scratch_weights = simd.stack(MAX_BLOCKS * _WEIGHT_BYTES)
_scratch_values = simd.stack(2 * CHUNK_KEYS * SLAB)
_scratch_turned = simd.stack(TILE_BYTES)
_scratch_groups = simd.stack(CHUNK_KEYS // simd.LANES * 8)
# Of each block the greatest scores so far, the sums of the exponentials, and the factors by which
# its sums are to be multiplied.
_PEAK_BYTES: Final = 3 * VECTOR
_scratch_peaks = simd.stack(MAX_BLOCKS * _PEAK_BYTES)


@inlined
def _score_by_either(
    block: int, groups: int, stride: int, queries: int, steps: int, scores: int
) -> None:
    if simd.read_i64(block + BY_TILES):
        inner.score_by_tiles(groups, stride, queries, steps, scores)
    else:
        inner.score_by_vectors(groups, stride, queries, steps, scores)


@inlined
def _score_without_tiles(
    block: int, groups: int, stride: int, queries: int, steps: int, scores: int
) -> None:
    inner.score_by_vectors(groups, stride, queries, steps, scores)


@inlined
def _add_by_either(
    block: int, sums: int, pitch: int, weights: int, values: int, count: int
) -> None:
    if simd.read_i64(block + BY_TILES):
        inner.add_by_tiles(sums, pitch, weights, values, count)
    else:
        inner.add_by_vectors(sums, pitch, weights, values, count)


@inlined
def _add_without_tiles(
    block: int, sums: int, pitch: int, weights: int, values: int, count: int
) -> None:
    inner.add_by_vectors(sums, pitch, weights, values, count)


Product = Callable[[int, int, int, int, int, int], None]
_score: Product = _score_by_either if HAS_TILES else _score_without_tiles
_add: Product = _add_by_either if HAS_TILES else _add_without_tiles


@inlined
def _open(block: int, settings: int) -> None:
    if simd.read_i64(block + BY_TILES):
        open_tiles(settings)


@inlined
def _close(block: int) -> None:
    if simd.read_i64(block + BY_TILES):
        close_tiles()


@inlined
def _nothing(*_: int) -> None:
    pass


_open_if_any = _open if HAS_TILES else _nothing
_close_if_any = _close if HAS_TILES else _nothing


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
def _find_groups(block: int, piece: int, start: int, stop: int, copies: int, groups: int) -> None:
    """Write the addresses of groups of 16 keys, from start <= k < stop, in tens of SCORED_GROUPS.

    What the last key leaves of a group repeats it, further groups repeat the last one.
    """
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
def _soften(block: int, num_keys: int, scores: int, peaks: int, turned: int, weights: int) -> None:
    """Turn the scores of a block of heads into tiles of weights."""
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
            vectors.store_first_pairs(turned + pair * VECTOR, even, odd, simd.LANES)
            even_mass = vectors.add(even_mass, vectors.round_bf16(even))
            odd_mass = vectors.add(odd_mass, vectors.round_bf16(odd))
        tile = weights + begin // TILE_KEYS * TILE_BYTES
        inner.transpose(turned, VECTOR, simd.LANES, tile)
    mass = vectors.fma(vectors.load_f32(peaks + VECTOR), factor, vectors.add(even_mass, odd_mass))
    vectors.store_f32(peaks + VECTOR, mass)


@inlined
def _rescale(factors: int, states: int, pitch: int) -> None:
    """Multiply the sums of a block of heads by their factors."""
    for head in range(BLOCK_HEADS):
        factor = simd.read_f32(factors + 4 * head)
        if factor != np.float32(1):
            wide = vectors.splat(factor)
            for place in range(VECTOR, pitch, VECTOR):
                sums = states + head * pitch + place
                vectors.store_f32(sums, vectors.mul(vectors.load_f32(sums), wide))


@inlined
def _add_values(
    block: int,
    num_keys: int,
    groups: int,
    num_blocks: int,
    weights: int,
    values: int,
    states: int,
) -> None:
    """Add the weighted values of a chunk to the states.

    Nothing is prefetched: keys come sooner if the processor alone foresees them (measured).
    """
    pitch, stride = state_vectors(block) * VECTOR, _key_pitch(block)
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
                sums = states + idx * BLOCK_HEADS * pitch + VECTOR + 2 * before
                _add(block, sums, pitch, weights + idx * _WEIGHT_BYTES, near, num_tiles)


@inlined
def _deliver(block: int, piece: int, head: int, state: int, peaks: int) -> None:
    """Write a head's state to the parts, or divide it and write it to the output."""
    lane = head % BLOCK_HEADS
    simd.write_f32(state, simd.read_f32(peaks + 4 * lane))
    simd.write_f32(state + 4, simd.read_f32(peaks + VECTOR + 4 * lane))
    row, part = simd.read_i64(piece), simd.read_i64(piece + 32)
    if part < 0:
        write_out(block, state, row, head)
    else:
        pitch = state_vectors(block) * VECTOR
        parts = simd.read_i64(simd.read_i64(block + WORK) + PARTS)
        _copy(state, pitch, parts + (part * simd.read_i64(block + REPEAT) + head) * pitch)


@inlined
def _do_piece(
    block: int,
    piece: int,
    first_head: int,
    last_head: int,
    states: int,
    queries: int,
    copies: int,
    scores: int,
    weights: int,
    values: int,
    turned: int,
    groups: int,
    peaks: int,
) -> None:
    """Attend one piece's row to its keys with query heads first_head <= h < last_head.

    `first_head` is the first one of a block.
    """
    head_bytes, pitch = bytes_of_head(block), state_vectors(block) * VECTOR
    steps, stride = head_bytes // SLICE, _key_pitch(block)
    start, key_end = simd.read_i64(piece + 16), simd.read_i64(piece + 24)
    num_blocks = (last_head - first_head + BLOCK_HEADS - 1) // BLOCK_HEADS
    query = simd.read_i64(block + Q) + simd.read_i64(piece) * simd.read_i64(block + Q_STRIDE)
    for idx in range(num_blocks):
        head = first_head + idx * BLOCK_HEADS
        count = min(last_head - head, BLOCK_HEADS)
        for step in range(steps):
            source = query + head * head_bytes + step * SLICE
            target = queries + (idx * steps + step) * TILE_BYTES
            inner.transpose(source, head_bytes, count, target)
        vectors.store_f32(peaks + idx * _PEAK_BYTES, vectors.splat(np.float32(-np.inf)))
        vectors.store_f32(peaks + idx * _PEAK_BYTES + VECTOR, vectors.splat(np.float32(0)))
    clear(states, num_blocks * BLOCK_HEADS * pitch // VECTOR)
    while start < key_end:
        num_keys = min(CHUNK_KEYS, key_end - start)
        _find_groups(block, piece, start, start + num_keys, copies, groups)
        for idx in range(num_blocks):
            some = queries + idx * steps * TILE_BYTES
            for begin in range(0, num_keys, _SCORED_KEYS):
                near = groups + begin // simd.LANES * 8
                _score(block, near, stride, some, steps, scores + begin * VECTOR)
            own = weights + idx * _WEIGHT_BYTES
            near = peaks + idx * _PEAK_BYTES
            _soften(block, num_keys, scores, near, turned, own)
            if start > simd.read_i64(piece + 16):
                _rescale(near + 2 * VECTOR, states + idx * BLOCK_HEADS * pitch, pitch)
        _add_values(block, num_keys, groups, num_blocks, weights, values, states)
        start += num_keys
    for head in range(first_head, last_head):
        state = states + (head - first_head) * pitch
        own = peaks + (head - first_head) // BLOCK_HEADS * _PEAK_BYTES
        _deliver(block, piece, head, state, own)


@Kernel
def _attend(block: int) -> None:
    states, queries, copies = _scratch_states(), _scratch_queries(), _scratch_copies()
    scores, weights, values = _scratch_scores(), _scratch_weights(), _scratch_values()
    turned, groups, peaks = _scratch_turned(), _scratch_groups(), _scratch_peaks()
    num_heads, work = simd.read_i64(block + REPEAT), simd.read_i64(block + WORK)
    num_tiles = simd.read_i64(work + NUM_TILES)
    size = (num_heads + num_tiles * BLOCK_HEADS - 1) // (num_tiles * BLOCK_HEADS) * BLOCK_HEADS
    num_tasks = simd.read_i64(work + NUM_PIECES) * num_tiles
    _open_if_any(block, tile_settings())
    task = claim_task(block, 0)
    while task < num_tasks:
        piece = simd.read_i64(work + PIECES) + task // num_tiles * PIECE_BYTES
        first = task % num_tiles * size
        last = min(first + size, num_heads)
        if first < last:
            _do_piece(
                block,
                piece,
                first,
                last,
                states,
                queries,
                copies,
                scores,
                weights,
                values,
                turned,
                groups,
                peaks,
            )
        finish_task(block, 0)
        task = claim_task(block, 0)
    _close_if_any(block)
    wait_for_tasks(block, 0, num_tasks)
    merge_parts(block, 1, states)

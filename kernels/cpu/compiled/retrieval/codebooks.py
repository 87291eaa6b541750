"""Codebooks and codes of keys in a paged cache, compiled; see `kernels.retrieval`.

A task is one sub-space of one key/value head: its parts of all keys are gathered in fp32, Lloyd's
algorithm learns their centroids, and the centroids, rounded as they are kept, code them. Sums are
added in the order of the keys, so the result does not depend on the number of threads. Knows no
sequences and no layers. Called by attention nodes when a segment of a sequence is to be coded.

Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels import retrieval as plain
from kernels.contracts import NUM_CENTROIDS, NUM_SUBSPACES, SEGMENT_KEYS
from kernels.cpu.compiled.retrieval.search import HEAD_DIMS
from kernels.cpu.compiled.runtime import Kernel, inlined, launch, offsets
from kernels.cpu.simd import codebooks as inner
from kernels.cpu.simd import fp8, vectors
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

(
    K_CACHE, NUMBER_BYTES, NUM_KV_HEADS, HEAD_DIM, SLOTS, NUM_KEYS, CENTROIDS, NUM_ITERATIONS,
    CODES, CODE_PITCH, SCRATCH, SCRATCH_BYTES,
) = offsets(12)  # fmt: skip
"""The kernel's arguments. NUMBER_BYTES: 1 is fp8, 2 bf16, 4 fp32. NUM_ITERATIONS below 0: the
centroids are there."""

_MAX_WIDTH: Final = HEAD_DIMS[-1] // NUM_SUBSPACES
# Scratch memory of a thread: centroids and their sums fp32[C, W], their rows fp32[C, 1 + W], the
# counts i64[C], the codes u8[n], and the parts fp32[n, W], where n is a multiple of the lanes.
_SUMS: Final = 4 * NUM_CENTROIDS * _MAX_WIDTH
_ROWS: Final = 2 * _SUMS
_COUNTS: Final = _ROWS + _SUMS + 4 * NUM_CENTROIDS
_FOUND: Final = _COUNTS + 8 * NUM_CENTROIDS
_PARTS: Final = _FOUND + SEGMENT_KEYS


def can_code(k_cache: Tensor) -> bool:
    """Return whether code_keys supports this cache [B, block size, G, D]."""
    return (
        k_cache.shape[3] in HEAD_DIMS
        and k_cache.dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
        and k_cache.is_contiguous()
    )


def code_keys(
    k_cache: Tensor,
    slots: Tensor,
    centroids: Tensor,
    codes: Tensor,
    *,
    num_iterations: int | None,
) -> None:
    """Code keys; see `kernels.retrieval.code_keys`."""
    if not can_code(k_cache):
        plain.code_keys(k_cache, slots, centroids, codes, num_iterations=num_iterations)
        return
    num_keys, (num_groups, head_dim) = len(slots), k_cache.shape[2:]
    assert num_keys <= SEGMENT_KEYS
    assert num_iterations is None or num_keys >= NUM_CENTROIDS
    assert centroids.shape == (num_groups, NUM_SUBSPACES, NUM_CENTROIDS, head_dim // NUM_SUBSPACES)
    assert centroids.is_contiguous()
    assert codes.shape[:2] == (num_groups, NUM_SUBSPACES)
    assert codes.shape[2] >= num_keys
    assert codes.stride() == (NUM_SUBSPACES * codes.stride(1), codes.stride(1), 1)
    assert slots.is_contiguous()
    num_threads = torch.get_num_threads()
    scratch_bytes = _PARTS + 4 * SEGMENT_KEYS * (head_dim // NUM_SUBSPACES)
    scratch = torch.empty(num_threads, scratch_bytes, dtype=torch.uint8)
    arguments = (
        k_cache.data_ptr(),
        k_cache.itemsize,
        num_groups,
        head_dim,
        slots.data_ptr(),
        num_keys,
        centroids.data_ptr(),
        -1 if num_iterations is None else num_iterations,
        codes.data_ptr(),
        codes.stride(1),
        scratch.data_ptr(),
        scratch_bytes,
    )
    launch(_code, arguments, num_threads=num_threads)


@inlined
def _gather(block: int, group: int, part: int, parts: int) -> None:
    """Write a sub-space of all keys as fp32[n, W]."""
    head_dim, number_bytes = simd.read_i64(block + HEAD_DIM), simd.read_i64(block + NUMBER_BYTES)
    width = head_dim // NUM_SUBSPACES
    slot_bytes = simd.read_i64(block + NUM_KV_HEADS) * head_dim * number_bytes
    begin = simd.read_i64(block + K_CACHE) + (group * head_dim + part * width) * number_bytes
    slots = simd.read_i64(block + SLOTS)
    for idx in range(simd.read_i64(block + NUM_KEYS)):
        key = begin + simd.read_i64(slots + 8 * idx) * slot_bytes
        if number_bytes == 1:
            for number in range(0, width, simd.LANES):
                some = fp8.load_first_fp8(key + number, width - number)
                vectors.store_first_f32(parts + 4 * number, some, width - number)
            parts += 4 * width
        elif number_bytes == 2:
            for number in range(width):
                simd.write_f32(parts, simd.read_bf16(key + 2 * number))
                parts += 4
        else:
            for number in range(width):
                simd.write_f32(parts, simd.read_f32(key + 4 * number))
                parts += 4


@inlined
def _choose_first(num_keys: int, width: int, parts: int, centroids: int) -> None:
    """Begin with keys at equal distances."""
    for idx in range(NUM_CENTROIDS):
        key = parts + idx * num_keys // NUM_CENTROIDS * 4 * width
        for number in range(width):
            place = centroids + 4 * (idx * width + number)
            simd.write_f32(place, simd.read_f32(key + 4 * number))


@inlined
def _find_nearest(num_keys: int, width: int, scratch: int) -> None:
    """Write the codes of the parts."""
    place, row = scratch, scratch + _ROWS
    for _ in range(NUM_CENTROIDS):
        norm = np.float32(0)
        for number in range(width):
            value = np.float32(simd.read_f32(place + 4 * number))
            norm += value * value
            simd.write_f32(row + 4 + 4 * number, np.float32(-2) * value)
        simd.write_f32(row, norm)
        place += 4 * width
        row += 4 * (1 + width)
    rows, codes, parts = scratch + _ROWS, scratch + _FOUND, scratch + _PARTS
    for begin in range(0, num_keys, simd.LANES):
        some, found = parts + begin * 4 * width, codes + begin
        if width == 2:
            inner.nearest2(some, rows, found)
        elif width == 4:
            inner.nearest4(some, rows, found)
        elif width == 8:
            inner.nearest8(some, rows, found)
        elif width == 16:
            inner.nearest16(some, rows, found)
        else:
            inner.nearest32(some, rows, found)


@inlined
def _move_centroids(num_keys: int, width: int, scratch: int) -> None:
    """Move each centroid to the mean of its parts; if it has none, it stays."""
    sums, counts = scratch + _SUMS, scratch + _COUNTS
    codes, parts = scratch + _FOUND, scratch + _PARTS
    zeros = vectors.splat(np.float32(0))
    for place in range(sums, sums + 4 * NUM_CENTROIDS * width, 4 * simd.LANES):
        vectors.store_f32(place, zeros)
    for idx in range(NUM_CENTROIDS):
        simd.write_i64(counts + 8 * idx, 0)
    if width == 2:
        inner.add_parts2(parts, codes, num_keys, sums, counts)
    elif width == 4:
        inner.add_parts4(parts, codes, num_keys, sums, counts)
    elif width == 8:
        inner.add_parts8(parts, codes, num_keys, sums, counts)
    elif width == 16:
        inner.add_parts16(parts, codes, num_keys, sums, counts)
    else:
        inner.add_parts32(parts, codes, num_keys, sums, counts)
    for idx in range(NUM_CENTROIDS):
        count = np.float32(simd.read_i64(counts + 8 * idx))
        if count > 0:
            for offset in range(4 * idx * width, 4 * (idx + 1) * width, 4):
                simd.write_f32(scratch + offset, simd.read_f32(sums + offset) / count)


@inlined
def _code_part(block: int, group: int, part: int, scratch: int) -> None:
    """Learn and code one sub-space of a head."""
    num_keys = simd.read_i64(block + NUM_KEYS)
    width = simd.read_i64(block + HEAD_DIM) // NUM_SUBSPACES
    num_iterations = simd.read_i64(block + NUM_ITERATIONS)
    place = group * NUM_SUBSPACES + part
    kept = simd.read_i64(block + CENTROIDS) + place * 2 * NUM_CENTROIDS * width
    _gather(block, group, part, scratch + _PARTS)
    if num_iterations >= 0:
        _choose_first(num_keys, width, scratch + _PARTS, scratch)
        for _ in range(num_iterations):
            _find_nearest(num_keys, width, scratch)
            _move_centroids(num_keys, width, scratch)
        for idx in range(0, NUM_CENTROIDS * width, simd.LANES):
            vectors.store_bf16(kept + 2 * idx, vectors.load_f32(scratch + 4 * idx))
    for idx in range(0, NUM_CENTROIDS * width, simd.LANES):
        vectors.store_f32(scratch + 4 * idx, vectors.load_bf16(kept + 2 * idx))
    _find_nearest(num_keys, width, scratch)
    codes = simd.read_i64(block + CODES) + place * simd.read_i64(block + CODE_PITCH)
    for idx in range(num_keys):
        simd.write_i8(codes + idx, simd.read_u8(scratch + _FOUND + idx))


@Kernel
def _code(block: int) -> None:
    # Phase 1 numbers the threads.
    scratch = simd.read_i64(block + SCRATCH)
    scratch += claim_task(block, 1) * simd.read_i64(block + SCRATCH_BYTES)
    num_tasks = simd.read_i64(block + NUM_KV_HEADS) * NUM_SUBSPACES
    task = claim_task(block, 0)
    while task < num_tasks:
        _code_part(block, task // NUM_SUBSPACES, task % NUM_SUBSPACES, scratch)
        finish_task(block, 0)
        task = claim_task(block, 0)
    wait_for_tasks(block, 0, num_tasks)

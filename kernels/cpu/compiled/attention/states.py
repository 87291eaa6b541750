"""Running softmax state per query head, in compiled attention.

Owns the layout of a state: the greatest score so far, the sum of the exponentials, and from VECTOR
on the weighted sum of the values (even and odd numbers of a slice apart, if they are bf16). States
of parts of a row are joined by merge_parts. Knows no keys. Used by the kernels of
`kernels.cpu.compiled`, inside compiled functions; `block` has the arguments of
`kernels.cpu.compiled.attention.keys`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from kernels.cpu.compiled.attention.keys import (
    IS_BF16,
    MERGES,
    NUM_KV_HEADS,
    NUM_MERGES,
    OUT,
    OUT_STRIDE,
    PARTS,
    REPEAT,
    SINKS,
    WORK,
    bytes_of_value,
)
from kernels.cpu.compiled.runtime import inlined
from kernels.cpu.simd import attention as inner
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors
from kernels.cpu.simd.attention import SCORE_PITCH, SLICE
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

VECTOR: Final = 4 * simd.LANES
MERGED_HEADS: Final = 4
"""Query heads whose parts one task joins."""


@inlined
def soften(num_keys: int, scores: int, state: int, num_vectors: int) -> None:
    """Turn a head's new scores into weights, and rescale its state to the greatest score so far."""
    lowest = np.float32(-np.inf)
    greatest = vectors.splat(lowest)
    for begin in range(0, num_keys, simd.LANES):
        found = vectors.load_f32(scores + 4 * begin)
        greatest = vectors.maximum(greatest, vectors.keep_first(found, num_keys - begin, lowest))
    before = simd.read_f32(state)
    peak = max(before, vectors.max_lanes(greatest))
    shift = vectors.splat(peak)
    total = vectors.splat(np.float32(0))
    for begin in range(0, num_keys, simd.LANES):
        weights = vectors.exp(vectors.sub(vectors.load_f32(scores + 4 * begin), shift))
        weights = vectors.keep_first(weights, num_keys - begin, np.float32(0))
        vectors.store_f32(scores + 4 * begin, weights)
        total = vectors.add(total, weights)
    factor = vectors.exp(vectors.sub(vectors.splat(before), shift))
    shrink = vectors.max_lanes(factor)
    simd.write_f32(state + 4, simd.read_f32(state + 4) * shrink + vectors.sum_lanes(total))
    simd.write_f32(state, peak)
    for vector in range(1, num_vectors):
        place = state + vector * VECTOR
        vectors.store_f32(place, vectors.mul(vectors.load_f32(place), factor))


@inlined
def clear(state: int, num_vectors: int) -> None:
    """Begin a state: no keys."""
    zeros = vectors.splat(np.float32(0))
    for vector in range(num_vectors):
        vectors.store_f32(state + vector * VECTOR, zeros)
    simd.write_f32(state, np.float32(-np.inf))


@inlined
def write_out(block: int, state: int, row: int, head: int) -> None:
    """Divide a query head's weighted sum by its sum of exponentials and write it to a row of OUT.

    Only here, where all keys are in the state, the head's sink is added to the exponentials.
    """
    value_bytes = bytes_of_value(block)
    is_bf16 = simd.read_i64(block + IS_BF16)
    out = simd.read_i64(block + OUT) + row * simd.read_i64(block + OUT_STRIDE) + head * value_bytes
    mass, sinks = simd.read_f32(state + 4), simd.read_i64(block + SINKS)
    if sinks:
        # The exponential's bound: a sink that is higher leaves nothing of the values either.
        above = min(simd.read_f32(sinks + 4 * head) - simd.read_f32(state), np.float32(87))
        mass += vectors.max_lanes(vectors.exp(vectors.splat(above)))
    total = vectors.splat(mass)
    for offset in range(0, value_bytes, SLICE):
        rest = (value_bytes - offset) // 4
        place = state + VECTOR + offset * (1 + is_bf16)
        first = vectors.div(vectors.load_f32(place), total)
        if is_bf16:
            second = vectors.div(vectors.load_f32(place + VECTOR), total)
            vectors.store_first_pairs(out + offset, first, second, rest)
        else:
            vectors.store_first_f32(out + offset, first, rest)


@inlined
def state_vectors(block: int) -> int:
    """Return the vectors of a state."""
    value_bytes = bytes_of_value(block)
    slices = (value_bytes + SLICE - 1) // SLICE
    count: int = 1 + slices * (1 + simd.read_i64(block + IS_BF16))
    return count


@inlined
def merge_parts(block: int, phase: int, state: int) -> None:
    """Join the parts of all rows that have some; `state` is memory for a state."""
    work = simd.read_i64(block + WORK)
    num_heads = simd.read_i64(block + REPEAT) * simd.read_i64(block + NUM_KV_HEADS)
    num_ranges = (num_heads + MERGED_HEADS - 1) // MERGED_HEADS
    num_tasks = simd.read_i64(work + NUM_MERGES) * num_ranges
    task = claim_task(block, phase)
    while task < num_tasks:
        merge = simd.read_i64(work + MERGES) + task // num_ranges * 24
        first = task % num_ranges * MERGED_HEADS
        for head in range(first, min(first + MERGED_HEADS, num_heads)):
            _merge_head(block, merge, head, state)
        finish_task(block, phase)
        task = claim_task(block, phase)
    wait_for_tasks(block, phase, num_tasks)


@inlined
def _merge_head(block: int, merge: int, head: int, state: int) -> None:
    """Join the parts of one row for a query head."""
    row, first, count = simd.read_i64(merge), simd.read_i64(merge + 8), simd.read_i64(merge + 16)
    num_heads = simd.read_i64(block + REPEAT) * simd.read_i64(block + NUM_KV_HEADS)
    num_vectors = state_vectors(block)
    step = num_heads * num_vectors * VECTOR
    parts = simd.read_i64(simd.read_i64(block + WORK) + PARTS)
    parts += (first * num_heads + head) * num_vectors * VECTOR
    peak = np.float32(-np.inf)
    for idx in range(count):
        peak = max(peak, simd.read_f32(parts + idx * step))
    clear(state, num_vectors)
    simd.write_f32(state, peak)
    for idx in range(count):
        part = parts + idx * step
        factor = vectors.exp(vectors.splat(simd.read_f32(part) - peak))
        total = simd.read_f32(part + 4) * vectors.max_lanes(factor)
        simd.write_f32(state + 4, simd.read_f32(state + 4) + total)
        for vector in range(1, num_vectors):
            place = vector * VECTOR
            added = vectors.fma(
                vectors.load_f32(part + place), factor, vectors.load_f32(state + place)
            )
            vectors.store_f32(state + place, added)
    write_out(block, state, row, head)


Weigh = Callable[[int, int, int, int, int, int, int], None]
"""Adds weighted values to one slice of the sums of several heads; see simd.attention."""


def _adding(
    four_bf16: Weigh, three_bf16: Weigh, two_bf16: Weigh, one_bf16: Weigh, four: Weigh, one: Weigh
) -> Callable[[int, int, int, int, int, int, int, int], None]:
    """Return what adds weighted values to any number of heads by these, named by their heads."""

    @inlined
    def add(
        block: int,
        heads: int,
        sums: int,
        weights: int,
        values: int,
        where: int,
        count: int,
        rest: int,
    ) -> None:
        """Add `count` values to a slice of `heads` heads, of which `rest` words are left.

        The values lie at `where`: a stride, or the address of their offsets.
        """
        is_bf16, pitch = simd.read_i64(block + IS_BF16), state_vectors(block) * VECTOR
        head = 0
        while head < heads:
            left, to, w = heads - head, sums + head * pitch, weights + head * SCORE_PITCH
            if is_bf16 and left >= 4:
                four_bf16(to, pitch, w, values, where, count, rest)
                head += 4
            elif is_bf16 and left == 3:
                three_bf16(to, pitch, w, values, where, count, rest)
                head += 3
            elif is_bf16 and left == 2:
                two_bf16(to, pitch, w, values, where, count, rest)
                head += 2
            elif is_bf16:
                one_bf16(to, pitch, w, values, where, count, rest)
                head += 1
            elif left >= 4:
                four(to, pitch, w, values, where, count, rest)
                head += 4
            else:
                one(to, pitch, w, values, where, count, rest)
                head += 1

    return add


add_run = _adding(
    inner.weigh4_bf16,
    inner.weigh3_bf16,
    inner.weigh2_bf16,
    inner.weigh1_bf16,
    inner.weigh4_f32,
    inner.weigh1_f32,
)
"""Values one behind the other, a stride apart."""
add_listed = _adding(
    inner.listed_weigh4_bf16,
    inner.listed_weigh3_bf16,
    inner.listed_weigh2_bf16,
    inner.listed_weigh1_bf16,
    inner.listed_weigh4_f32,
    inner.listed_weigh1_f32,
)
"""Values at the offsets of a list."""

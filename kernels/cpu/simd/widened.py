"""Products of bf16 rows in fp32 registers, for processors without bf16 instructions.

Owns the order of the loops: a part of the inputs at a time, whose numbers of all rows are widened
to fp32 once, then tiles of up to six rows and 64 outputs whose sums fit into the registers: sixteen
of eight floats, or with AVX512 thirty-two of sixteen. The layout of the weight is that of
`kernels.cpu.simd.matmul`, with blocks of 64. A row's sum does not depend on the other rows: every
tile adds the inputs in the same order. Used by `kernels.cpu.simd.matmul`, inside compiled functions
only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from llvmlite import ir
from numba.core import types

from kernels.cpu.compiled.runtime import inlined
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors
from kernels.cpu.simd.lanes import cpu_has, operation

MAX_ROWS: Final = 128
_VECTOR: Final = 4 * simd.LANES
_PAIR_BYTES: Final = 4 * _VECTOR
_SUM_BYTES: Final = 4 * _VECTOR
# Inputs are taken in parts of so many pairs. The weights of a part, which several tiles read, and
# of the next, which are prefetched, fill half of a small first-level cache.
_PART_PAIRS: Final = 32
# The weights are read in the order of their addresses for one row: prefetched not so far ahead.
_STREAM_BYTES: Final = 1024
# A widened row holds the even numbers, then the odd ones. The distance of two rows is no power of
# two, so that they do not compete for cache lines.
_HALF_BYTES: Final = 4 * _PART_PAIRS
_ROW_BYTES: Final = 8 * _PART_PAIRS + 64


def _tile(num_rows: int, num_vectors: int) -> Callable[..., None]:
    def tile(
        builder: ir.IRBuilder,
        rows: ir.Value,
        weight: ir.Value,
        ahead: ir.Value,
        pairs: ir.Value,
        sums: ir.Value,
    ) -> None:
        """Add to fp32 sums the products of widened rows and 16 * num_vectors outputs.

        Meanwhile prefetches as many bytes at `ahead`.
        """

        def add_pair(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            place = builder.add(weight, builder.mul(index, simd.constant(_PAIR_BYTES)))
            numbers = [
                simd.load(
                    builder, builder.add(place, simd.constant(_VECTOR * part)), simd.I32_LANES
                )
                for part in range(num_vectors)
            ]
            for part in range(num_vectors):
                line = builder.mul(index, simd.constant(num_vectors * _VECTOR))
                line = builder.add(builder.add(ahead, line), simd.constant(part * _VECTOR))
                hints = [ir.Constant(simd.I32, hint) for hint in (0, 3, 1)]
                where = simd.pointer(builder, line, simd.I64)
                simd.call(builder, "llvm.prefetch.p0", ir.VoidType(), [where, *hints])
            offset = builder.add(rows, builder.mul(index, simd.constant(4)))
            for half, widen in enumerate((simd.even_numbers, simd.odd_numbers)):
                wide = [widen(builder, number) for number in numbers]
                added = []
                for row in range(num_rows):
                    where = builder.add(
                        offset, simd.constant(row * _ROW_BYTES + half * _HALF_BYTES)
                    )
                    number = simd.broadcast(builder, simd.load(builder, where, simd.F32))
                    for part in range(num_vectors):
                        total = totals[row * num_vectors + part]
                        added.append(simd.fused(builder, number, wide[part], total))
                totals = added
            return totals

        places = [
            builder.add(sums, simd.constant(row * _SUM_BYTES + part * _VECTOR))
            for row in range(num_rows)
            for part in range(num_vectors)
        ]
        before = [simd.load(builder, place, simd.F32_LANES) for place in places]
        after = simd.count_up(builder, pairs, before, add_pair)
        for place, total in zip(places, after, strict=True):
            simd.store(builder, place, total)

    return operation(types.none, [types.int64] * 5, apart=True)(tile)


tile1x4, tile1x2, tile2x2, tile3x2, tile4x1, tile5x1, tile6x1 = (
    _tile(*shape) for shape in ((1, 4), (1, 2), (2, 2), (3, 2), (4, 1), (5, 1), (6, 1))
)
# With AVX512, beside tile1x4.
tile2x4, tile3x4, tile4x4, tile6x4 = (_tile(num_rows, 4) for num_rows in (2, 3, 4, 6))


@operation(types.none, [types.int64] * 3, apart=True)
def _widen(builder: ir.IRBuilder, target: ir.Value, source: ir.Value, count: ir.Value) -> None:
    """Widen up to 16 pairs: the even numbers to `target`, the odd ones _HALF_BYTES behind."""
    pairs = simd.load_first(builder, source, simd.I32_LANES, count)
    simd.store(builder, target, simd.even_numbers(builder, pairs))
    behind = builder.add(target, simd.constant(_HALF_BYTES))
    simd.store(builder, behind, simd.odd_numbers(builder, pairs))


_staged_rows = simd.stack(MAX_ROWS * _ROW_BYTES)


@inlined
def _multiply_part_in_16_registers(
    staged: int, num_rows: int, weight: int, ahead: int, pairs: int, num_vectors: int, sums: int
) -> None:
    if num_rows == 1 and num_vectors == 4:
        tile1x4(staged, weight, ahead, pairs, sums)
    elif num_rows <= 4:
        for part in range(0, num_vectors, 2):
            numbers, place = weight + part * _VECTOR, sums + part * _VECTOR
            begin = ahead + part * pairs * _VECTOR
            if num_rows == 1:
                tile1x2(staged, numbers, begin, pairs, place)
            elif num_rows == 3:
                tile3x2(staged, numbers, begin, pairs, place)
            else:
                tile2x2(staged, numbers, begin, pairs, place)
                if num_rows == 4:
                    here, there = staged + 2 * _ROW_BYTES, place + 2 * _SUM_BYTES
                    tile2x2(here, numbers, begin, pairs, there)
    else:
        for part in range(num_vectors):
            numbers, place = weight + part * _VECTOR, sums + part * _VECTOR
            begin = ahead + part * pairs * _VECTOR
            row = 0
            while row < num_rows:
                left = num_rows - row
                here, there = staged + row * _ROW_BYTES, place + row * _SUM_BYTES
                if left == 6 or left > 9:
                    tile6x1(here, numbers, begin, pairs, there)
                    row += 6
                elif left == 5 or left == 9:
                    tile5x1(here, numbers, begin, pairs, there)
                    row += 5
                else:
                    tile4x1(here, numbers, begin, pairs, there)
                    row += 4


@inlined
def _multiply_part_in_32_registers(
    staged: int, num_rows: int, weight: int, ahead: int, pairs: int, num_vectors: int, sums: int
) -> None:
    row = 0
    while row < num_rows:
        left = num_rows - row
        here, there = staged + row * _ROW_BYTES, sums + row * _SUM_BYTES
        if left == 6 or left > 8:
            tile6x4(here, weight, ahead, pairs, there)
            row += 6
        elif left == 4 or left > 6:
            tile4x4(here, weight, ahead, pairs, there)
            row += 4
        elif left == 3 or left == 5:
            tile3x4(here, weight, ahead, pairs, there)
            row += 3
        elif left == 2:
            tile2x4(here, weight, ahead, pairs, there)
            row += 2
        else:
            tile1x4(here, weight, ahead, pairs, there)
            row += 1


# Adds the products of a part of the inputs; prefetches a part at `ahead` meanwhile.
_multiply_part = (
    _multiply_part_in_32_registers if cpu_has("avx512f") else _multiply_part_in_16_registers
)


@inlined
def multiply_widened(
    rows: int, num_rows: int, weight: int, ahead: int, pairs: int, num_outputs: int, sums: int
) -> None:
    """Multiply rows, whose addresses lie at `rows`, by a block; writes fp32 sums [num_rows, 64].

    Only the first `num_outputs` sums of a row are needed. Prefetches the begin of the block at
    `ahead`.
    """
    staged = _staged_rows()
    zeros = vectors.splat(np.float32(0))
    for place in range(0, num_rows * _SUM_BYTES, _VECTOR):
        vectors.store_f32(sums + place, zeros)
    num_vectors = min((num_outputs + simd.LANES - 1) // simd.LANES, 4)
    for begin in range(0, pairs, _PART_PAIRS):
        here = min(pairs - begin, _PART_PAIRS)
        for row in range(num_rows):
            source = simd.read_i64(rows + 8 * row) + 4 * begin
            target = staged + row * _ROW_BYTES
            for pair in range(0, here, simd.LANES):
                _widen(target + 4 * pair, source + 4 * pair, here - pair)
        numbers = weight + begin * _PAIR_BYTES
        following = numbers + here * _PAIR_BYTES if begin + here < pairs else ahead
        if num_rows == 1 and num_vectors == 4:
            following = numbers + _STREAM_BYTES
        _multiply_part(staged, num_rows, numbers, following, here, num_vectors, sums)

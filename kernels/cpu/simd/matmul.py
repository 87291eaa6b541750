"""The inner loop of products of few bf16 rows, for kernels that numba compiles.

Owns the layout of the weights, oneDNN's for [O, I] (which serves these kernels and oneDNN, so
that one copy is enough): blocks of 64 outputs, in each the inputs in pairs, per pair 64
outputs times two inputs; outputs are padded to 64 and inputs to 32 by zeros. A row's sum
does not depend on the rows beside it. Used by `kernels.cpu.compiled.matmul` and
`kernels.cpu.compiled.experts`, inside compiled functions only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llvmlite import ir
from numba.core import types

from kernels.cpu.compiled.runtime import inlined
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.lanes import operation

BLOCK_OUTPUTS: Final = 64
INPUT_MULTIPLE: Final = 32
SUM_BYTES: Final = 4 * BLOCK_OUTPUTS
"""Size of one row of the fp32 sums of a block."""
_PAIR_BYTES: Final = 4 * BLOCK_OUTPUTS
_VECTOR: Final = 4 * simd.LANES


def padded(num_in: int) -> int:
    """Give the number of inputs with the zeros after them."""
    return -(-num_in // INPUT_MULTIPLE) * INPUT_MULTIPLE


def _tile(num_rows: int) -> Callable[..., None]:
    def tile(
        builder: ir.IRBuilder, rows: ir.Value, weight: ir.Value, pairs: ir.Value, sums: ir.Value
    ) -> None:
        """Multiply the rows whose addresses lie at `rows` by `pairs` pairs of a block.

        Writes fp32 sums [num_rows, 64].
        """
        width = BLOCK_OUTPUTS // simd.LANES
        addresses = [
            simd.load(builder, builder.add(rows, simd.constant(8 * row)), simd.I64)
            for row in range(num_rows)
        ]

        def add_pair(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            place = builder.add(weight, builder.mul(index, simd.constant(_PAIR_BYTES)))
            numbers = [
                simd.load(
                    builder, builder.add(place, simd.constant(_VECTOR * part)), simd.I32_LANES
                )
                for part in range(width)
            ]
            offset = builder.mul(index, simd.constant(4))
            added = []
            for row, address in enumerate(addresses):
                pair = simd.load(builder, builder.add(address, offset), simd.I32)
                both = simd.broadcast(builder, pair)
                for part, number in enumerate(numbers):
                    total = totals[row * width + part]
                    added.append(simd.dot_pairs(builder, total, both, number))
            return added

        zeros = [simd.lanes_of(simd.F32_LANES, 0.0)] * (num_rows * width)
        for idx, total in enumerate(simd.count_up(builder, pairs, zeros, add_pair)):
            simd.store(builder, builder.add(sums, simd.constant(_VECTOR * idx)), total)

    return operation(types.none, [types.int64] * 4)(tile)


tile1, tile2, tile3, tile4, tile6 = (_tile(num_rows) for num_rows in (1, 2, 3, 4, 6))


@inlined
def multiply(rows: int, num_rows: int, weight: int, pairs: int, sums: int) -> None:
    """Multiply any number of rows by a block; sums [num_rows, 64]."""
    row = 0
    while row < num_rows:
        left = num_rows - row
        here, place = rows + 8 * row, sums + row * SUM_BYTES
        if left == 6 or left > 8:
            tile6(here, weight, pairs, place)
            row += 6
        elif left == 4 or left > 6:
            tile4(here, weight, pairs, place)
            row += 4
        elif left == 3 or left == 5:
            tile3(here, weight, pairs, place)
            row += 3
        elif left == 2:
            tile2(here, weight, pairs, place)
            row += 2
        else:
            tile1(here, weight, pairs, place)
            row += 1


@inlined
def block_bytes(num_in: int) -> int:
    """Give the size of a block of a weight with so many inputs."""
    return (num_in + INPUT_MULTIPLE - 1) // INPUT_MULTIPLE * INPUT_MULTIPLE // 2 * _PAIR_BYTES

"""The inner loop of products of few bf16 rows, for kernels that numba compiles.

Owns the layout of a weight [O, I], which is oneDNN's, so that one copy of the weight serves
these kernels and oneDNN. Outputs lie in blocks, of 64 with AVX512-BF16 and of 32 with AMX
(the `width`, a property of the process). A block holds its inputs in pairs: for each pair the
two numbers of every output. Outputs are padded with zeros to a whole block, inputs to 32.

A task is TASK_OUTPUTS outputs: one block, or two. A row's sum does not depend on the rows
beside it. Used by `kernels.cpu.compiled.matmul` and `kernels.cpu.compiled.experts`, inside
compiled functions only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llvmlite import ir
from numba.core import types

from kernels.cpu.compiled.runtime import inlined
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.lanes import operation

TASK_OUTPUTS: Final = 64
INPUT_MULTIPLE: Final = 32
SUM_BYTES: Final = 4 * TASK_OUTPUTS
"""Size of one row of the fp32 sums of a task."""
_VECTOR: Final = 4 * simd.LANES
_HALF: Final = TASK_OUTPUTS // 2


def padded(num_in: int) -> int:
    """Return the number of inputs including the zeros after them."""
    return -(-num_in // INPUT_MULTIPLE) * INPUT_MULTIPLE


def _tile(num_rows: int) -> Callable[..., None]:
    def tile(
        builder: ir.IRBuilder,
        rows: ir.Value,
        weight: ir.Value,
        second: ir.Value,
        pair_bytes: ir.Value,
        pairs: ir.Value,
        sums: ir.Value,
    ) -> None:
        """Multiply the rows whose addresses lie at `rows` by `pairs` pairs of a task.

        The first half of the outputs is at `weight`, the second half at `second`; the next
        pair comes `pair_bytes` later. Writes fp32 sums [num_rows, 64].
        """
        num_vectors = TASK_OUTPUTS // simd.LANES
        addresses = [
            simd.load(builder, builder.add(rows, simd.constant(8 * row)), simd.I64)
            for row in range(num_rows)
        ]

        def add_pair(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            step = builder.mul(index, pair_bytes)
            numbers = [
                simd.load(
                    builder,
                    builder.add(builder.add(half, step), simd.constant(offset)),
                    simd.I32_LANES,
                )
                for half in (weight, second)
                for offset in range(0, 4 * _HALF, _VECTOR)
            ]
            offset = builder.mul(index, simd.constant(4))
            added = []
            for row, address in enumerate(addresses):
                pair = simd.load(builder, builder.add(address, offset), simd.I32)
                both = simd.broadcast(builder, pair)
                for part, number in enumerate(numbers):
                    total = totals[row * num_vectors + part]
                    added.append(simd.dot_pairs(builder, total, both, number))
            return added

        zeros = [simd.lanes_of(simd.F32_LANES, 0.0)] * (num_rows * num_vectors)
        for idx, total in enumerate(simd.count_up(builder, pairs, zeros, add_pair)):
            simd.store(builder, builder.add(sums, simd.constant(_VECTOR * idx)), total)

    return operation(types.none, [types.int64] * 6)(tile)


tile1, tile2, tile3, tile4, tile6 = (_tile(num_rows) for num_rows in (1, 2, 3, 4, 6))


@inlined
def multiply(
    rows: int, num_rows: int, weight: int, second: int, width: int, pairs: int, sums: int
) -> None:
    """Multiply any number of rows by a task; `second` is `second_half` of `weight`.

    Writes sums [num_rows, 64]. The sums of outputs that do not exist are arbitrary.
    """
    pair_bytes = 4 * width
    row = 0
    while row < num_rows:
        left = num_rows - row
        here, place = rows + 8 * row, sums + row * SUM_BYTES
        if left == 6 or left > 8:
            tile6(here, weight, second, pair_bytes, pairs, place)
            row += 6
        elif left == 4 or left > 6:
            tile4(here, weight, second, pair_bytes, pairs, place)
            row += 4
        elif left == 3 or left == 5:
            tile3(here, weight, second, pair_bytes, pairs, place)
            row += 3
        elif left == 2:
            tile2(here, weight, second, pair_bytes, pairs, place)
            row += 2
        else:
            tile1(here, weight, second, pair_bytes, pairs, place)
            row += 1


@inlined
def task_bytes(num_in: int) -> int:
    """Return the size of a task of a weight with `num_in` inputs; it is the same in any layout."""
    return (num_in + INPUT_MULTIPLE - 1) // INPUT_MULTIPLE * INPUT_MULTIPLE * 2 * TASK_OUTPUTS


@inlined
def second_half(weight: int, width: int, num_in: int, num_outputs: int) -> int:
    """Return where the second 32 outputs of the task at `weight` are; `num_outputs` follow it.

    A weight may end after the first 32: then these are read twice.
    """
    if width == TASK_OUTPUTS:
        return weight + 4 * _HALF
    if num_outputs <= _HALF:
        return weight
    return weight + task_bytes(num_in) // 2

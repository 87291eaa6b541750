"""The inner loops that learn codebooks and code keys, for kernels that numba compiles.

`nearest` finds the centroids nearest to sixteen parts of keys, `add_parts` adds parts up by their
centroids. Parts are fp32[n, W] one behind the other. Both are made for each width W. Used by
`kernels.cpu.compiled.retrieval.codebooks`, inside compiled functions only.

Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir
from numba.core import types

from kernels.contracts import NUM_CENTROIDS
from kernels.cpu.simd.lanes import (
    F32,
    F32_LANES,
    I32,
    I32_LANES,
    I64,
    LANES,
    broadcast,
    constant,
    count_up,
    fused,
    lanes_of,
    load,
    operation,
    pointer,
    store,
)
from kernels.cpu.simd.retrieval import dealt

_I8 = ir.IntType(8)


def _nearest(width: int) -> Callable[..., None]:
    def nearest(builder: ir.IRBuilder, parts: ir.Value, rows: ir.Value, codes: ir.Value) -> None:
        """Write the codes u8[16] of sixteen parts: the nearest centroids, the first of equals.

        The row of a centroid c is fp32[1 + W]: |c|^2, then -2 c.
        """
        read = [
            load(builder, builder.add(parts, constant(4 * LANES * idx)), F32_LANES)
            for idx in range(width)
        ]
        numbers = dealt(builder, read)

        def compare(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            least, found = carried
            row = builder.add(rows, builder.mul(index, constant(4 * (1 + width))))
            # |x - c|^2 without what is the same for all centroids.
            total = broadcast(builder, load(builder, row, F32))
            for idx, number in enumerate(numbers):
                place = builder.add(row, constant(4 * (1 + idx)))
                total = fused(builder, number, broadcast(builder, load(builder, place, F32)), total)
            is_less = builder.fcmp_ordered("<", total, least)
            code = broadcast(builder, builder.trunc(index, I32))
            return [builder.select(is_less, total, least), builder.select(is_less, code, found)]

        start = [lanes_of(F32_LANES, float("inf")), lanes_of(I32_LANES, 0)]
        _, found = count_up(builder, constant(NUM_CENTROIDS), start, compare)
        store(builder, codes, builder.trunc(found, ir.VectorType(_I8, LANES)))

    return operation(types.none, [types.int64] * 3, apart=True)(nearest)


def _add_parts(width: int) -> Callable[..., None]:
    def add_parts(
        builder: ir.IRBuilder,
        parts: ir.Value,
        codes: ir.Value,
        count: ir.Value,
        sums: ir.Value,
        counts: ir.Value,
    ) -> None:
        """Add `count` parts to the sums fp32[C, W] of their codes u8, and to the counts i64[C]."""
        kind = ir.VectorType(F32, width)

        def add(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            byte = builder.load(pointer(builder, builder.add(codes, index), _I8), align=1)
            code = builder.zext(byte, I64)
            place = builder.add(sums, builder.mul(code, constant(4 * width)))
            part = load(builder, builder.add(parts, builder.mul(index, constant(4 * width))), kind)
            store(builder, place, builder.fadd(load(builder, place, kind), part))
            place = builder.add(counts, builder.mul(code, constant(8)))
            store(builder, place, builder.add(load(builder, place, I64), constant(1)))
            return []

        count_up(builder, count, [], add)

    return operation(types.none, [types.int64] * 5, apart=True)(add_parts)


nearest2, nearest4, nearest8, nearest16, nearest32 = (_nearest(w) for w in (2, 4, 8, 16, 32))
add_parts2, add_parts4, add_parts8, add_parts16, add_parts32 = (
    _add_parts(w) for w in (2, 4, 8, 16, 32)
)

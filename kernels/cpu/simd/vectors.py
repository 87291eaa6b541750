"""Operations on vectors of sixteen lanes, for kernels that numba compiles.

Reading, writing, rounding to bf16, arithmetic, and the exponential, over the types and in
the manner of `kernels.cpu.simd.lanes`. Used by `kernels.cpu.compiled`, inside compiled functions
only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from llvmlite import ir
from numba.core import types

from kernels.cpu.simd.lanes import (
    F32_LANES,
    I32,
    I32_LANES,
    I64,
    LANES,
    Bfloat,
    F32x16,
    broadcast,
    call,
    constant,
    cpu_has,
    exchanged,
    first_lanes,
    fused,
    lanes_of,
    load,
    load_first,
    operation,
    paired,
    rounded,
    shuffled,
    store,
    store_first,
)


@operation(F32x16, [types.int64])
def load_f32(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Read sixteen floats."""
    return load(builder, address, F32_LANES)


@operation(F32x16, [types.int64])
def load_bf16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Read sixteen bf16 numbers, widened in order."""
    narrow = load(builder, address, ir.VectorType(ir.IntType(16), LANES))
    wide = builder.shl(builder.zext(narrow, I32_LANES), lanes_of(I32_LANES, 16))
    return builder.bitcast(wide, F32_LANES)


@operation(F32x16, [types.int64, types.int64])
def load_first_f32(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    """Read the first `count` of sixteen floats; the others are 0 and not read from memory."""
    return load_first(builder, address, F32_LANES, count)


@operation(F32x16, [types.int64, types.int64])
def load_first_bf16(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    """Read the first `count` of sixteen bf16 numbers, widened; the others are 0, not read."""
    narrow = load_first(builder, address, ir.VectorType(ir.IntType(16), LANES), count)
    wide = builder.shl(builder.zext(narrow, I32_LANES), lanes_of(I32_LANES, 16))
    return builder.bitcast(wide, F32_LANES)


@operation(types.none, [types.int64, F32x16])
def store_f32(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write sixteen floats."""
    store(builder, address, value)


@operation(types.none, [types.int64, F32x16])
def store_bf16(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Round sixteen floats to bf16 (nearest, ties to even; NaN stays NaN) and write them."""
    store(
        builder,
        address,
        builder.trunc(rounded(builder, value), ir.VectorType(ir.IntType(16), LANES)),
    )


@operation(F32x16, [F32x16])
def round_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round to bf16 and widen again."""
    bits = builder.shl(rounded(builder, value), lanes_of(I32_LANES, 16))
    return builder.bitcast(bits, F32_LANES)


@operation(types.none, [types.int64, F32x16, types.int64])
def store_first_bf16(
    builder: ir.IRBuilder, address: ir.Value, value: ir.Value, count: ir.Value
) -> None:
    """Round to bf16 and write the first `count` lanes."""
    kind = ir.VectorType(ir.IntType(16), LANES)
    store_first(builder, address, builder.trunc(rounded(builder, value), kind), count)


@operation(types.none, [types.int64, F32x16, F32x16, types.int64])
def store_first_pairs(
    builder: ir.IRBuilder, address: ir.Value, even: ir.Value, odd: ir.Value, count: ir.Value
) -> None:
    """Round to bf16 and write the first `count` pairs: lanes of `even` and `odd` in turn."""
    store_first(builder, address, paired(builder, even, odd), count)


@operation(types.none, [types.int64, types.int64, types.int64])
def zip_numbers(builder: ir.IRBuilder, address: ir.Value, even: ir.Value, odd: ir.Value) -> None:
    """Write sixteen pairs of the 16-bit numbers at `even` and those at `odd`, in turn."""
    kind = ir.VectorType(ir.IntType(16), LANES)
    low, high = (builder.zext(load(builder, each, kind), I32_LANES) for each in (even, odd))
    store(builder, address, builder.or_(low, builder.shl(high, lanes_of(I32_LANES, 16))))


@operation(types.none, [types.int64] * 5)
def transpose(
    builder: ir.IRBuilder,
    rows: ir.Value,
    offset: ir.Value,
    count: ir.Value,
    address: ir.Value,
    stride: ir.Value,
) -> None:
    """Write 16 columns of the 16 rows (32 bits each) whose addresses lie at `rows`.

    They begin `offset` bytes after the rows' begin; all after the first `count` columns are zeros.
    Column j is written at `address` + j `stride`.
    """
    found = [
        load_first(
            builder,
            builder.add(load(builder, builder.add(rows, constant(8 * row)), I64), offset),
            I32_LANES,
            count,
        )
        for row in range(LANES)
    ]
    width = LANES // 2
    while width:
        for row in (row for row in range(LANES) if not row & width):
            pair = found[row], found[row + width]
            found[row], found[row + width] = exchanged(builder, *pair, width)
        width //= 2
    for column, values in enumerate(found):
        place = builder.add(address, builder.mul(stride, constant(column)))
        store(builder, place, values)


@operation(types.none, [types.int64, F32x16, types.int64])
def store_first_f32(
    builder: ir.IRBuilder, address: ir.Value, value: ir.Value, count: ir.Value
) -> None:
    """Write the first `count` lanes."""
    store_first(builder, address, value, count)


@operation(F32x16, [types.float32])
def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """Return the vector with `scalar` in all lanes."""
    return broadcast(builder, scalar)


@operation(F32x16, [F32x16, F32x16])
def add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return a + b."""
    return builder.fadd(a, b)


@operation(F32x16, [F32x16, F32x16])
def sub(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return a - b."""
    return builder.fsub(a, b)


@operation(F32x16, [F32x16, F32x16])
def mul(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return a * b."""
    return builder.fmul(a, b)


@operation(F32x16, [F32x16, F32x16])
def div(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return a / b."""
    return builder.fdiv(a, b)


@operation(F32x16, [F32x16, F32x16, F32x16])
def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Return a * b + c, rounded once."""
    return fused(builder, a, b, c)


@operation(F32x16, [F32x16, F32x16])
def greater(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return the greater of each two lanes; that of b if one is NaN."""
    return _greater(builder, a, b)


def _greater(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@operation(F32x16, [F32x16, F32x16])
def maximum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Return the greater of each two lanes; NaN if one of them is."""
    greater = builder.fcmp_ordered(">", a, b)
    picked = builder.select(greater, a, b)
    return builder.select(builder.fcmp_unordered("uno", a, a), a, picked)


@operation(F32x16, [F32x16, F32x16, F32x16])
def minimum_from(
    builder: ir.IRBuilder, least: ir.Value, number: ir.Value, limit: ir.Value
) -> ir.Value:
    """Return the lesser of each two lanes; `least` where number < limit, or is NaN."""
    lesser = builder.fcmp_ordered("<", number, least)
    kept = builder.and_(lesser, builder.fcmp_ordered(">=", number, limit))
    return builder.select(kept, number, least)


@operation(types.float32, [F32x16])
def sum_lanes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Add the lanes, in pairs of halves."""
    return _fold(builder, value, builder.fadd)


@operation(types.float32, [F32x16])
def max_lanes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return the greatest lane; not defined if one is NaN."""
    return _fold(builder, value, partial(_greater, builder))


def _fold(
    builder: ir.IRBuilder, value: ir.Value, join: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    width = LANES // 2
    while width:
        swapped = [lane ^ width for lane in range(LANES)]
        value = join(value, shuffled(builder, value, value, swapped))
        width //= 2
    return builder.extract_element(value, ir.Constant(I32, 0))


@operation(F32x16, [F32x16, types.int64, types.float32])
def keep_first(
    builder: ir.IRBuilder, value: ir.Value, count: ir.Value, other: ir.Value
) -> ir.Value:
    """Replace all lanes but the first `count` (any number) by `other`."""
    return builder.select(first_lanes(builder, count), value, broadcast(builder, other))


@operation(F32x16, [F32x16, types.int64, types.float32])
def drop_first(
    builder: ir.IRBuilder, value: ir.Value, count: ir.Value, other: ir.Value
) -> ir.Value:
    """Replace the first `count` (any number) lanes by `other`."""
    return builder.select(first_lanes(builder, count), broadcast(builder, other), value)


@operation(F32x16, [F32x16, types.int64, types.float32])
def keep_bits(builder: ir.IRBuilder, value: ir.Value, bits: ir.Value, other: ir.Value) -> ir.Value:
    """Replace the lanes i whose bit i is 0 by `other`."""
    lanes = ir.VectorType(ir.IntType(1), LANES)
    kept = builder.bitcast(builder.trunc(bits, ir.IntType(LANES)), lanes)
    return builder.select(kept, value, broadcast(builder, other))


@operation(types.none, [types.int64, F32x16])
def store_weights(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Round sixteen floats to bf16 and write them; as 0 where they are below 2^-126."""
    if not cpu_has("avx512bf16", "avx512f"):
        kind, numbers = ir.VectorType(ir.IntType(16), LANES), rounded(builder, value)
        return store(builder, address, builder.trunc(numbers, kind))
    kind = ir.VectorType(Bfloat(), LANES)
    numbers = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", kind, [value])
    return store(builder, address, numbers)


@operation(F32x16, [F32x16])
def exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return 2 to the power x, x < 127, for weights in bf16: within 2^-13 of it; NaN of NaN.

    Below -125 the result is about 2^-125 or 0: denormal numbers take Intel's processors a hundred
    times as long. x = n + r, |r| <= 1/2; 2^r by the polynomial of degree 3 with the least relative
    error (Remez); times 2^n.
    """
    if not cpu_has("avx512f"):
        return _exp(builder, builder.fmul(x, lanes_of(F32_LANES, math.log(2))))
    lowest = lanes_of(F32_LANES, -125.0)
    clamped = builder.select(builder.fcmp_ordered("<", x, lowest), lowest, x)
    turns = call(builder, "llvm.rint.v16f32", F32_LANES, [clamped])
    rest = builder.fsub(clamped, turns)
    total = lanes_of(F32_LANES, 0.0551716695)
    for factor in (0.2426111254, 0.6932609857, 0.9999280733):
        total = fused(builder, total, rest, lanes_of(F32_LANES, factor))
    every, current = ir.Constant(ir.IntType(16), -1), ir.Constant(I32, 4)
    operands = [total, turns, total, every, current]
    return call(builder, "llvm.x86.avx512.mask.scalef.ps.512", F32_LANES, operands)


@operation(F32x16, [F32x16])
def exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return e to the power x within two units of the last place; 0 below -87, NaN of NaN.

    x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7; times 2^n by
    adding n to the exponent. ln 2 is subtracted in two parts (Cody and Waite). Above 88
    the result is undefined: softmax subtracts the greatest, silu clamps.
    """
    return _exp(builder, x)


def _exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    lowest, greatest = lanes_of(F32_LANES, -87.0), lanes_of(F32_LANES, 88.0)
    too_low = builder.fcmp_ordered("<", x, lowest)
    clamped = builder.select(too_low, lowest, x)
    clamped = builder.select(builder.fcmp_ordered(">", clamped, greatest), greatest, clamped)
    scaled = builder.fmul(clamped, lanes_of(F32_LANES, 1.4426950408889634))
    turns = call(builder, "llvm.rint.v16f32", F32_LANES, [scaled])
    rest = fused(builder, turns, lanes_of(F32_LANES, -0.693145751953125), clamped)
    rest = fused(builder, turns, lanes_of(F32_LANES, -1.42860682030941723212e-6), rest)
    total = lanes_of(F32_LANES, 1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        total = fused(builder, total, rest, lanes_of(F32_LANES, 1 / factorial))
    exponent = builder.shl(builder.fptosi(turns, I32_LANES), lanes_of(I32_LANES, 23))
    grown = builder.bitcast(builder.add(builder.bitcast(total, I32_LANES), exponent), F32_LANES)
    kept = builder.select(too_low, lanes_of(F32_LANES, 0.0), grown)
    return builder.select(builder.fcmp_unordered("uno", x, x), x, kept)

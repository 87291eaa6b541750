"""Operations on vectors of sixteen doubles, for sums that decide which token is drawn.

In the manner of `kernels.cpu.simd.vectors`. Used by `kernels.cpu.compiled`, inside compiled
functions only.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from llvmlite import ir
from numba.core import types

from kernels.cpu.simd.lanes import (
    I32,
    I32_LANES,
    I64,
    LANES,
    F32x16,
    I32x16,
    Vector,
    broadcast,
    call,
    first_lanes,
    lanes_of,
    load,
    operation,
    shuffled,
    store,
)

F64_LANES: Final = ir.VectorType(ir.DoubleType(), LANES)
I64_LANES: Final = ir.VectorType(I64, LANES)
F64x16: Final = Vector("F64x16", F64_LANES)


def _exponential_series(degree: int) -> list[float]:
    """Return coefficients of e^r, ascending, by interpolation at Chebyshev's points."""
    half = np.log(2) / 2
    series = np.polynomial.Chebyshev.interpolate(np.exp, degree, domain=[-half, half])
    found: list[float] = series.convert(kind=np.polynomial.Polynomial).coef.tolist()
    return found


# Within 3e-14 of e^r where |r| <= ln 2 / 2.
_SERIES: Final = _exponential_series(9)
# ln 2 in two parts, the first with zeros at its end: n times it is exact for |n| < 2^11.
_LN2_HIGH: Final = float.fromhex("0x1.62e42fefap-1")
_LN2_LOW: Final = float.fromhex("0x1.cf79abc9e3b39p-40")
# Added to a number below 2^51 it rounds it to an integer, which the low bits then hold.
_ROUNDER: Final = 1.5 * 2.0**52


@operation(F64x16, [types.int64])
def load_f64(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Read sixteen doubles."""
    return load(builder, address, F64_LANES)


@operation(F64x16, [types.float64])
def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """Return the vector with `scalar` in all lanes."""
    return broadcast(builder, scalar)


@operation(F64x16, [F32x16, types.float64])
def distances(builder: ir.IRBuilder, number: ir.Value, other: ir.Value) -> ir.Value:
    """Return number - other, exactly if both are fp32 of similar size."""
    return builder.fsub(builder.fpext(number, F64_LANES), broadcast(builder, other))


@operation(F64x16, [F64x16, types.float64])
def scaled(builder: ir.IRBuilder, number: ir.Value, factor: ir.Value) -> ir.Value:
    """Return number * factor."""
    return builder.fmul(number, broadcast(builder, factor))


@operation(I32x16, [F64x16, types.float64])
def truncated(builder: ir.IRBuilder, number: ir.Value, limit: ir.Value) -> ir.Value:
    """Return the integer parts of numbers from 0 to `limit`, and of these two beyond; not NaN."""
    bound, zeros = broadcast(builder, limit), lanes_of(F64_LANES, 0.0)
    number = builder.select(builder.fcmp_ordered("<", number, bound), number, bound)
    number = builder.select(builder.fcmp_ordered(">", number, zeros), number, zeros)
    return builder.fptosi(number, I32_LANES)


@operation(F64x16, [F64x16])
def exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return e to the power x, x <= 0, with a relative error below 1e-13; 0 below -700.

    x = n ln 2 + r, |r| <= ln 2 / 2; e^r by a polynomial; times 2^n by adding n to the exponent.
    """

    def fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return call(builder, "llvm.fma.v16f64", F64_LANES, [a, b, c])

    def number(value: float) -> ir.Constant:
        return lanes_of(F64_LANES, value)

    too_low = builder.fcmp_unordered("<", x, number(-700.0))
    clamped = builder.select(too_low, number(-700.0), x)
    shifted = fma(clamped, number(1 / float(np.log(2))), number(_ROUNDER))
    turns = builder.fsub(shifted, number(_ROUNDER))
    rest = fma(turns, number(-_LN2_HIGH), clamped)
    rest = fma(turns, number(-_LN2_LOW), rest)
    # Neighbours are joined first (Estrin), since a chain of ten would wait for each product.
    terms: list[ir.Value] = [number(coefficient) for coefficient in _SERIES]
    power = rest
    while len(terms) > 1:
        joined = [fma(b, power, a) for a, b in zip(terms[0::2], terms[1::2], strict=False)]
        terms = joined + terms[2 * len(joined) :]
        power = builder.fmul(power, power)
    (total,) = terms
    exponent = builder.shl(
        builder.bitcast(shifted, I64_LANES), ir.Constant(I64_LANES, [52] * LANES)
    )
    grown = builder.bitcast(builder.add(builder.bitcast(total, I64_LANES), exponent), F64_LANES)
    return builder.select(too_low, number(0.0), grown)


@operation(F64x16, [F64x16, F32x16, types.float32, types.float32, types.int64])
def keep(
    builder: ir.IRBuilder,
    value: ir.Value,
    number: ir.Value,
    low: ir.Value,
    high: ir.Value,
    count: ir.Value,
) -> ir.Value:
    """Return the first `count` lanes of `value` where low <= number <= high; 0 in all others."""
    kept = _inside(builder, number, low, high, count)
    return builder.select(kept, value, lanes_of(F64_LANES, 0.0))


@operation(types.float64, [F64x16])
def sum_lanes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Add the lanes, in pairs of halves."""
    width = LANES // 2
    while width:
        swapped = [lane ^ width for lane in range(LANES)]
        value = builder.fadd(value, shuffled(builder, value, value, swapped))
        width //= 2
    return builder.extract_element(value, ir.Constant(I32, 0))


@operation(types.none, [types.int64, F64x16])
def store_f64(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write sixteen doubles."""
    store(builder, address, value)


@operation(types.int64, [F32x16, types.float32, types.float32, types.int64])
def between(
    builder: ir.IRBuilder, number: ir.Value, low: ir.Value, high: ir.Value, count: ir.Value
) -> ir.Value:
    """Return the mask of the first `count` lanes where low <= number <= high, a bit per lane."""
    return _mask(builder, _inside(builder, number, low, high, count))


@operation(types.int64, [I32x16, types.int64])
def equal_to(builder: ir.IRBuilder, number: ir.Value, other: ir.Value) -> ir.Value:
    """Return the mask of the lanes that are `other`, a bit per lane."""
    same = builder.icmp_signed("==", number, broadcast(builder, builder.trunc(other, I32)))
    return _mask(builder, same)


def _inside(
    builder: ir.IRBuilder, number: ir.Value, low: ir.Value, high: ir.Value, count: ir.Value
) -> ir.Value:
    from_low = builder.fcmp_ordered(">=", number, broadcast(builder, low))
    to_high = builder.fcmp_ordered("<=", number, broadcast(builder, high))
    return builder.and_(builder.and_(from_low, to_high), first_lanes(builder, count))


def _mask(builder: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
    return builder.zext(builder.bitcast(lanes, ir.IntType(LANES)), I64)


@operation(types.int64, [types.int64])
def first_bit(builder: ir.IRBuilder, mask: ir.Value) -> ir.Value:
    """Return the place of the lowest bit of a mask that is not 0."""
    return call(builder, "llvm.cttz.i64", I64, [mask, ir.Constant(ir.IntType(1), 1)])


@operation(types.none, [types.int64, I32x16])
def store_i32(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    """Write sixteen i32."""
    store(builder, address, value)

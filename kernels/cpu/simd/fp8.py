"""Numbers in fp8 for kernels that numba compiles: widened without loss, rounded when stored.

The format is e4m3fn: a sign, four bits of exponent, three of mantissa, no infinity. Stored are the
nearest numbers, of equals the even one; what is beyond GREATEST becomes that, and NaN stays NaN.
Heads of a cache are widened to rows of bf16 or fp32, which the loops of
`kernels.cpu.simd.attention` read. Knows no layout of a cache. Used by `kernels.cpu.compiled`,
inside compiled functions only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from llvmlite import ir
from numba.core import types

from kernels.cpu.simd.attention import head_offset
from kernels.cpu.simd.lanes import (
    F32_LANES,
    I32,
    I32_LANES,
    I64,
    LANES,
    F32x16,
    call,
    constant,
    count_up,
    cpu_has,
    lanes_of,
    load,
    load_first,
    operation,
    pointer,
    store,
    store_first,
)

ROW_MULTIPLE: Final = 64
"""Numbers of a widened row: so many are written at once, the last ones behind it."""

_I8, _I16 = ir.IntType(8), ir.IntType(16)
_CODES: Final = ir.VectorType(_I8, LANES)
_TABLE: Final = ir.VectorType(_I8, ROW_MULTIPLE)
# Of fp32 numbers: the bits of mantissa that fp8 lacks, and the difference of the exponents' biases.
_SHIFT: Final = 20
_BIAS: Final = 127 - 7
# The least number with a leading one is 2**-6; below it codes count steps of 2**-9, the last bit of
# 2**14 in fp32.
_LEAST_NORMAL: Final = (127 - 6) << 23
_STEPS: Final = (127 + 14) << 23
_GREATEST: Final = 0x7E + (_BIAS << 3) << _SHIFT
_INFINITY: Final = 0x7F800000


def widened(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Return the numbers of sixteen codes i8, in fp32."""
    wide = builder.zext(codes, I32_LANES)
    size = builder.shl(builder.and_(wide, _all(0x7F)), _all(_SHIFT))
    normal = builder.add(size, _all(_BIAS << 23))
    # What has no leading one gets one, which is subtracted.
    led = builder.bitcast(builder.or_(size, _all(_LEAST_NORMAL)), F32_LANES)
    small = builder.fsub(led, lanes_of(F32_LANES, 2.0**-6))
    is_normal = builder.icmp_unsigned(">=", size, _all(1 << 23))
    found = builder.select(is_normal, normal, builder.bitcast(small, I32_LANES))
    is_nan = builder.icmp_unsigned("==", size, _all(0x7F << _SHIFT))
    found = builder.select(is_nan, _all(_INFINITY | 1 << 22), found)
    sign = builder.shl(builder.and_(wide, _all(0x80)), _all(24))
    return builder.bitcast(builder.or_(found, sign), F32_LANES)


def narrowed(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    """Return the codes i8 of sixteen fp32 numbers."""
    bits = builder.bitcast(numbers, I32_LANES)
    size = builder.and_(bits, _all(0x7FFFFFFF))
    is_held = builder.icmp_unsigned("<", size, _all(_GREATEST))
    held = builder.select(is_held, size, _all(_GREATEST))
    last = builder.and_(builder.lshr(held, _all(_SHIFT)), _all(1))
    up = builder.add(builder.add(held, _all((1 << _SHIFT - 1) - 1)), last)
    normal = builder.sub(builder.lshr(up, _all(_SHIFT)), _all(_BIAS << 3))
    steps = builder.fadd(builder.bitcast(held, F32_LANES), lanes_of(F32_LANES, 2.0**14))
    small = builder.sub(builder.bitcast(steps, I32_LANES), _all(_STEPS))
    is_normal = builder.icmp_unsigned(">=", held, _all(_LEAST_NORMAL))
    code = builder.select(is_normal, normal, small)
    is_nan = builder.icmp_unsigned(">", size, _all(_INFINITY))
    code = builder.select(is_nan, _all(0x7F), code)
    sign = builder.and_(builder.lshr(bits, _all(24)), _all(0x80))
    return builder.trunc(builder.or_(code, sign), _CODES)


def _all(number: int) -> ir.Constant:
    return lanes_of(I32_LANES, number)


@operation(F32x16, [types.int64, types.int64])
def load_first_fp8(builder: ir.IRBuilder, address: ir.Value, count: ir.Value) -> ir.Value:
    """Read the first `count` of sixteen numbers, widened; the others are 0 and not read."""
    return widened(builder, load_first(builder, address, _CODES, count))


@operation(types.none, [types.int64, F32x16, types.int64])
def store_first_fp8(
    builder: ir.IRBuilder, address: ir.Value, value: ir.Value, count: ir.Value
) -> None:
    """Round and write the first `count` lanes."""
    store_first(builder, address, narrowed(builder, value), count)


Put = Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], None]


def _widen(wide: bool, listed: bool = False) -> Callable[..., None]:
    has_table = not wide and cpu_has("avx512vbmi", "avx512bw")
    at_once = ROW_MULTIPLE if has_table else LANES
    put: Put = _look_up if has_table else _put_f32 if wide else _put_bf16

    def widen(
        builder: ir.IRBuilder,
        rows: ir.Value,
        pitch: ir.Value,
        heads: ir.Value,
        stride: ir.Value,
        count: ir.Value,
        size: ir.Value,
    ) -> None:
        """Widen `count` heads of `size` numbers, an even one, to rows `pitch` bytes apart.

        Heads lie `stride` bytes apart; if `listed`, that is the address of their offsets, i64. No
        memory behind a head is read, none behind a row is written.
        """
        turns = builder.sdiv(builder.add(size, constant(at_once - 1)), constant(at_once))

        def widen_head(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            head = builder.add(heads, head_offset(builder, index, stride, listed))
            row = builder.add(rows, builder.mul(index, pitch))

            def turn(number: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
                done = builder.mul(number, constant(at_once))
                place = builder.add(row, builder.mul(done, constant(4 if wide else 2)))
                put(builder, place, builder.add(head, done), builder.sub(size, done))
                return []

            count_up(builder, turns, [], turn)
            return []

        count_up(builder, count, [], widen_head)

    return operation(types.none, [types.int64] * 6, apart=True)(widen)


def _put_f32(builder: ir.IRBuilder, place: ir.Value, codes: ir.Value, count: ir.Value) -> None:
    """Write the first `count` of sixteen numbers in fp32."""
    read = load_first(builder, codes, _CODES, count)
    store_first(builder, place, widened(builder, read), count)


def _put_bf16(builder: ir.IRBuilder, place: ir.Value, codes: ir.Value, count: ir.Value) -> None:
    """Write the first `count` of sixteen numbers in bf16, which has all their bits."""
    read = widened(builder, load_first(builder, codes, _CODES, count))
    upper = builder.lshr(builder.bitcast(read, I32_LANES), _all(16))
    store_first(builder, place, builder.trunc(upper, ir.VectorType(_I16, LANES)), count)


def _look_up(builder: ir.IRBuilder, place: ir.Value, codes: ir.Value, count: ir.Value) -> None:
    """Write the first `count` of 64 numbers in bf16, whose bytes are entries of two tables."""
    is_whole = builder.icmp_signed(">=", count, constant(ROW_MULTIPLE))
    with builder.if_else(is_whole) as (then, otherwise):
        with then:
            for half, pairs in enumerate(_found(builder, load(builder, codes, _TABLE))):
                store(builder, builder.add(place, constant(64 * half)), pairs)
        with otherwise:
            places = ir.Constant(_TABLE, list(range(ROW_MULTIPLE)))
            least = builder.trunc(count, _I8)
            first = builder.insert_element(
                ir.Constant(_TABLE, ir.Undefined), least, ir.Constant(I32, 0)
            )
            zeros = ir.Constant(ir.VectorType(I32, ROW_MULTIPLE), [0] * ROW_MULTIPLE)
            limit = builder.shuffle_vector(first, first, zeros)
            operands = [
                pointer(builder, codes, _TABLE),
                ir.Constant(I32, 1),
                builder.icmp_unsigned("<", places, limit),
                ir.Constant(_TABLE, [0] * ROW_MULTIPLE),
            ]
            read = call(builder, "llvm.masked.load.v64i8.p0", _TABLE, operands)
            num_pairs = builder.sdiv(count, constant(2))
            for half, pairs in enumerate(_found(builder, read)):
                left = builder.sub(num_pairs, constant(LANES * half))
                store_first(builder, builder.add(place, constant(64 * half)), pairs, left)


def _found(builder: ir.IRBuilder, codes: ir.Value) -> list[ir.Value]:
    """Return the numbers of 64 codes in bf16, as two vectors of pairs."""
    # The bytes of numbers are interleaved in quarters of a register: the first eight of each
    # quarter become those of the first vector.
    quads = builder.bitcast(codes, ir.VectorType(I64, 8))
    order = ir.Constant(ir.VectorType(I32, 8), [0, 4, 1, 5, 2, 6, 3, 7])
    dealt = builder.bitcast(builder.shuffle_vector(quads, quads, order), _TABLE)
    low, high = (_entries(builder, dealt, byte) for byte in (0, 1))
    sign = builder.and_(dealt, ir.Constant(_TABLE, [0x80] * ROW_MULTIPLE))
    high = builder.or_(high, sign)
    pairs = []
    for begin in (0, 8):
        chosen = [
            lane
            for quarter in range(0, ROW_MULTIPLE, 16)
            for number in range(quarter + begin, quarter + begin + 8)
            for lane in (number, ROW_MULTIPLE + number)
        ]
        picked = ir.Constant(ir.VectorType(I32, ROW_MULTIPLE), chosen)
        pairs.append(builder.bitcast(builder.shuffle_vector(low, high, picked), I32_LANES))
    return pairs


def _entries(builder: ir.IRBuilder, codes: ir.Value, byte: int) -> ir.Value:
    """Return one byte of the bf16 number of each code without its sign."""
    numbers = torch.arange(2 * ROW_MULTIPLE, dtype=torch.uint8).view(torch.float8_e4m3fn)
    entries = numbers.bfloat16().view(torch.uint8)[byte::2].tolist()
    halves = [ir.Constant(_TABLE, entries[at : at + ROW_MULTIPLE]) for at in (0, ROW_MULTIPLE)]
    operands = [halves[0], codes, halves[1]]
    return call(builder, "llvm.x86.avx512.vpermi2var.qi.512", _TABLE, operands)


widen_bf16, widen_f32 = _widen(wide=False), _widen(wide=True)
widen_listed_bf16, widen_listed_f32 = (_widen(wide, listed=True) for wide in (False, True))

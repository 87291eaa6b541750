"""Dot products of quantised weights and quantised rows, for kernels that numba compiles.

Owns the layouts in which such kernels keep numbers, and the operations that read and write
them: `dot_tile` multiplies up to MAX_TILE rows by sixteen outputs, `quantise_group` turns 32
numbers of a row into codes. One instruction adds four products per lane with AVX512-VNNI and
AVX-VNNI, two with AVX2; the portable form takes one at a time. All forms give the same integers,
so the same bits. Knows no tensor. Used by `kernels.cpu.simd.quantised_rows` and
`kernels.cpu.compiled.matmul.quantised`, inside compiled functions only.

A number of a weight is code * step + low, with codes of 0..15 (4 bits) or 0..255 (8 bits);
step and low are shared by GROUP inputs of one output. A block holds LANES outputs. For each
group of inputs it has 64 bytes of scales, per output low and step as two bf16 numbers in one
word, then the codes: LANES words of four inputs each, or, with 4 bits, of eight, of which
the first four are in the lower halves of the bytes. MXFP4_BITS: codes of 4 bits stand for
E2M1_INTEGERS, low is -E2M1_ZERO steps, and the scales are a byte per output, the exponent of step.
CENTRED_BITS: low is -CENTRE steps, so the scales are step alone, a bf16 number per output.
A row has per group GROUP signed bytes, their scale, and their scaled sum (fp32).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from llvmlite import ir
from numba.core import types

from kernels.cpu.simd.lanes import (
    F32,
    F32_LANES,
    I32,
    I32_LANES,
    I64,
    LANES,
    F32x16,
    broadcast,
    call,
    constant,
    count_up,
    cpu_has,
    even_numbers,
    fused,
    lanes_of,
    load,
    odd_numbers,
    operation,
    pointer,
    store,
)
from topspin.plan.precision import E2M1_INTEGERS, E2M1_ZERO, MXFP4_BITS

GROUP: Final = 32
CENTRED_BITS: Final = 6
"""Codes of 4 bits whose zero is CENTRE in all groups."""
CENTRE: Final = 8
SCALE_BYTES: Final = 4 * LANES
"""Scales of one group of a block with lows; also one fp32 row of LANES outputs."""
ROW_GROUP_BYTES: Final = GROUP + 8
# Distance by which weights are prefetched ahead of a tile: measured best, and about the bytes
# that memory delivers within its latency on one core.
AHEAD_BYTES: Final = 4096
LINE_BYTES: Final = 64
# A group with a smaller magnitude becomes zeros: the inverse of its scale would overflow.
MIN_MAGNITUDE: Final = 1e-30


def scale_bytes(bits: int) -> int:
    """Return the size of the scales of one group of a block."""
    return {MXFP4_BITS: LANES, CENTRED_BITS: 2 * LANES}.get(bits, SCALE_BYTES)


def group_bytes(bits: int) -> int:
    """Return the size of one group of a block."""
    return scale_bytes(bits) + LANES * GROUP * _stored_bits(bits) // 8


def _stored_bits(bits: int) -> int:
    return 8 if bits == 8 else 4


def _at(builder: ir.IRBuilder, address: ir.Value, offset: int) -> ir.Value:
    return builder.add(address, constant(offset))


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Prefetch the cache line at `address`, which may be invalid."""
    place = pointer(builder, address, ir.IntType(8))
    hints = [ir.Constant(I32, hint) for hint in (0, 3, 1)]
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [place, *hints])


class _Form(NamedTuple):
    """How this processor adds products of bytes."""

    lanes: int
    """Outputs of one vector."""
    in_shorts: bool = False
    """True: AVX2's instruction adds two products to each half of a lane."""
    one_by_one: bool = False
    """True: no instruction adds several products."""


def _form() -> _Form:
    if cpu_has("avx512vnni", "avx512f"):
        return _Form(LANES)
    if cpu_has("avxvnni", "avx2"):
        return _Form(LANES // 2)
    if cpu_has("avx2"):
        return _Form(LANES // 2, in_shorts=True)
    return _Form(LANES, one_by_one=True)


# Rows of the largest tile: integer sums of more would not fit the registers.
MAX_TILE: Final = 8 if cpu_has("avx512f") else 4


def _all(kind: ir.VectorType, number: int) -> ir.Constant:
    return ir.Constant(kind, [number] * kind.count)


def _spread(builder: ir.IRBuilder, four: ir.Value, lanes: int) -> ir.Value:
    """Return a vector of `lanes` copies of an i32."""
    kind = ir.VectorType(I32, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), four, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, _all(kind, 0))


def _halves(builder: ir.IRBuilder, codes: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the lower and the upper four bits of each byte."""
    mask = _all(codes.type, 0x0F0F0F0F)
    upper = builder.lshr(codes, _all(codes.type, 4))
    return builder.and_(codes, mask), builder.and_(upper, mask)


def _e2m1_integers(builder: ir.IRBuilder, codes: ir.Value) -> ir.Value:
    """Return the integers of e2m1 codes, four in each lane."""
    num_bytes = 4 * codes.type.count
    kind = ir.VectorType(ir.IntType(8), num_bytes)
    places = builder.bitcast(codes, kind)
    shuffles = {64: ("avx512bw", "avx512.pshuf.b.512"), 32: ("avx2", "avx2.pshuf.b")}
    feature, name = shuffles[num_bytes]
    if cpu_has(feature):
        table = ir.Constant(kind, [*E2M1_INTEGERS] * (num_bytes // len(E2M1_INTEGERS)))
        integers = call(builder, f"llvm.x86.{name}", kind, [table, places])
    else:
        integers = _all(kind, E2M1_INTEGERS[0])
        for code, integer in enumerate(E2M1_INTEGERS):
            is_code = builder.icmp_unsigned("==", places, _all(kind, code))
            integers = builder.select(is_code, _all(kind, integer), integers)
    return builder.bitcast(integers, codes.type)


def _byte_dot(builder: ir.IRBuilder, total: ir.Value, codes: ir.Value, row: ir.Value) -> ir.Value:
    """Add the products of four unsigned bytes of `codes` and signed bytes of `row` to each lane.

    `total` is i32, or i16 with two lanes for each lane of the others.
    """
    kind = codes.type
    form = _form()
    if form.in_shorts:
        as_bytes = ir.VectorType(ir.IntType(8), 4 * kind.count)
        operands = [builder.bitcast(codes, as_bytes), builder.bitcast(row, as_bytes)]
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", total.type, operands)
        return builder.add(total, pairs)
    if not form.one_by_one:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * kind.count}"
        return call(builder, name, kind, [total, codes, row])
    for byte in range(4):
        code = builder.and_(builder.lshr(codes, _all(kind, 8 * byte)), _all(kind, 255))
        top = builder.shl(row, _all(kind, 24 - 8 * byte))
        number = builder.ashr(top, _all(kind, 24))
        total = builder.add(total, builder.mul(code, number))
    return total


def _weigh(builder: ir.IRBuilder, shorts: ir.Value, weight: int) -> ir.Value:
    """Return the sums i32 of pairs of i16, times `weight`."""
    kind = ir.VectorType(I32, shorts.type.count // 2)
    operands = [shorts, _all(shorts.type, weight)]
    return call(builder, "llvm.x86.avx2.pmadd.wd", kind, operands)


def _sums(
    builder: ir.IRBuilder,
    codes: Sequence[ir.Value],
    rows: Sequence[ir.Value],
    bits: int,
) -> list[list[ir.Value]]:
    """Return the integer sums of one group's products, by row and by address of `codes`.

    A sum in half a lane, of 16 bits, holds a group's products by four bits: at most 16 * 15 * 127.
    So codes of 8 bits are split there into two of 4 bits, with a sum for each, and products by
    e2m1's integers, of up to 24, are added in two sums.
    """
    form = _form()
    kind = ir.VectorType(I32, form.lanes)
    is_split = form.in_shorts and bits in (8, MXFP4_BITS)
    stored = _stored_bits(bits)
    total_kind = ir.VectorType(ir.IntType(16), 2 * form.lanes) if form.in_shorts else kind
    totals = [[[_all(total_kind, 0) for _ in codes] for _ in rows] for _ in range(1 + is_split)]
    for idx in range(GROUP * stored // 32):
        raw = [load(builder, _at(builder, each, 4 * LANES * idx), kind) for each in codes]
        if stored == 4 or is_split:
            halves = list(zip(*(_halves(builder, each) for each in raw), strict=True))
        else:
            halves = [tuple(raw)]
        if bits == MXFP4_BITS:
            halves = [tuple(_e2m1_integers(builder, each) for each in half) for half in halves]
        for half, vectors in enumerate(halves):
            sums = totals[half if is_split else 0]
            place = len(halves) * idx + half if stored == 4 else idx
            for row, numbers in enumerate(rows):
                four = load(builder, _at(builder, numbers, 4 * place), I32)
                inputs = _spread(builder, four, form.lanes)
                for part, vector in enumerate(vectors):
                    sums[row][part] = _byte_dot(builder, sums[row][part], vector, inputs)
    if not form.in_shorts:
        return totals[0]
    weighed = [
        [[_weigh(builder, x, 16**half if bits == 8 else 1) for x in row] for row in each]
        for half, each in enumerate(totals)
    ]
    if not is_split:
        return weighed[0]
    return [
        [builder.add(low, high) for low, high in zip(*pair, strict=True)]
        for pair in zip(*weighed, strict=True)
    ]


def _group_sums(
    builder: ir.IRBuilder, group: ir.Value, rows: Sequence[ir.Value], bits: int
) -> list[ir.Value]:
    """Return the sums i32[LANES] of one group's products, by row."""
    form = _form()
    first = scale_bytes(bits)
    parts = [_at(builder, group, first + 4 * lane) for lane in range(0, LANES, form.lanes)]
    if form.in_shorts and bits in (8, MXFP4_BITS):
        # All sums of both parts would not fit the registers.
        alone = [_sums(builder, [part], rows, bits) for part in parts]
        found = [[part[0] for part in row] for row in zip(*alone, strict=True)]
    else:
        found = _sums(builder, parts, rows, bits)
    if len(parts) == 1:
        return [row[0] for row in found]
    joined = ir.Constant(I32_LANES, list(range(LANES)))
    return [builder.shuffle_vector(*row, joined) for row in found]


def _scales(builder: ir.IRBuilder, group: ir.Value, bits: int) -> tuple[ir.Value, ir.Value]:
    """Return the lows and the steps of a group."""
    if bits == MXFP4_BITS:
        exponents = load(builder, group, ir.VectorType(ir.IntType(8), LANES))
        shifted = builder.shl(builder.zext(exponents, I32_LANES), lanes_of(I32_LANES, 23))
        step = builder.bitcast(shifted, F32_LANES)
        return builder.fmul(step, lanes_of(F32_LANES, -E2M1_ZERO)), step
    if bits == CENTRED_BITS:
        steps = load(builder, group, ir.VectorType(ir.IntType(16), LANES))
        step = even_numbers(builder, builder.zext(steps, I32_LANES))
        return builder.fmul(step, lanes_of(F32_LANES, -CENTRE)), step
    scales = load(builder, group, I32_LANES)
    return even_numbers(builder, scales), odd_numbers(builder, scales)


def _tile_group(
    builder: ir.IRBuilder,
    group: ir.Value,
    rows: Sequence[ir.Value],
    sums: Sequence[ir.Value],
    bits: int,
) -> list[ir.Value]:
    """Add one group's products to `sums`; rows are addresses of the group."""
    low, step = _scales(builder, group, bits)
    totals = _group_sums(builder, group, rows, bits)
    results = []
    for total, old, numbers in zip(totals, sums, rows, strict=True):
        scale = broadcast(builder, load(builder, _at(builder, numbers, GROUP), F32))
        scaled_sum = broadcast(builder, load(builder, _at(builder, numbers, GROUP + 4), F32))
        product = builder.fmul(builder.sitofp(total, F32_LANES), scale)
        results.append(fused(builder, low, scaled_sum, fused(builder, product, step, old)))
    return results


@functools.cache
def dot_tile(num_rows: int, bits: int) -> Callable[..., Any]:
    """Make tile(block, num_groups, rows, out), which multiplies rows by one block.

    All are int64: the address of the block, the number of its groups, the address of num_rows
    addresses of quantised rows, and the address of the products, fp32 [num_rows, LANES].
    """

    def tile(
        builder: ir.IRBuilder,
        block: ir.Value,
        num_groups: ir.Value,
        rows: ir.Value,
        out: ir.Value,
    ) -> None:
        codes = [load(builder, _at(builder, rows, 8 * row), I64) for row in range(num_rows)]

        def add_group(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            group = builder.add(block, builder.mul(index, constant(group_bytes(bits))))
            for line in range(0, group_bytes(bits), LINE_BYTES):
                _prefetch(builder, _at(builder, group, AHEAD_BYTES + line))
            row_at = builder.mul(index, constant(ROW_GROUP_BYTES))
            places = [builder.add(row, row_at) for row in codes]
            return _tile_group(builder, group, places, sums, bits)

        zeros: list[ir.Value] = [lanes_of(F32_LANES, 0.0) for _ in range(num_rows)]
        for row, total in enumerate(count_up(builder, num_groups, zeros, add_group)):
            store(builder, _at(builder, out, SCALE_BYTES * row), total)

    return operation(types.none, [types.int64] * 4, apart=True)(tile)


@operation(types.none, [F32x16, F32x16, types.int64])
def quantise_group(builder: ir.IRBuilder, first: ir.Value, last: ir.Value, group: ir.Value) -> None:
    """Write the codes of 32 numbers and their scales as a row's group.

    The largest magnitude becomes 127. A group with a NaN or an infinity gives NaN.
    """
    magnitude = [
        builder.and_(builder.bitcast(half, I32_LANES), lanes_of(I32_LANES, 0x7FFFFFFF))
        for half in (first, last)
    ]
    # Compared as integers, which have the same order, with NaN above all numbers.
    larger = call(builder, "llvm.umax.v16i32", I32_LANES, magnitude)
    most = call(builder, "llvm.vector.reduce.umax.v16i32", I32, [larger])
    largest = builder.bitcast(most, F32)
    is_quiet = builder.fcmp_ordered("<", largest, ir.Constant(F32, MIN_MAGNITUDE))
    quotient = builder.fdiv(ir.Constant(F32, 127.0), largest)
    inverse = builder.select(is_quiet, ir.Constant(F32, 0.0), quotient)
    total: ir.Value = ir.Constant(I32, 0)
    for idx, half in enumerate((first, last)):
        scaled = builder.fmul(half, broadcast(builder, inverse))
        rounded = call(builder, "llvm.rint.v16f32", F32_LANES, [scaled])
        whole = builder.fptosi(rounded, I32_LANES)
        narrow = builder.trunc(whole, ir.VectorType(ir.IntType(8), LANES))
        store(builder, _at(builder, group, LANES * idx), narrow)
        added = call(builder, "llvm.vector.reduce.add.v16i32", I32, [whole])
        total = builder.add(total, added)
    scale = builder.fmul(largest, ir.Constant(F32, 1 / 127))
    # A number that is not finite, minus itself, is NaN; its codes are meaningless.
    scale = builder.fadd(scale, builder.fsub(scale, scale))
    store(builder, _at(builder, group, GROUP), scale)
    store(builder, _at(builder, group, GROUP + 4), builder.fmul(builder.sitofp(total, F32), scale))


@operation(F32x16, [F32x16, types.float32, types.float32, types.float32])
def to_codes(
    builder: ir.IRBuilder, value: ir.Value, low: ir.Value, inverse: ir.Value, most: ir.Value
) -> ir.Value:
    """Return round((value - low) * inverse), clamped to 0 .. `most`, as floats."""
    moved = builder.fsub(value, broadcast(builder, low))
    scaled = builder.fmul(moved, broadcast(builder, inverse))
    rounded = call(builder, "llvm.rint.v16f32", F32_LANES, [scaled])
    held = call(builder, "llvm.maxnum.v16f32", F32_LANES, [rounded, lanes_of(F32_LANES, 0.0)])
    return call(builder, "llvm.minnum.v16f32", F32_LANES, [held, broadcast(builder, most)])


@operation(types.float32, [types.float32])
def to_bf16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round to the nearest bf16, ties to even."""
    bits = builder.bitcast(value, I32)
    last = builder.and_(builder.lshr(bits, ir.Constant(I32, 16)), ir.Constant(I32, 1))
    up = builder.add(builder.add(bits, ir.Constant(I32, 0x7FFF)), last)
    return builder.bitcast(builder.and_(up, ir.Constant(I32, -65536)), F32)


@operation(types.none, [types.int64, types.int64, types.float32, types.float32])
def write_scales(
    builder: ir.IRBuilder, group: ir.Value, lane: ir.Value, low: ir.Value, step: ir.Value
) -> None:
    """Write the scales of output `lane` in a group of a block; both are bf16 numbers."""
    lower = builder.lshr(builder.bitcast(low, I32), ir.Constant(I32, 16))
    word = builder.or_(lower, builder.bitcast(step, I32))
    store(builder, builder.add(group, builder.mul(lane, constant(4))), word)


def write_codes(bits: int) -> Callable[..., Any]:
    """Make write(group, lane, first, last): 32 codes, given as floats, of output `lane`."""

    def write(
        builder: ir.IRBuilder, group: ir.Value, lane: ir.Value, first: ir.Value, last: ir.Value
    ) -> None:
        words = []
        for half in (first, last):
            narrow = builder.fptoui(half, ir.VectorType(ir.IntType(8), LANES))
            four = builder.bitcast(narrow, ir.VectorType(I32, 4))
            words += [builder.extract_element(four, ir.Constant(I32, idx)) for idx in range(4)]
        if bits == 4:
            pairs = zip(words[::2], words[1::2], strict=True)
            words = [builder.or_(a, builder.shl(b, ir.Constant(I32, 4))) for a, b in pairs]
        place = builder.add(group, builder.mul(lane, constant(4)))
        for idx, word in enumerate(words):
            store(builder, _at(builder, place, SCALE_BYTES + 4 * LANES * idx), word)

    return operation(types.none, [types.int64, types.int64, F32x16, F32x16])(write)

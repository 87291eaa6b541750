"""The inner loops of a search among coded keys, for kernels that numba compiles.

Owns the numbers that such a search compares. The products of a part of a query with the centroids
are a table in fp32; tables that are compared become i16, with one scale (`quantise_table`); a coded
key's score is the sum of the entries that its codes name, and the greatest over query heads
(`look_up`). With AVX512BW an instruction finds 32 entries; the portable form takes one at a time
and gives the same integers. Scores are i16, of whole segments. Used by
`kernels.cpu.compiled.retrieval`, inside compiled functions only.

Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from llvmlite import ir
from numba.core import types

from kernels.contracts import NUM_CENTROIDS, NUM_SUBSPACES, SEGMENT_KEYS
from kernels.cpu.simd.lanes import (
    F32,
    F32_LANES,
    I32,
    I32_LANES,
    I64,
    LANES,
    Emit,
    broadcast,
    call,
    constant,
    count_up,
    cpu_has,
    dot_pairs,
    even_numbers,
    fused,
    lanes_of,
    load,
    odd_numbers,
    operation,
    pointer,
    shuffled,
    store,
)

PART_BYTES: Final = 4 * NUM_CENTROIDS
"""Of a table in fp32: one sub-space."""
TABLE_BYTES: Final = NUM_SUBSPACES * PART_BYTES
KEYS_AT_ONCE: Final = 32
KEYS_OF_MASK: Final = 64
GREATEST: Final = 32000.0
"""The bound of all scores is scaled to it; rounding moves a score by at most 4."""
EXCLUDED: Final = -32768
"""The score of what is no key, or is not searched; no key has it."""

_I8, _I16 = ir.IntType(8), ir.IntType(16)
_VECTOR: Final = 4 * LANES
_SHORTS: Final = ir.VectorType(_I16, KEYS_AT_ONCE)
_MANY_SHORTS: Final = ir.VectorType(_I16, KEYS_OF_MASK)


def _at(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, step: int) -> ir.Value:
    return builder.add(address, builder.mul(index, constant(step)))


def _all(builder: ir.IRBuilder, number: ir.Value, kind: ir.VectorType) -> ir.Value:
    """Return a vector all of whose lanes are the lowest 16 bits of an i64."""
    short = builder.trunc(number, _I16)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), short, ir.Constant(I32, 0))
    places = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(first, first, places)


def dealt(builder: ir.IRBuilder, vectors: Sequence[ir.Value]) -> list[ir.Value]:
    """Return vectors of which number p has the lanes p, p + P, p + 2 P of P vectors in a row."""
    if len(vectors) == 1:
        return list(vectors)
    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    halves = []
    for first in (0, 1):
        picked = list(range(first, 2 * LANES, 2))
        halves.append(dealt(builder, [shuffled(builder, a, b, picked) for a, b in pairs]))
    return [vector for both in zip(*halves, strict=True) for vector in both]


def _transpose(num_pairs: int) -> Callable[..., None]:
    def transpose(builder: ir.IRBuilder, centroids: ir.Value, target: ir.Value) -> None:
        """Write the pairs of numbers of bf16[C, 2 * num_pairs] as pairs [num_pairs, C]."""
        for block in range(NUM_CENTROIDS // LANES):
            places = range(block * num_pairs, (block + 1) * num_pairs)
            rows = [
                load(builder, builder.add(centroids, constant(_VECTOR * place)), I32_LANES)
                for place in places
            ]
            for pair, vector in enumerate(dealt(builder, rows)):
                offset = pair * PART_BYTES + block * _VECTOR
                store(builder, builder.add(target, constant(offset)), vector)

    return operation(types.none, [types.int64] * 2, apart=True)(transpose)


transpose1, transpose2, transpose4, transpose8, transpose16 = (
    _transpose(num_pairs) for num_pairs in (1, 2, 4, 8, 16)
)


def _emit_products(wide: bool) -> Emit:
    def products(
        builder: ir.IRBuilder,
        query: ir.Value,
        transposed: ir.Value,
        num_pairs: ir.Value,
        table: ir.Value,
        peaks: ir.Value,
    ) -> None:
        """Write the products fp32[C] of a part of a query head with transposed centroids.

        Raises the sixteen fp32 at `peaks` to their magnitudes.
        """
        vectors = range(NUM_CENTROIDS // LANES)

        def add_pair(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            place = _at(builder, transposed, index, PART_BYTES)
            pairs = [
                load(builder, builder.add(place, constant(_VECTOR * idx)), I32_LANES)
                for idx in vectors
            ]
            if not wide:
                both = broadcast(builder, load(builder, _at(builder, query, index, 4), I32))
                return [
                    dot_pairs(builder, total, both, pair)
                    for total, pair in zip(totals, pairs, strict=True)
                ]
            numbers = _at(builder, query, index, 8)
            even = broadcast(builder, load(builder, numbers, F32))
            odd = broadcast(builder, load(builder, builder.add(numbers, constant(4)), F32))
            totals = [
                fused(builder, even, even_numbers(builder, pair), total)
                for total, pair in zip(totals, pairs, strict=True)
            ]
            return [
                fused(builder, odd, odd_numbers(builder, pair), total)
                for total, pair in zip(totals, pairs, strict=True)
            ]

        zeros: list[ir.Value] = [lanes_of(F32_LANES, 0.0) for _ in vectors]
        # Compared as integers, which have the same order, with NaN above all numbers.
        peak = load(builder, peaks, I32_LANES)
        for idx, total in enumerate(count_up(builder, num_pairs, zeros, add_pair)):
            store(builder, builder.add(table, constant(_VECTOR * idx)), total)
            bits = builder.bitcast(total, I32_LANES)
            magnitude = builder.and_(bits, lanes_of(I32_LANES, 0x7FFFFFFF))
            peak = call(builder, "llvm.umax.v16i32", I32_LANES, [peak, magnitude])
        store(builder, peaks, peak)

    return products


products_bf16 = operation(types.none, [types.int64] * 5, apart=True)(_emit_products(wide=False))
products_f32 = operation(types.none, [types.int64] * 5, apart=True)(_emit_products(wide=True))


@operation(types.none, [types.int64, types.float32, types.int64], apart=True)
def quantise_table(
    builder: ir.IRBuilder, table: ir.Value, scale: ir.Value, target: ir.Value
) -> None:
    """Write round(table * scale) as i16[M, C]; what is no number becomes any."""
    factor = broadcast(builder, scale)

    def turn(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        number = load(builder, _at(builder, table, index, _VECTOR), F32_LANES)
        scaled = builder.fmul(number, factor)
        rounded = call(builder, "llvm.rint.v16f32", F32_LANES, [scaled])
        least, most = lanes_of(F32_LANES, -GREATEST), lanes_of(F32_LANES, GREATEST)
        held = call(builder, "llvm.maxnum.v16f32", F32_LANES, [rounded, least])
        held = call(builder, "llvm.minnum.v16f32", F32_LANES, [held, most])
        whole = builder.fptosi(held, I32_LANES)
        short = builder.trunc(whole, ir.VectorType(_I16, LANES))
        store(builder, _at(builder, target, index, 2 * LANES), short)
        return []

    count_up(builder, constant(TABLE_BYTES // _VECTOR), [], turn)


@operation(types.none, [types.int64] * 4, apart=True)
def look_up(
    builder: ir.IRBuilder, tables: ir.Value, codes: ir.Value, scores: ir.Value, count: ir.Value
) -> None:
    """Raise the i16 scores of KEYS_AT_ONCE * count keys to their sums of entries of i16[M, C].

    The codes of a sub-space lie SEGMENT_KEYS apart. Sums are saturated.
    """
    if cpu_has("avx512bw"):
        _look_up_vectors(builder, tables, codes, scores, count)
    else:
        keys = builder.mul(count, constant(KEYS_AT_ONCE))
        _look_up_numbers(builder, tables, codes, scores, keys)


def _look_up_vectors(
    builder: ir.IRBuilder, tables: ir.Value, codes: ir.Value, scores: ir.Value, count: ir.Value
) -> None:
    half_bytes = 2 * KEYS_AT_ONCE
    halves = [
        load(builder, builder.add(tables, constant(half_bytes * half)), _SHORTS)
        for half in range(2 * NUM_SUBSPACES)
    ]

    def turn(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        keys = _at(builder, codes, index, KEYS_AT_ONCE)
        found = []
        for part in range(NUM_SUBSPACES):
            place = builder.add(keys, constant(part * SEGMENT_KEYS))
            code = builder.zext(load(builder, place, ir.VectorType(_I8, KEYS_AT_ONCE)), _SHORTS)
            entries = [halves[2 * part], code, halves[2 * part + 1]]
            found.append(call(builder, "llvm.x86.avx512.vpermi2var.hi.512", _SHORTS, entries))
        while len(found) > 1:
            found = [
                call(builder, "llvm.sadd.sat.v32i16", _SHORTS, [a, b])
                for a, b in zip(found[::2], found[1::2], strict=True)
            ]
        place = _at(builder, scores, index, half_bytes)
        both = [load(builder, place, _SHORTS), found[0]]
        store(builder, place, call(builder, "llvm.smax.v32i16", _SHORTS, both))
        return []

    count_up(builder, count, [], turn)


def _look_up_numbers(
    builder: ir.IRBuilder, tables: ir.Value, codes: ir.Value, scores: ir.Value, count: ir.Value
) -> None:
    def turn(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        found = []
        for part in range(NUM_SUBSPACES):
            place = builder.add(builder.add(codes, index), constant(part * SEGMENT_KEYS))
            code = builder.zext(builder.load(pointer(builder, place, _I8), align=1), I64)
            entry = builder.and_(code, constant(NUM_CENTROIDS - 1))
            place = builder.add(tables, constant(2 * NUM_CENTROIDS * part))
            found.append(load(builder, _at(builder, place, entry, 2), _I16))
        while len(found) > 1:
            found = [
                call(builder, "llvm.sadd.sat.i16", _I16, [a, b])
                for a, b in zip(found[::2], found[1::2], strict=True)
            ]
        place = _at(builder, scores, index, 2)
        both = [load(builder, place, _I16), found[0]]
        store(builder, place, call(builder, "llvm.smax.i16", _I16, both))
        return []

    count_up(builder, count, [], turn)


@operation(types.none, [types.int64] * 2, apart=True)
def clear_scores(builder: ir.IRBuilder, scores: ir.Value, count: ir.Value) -> None:
    """Give KEYS_AT_ONCE * count keys the lowest score of a key."""
    lowest = ir.Constant(_SHORTS, [EXCLUDED + 1] * KEYS_AT_ONCE)

    def turn(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        store(builder, _at(builder, scores, index, 2 * KEYS_AT_ONCE), lowest)
        return []

    count_up(builder, count, [], turn)


@operation(types.none, [types.int64])
def exclude(builder: ir.IRBuilder, score: ir.Value) -> None:
    """Write the score of what is not searched."""
    store(builder, score, ir.Constant(_I16, EXCLUDED))


@operation(types.none, [types.int64] * 4, apart=True)
def count_above(
    builder: ir.IRBuilder, scores: ir.Value, count: ir.Value, limit: ir.Value, found: ir.Value
) -> None:
    """Write how many of KEYS_OF_MASK * count scores are above `limit`, an i64."""

    def turn(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        mask = _mask(builder, ">", _at(builder, scores, index, 2 * KEYS_OF_MASK), limit)
        return [builder.add(totals[0], call(builder, "llvm.ctpop.i64", I64, [mask]))]

    (total,) = count_up(builder, count, [constant(0)], turn)
    store(builder, found, total)


@operation(types.int64, [types.int64] * 2)
def above(builder: ir.IRBuilder, scores: ir.Value, limit: ir.Value) -> ir.Value:
    """Return the mask of the KEYS_OF_MASK scores above `limit`."""
    return _mask(builder, ">", scores, limit)


@operation(types.int64, [types.int64] * 2)
def equal(builder: ir.IRBuilder, scores: ir.Value, limit: ir.Value) -> ir.Value:
    """Return the mask of the KEYS_OF_MASK scores that are `limit`."""
    return _mask(builder, "==", scores, limit)


def _mask(builder: ir.IRBuilder, sign: str, scores: ir.Value, limit: ir.Value) -> ir.Value:
    bound = _all(builder, limit, _MANY_SHORTS)
    chosen = builder.icmp_signed(sign, load(builder, scores, _MANY_SHORTS), bound)
    return builder.bitcast(chosen, I64)

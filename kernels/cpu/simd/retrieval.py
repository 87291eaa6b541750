"""The inner loops of a search among coded keys, for kernels that numba compiles.

Owns the numbers that such a search compares. The products of a part of a query with the centroids
are a table in fp32; tables that are compared become i16, with one scale (`quantise_table`); a coded
key's score is the sum of the entries that its codes name, and the greatest over query heads
(`look_up`). Entries are split into bytes: an instruction finds those of a vector among 64
with AVX512-VBMI, and among 16 with AVX2; the portable form takes one entry at a time. All forms
give the same integers. Scores are i16, of whole segments. Used by
`kernels.cpu.compiled.retrieval.search`, inside compiled functions only.

Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

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
KEYS_AT_ONCE: Final = 64
LOW_BITS: Final = 5
"""Of an entry, which is split into bytes: eight times the greatest of the low ones fits a byte."""
GREATEST: Final = 3800.0
"""The bound of all scores is scaled to it. Rounding moves a score by at most 4; then the sum of the
high bytes of eight entries is at least -127."""
EXCLUDED: Final = -32768
"""The score of what is no key, or is not searched; no key has it."""

_I8, _I16 = ir.IntType(8), ir.IntType(16)
_VECTOR: Final = 4 * LANES
_SHORTS: Final = ir.VectorType(_I16, KEYS_AT_ONCE)


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


class _LookUpForm(NamedTuple):
    """How this processor finds entries of tables."""

    num_keys: int
    """Keys of a vector; 1: tables are not split into bytes."""
    has_permutation: bool = False
    """True: an instruction finds entries of 64, else of 16."""


def _form() -> _LookUpForm:
    if cpu_has("avx512vbmi", "avx512bw"):
        return _LookUpForm(64, has_permutation=True)
    if cpu_has("avx512bw"):
        return _LookUpForm(64)
    if cpu_has("avx2"):
        return _LookUpForm(32)
    return _LookUpForm(1)


@operation(types.none, [types.int64, types.float32, types.int64], apart=True)
def quantise_table(
    builder: ir.IRBuilder, table: ir.Value, scale: ir.Value, target: ir.Value
) -> None:
    """Write round(table * scale) for `look_up`; what is no number becomes any.

    Entries that are split have their lowest LOW_BITS in bytes [M, 0, C] and the rest, signed,
    in [M, 1, C]; others are i16[M, C].
    """
    factor = broadcast(builder, scale)
    is_split = _form().num_keys > 1

    def turn(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        number = load(builder, _at(builder, table, index, _VECTOR), F32_LANES)
        scaled = builder.fmul(number, factor)
        rounded = call(builder, "llvm.rint.v16f32", F32_LANES, [scaled])
        least, most = lanes_of(F32_LANES, -GREATEST), lanes_of(F32_LANES, GREATEST)
        held = call(builder, "llvm.maxnum.v16f32", F32_LANES, [rounded, least])
        held = call(builder, "llvm.minnum.v16f32", F32_LANES, [held, most])
        whole = builder.fptosi(held, I32_LANES)
        if not is_split:
            short = builder.trunc(whole, ir.VectorType(_I16, LANES))
            store(builder, _at(builder, target, index, 2 * LANES), short)
            return []
        parts = NUM_CENTROIDS // LANES
        part, within = builder.sdiv(index, constant(parts)), builder.srem(index, constant(parts))
        place = _at(builder, _at(builder, target, part, 2 * NUM_CENTROIDS), within, LANES)
        kind = ir.VectorType(_I8, LANES)
        low = builder.and_(whole, lanes_of(I32_LANES, (1 << LOW_BITS) - 1))
        high = builder.ashr(whole, lanes_of(I32_LANES, LOW_BITS))
        store(builder, place, builder.trunc(low, kind))
        store(builder, builder.add(place, constant(NUM_CENTROIDS)), builder.trunc(high, kind))
        return []

    count_up(builder, constant(TABLE_BYTES // _VECTOR), [], turn)


@operation(types.none, [types.int64] * 4, apart=True)
def look_up(
    builder: ir.IRBuilder, tables: ir.Value, codes: ir.Value, scores: ir.Value, count: ir.Value
) -> None:
    """Raise the i16 scores of KEYS_AT_ONCE * count keys to the sums of their entries.

    The codes of a sub-space lie SEGMENT_KEYS apart.
    """
    form = _form()
    turns = builder.mul(count, constant(KEYS_AT_ONCE // form.num_keys))
    find = _find_number if form.num_keys == 1 else _find_vector

    def turn(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        found = find(builder, tables, _at(builder, codes, index, form.num_keys))
        place = _at(builder, scores, index, 2 * form.num_keys)
        lanes = "" if form.num_keys == 1 else f"v{form.num_keys}"
        before = load(builder, place, found.type)
        greater = call(builder, f"llvm.smax.{lanes}i16", found.type, [before, found])
        store(builder, place, greater)
        return []

    count_up(builder, turns, [], turn)


def _find_vector(builder: ir.IRBuilder, tables: ir.Value, codes: ir.Value) -> ir.Value:
    """Return the sums of a vector of keys; neither sum of bytes overflows."""
    form = _form()
    kind = ir.VectorType(_I8, form.num_keys)
    sums: list[ir.Value] = [ir.Constant(kind, [0] * form.num_keys)] * 2
    for part in range(NUM_SUBSPACES):
        code = load(builder, builder.add(codes, constant(part * SEGMENT_KEYS)), kind)
        for half in range(2):
            offset = (2 * part + half) * NUM_CENTROIDS
            entries = builder.add(tables, constant(offset))
            find = _permute if form.has_permutation else _pick
            sums[half] = builder.add(sums[half], find(builder, entries, code))
    wide = ir.VectorType(_I16, form.num_keys)
    shift = ir.Constant(wide, [LOW_BITS] * form.num_keys)
    high = builder.shl(builder.sext(sums[1], wide), shift)
    return builder.add(builder.zext(sums[0], wide), high)


def _permute(builder: ir.IRBuilder, entries: ir.Value, code: ir.Value) -> ir.Value:
    table = load(builder, entries, code.type)
    return call(builder, "llvm.x86.avx512.permvar.qi.512", code.type, [table, code])


def _pick(builder: ir.IRBuilder, entries: ir.Value, code: ir.Value) -> ir.Value:
    """Find an entry in each quarter by the lowest four bits of a code; two bits choose one."""
    count = code.type.count
    name = "llvm.x86.avx2.pshuf.b" if count == 32 else "llvm.x86.avx512.pshuf.b.512"
    spread = ir.Constant(ir.VectorType(I32, count), [lane % 16 for lane in range(count)])
    found = []
    for quarter in range(4):
        place = builder.add(entries, constant(16 * quarter))
        few = load(builder, place, ir.VectorType(_I8, 16))
        table = builder.shuffle_vector(few, few, spread)
        found.append(call(builder, name, code.type, [table, code]))
    for bit in (16, 32):
        mask = ir.Constant(code.type, [bit] * count)
        is_set = builder.icmp_signed("==", builder.and_(code, mask), mask)
        found = [builder.select(is_set, b, a) for a, b in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def _find_number(builder: ir.IRBuilder, tables: ir.Value, codes: ir.Value) -> ir.Value:
    """Return the sum i16 of one key."""
    total: ir.Value = ir.Constant(_I16, 0)
    for part in range(NUM_SUBSPACES):
        place = builder.add(codes, constant(part * SEGMENT_KEYS))
        code = builder.zext(builder.load(pointer(builder, place, _I8), align=1), I64)
        entry = builder.and_(code, constant(NUM_CENTROIDS - 1))
        place = builder.add(tables, constant(2 * NUM_CENTROIDS * part))
        total = builder.add(total, load(builder, _at(builder, place, entry, 2), _I16))
    return total


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
    """Write how many of KEYS_AT_ONCE * count scores are above `limit`, an i64."""

    def turn(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        mask = _mask(builder, ">", _at(builder, scores, index, 2 * KEYS_AT_ONCE), limit)
        return [builder.add(totals[0], call(builder, "llvm.ctpop.i64", I64, [mask]))]

    (total,) = count_up(builder, count, [constant(0)], turn)
    store(builder, found, total)


@operation(types.int64, [types.int64] * 2)
def above(builder: ir.IRBuilder, scores: ir.Value, limit: ir.Value) -> ir.Value:
    """Return the mask of the KEYS_AT_ONCE scores above `limit`."""
    return _mask(builder, ">", scores, limit)


@operation(types.int64, [types.int64] * 2)
def equal(builder: ir.IRBuilder, scores: ir.Value, limit: ir.Value) -> ir.Value:
    """Return the mask of the KEYS_AT_ONCE scores that are `limit`."""
    return _mask(builder, "==", scores, limit)


def _mask(builder: ir.IRBuilder, sign: str, scores: ir.Value, limit: ir.Value) -> ir.Value:
    bound = _all(builder, limit, _SHORTS)
    chosen = builder.icmp_signed(sign, load(builder, scores, _SHORTS), bound)
    return builder.bitcast(chosen, I64)

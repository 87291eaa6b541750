"""The inner loops of attention, for kernels that numba compiles.

Scores of one query head with up to sixteen keys, and the weighted sum of up to sixteen values
for up to four query heads. A slice is 64 bytes of a head: 32 numbers in bf16, 16 in fp32; the
last slice may be partial. Sums of bf16 slices are kept as two vectors, of the even and of the
odd numbers. Used by `kernels.cpu.compiled.attention.rows`, inside compiled functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from llvmlite import ir
from numba.core import types

from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.lanes import F32x16, operation

SLICE: Final = 64
_VECTOR: Final = 4 * simd.LANES
# Keys whose scores are kept at a time; sixteen more may be written after them.
CHUNK_KEYS: Final = 128
SCORE_PITCH: Final = 4 * (CHUNK_KEYS + simd.LANES)

# Keys multiplied together, whose sums fit the registers with the numbers that they come from.
_KEYS_AT_ONCE: Final = 16 if simd.cpu_has("avx512f") else 4

Load = Callable[[ir.Value], ir.Value]
Turn = Callable[[ir.Value, list[ir.Value]], list[ir.Value]]


def _emit_scores(wide: bool, listed: bool = False) -> simd.Emit:
    def scores(
        builder: ir.IRBuilder,
        query: ir.Value,
        keys: ir.Value,
        stride: ir.Value,
        count: ir.Value,
        num_bytes: ir.Value,
    ) -> ir.Value:
        """Return the dot products of a query with `count` keys, at most 16 that lie `stride` apart.

        If they are `listed`, `stride` is the address of their offsets, i64, from `keys`.
        The lanes from `count` on repeat the last key.
        """
        last = builder.sub(count, simd.constant(1))
        addresses = []
        for lane in range(simd.LANES):
            within = builder.icmp_signed("<", simd.constant(lane), last)
            index = builder.select(within, simd.constant(lane), last)
            offset = head_offset(builder, index, stride, listed)
            addresses.append(builder.add(keys, offset))
        totals: list[ir.Value] = []
        for first in range(0, simd.LANES, _KEYS_AT_ONCE):
            together = addresses[first : first + _KEYS_AT_ONCE]
            totals += _dot_keys(builder, query, together, num_bytes, wide)
        return simd.sum_each(builder, totals)

    return scores


def head_offset(builder: ir.IRBuilder, index: ir.Value, stride: ir.Value, listed: bool) -> ir.Value:
    """Return the offset of a head: index * stride, or the i64 of that index at `stride`."""
    if not listed:
        return builder.mul(index, stride)
    return simd.load(builder, builder.add(stride, builder.mul(index, simd.constant(8))), simd.I64)


def _dot_keys(
    builder: ir.IRBuilder,
    query: ir.Value,
    addresses: Sequence[ir.Value],
    num_bytes: ir.Value,
    wide: bool,
) -> list[ir.Value]:
    """Return, for each key, vectors of sums that add up to its product with the query."""
    kind = simd.F32_LANES if wide else simd.I32_LANES
    multiply = _multiply_wide if wide else simd.dot_pairs

    def slice_of(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        offset = builder.mul(index, simd.constant(SLICE))
        head = simd.load(builder, builder.add(query, offset), kind)
        return [
            multiply(builder, total, head, simd.load(builder, builder.add(address, offset), kind))
            for total, address in zip(totals, addresses, strict=True)
        ]

    zeros = [simd.lanes_of(simd.F32_LANES, 0.0)] * len(addresses)
    num_slices = builder.sdiv(num_bytes, simd.constant(SLICE))
    totals = simd.count_up(builder, num_slices, zeros, slice_of)
    done = builder.mul(num_slices, simd.constant(SLICE))
    rest = builder.sdiv(builder.sub(num_bytes, done), simd.constant(4))

    def tail(_: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
        head = simd.load_first(builder, builder.add(query, done), kind, rest)
        return [
            multiply(
                builder,
                total,
                head,
                simd.load_first(builder, builder.add(address, done), kind, rest),
            )
            for total, address in zip(totals, addresses, strict=True)
        ]

    has_tail = builder.zext(builder.icmp_signed(">", rest, simd.constant(0)), simd.I64)
    return simd.count_up(builder, has_tail, totals, tail)


def _multiply_wide(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    return simd.fused(builder, a, b, total)


_SCORE_OPERANDS = [types.int64] * 5
scores_bf16 = operation(F32x16, _SCORE_OPERANDS, apart=True)(_emit_scores(wide=False))
scores_f32 = operation(F32x16, _SCORE_OPERANDS, apart=True)(_emit_scores(wide=True))
listed_scores_bf16 = operation(F32x16, _SCORE_OPERANDS, apart=True)(
    _emit_scores(wide=False, listed=True)
)
listed_scores_f32 = operation(F32x16, _SCORE_OPERANDS, apart=True)(
    _emit_scores(wide=True, listed=True)
)


def _weigh(heads: int, wide: bool, listed: bool = False) -> Callable[..., None]:
    def weigh(
        builder: ir.IRBuilder,
        sums: ir.Value,
        pitch: ir.Value,
        weights: ir.Value,
        values: ir.Value,
        stride: ir.Value,
        count: ir.Value,
        rest: ir.Value,
    ) -> None:
        """Add the weighted values of `count` keys to one slice of the sums of `heads` heads.

        The sums of heads lie `pitch` bytes apart, their weights SCORE_PITCH. If the values are
        `listed`, `stride` is the address of their offsets, i64. `rest` is the
        number of lanes of the slice that the cache holds (16: all).
        """
        per_slice = 1 if wide else 2
        places = [
            builder.add(
                builder.add(sums, builder.mul(pitch, simd.constant(head))),
                simd.constant(part * _VECTOR),
            )
            for head in range(heads)
            for part in range(per_slice)
        ]
        start = [simd.load(builder, place, simd.F32_LANES) for place in places]
        kind = simd.F32_LANES if wide else simd.I32_LANES

        def add_key(load: Load) -> Turn:
            def body(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
                read = load(builder.add(values, head_offset(builder, index, stride, listed)))
                parts = (
                    [read]
                    if wide
                    else [simd.even_numbers(builder, read), simd.odd_numbers(builder, read)]
                )
                added = []
                for head in range(heads):
                    offset = builder.add(
                        builder.mul(index, simd.constant(4)), simd.constant(head * SCORE_PITCH)
                    )
                    weight = simd.load(builder, builder.add(weights, offset), simd.F32)
                    factor = simd.broadcast(builder, weight)
                    for part, number in enumerate(parts):
                        total = totals[head * per_slice + part]
                        added.append(simd.fused(builder, number, factor, total))
                return added

            return body

        def whole(address: ir.Value) -> ir.Value:
            return simd.load(builder, address, kind)

        def partial(address: ir.Value) -> ir.Value:
            return simd.load_first(builder, address, kind, rest)

        is_whole = builder.icmp_signed(">=", rest, simd.constant(simd.LANES))
        zero = simd.constant(0)
        totals = simd.count_up(
            builder, builder.select(is_whole, count, zero), start, add_key(whole)
        )
        totals = simd.count_up(
            builder, builder.select(is_whole, zero, count), totals, add_key(partial)
        )
        for place, total in zip(places, totals, strict=True):
            simd.store(builder, place, total)

    return operation(types.none, [types.int64] * 7, apart=True)(weigh)


weigh1_bf16, weigh2_bf16, weigh3_bf16, weigh4_bf16 = (_weigh(n, wide=False) for n in (1, 2, 3, 4))
weigh1_f32, weigh4_f32 = _weigh(1, wide=True), _weigh(4, wide=True)
listed_weigh1_bf16, listed_weigh2_bf16, listed_weigh3_bf16, listed_weigh4_bf16 = (
    _weigh(n, wide=False, listed=True) for n in (1, 2, 3, 4)
)
listed_weigh1_f32, listed_weigh4_f32 = (_weigh(n, wide=True, listed=True) for n in (1, 4))

"""The inner loops of attention to latents with AMX, for kernels that numba compiles.

Sixteen query heads share each key, so that scores and sums of values are products of matrices, of
bf16 numbers to fp32 sums, made of tiles: 16 rows of 64 bytes. One factor has its rows as they lie;
the other has pairs of its rows: row i of a tile has of each column the numbers 2 i and 2 i + 1.
Scores are the products of keys, as they lie, and of the queries' pairs; sums those of weights and
of pairs of values. The even and the odd numbers of a slice of values are apart, as in
`kernels.cpu.simd.attention`. A sum depends on its own head and keys only. The caller opens the
tiles (`kernels.cpu.simd.matmul`). Used by `kernels.cpu.compiled.attention.latents`, inside compiled
functions only.
"""

from __future__ import annotations

from typing import Final

from llvmlite import ir
from numba.core import types

from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.attention import SLICE
from kernels.cpu.simd.lanes import operation
from kernels.cpu.simd.matmul import amx, tile_pointer

TILE_BYTES: Final = SLICE * simd.LANES
TILE_KEYS: Final = 32
"""The keys of a tile of weights, and of a tile of values: pairs of them."""
SCORED_GROUPS: Final = 4
"""Groups of 16 keys whose scores are made together."""
SLAB: Final = 2 * SLICE
"""The bytes of a value whose sums are made together."""
SLAB_TILES: Final = 4
_VECTOR: Final = 4 * simd.LANES
_SUM_TILES: Final = range(4)
_LEFT_TILE: Final = 4
_RIGHT_TILES: Final = (5, 6, 7)


def _at(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, num_bytes: int) -> ir.Value:
    """Return address + index * num_bytes."""
    return builder.add(address, builder.mul(index, simd.constant(num_bytes)))


@operation(types.none, [types.int64] * 4, apart=True)
def transpose(
    builder: ir.IRBuilder, source: ir.Value, stride: ir.Value, count: ir.Value, target: ir.Value
) -> None:
    """Write the tile whose row i has lane i of each of `count` vectors, which lie `stride` apart.

    Lanes from `count` on repeat the last vector.
    """
    last = builder.sub(count, simd.constant(1))
    rows = []
    for lane in range(simd.LANES):
        within = builder.icmp_signed("<", simd.constant(lane), last)
        index = builder.select(within, simd.constant(lane), last)
        place = builder.add(source, builder.mul(index, stride))
        rows.append(simd.load(builder, place, simd.I32_LANES))
    width = simd.LANES // 2
    while width:
        # Blocks of `width` lanes off the diagonal change places.
        low = [lane if not lane & width else lane - width + 16 for lane in range(simd.LANES)]
        high = [lane + width if not lane & width else lane + 16 for lane in range(simd.LANES)]
        for first in range(simd.LANES):
            if not first & width:
                pair = rows[first], rows[first + width]
                rows[first] = simd.shuffled(builder, *pair, low)
                rows[first + width] = simd.shuffled(builder, *pair, high)
        width //= 2
    for lane, row in enumerate(rows):
        simd.store(builder, builder.add(target, simd.constant(_VECTOR * lane)), row)


@operation(types.none, [types.int64] * 3, apart=True)
def pair_values(
    builder: ir.IRBuilder, values: ir.Value, stride: ir.Value, target: ir.Value
) -> None:
    """Write a slab of 16 values, which lie `stride` apart, as half of each of SLAB_TILES tiles.

    Tiles are those of the even and of the odd numbers of each slice.
    """
    low, high = (simd.lanes_of(simd.I32_LANES, bits) for bits in (0xFFFF, 0xFFFF0000))
    half = simd.lanes_of(simd.I32_LANES, 16)
    for row in range(simd.LANES // 2):
        for part in range(SLAB // SLICE):
            first, second = (
                simd.load(
                    builder,
                    builder.add(
                        builder.add(values, builder.mul(stride, simd.constant(2 * row + key))),
                        simd.constant(SLICE * part),
                    ),
                    simd.I32_LANES,
                )
                for key in range(2)
            )
            even = builder.or_(builder.and_(first, low), builder.shl(second, half))
            odd = builder.or_(builder.lshr(first, half), builder.and_(second, high))
            for idx, pairs in enumerate((even, odd)):
                offset = (2 * part + idx) * TILE_BYTES + row * _VECTOR
                simd.store(builder, builder.add(target, simd.constant(offset)), pairs)


@operation(types.none, [types.int64] * 5, apart=True)
def score_keys(
    builder: ir.IRBuilder,
    groups: ir.Value,
    stride: ir.Value,
    queries: ir.Value,
    steps: ir.Value,
    scores: ir.Value,
) -> None:
    """Write the products of 16 query heads with SCORED_GROUPS times 16 keys, a vector for each key.

    The groups' addresses lie at `groups`, the keys of one `stride` apart; `queries` are tiles of
    pairs, one for each of `steps` slices of a key.
    """
    keys = [
        simd.load(builder, builder.add(groups, simd.constant(8 * tile)), simd.I64)
        for tile in _SUM_TILES
    ]
    for tile in _SUM_TILES:
        amx(builder, "tilezero", tile)

    def step(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        pairs = tile_pointer(builder, _at(builder, queries, index, TILE_BYTES))
        amx(builder, "tileloadd64", _LEFT_TILE, pairs, simd.constant(_VECTOR))
        for tile in _SUM_TILES:
            place = tile_pointer(builder, _at(builder, keys[tile], index, SLICE))
            own = _RIGHT_TILES[tile % len(_RIGHT_TILES)]
            amx(builder, "tileloadd64", own, place, stride)
            amx(builder, "tdpbf16ps", tile, own, _LEFT_TILE)
        return []

    simd.count_up(builder, steps, [], step)
    for tile in _SUM_TILES:
        place = builder.add(scores, simd.constant(TILE_BYTES * tile))
        amx(builder, "tilestored64", tile, tile_pointer(builder, place), simd.constant(_VECTOR))


@operation(types.none, [types.int64] * 5, apart=True)
def add_values(
    builder: ir.IRBuilder,
    sums: ir.Value,
    pitch: ir.Value,
    weights: ir.Value,
    values: ir.Value,
    count: ir.Value,
) -> None:
    """Add to a slab of the sums of 16 heads, `pitch` apart, their weights times values.

    `count` tiles of weights lie one behind the other, and as many times SLAB_TILES of values.
    """
    places = [
        tile_pointer(builder, builder.add(sums, simd.constant(_VECTOR * tile)))
        for tile in _SUM_TILES
    ]
    for tile in _SUM_TILES:
        amx(builder, "tileloadd64", tile, places[tile], pitch)

    def step(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        own = tile_pointer(builder, _at(builder, weights, index, TILE_BYTES))
        amx(builder, "tileloadd64", _LEFT_TILE, own, simd.constant(_VECTOR))
        some = _at(builder, values, index, SLAB_TILES * TILE_BYTES)
        for tile in _SUM_TILES:
            place = tile_pointer(builder, builder.add(some, simd.constant(TILE_BYTES * tile)))
            pairs = _RIGHT_TILES[tile % len(_RIGHT_TILES)]
            amx(builder, "tileloadd64", pairs, place, simd.constant(_VECTOR))
            amx(builder, "tdpbf16ps", tile, _LEFT_TILE, pairs)
        return []

    simd.count_up(builder, count, [], step)
    for tile in _SUM_TILES:
        amx(builder, "tilestored64", tile, places[tile], pitch)

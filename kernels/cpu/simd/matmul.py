"""The inner loop of products of bf16 rows, for kernels that numba compiles.

Owns the layout of a weight [O, I], which is oneDNN's, so that where oneDNN multiplies bf16, one
copy of the weight serves it and these kernels. Outputs lie in blocks, of 32 with AMX and else of 64
(the `width`, a property of the process). A block holds its inputs in pairs: for each pair the
two numbers of every output. Outputs are padded with zeros to a whole block, inputs to 32.

A task is TASK_OUTPUTS outputs: one block of 64, multiplied with vectors, or two of 32,
multiplied with AMX tiles. Processors without bf16 instructions use `kernels.cpu.simd.widened`.
A row's sum does not depend on the other rows. Used by
`kernels.cpu.compiled.matmul.linear` and `kernels.cpu.compiled.matmul.experts`, by
`kernels.cpu.compiled.attention.prompts`, and what opens tiles by
`kernels.cpu.compiled.attention.latents`, inside compiled functions only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Final

from llvmlite import ir
from numba.core import types

from kernels.cpu.compiled.runtime import inlined
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors
from kernels.cpu.simd.lanes import cpu_has, operation
from kernels.cpu.simd.widened import multiply_widened

TASK_OUTPUTS: Final = 64
TILE_WIDTH: Final = 32
"""The width of a block where oneDNN multiplies with AMX tiles."""
INPUT_MULTIPLE: Final = 32
SUM_BYTES: Final = 4 * TASK_OUTPUTS
"""Size of one row of the fp32 sums of a task."""
ROW_MULTIPLE: Final = 16
"""Sums are written for this many rows at a time, also beyond the last row."""
MAX_EVEN_ROWS: Final = 48
_SYS_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18
_PAIR_BYTES: Final = 4 * TASK_OUTPUTS
_VECTOR: Final = 4 * simd.LANES
# A tile of AMX: 16 rows of 64 bytes. A step multiplies one tile of 16 rows and 32 inputs.
_STEP_PAIRS: Final = 16
_STEP_BYTES: Final = _STEP_PAIRS * 4 * TILE_WIDTH
# Rows are copied in parts of this many steps; the distance of two rows is not a power of two,
# so that they do not compete for the same cache lines.
_STAGED_STEPS: Final = 16
_STAGED_ROW_BYTES: Final = (_STAGED_STEPS + 1) * _VECTOR


def padded(num_in: int) -> int:
    """Return the number of inputs with their padding."""
    return -(-num_in // INPUT_MULTIPLE) * INPUT_MULTIPLE


def can_multiply_blocks(width: int) -> bool:
    """Return whether `multiply` takes blocks of `width` outputs on this processor."""
    if width == TILE_WIDTH:
        return HAS_TILES
    return width == TASK_OUTPUTS and (HAS_DOT_PAIRS or HAS_FMA)


HAS_TILES: Final = cpu_has("amx-tile", "amx-bf16", "avx512f")
HAS_DOT_PAIRS: Final = cpu_has("avx512bf16", "avx512f")
HAS_FMA: Final = cpu_has("avx2", "fma") and not HAS_DOT_PAIRS


@cache
def may_use_tiles() -> bool:
    """Return whether there is AMX and Linux lets this process use it, which must ask for that."""
    if not HAS_TILES:
        return False
    asked = ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA)
    return bool(asked == 0)


def _tile(num_rows: int) -> Callable[..., None]:
    def tile(
        builder: ir.IRBuilder, rows: ir.Value, weight: ir.Value, pairs: ir.Value, sums: ir.Value
    ) -> None:
        """Multiply the rows whose addresses lie at `rows` by `pairs` pairs of a block of 64.

        Writes fp32 sums [num_rows, 64].
        """
        width = TASK_OUTPUTS // simd.LANES
        addresses = [
            simd.load(builder, builder.add(rows, simd.constant(8 * row)), simd.I64)
            for row in range(num_rows)
        ]

        def add_pair(index: ir.Value, totals: list[ir.Value]) -> list[ir.Value]:
            place = builder.add(weight, builder.mul(index, simd.constant(_PAIR_BYTES)))
            numbers = [
                simd.load(
                    builder, builder.add(place, simd.constant(_VECTOR * part)), simd.I32_LANES
                )
                for part in range(width)
            ]
            offset = builder.mul(index, simd.constant(4))
            added = []
            for row, address in enumerate(addresses):
                pair = simd.load(builder, builder.add(address, offset), simd.I32)
                both = simd.broadcast(builder, pair)
                for part, number in enumerate(numbers):
                    total = totals[row * width + part]
                    added.append(simd.dot_pairs(builder, total, both, number))
            return added

        zeros = [simd.lanes_of(simd.F32_LANES, 0.0)] * (num_rows * width)
        for idx, total in enumerate(simd.count_up(builder, pairs, zeros, add_pair)):
            simd.store(builder, builder.add(sums, simd.constant(_VECTOR * idx)), total)

    return operation(types.none, [types.int64] * 4, apart=True)(tile)


tile1, tile2, tile3, tile4, tile6 = (_tile(num_rows) for num_rows in (1, 2, 3, 4, 6))


@inlined
def _multiply_by_vectors(rows: int, num_rows: int, weight: int, pairs: int, sums: int) -> None:
    row = 0
    while row < num_rows:
        left = num_rows - row
        here, place = rows + 8 * row, sums + row * SUM_BYTES
        if left == 6 or left > 8:
            tile6(here, weight, pairs, place)
            row += 6
        elif left == 4 or left > 6:
            tile4(here, weight, pairs, place)
            row += 4
        elif left == 3 or left == 5:
            tile3(here, weight, pairs, place)
            row += 3
        elif left == 2:
            tile2(here, weight, pairs, place)
            row += 2
        else:
            tile1(here, weight, pairs, place)
            row += 1


# AMX. LLVM does not allocate the tile registers: these operations name them. Tiles 0 to 3 hold
# the sums of 16 rows and 64 outputs, 4 the rows, the others the weights.

_ROWS_TILE: Final = 4
_WEIGHT_TILES: Final = (5, 6, 7)


def amx(builder: ir.IRBuilder, name: str, *operands: ir.Value | int) -> None:
    """Call an AMX intrinsic; an int names a tile."""
    values = [ir.Constant(ir.IntType(8), x) if isinstance(x, int) else x for x in operands]
    simd.call(builder, f"llvm.x86.{name}", ir.VoidType(), values)


def tile_pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Return an address as AMX intrinsics take it."""
    return simd.pointer(builder, address, ir.IntType(8))


@operation(types.none, [types.int64])
def open_tiles(builder: ir.IRBuilder, memory: ir.Value) -> None:
    """Configure all tiles to 16 rows of 64 bytes; `memory`: 64 bytes for the settings."""
    settings = bytearray(64)
    settings[0] = 1  # the palette
    for tile in range(8):
        settings[16 + 2 * tile] = 64  # bytes of a row
        settings[48 + tile] = 16  # rows
    kind = ir.VectorType(ir.IntType(8), 64)
    simd.store(builder, memory, ir.Constant(kind, list(settings)))
    amx(builder, "ldtilecfg", tile_pointer(builder, memory))


@operation(types.none, [])
def close_tiles(builder: ir.IRBuilder) -> None:
    """Release the tiles, so that the processor need not save them any more."""
    amx(builder, "tilerelease")


@operation(types.none, [])
def _clear_sums(builder: ir.IRBuilder) -> None:
    for tile in range(4):
        amx(builder, "tilezero", tile)


@operation(types.none, [types.int64] * 5)
def _add_steps(
    builder: ir.IRBuilder,
    rows: ir.Value,
    pitch: ir.Value,
    weight: ir.Value,
    second: ir.Value,
    steps: ir.Value,
) -> None:
    """Add the products of 16 rows, `pitch` bytes apart, and two blocks, of `steps` times 32."""

    def step(index: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        place = builder.add(rows, builder.mul(index, simd.constant(_VECTOR)))
        amx(builder, "tileloadd64", _ROWS_TILE, tile_pointer(builder, place), pitch)
        offset = builder.mul(index, simd.constant(_STEP_BYTES))
        for part in range(4):
            block = builder.add((weight, second)[part // 2], offset)
            numbers = builder.add(block, simd.constant(_VECTOR * (part % 2)))
            tile = _WEIGHT_TILES[part % len(_WEIGHT_TILES)]
            stride = simd.constant(4 * TILE_WIDTH)
            amx(builder, "tileloadd64", tile, tile_pointer(builder, numbers), stride)
            amx(builder, "tdpbf16ps", part, _ROWS_TILE, tile)
        return []

    simd.count_up(builder, steps, [], step)


@operation(types.none, [types.int64])
def _store_sums(builder: ir.IRBuilder, sums: ir.Value) -> None:
    """Write the sums [16, 64]."""
    for tile in range(4):
        place = builder.add(sums, simd.constant(_VECTOR * tile))
        amx(builder, "tilestored64", tile, tile_pointer(builder, place), simd.constant(SUM_BYTES))


_staged_rows = simd.stack(ROW_MULTIPLE * _STAGED_ROW_BYTES)
tile_settings = simd.stack(64)


@inlined
def _multiply_by_tiles(
    rows: int, num_rows: int, weight: int, second: int, pairs: int, sums: int
) -> None:
    staged = _staged_rows()
    open_tiles(tile_settings())
    for first in range(0, num_rows, ROW_MULTIPLE):
        count = min(num_rows - first, ROW_MULTIPLE)
        _clear_sums()
        for begin in range(0, pairs, _STAGED_STEPS * _STEP_PAIRS):
            here = min(pairs - begin, _STAGED_STEPS * _STEP_PAIRS)
            for row in range(count):
                source = simd.read_i64(rows + 8 * (first + row)) + 4 * begin
                target = staged + row * _STAGED_ROW_BYTES
                for pair in range(0, here, simd.LANES):
                    # Padded with zeros after the last input, as in the weight.
                    numbers = vectors.load_first_f32(source + 4 * pair, here - pair)
                    vectors.store_f32(target + 4 * pair, numbers)
            offset = begin * 4 * TILE_WIDTH
            steps = (here + _STEP_PAIRS - 1) // _STEP_PAIRS
            _add_steps(staged, _STAGED_ROW_BYTES, weight + offset, second + offset, steps)
        _store_sums(sums + first * SUM_BYTES)
    close_tiles()


@inlined
def _multiply_by_either(
    rows: int,
    num_rows: int,
    weight: int,
    second: int,
    ahead: int,
    width: int,
    pairs: int,
    num_outputs: int,
    sums: int,
) -> None:
    if width == TILE_WIDTH:
        _multiply_by_tiles(rows, num_rows, weight, second, pairs, sums)
    else:
        _multiply_by_vectors(rows, num_rows, weight, pairs, sums)


@inlined
def _multiply_without_tiles(
    rows: int,
    num_rows: int,
    weight: int,
    second: int,
    ahead: int,
    width: int,
    pairs: int,
    num_outputs: int,
    sums: int,
) -> None:
    _multiply_by_vectors(rows, num_rows, weight, pairs, sums)


@inlined
def _multiply_widened(
    rows: int,
    num_rows: int,
    weight: int,
    second: int,
    ahead: int,
    width: int,
    pairs: int,
    num_outputs: int,
    sums: int,
) -> None:
    multiply_widened(rows, num_rows, weight, ahead, pairs, num_outputs, sums)


def _choose_multiply() -> Callable[[int, int, int, int, int, int, int, int, int], None]:
    if HAS_TILES:
        return _multiply_by_either
    return _multiply_without_tiles if HAS_DOT_PAIRS else _multiply_widened


# Multiplies any number of rows, whose addresses lie at `rows`, by the task at `weight`; `second`
# comes from `second_half`; `ahead` is what this thread will read next, which may be prefetched;
# `width` is that of a block. Writes fp32 sums [num_rows, 64], ROW_MULTIPLE rows at a time; those
# beyond `num_outputs` are arbitrary.
multiply = _choose_multiply()


@inlined
def _multiply_even_by_tiles(
    rows: int,
    pitch: int,
    num_rows: int,
    weight: int,
    second: int,
    num_in: int,
    num_outputs: int,
    sums: int,
) -> None:
    open_tiles(tile_settings())
    for first in range(0, num_rows, ROW_MULTIPLE):
        _clear_sums()
        steps = padded_inputs(num_in) // INPUT_MULTIPLE
        _add_steps(rows + first * pitch, pitch, weight, second, steps)
        _store_sums(sums + first * SUM_BYTES)
    close_tiles()


_even_rows = simd.stack(8 * MAX_EVEN_ROWS)


@inlined
def _multiply_even_by_vectors(
    rows: int,
    pitch: int,
    num_rows: int,
    weight: int,
    second: int,
    num_in: int,
    num_outputs: int,
    sums: int,
) -> None:
    listed = _even_rows()
    for row in range(num_rows):
        simd.write_i64(listed + 8 * row, rows + row * pitch)
    width, pairs = TASK_OUTPUTS, num_in // 2
    multiply(listed, num_rows, weight, second, weight, width, pairs, num_outputs, sums)


# Multiplies at most MAX_EVEN_ROWS rows that lie `pitch` bytes apart, with zeros behind their last
# input as in the weight, in blocks of EVEN_WIDTH; reads ROW_MULTIPLE rows at a time. All else is as
# with `multiply`.
multiply_even = _multiply_even_by_tiles if HAS_TILES else _multiply_even_by_vectors
EVEN_WIDTH: Final = TILE_WIDTH if HAS_TILES else TASK_OUTPUTS


@inlined
def padded_inputs(num_in: int) -> int:
    """Return the number of inputs with their padding, in compiled functions."""
    return (num_in + INPUT_MULTIPLE - 1) // INPUT_MULTIPLE * INPUT_MULTIPLE


@inlined
def task_bytes(num_in: int) -> int:
    """Return the size of a task of a weight with `num_in` inputs; the same for any width."""
    return padded_inputs(num_in) * 2 * TASK_OUTPUTS


@inlined
def second_half(weight: int, num_in: int, num_outputs: int) -> int:
    """Return the address of the second block of 32 of the task at `weight`.

    The weight ends `num_outputs` after the task's begin: if the first block is the last one, it
    is read twice.
    """
    return weight if num_outputs <= TILE_WIDTH else weight + task_bytes(num_in) // 2

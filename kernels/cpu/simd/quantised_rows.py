"""Steps of products of quantised weights, for kernels that numba compiles.

Quantises rows, and multiplies any number of them by a block of outputs. The layouts are those of
`kernels.cpu.simd.integers`. Used by `kernels.cpu.compiled.matmul.quantised` and
`kernels.cpu.compiled.matmul.quantised_experts`, inside compiled functions only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kernels.cpu.compiled.runtime import inlined
from kernels.cpu.simd.integers import (
    CENTRED_BITS,
    GROUP,
    MAX_TILE,
    ROW_GROUP_BYTES,
    SCALE_BYTES,
    dot_tile,
    group_bytes,
    quantise_group,
)
from kernels.cpu.simd.lanes import LANES, stack
from kernels.cpu.simd.vectors import (
    load_bf16,
    load_f32,
    load_first_bf16,
    load_first_f32,
    store_first_bf16,
    store_first_f32,
)
from topspin.plan.precision import MXFP4_BITS

GROUP_BYTES_4: Final = group_bytes(4)
GROUP_BYTES_8: Final = group_bytes(8)
GROUP_BYTES_MXFP4: Final = group_bytes(MXFP4_BITS)
GROUP_BYTES_CENTRED: Final = group_bytes(CENTRED_BITS)
TILE_BYTES: Final = MAX_TILE * SCALE_BYTES
rows_on_stack = stack(8 * MAX_TILE)
"""Addresses of the rows of a tile."""
tile_on_stack = stack(TILE_BYTES)
"""Products fp32 of a tile."""


def _multiplier(bits: int) -> Callable[[int, int, int, int, int], None]:
    """Make multiply() of weights of `bits`."""
    one, two, four, eight = (dot_tile(rows, bits) for rows in (1, 2, 4, 8))

    @inlined
    def multiply_block(weights: int, num_groups: int, rows: int, count: int, out: int) -> None:
        if count == 1:
            one(weights, num_groups, rows, out)
        elif count == 2:
            two(weights, num_groups, rows, out)
        elif count <= 4:
            four(weights, num_groups, rows, out)
        elif MAX_TILE == 8:
            eight(weights, num_groups, rows, out)

    return multiply_block


_multiply_4, _multiply_8 = _multiplier(4), _multiplier(8)
_multiply_mxfp4, _multiply_centred = _multiplier(MXFP4_BITS), _multiplier(CENTRED_BITS)


@inlined
def load_numbers(address: int, is_bf16: int) -> Any:
    """Read LANES numbers as fp32."""
    if is_bf16:
        return load_bf16(address)
    return load_f32(address)


@inlined
def store_numbers(address: int, is_bf16: int, value: Any, count: int) -> None:
    """Write the first `count` of LANES numbers."""
    if is_bf16:
        store_first_bf16(address, value, count)
    else:
        store_first_f32(address, value, count)


@inlined
def quantise_row(source: int, is_bf16: int, num_in: int, out: int) -> None:
    """Write the groups of a row; zeros follow its last number."""
    size = 2 if is_bf16 else 4
    whole = num_in // GROUP
    for group in range(whole):
        at = source + group * GROUP * size
        first, last = load_numbers(at, is_bf16), load_numbers(at + LANES * size, is_bf16)
        quantise_group(first, last, out + group * ROW_GROUP_BYTES)
    left = num_in - whole * GROUP
    if left:
        at = source + whole * GROUP * size
        if is_bf16:
            first, last = load_first_bf16(at, left), load_first_bf16(at + 32, left - LANES)
        else:
            first, last = load_first_f32(at, left), load_first_f32(at + 64, left - LANES)
        quantise_group(first, last, out + whole * ROW_GROUP_BYTES)


@inlined
def block_bytes(num_groups: int, bits: int) -> int:
    """Return the size of a block of LANES outputs."""
    if bits == MXFP4_BITS:
        return num_groups * GROUP_BYTES_MXFP4
    if bits == CENTRED_BITS:
        return num_groups * GROUP_BYTES_CENTRED
    return num_groups * (GROUP_BYTES_4 if bits == 4 else GROUP_BYTES_8)


@inlined
def multiply(weights: int, num_groups: int, bits: int, rows: int, count: int, out: int) -> None:
    """Multiply 1 to MAX_TILE rows by a block; writes fp32 [count, LANES].

    `rows` must have valid addresses up to the next tile size.
    """
    if bits == 4:
        _multiply_4(weights, num_groups, rows, count, out)
    elif bits == MXFP4_BITS:
        _multiply_mxfp4(weights, num_groups, rows, count, out)
    elif bits == CENTRED_BITS:
        _multiply_centred(weights, num_groups, rows, count, out)
    else:
        _multiply_8(weights, num_groups, rows, count, out)

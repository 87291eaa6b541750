"""The compiled kernels of quantised weights: quantising a matrix, and linear.

Owns the order of work inside each kernel and how threads share it; every sum has one order, so
that a row's result depends neither on other rows nor on the number of threads. The layouts are
those of `kernels.cpu.simd.integers`. Knows no tensor: `kernels.cpu.quantised` passes addresses.
Runs through `kernels.cpu.compiled.runtime`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kernels.cpu.compiled.runtime import Kernel, inlined, offsets
from kernels.cpu.simd.integers import (
    GROUP,
    MAX_TILE,
    ROW_GROUP_BYTES,
    SCALE_BYTES,
    to_bf16,
    to_codes,
    write_codes,
    write_scales,
)
from kernels.cpu.simd.lanes import LANES, read_i64, write_i64
from kernels.cpu.simd.quantised_rows import (
    block_bytes,
    load_numbers,
    multiply,
    quantise_row,
    rows_on_stack,
    store_numbers,
    tile_on_stack,
)
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks
from kernels.cpu.simd.vectors import (
    add,
    fma,
    load_f32,
    load_first_bf16,
    load_first_f32,
    max_lanes,
    maximum,
    mul,
    splat,
    sub,
    sum_lanes,
)

# Blocks that a thread claims at a time: consecutive, and enough work for one claim.
LINEAR_BLOCKS: Final = 4
# Candidate ranges, as parts of a group's range around its middle: a narrower range rounds the many
# numbers near the middle more finely and clamps the few at the ends.
NARROWER: Final = (1.0, 0.92, 0.84)
# A smaller step counts as 0: its inverse would overflow.
MIN_STEP: Final = np.float32(1e-30)
ZERO, ONE = np.float32(0.0), np.float32(1.0)

_write_codes_4, _write_codes_8 = write_codes(4), write_codes(8)


# Weights.

W_SOURCE, W_IS_BF16, W_ROWS, W_GROUPS, W_BITS, W_OUT = offsets(6)


@inlined
def _refit(first: Any, last: Any, low: Any, step: Any, most: Any) -> tuple[Any, Any]:
    """Return the least-squares (low, step) for the codes that result from (low, step)."""
    inverse = ONE / step
    a, b = to_codes(first, low, inverse, most), to_codes(last, low, inverse, most)
    mean_code = sum_lanes(add(a, b)) / np.float32(GROUP)
    mean = sum_lanes(add(first, last)) / np.float32(GROUP)
    a, b = sub(a, splat(mean_code)), sub(b, splat(mean_code))
    square = sum_lanes(fma(a, a, mul(b, b)))
    if square == ZERO:
        return low, step
    product = sum_lanes(fma(a, first, mul(b, last)))
    step = to_bf16(product / square)
    return to_bf16(mean - step * mean_code), step


@inlined
def _error(first: Any, last: Any, low: Any, step: Any, most: Any) -> Any:
    """Return the sum of squared errors of (low, step)."""
    inverse = ONE / step
    a = sub(fma(to_codes(first, low, inverse, most), splat(step), splat(low)), first)
    b = sub(fma(to_codes(last, low, inverse, most), splat(step), splat(low)), last)
    return sum_lanes(fma(a, a, mul(b, b)))


@inlined
def _choose_scales(first: Any, last: Any, most: Any) -> tuple[Any, Any]:
    """Return (low, step), bf16 numbers, with a small squared error for 32 numbers."""
    highest = max_lanes(maximum(first, last))
    zeros = splat(ZERO)
    lowest = -max_lanes(maximum(sub(zeros, first), sub(zeros, last)))
    middle, half = (highest + lowest) / np.float32(2), (highest - lowest) / np.float32(2)
    best_low, best_step, best_error = to_bf16(lowest), ZERO, np.float32(np.inf)
    for share in NARROWER:
        low = to_bf16(middle - half * np.float32(share))
        step = to_bf16(half * np.float32(2 * share) / most)
        for _ in range(2):
            # Else all are equal, or nearly: each is `low`.
            if step > MIN_STEP:
                error = _error(first, last, low, step, most)
                if error < best_error:
                    best_low, best_step, best_error = low, step, error
                low, step = _refit(first, last, low, step, most)
    return best_low, best_step


@Kernel
def quantise_weight(block: int) -> None:
    """Quantise a matrix [rows, groups * GROUP]; threads claim blocks of LANES rows."""
    source, is_bf16 = read_i64(block + W_SOURCE), read_i64(block + W_IS_BF16)
    num_rows, num_groups = read_i64(block + W_ROWS), read_i64(block + W_GROUPS)
    bits, out = read_i64(block + W_BITS), read_i64(block + W_OUT)
    size = 2 if is_bf16 else 4
    one_group = block_bytes(1, bits)
    most = np.float32(15.0) if bits == 4 else np.float32(255.0)
    num_tasks = (num_rows + LANES - 1) // LANES
    while True:
        claimed = claim_task(block, 0)
        if claimed >= num_tasks:
            break
        for lane in range(min(LANES, num_rows - claimed * LANES)):
            row = source + (claimed * LANES + lane) * num_groups * GROUP * size
            for group in range(num_groups):
                at = row + group * GROUP * size
                first, last = load_numbers(at, is_bf16), load_numbers(at + LANES * size, is_bf16)
                low, step = _choose_scales(first, last, most)
                inverse = ONE / step if step > MIN_STEP else ZERO
                a, b = to_codes(first, low, inverse, most), to_codes(last, low, inverse, most)
                place = out + (claimed * num_groups + group) * one_group
                write_scales(place, lane, low, step)
                if bits == 4:
                    _write_codes_4(place, lane, a, b)
                else:
                    _write_codes_8(place, lane, a, b)
        finish_task(block, 0)
    wait_for_tasks(block, 0, num_tasks)


# Products.

(L_INPUT, L_STRIDE, L_IS_BF16, L_ROWS, L_INPUTS, L_WEIGHT, L_BITS, L_OUTPUTS) = offsets(8)
(L_BIAS, L_BIAS_IS_BF16, L_OUT, L_OUT_IS_BF16, L_CODES) = offsets(13)[8:]
"""The arguments of `quantised_linear`; the stride is in bytes; L_BIAS 0: no bias."""


@Kernel
def quantised_linear(block: int) -> None:
    """Multiply rows by a weight: threads claim rows to quantise, then blocks of outputs."""
    num_rows, num_in = read_i64(block + L_ROWS), read_i64(block + L_INPUTS)
    is_bf16, source = read_i64(block + L_IS_BF16), read_i64(block + L_INPUT)
    num_groups = (num_in + GROUP - 1) // GROUP
    codes, one_row = read_i64(block + L_CODES), num_groups * ROW_GROUP_BYTES
    while True:
        row = claim_task(block, 0)
        if row >= num_rows:
            break
        at = source + row * read_i64(block + L_STRIDE)
        quantise_row(at, is_bf16, num_in, codes + row * one_row)
        finish_task(block, 0)
    wait_for_tasks(block, 0, num_rows)
    num_blocks = (read_i64(block + L_OUTPUTS) + LANES - 1) // LANES
    num_tasks = (num_blocks + LINEAR_BLOCKS - 1) // LINEAR_BLOCKS
    while True:
        start = claim_task(block, 1) * LINEAR_BLOCKS
        if start >= num_blocks:
            break
        for index in range(start, min(start + LINEAR_BLOCKS, num_blocks)):
            _linear_block(block, index, num_groups, num_rows)
        finish_task(block, 1)
    wait_for_tasks(block, 1, num_tasks)


@inlined
def _linear_block(block: int, index: int, num_groups: int, num_rows: int) -> None:
    """Write LANES outputs of all rows."""
    bits, is_bf16 = read_i64(block + L_BITS), read_i64(block + L_OUT_IS_BF16)
    codes, one_row = read_i64(block + L_CODES), num_groups * ROW_GROUP_BYTES
    out, outputs = read_i64(block + L_OUT), read_i64(block + L_OUTPUTS)
    size = 2 if is_bf16 else 4
    weights = read_i64(block + L_WEIGHT) + index * block_bytes(num_groups, bits)
    rows, products = rows_on_stack(), tile_on_stack()
    begin, left = index * LANES, outputs - index * LANES
    bias, added = read_i64(block + L_BIAS), splat(ZERO)
    if bias and read_i64(block + L_BIAS_IS_BF16):
        added = load_first_bf16(bias + 2 * begin, left)
    elif bias:
        added = load_first_f32(bias + 4 * begin, left)
    for first in range(0, num_rows, MAX_TILE):
        count = min(MAX_TILE, num_rows - first)
        for idx in range(MAX_TILE):
            write_i64(rows + 8 * idx, codes + (first + min(idx, count - 1)) * one_row)
        multiply(weights, num_groups, bits, rows, count, products)
        for row in range(count):
            value = load_f32(products + row * SCALE_BYTES)
            if bias:
                value = add(value, added)
            place = out + ((first + row) * outputs + begin) * size
            store_numbers(place, is_bf16, value, left)

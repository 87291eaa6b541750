"""The compiled kernels of quantised weights: quantising a matrix, linear, and experts' MLPs.

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
    copy_bytes,
    dot_tile,
    group_bytes,
    quantise_group,
    to_bf16,
    to_codes,
    write_codes,
    write_scales,
)
from kernels.cpu.simd.lanes import (
    LANES,
    read_f32,
    read_i32,
    read_i64,
    stack,
    write_i64,
)
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks
from kernels.cpu.simd.vectors import (
    add,
    div,
    exp,
    fma,
    load_bf16,
    load_f32,
    max_lanes,
    maximum,
    mul,
    splat,
    store_bf16,
    store_f32,
    sub,
    sum_lanes,
)

# Blocks that a thread claims at a time: consecutive, and enough work for one claim.
LINEAR_BLOCKS: Final = 4
DOWN_BLOCKS: Final = 4
# Candidate ranges, as parts of a group's range around its middle: a narrower range rounds the many
# numbers near the middle more finely and clamps the few at the ends.
NARROWER: Final = (1.0, 0.92, 0.84)
# A smaller step counts as 0: its inverse would overflow.
MIN_STEP: Final = np.float32(1e-30)
ZERO, ONE = np.float32(0.0), np.float32(1.0)

GROUP_BYTES_4: Final = group_bytes(4)
GROUP_BYTES_8: Final = group_bytes(8)

TILE_BYTES: Final = MAX_TILE * SCALE_BYTES
rows_on_stack = stack(8 * MAX_TILE)
tile_on_stack = stack(TILE_BYTES)
four_tiles_on_stack = stack(4 * TILE_BYTES)

_write_codes_4, _write_codes_8 = write_codes(4), write_codes(8)
_tile_1_4, _tile_2_4, _tile_4_4, _tile_8_4 = (dot_tile(rows, 4) for rows in (1, 2, 4, MAX_TILE))
_tile_1_8, _tile_2_8, _tile_4_8, _tile_8_8 = (dot_tile(rows, 8) for rows in (1, 2, 4, MAX_TILE))


@inlined
def _load(address: int, is_bf16: int) -> Any:
    if is_bf16:
        return load_bf16(address)
    return load_f32(address)


@inlined
def _store(address: int, is_bf16: int, value: Any) -> None:
    if is_bf16:
        store_bf16(address, value)
    else:
        store_f32(address, value)


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
    one_group = GROUP_BYTES_4 if bits == 4 else GROUP_BYTES_8
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
                first, last = _load(at, is_bf16), _load(at + LANES * size, is_bf16)
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


@inlined
def _quantise_row(source: int, is_bf16: int, num_groups: int, out: int) -> None:
    size = 2 if is_bf16 else 4
    for group in range(num_groups):
        at = source + group * GROUP * size
        first, last = _load(at, is_bf16), _load(at + LANES * size, is_bf16)
        quantise_group(first, last, out + group * ROW_GROUP_BYTES)


@inlined
def _tile(weights: int, num_groups: int, bits: int, rows: int, count: int, out: int) -> None:
    """Multiply 1 to MAX_TILE rows; `rows` must have valid addresses up to the next tile size."""
    if bits == 4:
        if count == 1:
            _tile_1_4(weights, num_groups, rows, out)
        elif count == 2:
            _tile_2_4(weights, num_groups, rows, out)
        elif count <= 4:
            _tile_4_4(weights, num_groups, rows, out)
        else:
            _tile_8_4(weights, num_groups, rows, out)
    elif count == 1:
        _tile_1_8(weights, num_groups, rows, out)
    elif count == 2:
        _tile_2_8(weights, num_groups, rows, out)
    elif count <= 4:
        _tile_4_8(weights, num_groups, rows, out)
    else:
        _tile_8_8(weights, num_groups, rows, out)


@inlined
def _name_rows(rows: int, first: int, size: int, count: int) -> None:
    """Write the addresses of `count` consecutive rows, and the last one's up to MAX_TILE."""
    for idx in range(MAX_TILE):
        write_i64(rows + 8 * idx, first + min(idx, count - 1) * size)


(L_INPUT, L_IS_BF16, L_ROWS, L_GROUPS, L_WEIGHT, L_BITS, L_OUTPUTS, L_BIAS) = offsets(8)
(L_OUT, L_OUT_IS_BF16, L_CODES) = offsets(11)[8:]


@Kernel
def quantised_linear(block: int) -> None:
    """Multiply rows by a weight: threads claim rows to quantise, then blocks of outputs."""
    num_rows, num_groups = read_i64(block + L_ROWS), read_i64(block + L_GROUPS)
    is_bf16, source = read_i64(block + L_IS_BF16), read_i64(block + L_INPUT)
    codes, one_row = read_i64(block + L_CODES), num_groups * ROW_GROUP_BYTES
    size = 2 if is_bf16 else 4
    while True:
        row = claim_task(block, 0)
        if row >= num_rows:
            break
        at = source + row * num_groups * GROUP * size
        _quantise_row(at, is_bf16, num_groups, codes + row * one_row)
        finish_task(block, 0)
    wait_for_tasks(block, 0, num_rows)
    bits, outputs = read_i64(block + L_BITS), read_i64(block + L_OUTPUTS)
    num_blocks = (outputs + LANES - 1) // LANES
    num_tasks = (num_blocks + LINEAR_BLOCKS - 1) // LINEAR_BLOCKS
    while True:
        start = claim_task(block, 1) * LINEAR_BLOCKS
        if start >= num_blocks:
            break
        for index in range(start, min(start + LINEAR_BLOCKS, num_blocks)):
            _linear_block(block, index, bits, num_groups, num_rows)
        finish_task(block, 1)
    wait_for_tasks(block, 1, num_tasks)


@inlined
def _linear_block(block: int, index: int, bits: int, num_groups: int, num_rows: int) -> None:
    """Write LANES outputs of all rows."""
    is_bf16, outputs = read_i64(block + L_OUT_IS_BF16), read_i64(block + L_OUTPUTS)
    codes, one_row = read_i64(block + L_CODES), num_groups * ROW_GROUP_BYTES
    bias, out = read_i64(block + L_BIAS), read_i64(block + L_OUT)
    size = 2 if is_bf16 else 4
    one_group = GROUP_BYTES_4 if bits == 4 else GROUP_BYTES_8
    weights = read_i64(block + L_WEIGHT) + index * num_groups * one_group
    rows, products = rows_on_stack(), tile_on_stack()
    width = min(LANES, outputs - index * LANES)
    for first in range(0, num_rows, MAX_TILE):
        count = min(MAX_TILE, num_rows - first)
        _name_rows(rows, codes + first * one_row, one_row, count)
        _tile(weights, num_groups, bits, rows, count, products)
        for row in range(count):
            value = load_f32(products + row * SCALE_BYTES)
            if bias:
                value = add(value, load_f32(bias + index * SCALE_BYTES))
            place = out + ((first + row) * outputs + index * LANES) * size
            if width == LANES:
                _store(place, is_bf16, value)
            else:
                _store(products, is_bf16, value)
                copy_bytes(place, products, width * size)


# Experts.

(E_HIDDEN, E_IS_BF16, E_ROWS, E_CHOICES, E_SLOTS, E_SCALES, E_EXPERTS, E_WEIGHTS) = offsets(8)
(E_BITS, E_GROUPS, E_UNITS, E_WIDTH, E_OUT, E_OUT_IS_BF16, E_SUMS, E_COUNTS) = offsets(16)[8:]
(E_STARTS, E_PAIRS, E_CODES, E_PAIR_CODES) = offsets(20)[16:]


@inlined
def _group_pairs(block: int) -> None:
    """Count the pairs of each expert, and list them by expert, in order of the rows."""
    num_pairs = read_i64(block + E_ROWS) * read_i64(block + E_CHOICES)
    slots, num_experts = read_i64(block + E_SLOTS), read_i64(block + E_EXPERTS)
    counts, starts = read_i64(block + E_COUNTS), read_i64(block + E_STARTS)
    pairs = read_i64(block + E_PAIRS)
    for expert in range(num_experts):
        write_i64(counts + 8 * expert, 0)
    for pair in range(num_pairs):
        slot = read_i32(slots + 4 * pair)
        if slot >= 0:
            write_i64(counts + 8 * slot, read_i64(counts + 8 * slot) + 1)
    total = 0
    for expert in range(num_experts):
        write_i64(starts + 8 * expert, total)
        total += read_i64(counts + 8 * expert)
    for pair in range(num_pairs):
        slot = read_i32(slots + 4 * pair)
        if slot >= 0:
            place = read_i64(starts + 8 * slot)
            write_i64(pairs + 8 * place, pair)
            write_i64(starts + 8 * slot, place + 1)
    for expert in range(num_experts):
        place = starts + 8 * expert
        write_i64(place, read_i64(place) - read_i64(counts + 8 * expert))


@Kernel
def quantised_experts(block: int) -> None:
    """Sum each row's experts: group pairs and quantise rows, gate and up, then down.

    A unit is GROUP hidden units of one expert: two blocks of gates, two of up projections.
    """
    num_rows, num_groups = read_i64(block + E_ROWS), read_i64(block + E_GROUPS)
    hidden, is_bf16 = read_i64(block + E_HIDDEN), read_i64(block + E_IS_BF16)
    codes, size = read_i64(block + E_CODES), 2 if is_bf16 else 4
    while True:
        row = claim_task(block, 0) - 1
        if row >= num_rows:
            break
        if row < 0:
            _group_pairs(block)
        else:
            at = hidden + row * num_groups * GROUP * size
            _quantise_row(at, is_bf16, num_groups, codes + row * num_groups * ROW_GROUP_BYTES)
        finish_task(block, 0)
    wait_for_tasks(block, 0, num_rows + 1)
    units, num_experts = read_i64(block + E_UNITS), read_i64(block + E_EXPERTS)
    counts = read_i64(block + E_COUNTS)
    while True:
        claimed = claim_task(block, 1)
        expert = claimed // units
        if expert >= num_experts:
            break
        if read_i64(counts + 8 * expert):
            _gate_and_up(block, expert, claimed - expert * units)
        finish_task(block, 1)
    wait_for_tasks(block, 1, num_experts * units)
    num_blocks = (read_i64(block + E_WIDTH) + LANES - 1) // LANES
    num_tasks = (num_blocks + DOWN_BLOCKS - 1) // DOWN_BLOCKS
    while True:
        start = claim_task(block, 2) * DOWN_BLOCKS
        if start >= num_blocks:
            break
        _down(block, start, min(start + DOWN_BLOCKS, num_blocks))
        finish_task(block, 2)
    wait_for_tasks(block, 2, num_tasks)


@inlined
def _gate_and_up(block: int, expert: int, unit: int) -> None:
    """Write a unit's activations, quantised, for all pairs of an expert."""
    bits, num_groups = read_i64(block + E_BITS), read_i64(block + E_GROUPS)
    units, choices = read_i64(block + E_UNITS), read_i64(block + E_CHOICES)
    one_block = num_groups * (GROUP_BYTES_4 if bits == 4 else GROUP_BYTES_8)
    gates = read_i64(read_i64(block + E_WEIGHTS) + 16 * expert) + 2 * unit * one_block
    ups = gates + 2 * units * one_block
    pairs = read_i64(block + E_PAIRS) + 8 * read_i64(read_i64(block + E_STARTS) + 8 * expert)
    num_pairs = read_i64(read_i64(block + E_COUNTS) + 8 * expert)
    codes, one_row = read_i64(block + E_CODES), num_groups * ROW_GROUP_BYTES
    results, one_result = read_i64(block + E_PAIR_CODES), units * ROW_GROUP_BYTES
    rows, products = rows_on_stack(), four_tiles_on_stack()
    for first in range(0, num_pairs, MAX_TILE):
        count = min(MAX_TILE, num_pairs - first)
        for idx in range(MAX_TILE):
            pair = read_i64(pairs + 8 * (first + min(idx, count - 1)))
            write_i64(rows + 8 * idx, codes + pair // choices * one_row)
        for half in range(2):
            at = products + 2 * half * TILE_BYTES
            _tile(gates + half * one_block, num_groups, bits, rows, count, at)
            _tile(ups + half * one_block, num_groups, bits, rows, count, at + TILE_BYTES)
        for idx in range(count):
            at = products + idx * SCALE_BYTES
            a = _swiglu(load_f32(at), load_f32(at + TILE_BYTES))
            b = _swiglu(load_f32(at + 2 * TILE_BYTES), load_f32(at + 3 * TILE_BYTES))
            result = results + read_i64(pairs + 8 * (first + idx)) * one_result
            quantise_group(a, b, result + unit * ROW_GROUP_BYTES)


@inlined
def _swiglu(gate: Any, up: Any) -> Any:
    ones = splat(ONE)
    return mul(div(gate, add(ones, exp(sub(splat(ZERO), gate)))), up)


@inlined
def _down(block: int, start: int, end: int) -> None:
    """Write outputs of blocks start..end - 1 of all rows, adding experts in slot order."""
    num_rows, width = read_i64(block + E_ROWS), read_i64(block + E_WIDTH)
    one_sum = (width + LANES - 1) // LANES * SCALE_BYTES
    sums, is_bf16 = read_i64(block + E_SUMS), read_i64(block + E_OUT_IS_BF16)
    zeros = splat(ZERO)
    for row in range(num_rows):
        for index in range(start, end):
            store_f32(sums + row * one_sum + index * SCALE_BYTES, zeros)
    counts = read_i64(block + E_COUNTS)
    for expert in range(read_i64(block + E_EXPERTS)):
        if read_i64(counts + 8 * expert):
            _add_expert(block, expert, start, end)
    out, size = read_i64(block + E_OUT), 2 if is_bf16 else 4
    spare = tile_on_stack()
    for row in range(num_rows):
        for index in range(start, end):
            value = load_f32(sums + row * one_sum + index * SCALE_BYTES)
            place = out + (row * width + index * LANES) * size
            if (index + 1) * LANES <= width:
                _store(place, is_bf16, value)
            else:
                _store(spare, is_bf16, value)
                copy_bytes(place, spare, (width - index * LANES) * size)


@inlined
def _add_expert(block: int, expert: int, start: int, end: int) -> None:
    """Add an expert's weighted outputs of blocks start..end - 1 to its rows' sums."""
    bits, units = read_i64(block + E_BITS), read_i64(block + E_UNITS)
    choices, width = read_i64(block + E_CHOICES), read_i64(block + E_WIDTH)
    one_block = units * (GROUP_BYTES_4 if bits == 4 else GROUP_BYTES_8)
    weights = read_i64(read_i64(block + E_WEIGHTS) + 16 * expert + 8)
    pairs = read_i64(block + E_PAIRS) + 8 * read_i64(read_i64(block + E_STARTS) + 8 * expert)
    num_pairs = read_i64(read_i64(block + E_COUNTS) + 8 * expert)
    codes, one_row = read_i64(block + E_PAIR_CODES), units * ROW_GROUP_BYTES
    sums, one_sum = read_i64(block + E_SUMS), (width + LANES - 1) // LANES * SCALE_BYTES
    scales, rows, products = read_i64(block + E_SCALES), rows_on_stack(), tile_on_stack()
    for index in range(start, end):
        for first in range(0, num_pairs, MAX_TILE):
            count = min(MAX_TILE, num_pairs - first)
            for idx in range(MAX_TILE):
                pair = read_i64(pairs + 8 * (first + min(idx, count - 1)))
                write_i64(rows + 8 * idx, codes + pair * one_row)
            _tile(weights + index * one_block, units, bits, rows, count, products)
            for idx in range(count):
                pair = read_i64(pairs + 8 * (first + idx))
                place = sums + pair // choices * one_sum + index * SCALE_BYTES
                scale = splat(read_f32(scales + 4 * pair))
                value = fma(load_f32(products + idx * SCALE_BYTES), scale, load_f32(place))
                store_f32(place, value)

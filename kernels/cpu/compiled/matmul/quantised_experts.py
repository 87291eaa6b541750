"""The compiled kernel of experts with quantised weights.

Owns the order of its work and how threads share it; a row's experts are added in the order of
their slots, so that its result depends neither on other rows nor on the number of threads. The
layouts are those of `kernels.cpu.simd.integers` and `kernels.cpu.quantised.QuantisedExperts`.
Knows no tensor: `kernels.cpu.quantised` passes addresses. Runs through
`kernels.cpu.compiled.runtime`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kernels.cpu.compiled.matmul.units import (
    DOWN_BIAS,
    GATE_UP_BIAS,
    IS_SWIGLU,
    add_bias,
    clamped_units,
)
from kernels.cpu.compiled.runtime import Kernel, inlined, offsets
from kernels.cpu.simd.integers import (
    GROUP,
    MAX_TILE,
    ROW_GROUP_BYTES,
    SCALE_BYTES,
    quantise_group,
)
from kernels.cpu.simd.lanes import LANES, read_f32, read_i32, read_i64, stack, write_i64
from kernels.cpu.simd.quantised_rows import (
    TILE_BYTES,
    block_bytes,
    multiply,
    quantise_row,
    rows_on_stack,
    store_numbers,
    tile_on_stack,
)
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks
from kernels.cpu.simd.vectors import add, div, exp, fma, load_f32, mul, splat, store_f32, sub

# Blocks of down projections that a thread claims at a time: consecutive.
DOWN_BLOCKS: Final = 4
UNIT_BLOCKS: Final = 2 * GROUP // LANES
"""A unit is GROUP hidden units of one expert: blocks of gates, then of up projections."""
ZERO, ONE = np.float32(0.0), np.float32(1.0)

four_tiles_on_stack = stack(UNIT_BLOCKS * TILE_BYTES)

(E_HIDDEN, E_STRIDE, E_IS_BF16, E_ROWS, E_CHOICES, E_SLOTS, E_SCALES, E_EXPERTS) = offsets(8)
(E_TABLE, E_UNITS, E_WIDTH, E_OUT, E_OUT_IS_BF16, E_SUMS, E_COUNTS, E_STARTS) = offsets(16)[8:]
(E_USED, E_PAIRS, E_CODES, E_PAIR_CODES, E_FFN_SIZE, E_FORM) = offsets(22)[16:]
"""The arguments of `quantised_experts`; E_USED has room for a number and all experts, E_FORM is
the first word of the experts' form: the last arguments, of `quantised_formed_experts` only."""
T_GATE_UP, T_GATE_UP_BITS, T_DOWN, T_DOWN_BITS, T_ROW = range(0, 40, 8)
"""The words of an expert in E_TABLE: the addresses of its weights, each with its bits."""


@inlined
def _group_pairs(block: int) -> None:
    """Count the pairs of each expert, and list them by expert, in order of the rows."""
    num_pairs = read_i64(block + E_ROWS) * read_i64(block + E_CHOICES)
    slots, num_experts = read_i64(block + E_SLOTS), read_i64(block + E_EXPERTS)
    counts, starts = read_i64(block + E_COUNTS), read_i64(block + E_STARTS)
    pairs, used = read_i64(block + E_PAIRS), read_i64(block + E_USED)
    for expert in range(num_experts):
        write_i64(counts + 8 * expert, 0)
    for pair in range(num_pairs):
        slot = read_i32(slots + 4 * pair)
        if slot >= 0:
            write_i64(counts + 8 * slot, read_i64(counts + 8 * slot) + 1)
    total, num_used = 0, 0
    for expert in range(num_experts):
        write_i64(starts + 8 * expert, total)
        count = read_i64(counts + 8 * expert)
        total += count
        if count:
            num_used += 1
            write_i64(used + 8 * num_used, expert)
    write_i64(used, num_used)
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
    """Sum each row's experts without biases and with SwiGLU."""
    _sum_experts(block, 0)


@Kernel
def quantised_formed_experts(block: int) -> None:
    """Sum each row's experts of any form."""
    _sum_experts(block, block + E_FORM)


@inlined
def _sum_experts(block: int, form: int) -> None:
    """Group pairs and quantise rows, gate and up, then down; `form` 0: see the kernels."""
    num_rows, width = read_i64(block + E_ROWS), read_i64(block + E_WIDTH)
    hidden, is_bf16 = read_i64(block + E_HIDDEN), read_i64(block + E_IS_BF16)
    one_row = (width + GROUP - 1) // GROUP * ROW_GROUP_BYTES
    while True:
        row = claim_task(block, 0) - 1
        if row >= num_rows:
            break
        if row < 0:
            _group_pairs(block)
        else:
            at = hidden + row * read_i64(block + E_STRIDE)
            quantise_row(at, is_bf16, width, read_i64(block + E_CODES) + row * one_row)
        finish_task(block, 0)
    wait_for_tasks(block, 0, num_rows + 1)
    used, units = read_i64(block + E_USED), read_i64(block + E_UNITS)
    num_tasks = read_i64(used) * units
    while True:
        claimed = claim_task(block, 1)
        if claimed >= num_tasks:
            break
        place = claimed // units
        _gate_and_up(block, read_i64(used + 8 + 8 * place), claimed - place * units, form)
        finish_task(block, 1)
    wait_for_tasks(block, 1, num_tasks)
    num_blocks = (width + LANES - 1) // LANES
    num_tasks = (num_blocks + DOWN_BLOCKS - 1) // DOWN_BLOCKS
    while True:
        start = claim_task(block, 2) * DOWN_BLOCKS
        if start >= num_blocks:
            break
        _down(block, start, min(start + DOWN_BLOCKS, num_blocks), form)
        finish_task(block, 2)
    wait_for_tasks(block, 2, num_tasks)


@inlined
def _gate_and_up(block: int, expert: int, unit: int, form: int) -> None:
    """Write a unit's activations, quantised, for all pairs of an expert."""
    entry = read_i64(block + E_TABLE) + expert * T_ROW
    bits, choices = read_i64(entry + T_GATE_UP_BITS), read_i64(block + E_CHOICES)
    num_groups = (read_i64(block + E_WIDTH) + GROUP - 1) // GROUP
    one_block = block_bytes(num_groups, bits)
    weights = read_i64(entry + T_GATE_UP) + unit * UNIT_BLOCKS * one_block
    pairs = read_i64(block + E_PAIRS) + 8 * read_i64(read_i64(block + E_STARTS) + 8 * expert)
    num_pairs = read_i64(read_i64(block + E_COUNTS) + 8 * expert)
    codes, one_row = read_i64(block + E_CODES), num_groups * ROW_GROUP_BYTES
    results = read_i64(block + E_PAIR_CODES) + unit * ROW_GROUP_BYTES
    one_result = read_i64(block + E_UNITS) * ROW_GROUP_BYTES
    rows, products = rows_on_stack(), four_tiles_on_stack()
    bias = read_i64(form + GATE_UP_BIAS) if form else 0
    is_swiglu = read_i64(form + IS_SWIGLU) if form else 1
    ffn_size = read_i64(block + E_FFN_SIZE)
    gate_bias = bias + 4 * (2 * expert * ffn_size + unit * GROUP)
    left = ffn_size - unit * GROUP
    for first in range(0, num_pairs, MAX_TILE):
        count = min(MAX_TILE, num_pairs - first)
        for idx in range(MAX_TILE):
            pair = read_i64(pairs + 8 * (first + min(idx, count - 1)))
            write_i64(rows + 8 * idx, codes + pair // choices * one_row)
        for part in range(UNIT_BLOCKS):
            place = weights + part * one_block
            multiply(place, num_groups, bits, rows, count, products + part * TILE_BYTES)
        if bias:
            for part in range(UNIT_BLOCKS):
                # Two blocks of gates, then two of ups.
                first_column = part % 2 * LANES
                place = gate_bias + 4 * (part // 2 * ffn_size + first_column)
                tile = products + part * TILE_BYTES
                add_bias(tile, SCALE_BYTES, count, place, left - first_column, LANES)
        if not is_swiglu:
            for idx in range(count):
                at = products + idx * SCALE_BYTES
                a = clamped_units(form, load_f32(at), load_f32(at + 2 * TILE_BYTES))
                b = clamped_units(form, load_f32(at + TILE_BYTES), load_f32(at + 3 * TILE_BYTES))
                pair = read_i64(pairs + 8 * (first + idx))
                quantise_group(a, b, results + pair * one_result)
            continue
        for idx in range(count):
            at = products + idx * SCALE_BYTES
            a = _swiglu(load_f32(at), load_f32(at + 2 * TILE_BYTES))
            b = _swiglu(load_f32(at + TILE_BYTES), load_f32(at + 3 * TILE_BYTES))
            pair = read_i64(pairs + 8 * (first + idx))
            quantise_group(a, b, results + pair * one_result)


@inlined
def _swiglu(gate: Any, up: Any) -> Any:
    ones = splat(ONE)
    return mul(div(gate, add(ones, exp(sub(splat(ZERO), gate)))), up)


@inlined
def _down(block: int, start: int, end: int, form: int) -> None:
    """Write outputs of blocks start..end - 1 of all rows, adding experts in slot order."""
    num_rows, width = read_i64(block + E_ROWS), read_i64(block + E_WIDTH)
    one_sum = (width + LANES - 1) // LANES * SCALE_BYTES
    sums, is_bf16 = read_i64(block + E_SUMS), read_i64(block + E_OUT_IS_BF16)
    zeros = splat(ZERO)
    for row in range(num_rows):
        for index in range(start, end):
            store_f32(sums + row * one_sum + index * SCALE_BYTES, zeros)
    used = read_i64(block + E_USED)
    for place in range(read_i64(used)):
        _add_expert(block, read_i64(used + 8 + 8 * place), start, end, form)
    out, size = read_i64(block + E_OUT), 2 if is_bf16 else 4
    for row in range(num_rows):
        for index in range(start, end):
            value = load_f32(sums + row * one_sum + index * SCALE_BYTES)
            place = out + (row * width + index * LANES) * size
            store_numbers(place, is_bf16, value, width - index * LANES)


@inlined
def _add_expert(block: int, expert: int, start: int, end: int, form: int) -> None:
    """Add an expert's weighted outputs of blocks start..end - 1 to its rows' sums."""
    entry = read_i64(block + E_TABLE) + expert * T_ROW
    bits, units = read_i64(entry + T_DOWN_BITS), read_i64(block + E_UNITS)
    choices, width = read_i64(block + E_CHOICES), read_i64(block + E_WIDTH)
    one_block = block_bytes(units, bits)
    weights = read_i64(entry + T_DOWN)
    pairs = read_i64(block + E_PAIRS) + 8 * read_i64(read_i64(block + E_STARTS) + 8 * expert)
    num_pairs = read_i64(read_i64(block + E_COUNTS) + 8 * expert)
    codes, one_row = read_i64(block + E_PAIR_CODES), units * ROW_GROUP_BYTES
    sums, one_sum = read_i64(block + E_SUMS), (width + LANES - 1) // LANES * SCALE_BYTES
    scales, rows, products = read_i64(block + E_SCALES), rows_on_stack(), tile_on_stack()
    bias = read_i64(form + DOWN_BIAS) if form else 0
    for index in range(start, end):
        for first in range(0, num_pairs, MAX_TILE):
            count = min(MAX_TILE, num_pairs - first)
            for idx in range(MAX_TILE):
                pair = read_i64(pairs + 8 * (first + min(idx, count - 1)))
                write_i64(rows + 8 * idx, codes + pair * one_row)
            multiply(weights + index * one_block, units, bits, rows, count, products)
            if bias:
                column = index * LANES
                place = bias + 4 * (expert * width + column)
                add_bias(products, SCALE_BYTES, count, place, width - column, LANES)
            for idx in range(count):
                pair = read_i64(pairs + 8 * (first + idx))
                place = sums + pair // choices * one_sum + index * SCALE_BYTES
                scale = splat(read_f32(scales + 4 * pair))
                value = fma(load_f32(products + idx * SCALE_BYTES), scale, load_f32(place))
                store_f32(place, value)

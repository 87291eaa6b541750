"""Moves and sums of rows, compiled: torch's own operations in a recorded step.

Copies of chosen rows, look-ups of expert slots, sums and bounds in place, which
`kernels.cpu.recorder` puts into programs in the place of torch's; activations, gates and counts,
for `kernels.cpu.ops`. Rounded as torch rounds. Knows no layer.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.compiled.runtime import Kernel, inlined, launch, offsets
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

# Numbers that one task adds; fewer are computed faster than a second thread wakes.
CHUNK: Final = 4096

SOURCE, ROW_BYTES, INDICES, NUM_ROWS, OUT = offsets(5)
"""The arguments of `copy_rows`; row i of OUT is row INDICES[i] (i64) of SOURCE."""

TOTAL, TOTAL_IS_BF16, TERM, TERM_IS_BF16, COUNT, REPLACES = offsets(6)
"""The arguments of `add_numbers`: COUNT numbers of TERM are added to those of TOTAL, or replace
them."""

TABLE, NUM_TABLES, NUM_COLUMNS, COLUMNS, NUM_LOOKED_UP, FOUND = offsets(6)
"""The arguments of `look_up`: row n of FOUND i32 has COLUMNS i64 of row n of TABLE i32."""

TOTALS, COUNTS, NUM_COUNTS = offsets(3)
"""The arguments of `add_expert_counts`, both i64; TOTALS has two more."""

NUMBERS, NUM_NUMBERS, LOWEST, GREATEST = offsets(4)
"""The arguments of `clip_numbers`: bf16, and the bounds in fp32."""

GATED, GATED_STRIDE, GATES, GATES_STRIDE, NUM_GATED, GATED_WIDTH = offsets(6)
"""The arguments of `scale_rows`; strides in bytes, numbers in bf16."""

GATE, UP, STRIDE, UNITS, UNIT_STRIDE, NUM_UNITS, NUM_UNIT_ROWS = offsets(7)
"""The arguments of `swiglu_rows`; strides in bytes, numbers in bf16."""


@inlined
def _copy_numbers(source: int, target: int, num_bytes: int) -> None:
    """Copy a multiple of two bytes."""
    whole = num_bytes // 64 * 64
    for at in range(0, whole, 64):
        vectors.store_f32(target + at, vectors.load_f32(source + at))
    for at in range(whole, num_bytes, 32):
        left = (num_bytes - at) // 2
        vectors.store_first_bf16(target + at, vectors.load_first_bf16(source + at, left), left)


@Kernel
def copy_rows(block: int) -> None:
    """Copy chosen rows; a task is a row."""
    num_rows, row_bytes = simd.read_i64(block + NUM_ROWS), simd.read_i64(block + ROW_BYTES)
    row = claim_task(block, 0)
    while row < num_rows:
        index = simd.read_i64(simd.read_i64(block + INDICES) + 8 * row)
        source = simd.read_i64(block + SOURCE) + index * row_bytes
        _copy_numbers(source, simd.read_i64(block + OUT) + row * row_bytes, row_bytes)
        finish_task(block, 0)
        row = claim_task(block, 0)
    wait_for_tasks(block, 0, num_rows)


@Kernel
def add_numbers(block: int) -> None:
    """Add numbers in place; a task is a chunk of them."""
    count = simd.read_i64(block + COUNT)
    total, term = simd.read_i64(block + TOTAL), simd.read_i64(block + TERM)
    is_bf16, replaces = simd.read_i64(block + TOTAL_IS_BF16), simd.read_i64(block + REPLACES)
    term_is_bf16 = simd.read_i64(block + TERM_IS_BF16)
    num_tasks = (count + CHUNK - 1) // CHUNK
    task = claim_task(block, 0)
    while task < num_tasks:
        for begin in range(task * CHUNK, min((task + 1) * CHUNK, count), simd.LANES):
            left = count - begin
            if term_is_bf16:
                added = vectors.load_first_bf16(term + 2 * begin, left)
            else:
                added = vectors.load_first_f32(term + 4 * begin, left)
            if is_bf16:
                if not replaces:
                    old = vectors.load_first_bf16(total + 2 * begin, left)
                    added = vectors.add(old, added)
                vectors.store_first_bf16(total + 2 * begin, added, left)
            else:
                if not replaces:
                    old = vectors.load_first_f32(total + 4 * begin, left)
                    added = vectors.add(old, added)
                vectors.store_first_f32(total + 4 * begin, added, left)
        finish_task(block, 0)
        task = claim_task(block, 0)
    wait_for_tasks(block, 0, num_tasks)


@Kernel
def look_up(block: int) -> None:
    """Take columns of a table of i32; one task."""
    if claim_task(block, 0) == 0:
        width, count = simd.read_i64(block + NUM_COLUMNS), simd.read_i64(block + NUM_LOOKED_UP)
        for row in range(simd.read_i64(block + NUM_TABLES)):
            table = simd.read_i64(block + TABLE) + 4 * row * width
            found = simd.read_i64(block + FOUND) + 4 * row * count
            for idx in range(count):
                column = simd.read_i64(simd.read_i64(block + COLUMNS) + 8 * idx)
                simd.write_i32(found + 4 * idx, simd.read_i32(table + 4 * column))
        finish_task(block, 0)
    wait_for_tasks(block, 0, 1)


def add_counts(totals: Tensor, counts: Tensor) -> None:
    """Add counts i64[E] to totals i64[E + 2]; see `kernels.reference.add_counts`."""
    launch(add_expert_counts, (totals.data_ptr(), counts.data_ptr(), counts.numel()), num_threads=1)


@Kernel
def add_expert_counts(block: int) -> None:
    """Add i64 to i64, and count what was added to; one task."""
    if claim_task(block, 0) == 0:
        totals, counts = simd.read_i64(block + TOTALS), simd.read_i64(block + COUNTS)
        end = 8 * simd.read_i64(block + NUM_COUNTS)
        woken = 0
        for at in range(0, end, 8):
            count = simd.read_i64(counts + at)
            simd.write_i64(totals + at, simd.read_i64(totals + at) + count)
            woken += count != 0
        simd.write_i64(totals + end, simd.read_i64(totals + end) + woken)
        simd.write_i64(totals + end + 8, simd.read_i64(totals + end + 8) + (woken != 0))
        finish_task(block, 0)
    wait_for_tasks(block, 0, 1)


@Kernel
def clip_numbers(block: int) -> None:
    """Bound numbers in place, NaN stays NaN; a task is a chunk of them."""
    count, numbers = simd.read_i64(block + NUM_NUMBERS), simd.read_i64(block + NUMBERS)
    # The lesser of x and y is -max(-x, -y).
    minus = vectors.splat(np.float32(-1))
    highest = vectors.splat(-simd.read_f32(block + GREATEST))
    lowest = vectors.splat(simd.read_f32(block + LOWEST))
    num_tasks = (count + CHUNK - 1) // CHUNK
    task = claim_task(block, 0)
    while task < num_tasks:
        for begin in range(task * CHUNK, min((task + 1) * CHUNK, count), simd.LANES):
            number = vectors.load_first_bf16(numbers + 2 * begin, count - begin)
            bounded = vectors.maximum(vectors.mul(number, minus), highest)
            bounded = vectors.maximum(vectors.mul(bounded, minus), lowest)
            vectors.store_first_bf16(numbers + 2 * begin, bounded, count - begin)
        finish_task(block, 0)
        task = claim_task(block, 0)
    wait_for_tasks(block, 0, num_tasks)


def can_gate(x: Tensor, gate: Tensor) -> bool:
    """Return whether `gate_rows` takes these."""
    return (
        x.dtype == gate.dtype == torch.bfloat16
        and x.dim() == 2
        and x.stride(1) == 1
        and gate.shape == (len(x), 1)
    )


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x [R, H] by sigmoid(gate [R, 1]) in place; see `kernels.reference.sigmoid_gate`."""
    num_rows, width = x.shape
    arguments = (
        *(x.data_ptr(), 2 * x.stride(0)),
        *(gate.data_ptr(), 2 * gate.stride(0)),
        num_rows,
        width,
    )
    num_threads = torch.get_num_threads() if x.numel() >= 2 * CHUNK else 1
    launch(scale_rows, arguments, num_threads=num_threads)
    return x


@Kernel
def scale_rows(block: int) -> None:
    """Multiply rows by the sigmoids of their gates, rounded to bf16; a task is a row."""
    width, num_rows = simd.read_i64(block + GATED_WIDTH), simd.read_i64(block + NUM_GATED)
    zeros, ones = vectors.splat(np.float32(0)), vectors.splat(np.float32(1))
    row = claim_task(block, 0)
    while row < num_rows:
        numbers = simd.read_i64(block + GATED) + row * simd.read_i64(block + GATED_STRIDE)
        gates = simd.read_i64(block + GATES) + row * simd.read_i64(block + GATES_STRIDE)
        gate = vectors.splat(simd.read_bf16(gates))
        decay = vectors.exp(vectors.sub(zeros, gate))
        scale = vectors.round_bf16(vectors.div(ones, vectors.add(ones, decay)))
        for begin in range(0, width, simd.LANES):
            left = width - begin
            number = vectors.load_first_bf16(numbers + 2 * begin, left)
            vectors.store_first_bf16(numbers + 2 * begin, vectors.mul(number, scale), left)
        finish_task(block, 0)
        row = claim_task(block, 0)
    wait_for_tasks(block, 0, num_rows)


def can_activate(gate_up: Tensor) -> bool:
    """Return whether `activate` takes these rows."""
    return (
        gate_up.dtype == torch.bfloat16
        and gate_up.dim() == 2
        and gate_up.is_contiguous()
        and gate_up.shape[1] % 2 == 0
    )


def activate(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [R, F] of gate_up [R, 2F]; see `kernels.reference.swiglu`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=torch.bfloat16)
    arguments = (
        gate_up.data_ptr(),
        gate_up.data_ptr() + 2 * width,
        4 * width,
        out.data_ptr(),
        2 * width,
        width,
        num_rows,
    )
    num_threads = torch.get_num_threads() if out.numel() >= 2 * CHUNK else 1
    launch(swiglu_rows, arguments, num_threads=num_threads)
    return out


@Kernel
def swiglu_rows(block: int) -> None:
    """Write silu(gate) * up, each rounded to bf16; a task is a row."""
    width, num_rows = simd.read_i64(block + NUM_UNITS), simd.read_i64(block + NUM_UNIT_ROWS)
    zeros, ones = vectors.splat(np.float32(0)), vectors.splat(np.float32(1))
    row = claim_task(block, 0)
    while row < num_rows:
        gates = simd.read_i64(block + GATE) + row * simd.read_i64(block + STRIDE)
        ups = simd.read_i64(block + UP) + row * simd.read_i64(block + STRIDE)
        units = simd.read_i64(block + UNITS) + row * simd.read_i64(block + UNIT_STRIDE)
        for begin in range(0, width, simd.LANES):
            left = width - begin
            gate = vectors.load_first_bf16(gates + 2 * begin, left)
            up = vectors.load_first_bf16(ups + 2 * begin, left)
            decay = vectors.exp(vectors.sub(zeros, gate))
            silu = vectors.round_bf16(vectors.div(gate, vectors.add(ones, decay)))
            vectors.store_first_bf16(units + 2 * begin, vectors.mul(silu, up), left)
        finish_task(block, 0)
        row = claim_task(block, 0)
    wait_for_tasks(block, 0, num_rows)

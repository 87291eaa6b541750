"""Products of few bf16 rows with a weight, compiled: the weight is read once, at memory's speed.

Reads weights in oneDNN's layout (`kernels.cpu.simd.matmul`), so that one copy of a weight
serves these kernels and oneDNN, which computes products of many rows; `address_of` tells
whether a weight has that layout. Results depend neither on the number of threads nor on other
rows. Knows no layer; used by `kernels.cpu.matmul`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.compiled.runtime import Kernel, launch, offsets
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors
from kernels.cpu.simd.matmul import (
    INPUT_MULTIPLE,
    SUM_BYTES,
    TASK_OUTPUTS,
    TILE_WIDTH,
    can_multiply_blocks,
    multiply,
    padded,
    second_half,
    task_bytes,
)
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

MAX_ROWS: Final = 128
# With more rows oneDNN's own AMX kernels are faster (measured for the shapes of two models).
_MAX_ROWS_WITH_TILES: Final = 48

X, X_STRIDE, WEIGHT, WIDTH, NUM_INPUTS, NUM_OUTPUTS, NUM_ROWS, BIAS, OUT, OUT_STRIDE = offsets(10)
"""The arguments of `_linear`. Strides are in bytes; BIAS 0: no bias."""


@cache
def block_width() -> int:
    """Return the number of outputs in a block of oneDNN's layout; 0: not supported here.

    oneDNN chooses the layout by the processor's instructions and by ONEDNN_MAX_CPU_ISA.
    """
    weight = torch.zeros(1, INPUT_MULTIPLE, dtype=torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    width = int(torch.ops.mkldnn._nbytes(packed)) // (2 * INPUT_MULTIPLE)
    return width if can_multiply_blocks(width) else 0


@cache
def max_rows() -> int:
    """Return the largest number of rows for which `linear_of_rows` is faster than oneDNN."""
    return _MAX_ROWS_WITH_TILES if block_width() == TILE_WIDTH else MAX_ROWS


def address_of(weight: Tensor, packed: Tensor) -> int:
    """Return the address of a weight [O, I] that oneDNN packed; 0: only oneDNN can multiply it.

    Compares the first, the middle and the last row with the numbers at their expected addresses.
    """
    num_out, num_in = weight.shape
    width = block_width()
    if num_in % 2 != 0 or not width:
        return 0
    num_blocks, num_stored = -(-num_out // width), padded(num_in)
    num_bytes = 2 * num_blocks * width * num_stored
    if torch.ops.mkldnn._nbytes(packed) != num_bytes:
        return 0
    address = int(torch.ops.mkldnn.data_ptr(packed))
    memory = (ctypes.c_int16 * (num_bytes // 2)).from_address(address)
    blocks = np.ctypeslib.as_array(memory).reshape(num_blocks, num_stored // 2, width, 2)
    for row in (0, num_out // 2, num_out - 1):
        found = blocks[row // width, :, row % width].reshape(-1)
        wanted = weight[row].contiguous().view(torch.int16).numpy(force=True)
        if not np.array_equal(found[:num_in], wanted) or found[num_in:].any():
            return 0
    return address


def can_multiply(x: Tensor) -> bool:
    """Return whether `linear_of_rows` takes these rows, and is faster than oneDNN."""
    return (
        x.dim() == 2
        and 0 < x.shape[0] <= max_rows()
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
    )


def linear_of_rows(x: Tensor, address: int, num_out: int, bias: Tensor | None) -> Tensor:
    """Multiply x [R, I] by the weight [num_out, I] at `address`, transposed, and add bias.

    Returns [R, num_out]. Sums are fp32; with the bias added they are rounded once.
    """
    assert bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous())
    out = torch.empty(x.shape[0], num_out, dtype=torch.bfloat16)
    arguments = (
        x.data_ptr(),
        2 * x.stride(0),
        address,
        block_width(),
        x.shape[1],
        num_out,
        x.shape[0],
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        2 * out.stride(0),
    )
    launch(_linear, arguments, num_threads=torch.get_num_threads())
    return out


_row_list = simd.stack(8 * MAX_ROWS)
_sums = simd.stack(MAX_ROWS * SUM_BYTES)


@Kernel
def _linear(block: int) -> None:
    rows, sums = _row_list(), _sums()
    num_rows, num_in = simd.read_i64(block + NUM_ROWS), simd.read_i64(block + NUM_INPUTS)
    num_out, width = simd.read_i64(block + NUM_OUTPUTS), simd.read_i64(block + WIDTH)
    for row in range(num_rows):
        address = simd.read_i64(block + X) + row * simd.read_i64(block + X_STRIDE)
        simd.write_i64(rows + 8 * row, address)
    bias = simd.read_i64(block + BIAS)
    num_tasks = (num_out + TASK_OUTPUTS - 1) // TASK_OUTPUTS
    task = claim_task(block, 0)
    while task < num_tasks:
        first = task * TASK_OUTPUTS
        last = min(first + TASK_OUTPUTS, num_out)
        weight = simd.read_i64(block + WEIGHT) + task * task_bytes(num_in)
        second = second_half(weight, num_in, num_out - first)
        multiply(rows, num_rows, weight, second, width, num_in // 2, sums)
        for row in range(num_rows):
            out = simd.read_i64(block + OUT) + row * simd.read_i64(block + OUT_STRIDE)
            for begin in range(first, last, simd.LANES):
                total = vectors.load_f32(sums + row * SUM_BYTES + 4 * (begin - first))
                if bias:
                    total = vectors.add(
                        total, vectors.load_first_bf16(bias + 2 * begin, last - begin)
                    )
                vectors.store_first_bf16(out + 2 * begin, total, last - begin)
        finish_task(block, 0)
        task = claim_task(block, 0)
    wait_for_tasks(block, 0, num_tasks)

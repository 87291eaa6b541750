"""Products of bf16 rows with a weight, compiled: the weight is read once, at memory's speed.

Weights are in oneDNN's layout (`kernels.cpu.simd.matmul`). Where oneDNN multiplies bf16 it packs
them, so that one copy of a weight serves these kernels and oneDNN, which computes products of many
rows; `address_of` tells whether a weight has that layout. Elsewhere `pack_blocks` packs
them, and these kernels compute all products. Results depend neither on the number of threads nor on
other rows. Knows no layer; used by `kernels.cpu.matmul`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contracts import HeadMatrices
from kernels.cpu.compiled.runtime import Kernel, launch, offsets
from kernels.cpu.huge_pages import Arena
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors
from kernels.cpu.simd.matmul import (
    HAS_DOT_PAIRS,
    HAS_TILES,
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
"""Rows of a task."""
# With more rows oneDNN's own AMX kernels are faster (measured for the shapes of two models).
_MAX_ROWS_WITH_TILES: Final = 48

(
    X, X_STRIDE, WEIGHT, WIDTH, NUM_INPUTS, NUM_OUTPUTS, NUM_ROWS, BIAS, OUT, OUT_STRIDE,
    OUT_IS_F32,
) = offsets(11)  # fmt: skip
"""The arguments of `_linear`. Strides are in bytes; BIAS 0: no bias."""


(
    HEADS_X, HEADS_ROW, HEADS_X_HEAD, HEADS_WEIGHT, HEADS_INPUTS, HEADS_OUTPUTS, HEADS_ROWS,
    HEADS_COUNT, HEADS_OUT, HEADS_OUT_ROW, HEADS_OUT_HEAD, HEADS_COPIED,
) = offsets(12)  # fmt: skip
"""The arguments of `_multiply_heads`. Strides, of rows and of heads, are in bytes."""


@cache
def onednn_packs() -> bool:
    """Return whether this build of torch prepacks bf16 weights with equal results.

    Not where the processor has no bf16 instructions: there oneDNN's products are slower than ours.
    """
    ops = torch.ops.mkldnn
    return (
        (HAS_TILES or HAS_DOT_PAIRS)
        and hasattr(ops, "_linear_pointwise")
        and hasattr(ops, "_reorder_linear_weight")
        and bool(ops._is_mkldnn_bf16_supported())
    )


@cache
def packs_blocks() -> bool:
    """Return whether weights come from `pack_blocks` here, not from oneDNN."""
    return not onednn_packs() and can_multiply_blocks(TASK_OUTPUTS)


@cache
def block_width() -> int:
    """Return the number of outputs in a block of the layout; 0: not supported here.

    oneDNN chooses the layout by the processor's instructions and by ONEDNN_MAX_CPU_ISA.
    """
    if not onednn_packs():
        return TASK_OUTPUTS if packs_blocks() else 0
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


def pack_blocks(weight: Tensor, arena: Arena | None) -> Tensor:
    """Return a bf16 weight [O, I], I even, in blocks [blocks, pairs, 2 * TASK_OUTPUTS]."""
    num_out, num_in = weight.shape
    assert weight.dtype == torch.bfloat16, f"{weight.dtype}"
    # Pairs of numbers can be seen as integers only at even places of a storage.
    aligned = weight.clone() if weight.storage_offset() % 2 else weight.contiguous()
    pairs = aligned.view(torch.int32)
    shape = (-(-num_out // TASK_OUTPUTS), padded(num_in) // 2, 4 * TASK_OUTPUTS)
    data = torch.zeros(shape, dtype=torch.uint8) if arena is None else arena.zeros(*shape)
    blocks, whole = data.view(torch.int32)[:, : num_in // 2], num_out // TASK_OUTPUTS
    if whole:
        parts = pairs[: whole * TASK_OUTPUTS].view(whole, TASK_OUTPUTS, -1)
        blocks[:whole] = parts.transpose(1, 2)
    if num_out % TASK_OUTPUTS:
        blocks[whole, :, : num_out % TASK_OUTPUTS] = pairs[whole * TASK_OUTPUTS :].t()
    return data.view(torch.bfloat16)


def can_pack_heads(weight: Tensor) -> bool:
    """Return whether `multiply_heads` knows a layout for matrices [N, O, I]."""
    return (
        weight.dtype == torch.bfloat16
        and weight.shape[2] % 2 == 0
        and can_multiply_blocks(TASK_OUTPUTS)
    )


def pack_heads(weight: Tensor, arena: Arena | None) -> Tensor:
    """Return bf16 matrices [N, O, I] in blocks, as `pack_blocks`; each begins with a block."""
    behind = -weight.shape[1] % TASK_OUTPUTS
    return pack_blocks(F.pad(weight, (0, 0, 0, behind)).flatten(0, 1), arena)


def can_multiply_heads(x: Tensor, out: Tensor) -> bool:
    """Return whether `multiply_heads` takes these: numbers of a head lie one behind the other."""
    return (
        x.dtype == out.dtype == torch.bfloat16 and len(x) > 0 and x.stride(2) == out.stride(2) == 1
    )


def multiply_heads(x: Tensor, weight: HeadMatrices, out: Tensor) -> None:
    """Write the products of the heads of x [T, N, I] to out [T, N, O].

    See `kernels.reference.multiply_heads`. Sums are fp32, and rounded once.
    """
    num_rows, num_heads, width = x.shape
    arguments = (
        x.data_ptr(),
        2 * x.stride(0),
        2 * x.stride(1),
        weight.address,
        weight.in_features,
        weight.out_features,
        num_rows,
        num_heads,
        out.data_ptr(),
        2 * out.stride(0),
        2 * out.stride(1),
        width - weight.in_features,
    )
    launch(_multiply_heads, arguments, num_threads=torch.get_num_threads())


def can_multiply(x: Tensor) -> bool:
    """Return whether `linear_of_rows` takes these rows, and is faster than oneDNN."""
    return (
        x.dim() == 2
        and x.shape[0] > 0
        and (packs_blocks() or x.shape[0] <= max_rows())
        and x.dtype == torch.bfloat16
        and x.stride(1) == 1
    )


def can_write(out: Tensor) -> bool:
    """Return whether `linear_of_rows` writes to this tensor."""
    return out.dim() == 2 and out.stride(1) == 1 and out.dtype in (torch.bfloat16, torch.float32)


def linear_of_rows(
    x: Tensor, address: int, num_out: int, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Multiply x [R, I] by the weight [num_out, I] at `address`, transposed, and add bias.

    Returns [R, num_out], `out` if given. Sums are fp32; with the bias added they are rounded once
    to bf16, also where `out` is fp32.
    """
    assert bias is None or (bias.dtype == torch.bfloat16 and bias.is_contiguous())
    if out is None:
        out = torch.empty(x.shape[0], num_out, dtype=torch.bfloat16)
    assert out.shape == (x.shape[0], num_out), f"out is {tuple(out.shape)}"
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
        out.itemsize * out.stride(0),
        int(out.dtype == torch.float32),
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
    bias, is_f32 = simd.read_i64(block + BIAS), simd.read_i64(block + OUT_IS_F32)
    parts = (num_out + TASK_OUTPUTS - 1) // TASK_OUTPUTS
    num_tasks = parts * ((num_rows + MAX_ROWS - 1) // MAX_ROWS)
    task = claim_task(block, 0)
    while task < num_tasks:
        # Claimed early, so that its weights can be prefetched.
        following = claim_task(block, 0)
        part, first_row = task % parts, task // parts * MAX_ROWS
        count = min(num_rows - first_row, MAX_ROWS)
        for row in range(count):
            offset = (first_row + row) * simd.read_i64(block + X_STRIDE)
            simd.write_i64(rows + 8 * row, simd.read_i64(block + X) + offset)
        first = part * TASK_OUTPUTS
        last = min(first + TASK_OUTPUTS, num_out)
        weight = simd.read_i64(block + WEIGHT) + part * task_bytes(num_in)
        ahead = simd.read_i64(block + WEIGHT) + following % parts * task_bytes(num_in)
        second = second_half(weight, num_in, num_out - first)
        multiply(rows, count, weight, second, ahead, width, num_in // 2, num_out - first, sums)
        for row in range(count):
            offset = (first_row + row) * simd.read_i64(block + OUT_STRIDE)
            out = simd.read_i64(block + OUT) + offset
            for begin in range(first, last, simd.LANES):
                total = vectors.load_f32(sums + row * SUM_BYTES + 4 * (begin - first))
                left = last - begin
                if bias:
                    total = vectors.add(total, vectors.load_first_bf16(bias + 2 * begin, left))
                if is_f32:
                    vectors.store_first_f32(out + 4 * begin, vectors.round_bf16(total), left)
                else:
                    vectors.store_first_bf16(out + 2 * begin, total, left)
        finish_task(block, 0)
        task = following
    wait_for_tasks(block, 0, num_tasks)


@Kernel
def _multiply_heads(block: int) -> None:
    rows, sums = _row_list(), _sums()
    num_rows, num_heads = simd.read_i64(block + HEADS_ROWS), simd.read_i64(block + HEADS_COUNT)
    num_in, num_out = simd.read_i64(block + HEADS_INPUTS), simd.read_i64(block + HEADS_OUTPUTS)
    num_copied = simd.read_i64(block + HEADS_COPIED)
    parts = (num_out + TASK_OUTPUTS - 1) // TASK_OUTPUTS
    per_rows = parts * num_heads
    num_tasks = per_rows * ((num_rows + MAX_ROWS - 1) // MAX_ROWS)
    task = claim_task(block, 0)
    while task < num_tasks:
        following = claim_task(block, 0)
        head, part = task % per_rows // parts, task % parts
        first_row = task // per_rows * MAX_ROWS
        count = min(num_rows - first_row, MAX_ROWS)
        source = simd.read_i64(block + HEADS_X) + head * simd.read_i64(block + HEADS_X_HEAD)
        for row in range(count):
            offset = (first_row + row) * simd.read_i64(block + HEADS_ROW)
            simd.write_i64(rows + 8 * row, source + offset)
        first = part * TASK_OUTPUTS
        last = min(first + TASK_OUTPUTS, num_out)
        weight = simd.read_i64(block + HEADS_WEIGHT)
        ahead = weight + following % per_rows * task_bytes(num_in)
        weight += task % per_rows * task_bytes(num_in)
        # Behind the last output a block has zeros.
        second = second_half(weight, num_in, TASK_OUTPUTS)
        multiply(rows, count, weight, second, ahead, TASK_OUTPUTS, num_in // 2, TASK_OUTPUTS, sums)
        target = simd.read_i64(block + HEADS_OUT) + head * simd.read_i64(block + HEADS_OUT_HEAD)
        for row in range(count):
            out = target + (first_row + row) * simd.read_i64(block + HEADS_OUT_ROW)
            for begin in range(first, last, simd.LANES):
                total = vectors.load_f32(sums + row * SUM_BYTES + 4 * (begin - first))
                vectors.store_first_bf16(out + 2 * begin, total, last - begin)
            if last == num_out:
                behind = simd.read_i64(rows + 8 * row) + 2 * num_in
                for begin in range(0, num_copied, simd.LANES):
                    left = num_copied - begin
                    copied = vectors.load_first_bf16(behind + 2 * begin, left)
                    vectors.store_first_bf16(out + 2 * (num_out + begin), copied, left)
        finish_task(block, 0)
        task = following
    wait_for_tasks(block, 0, num_tasks)

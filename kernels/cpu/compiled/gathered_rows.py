"""Chosen slots of a cache in fp8, compiled: gathered and widened in one pass.

For attention that gathers its keys (`kernels.cpu.padded_groups`). A task is some rows. Knows no
sequences.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.cpu.compiled.runtime import Kernel, launch, offsets
from kernels.cpu.simd import fp8
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

CACHE, ROW_NUMBERS, SLOTS, NUM_ROWS, OUT, OUT_IS_BF16 = offsets(6)
"""The arguments of the kernel; row i of OUT is row SLOTS[i] (i64) of CACHE."""

_TASK_ROWS: Final = 64


def gather_widened(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return slots i64[n] of a cache fp8[B, block size, G, D] as [n, G, D] in bf16 or fp32.

    The cache is contiguous and D even.
    """
    assert cache.is_contiguous()
    assert slots.is_contiguous()
    num_rows, (num_groups, head_dim) = len(slots), cache.shape[2:]
    out = torch.empty(num_rows, num_groups, head_dim, dtype=dtype)
    arguments = (
        cache.data_ptr(),
        num_groups * head_dim,
        slots.data_ptr(),
        num_rows,
        out.data_ptr(),
        int(dtype == torch.bfloat16),
    )
    num_threads = torch.get_num_threads() if num_rows >= 2 * _TASK_ROWS else 1
    launch(_gather, arguments, num_threads=num_threads)
    return out


@Kernel
def _gather(block: int) -> None:
    num_rows, width = simd.read_i64(block + NUM_ROWS), simd.read_i64(block + ROW_NUMBERS)
    is_bf16 = simd.read_i64(block + OUT_IS_BF16)
    row_bytes = width * (4 - 2 * is_bf16)
    num_tasks = (num_rows + _TASK_ROWS - 1) // _TASK_ROWS
    task = claim_task(block, 0)
    while task < num_tasks:
        for row in range(task * _TASK_ROWS, min((task + 1) * _TASK_ROWS, num_rows)):
            slot = simd.read_i64(simd.read_i64(block + SLOTS) + 8 * row)
            codes = simd.read_i64(block + CACHE) + slot * width
            numbers = simd.read_i64(block + OUT) + row * row_bytes
            if is_bf16:
                fp8.widen_bf16(numbers, 0, codes, 0, 1, width)
            else:
                fp8.widen_f32(numbers, 0, codes, 0, 1, width)
        finish_task(block, 0)
        task = claim_task(block, 0)
    wait_for_tasks(block, 0, num_tasks)

"""Helpers of all Triton kernels: rounding and products that are right in the interpreter too.

Triton's interpreter (TRITON_INTERPRET=1 when triton is imported; for hosts without a GPU)
truncates where a GPU rounds to nearest even, and multiplies bf16 tiles as integers.
Kernels therefore convert by `rounded` and multiply by `dot`; compiled, these are the plain
operations. Knows no op. Imported only by the triton modules: other hosts need not have triton.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: Final = tl.constexpr(triton.knobs.runtime.interpret)

FP8_MAX: Final = 448.0
"""The largest number of float8_e4m3fn."""


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Convert an fp32 tile to bf16, fp32 or fp8-e4m3, to nearest even; fp8 saturates.

    NaN stays NaN, in fp8 too.
    """
    if dtype == tl.float8e4nv:
        x = tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 448.0, propagate_nan=tl.PropagateNan.ALL)
        if INTERPRETED:
            # 1.5 * 2**20 times the power of two in x: the fp32 sum keeps 3 bits of fraction.
            power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            magic = tl.maximum(power, 0.015625) * 1572864.0
            x = (x + magic) - magic
            # The interpreter's conversion turns a NaN into a finite number.
            codes = tl.where(x == x, x.to(dtype).to(tl.uint8, bitcast=True), 127)
            return codes.to(tl.uint8).to(dtype, bitcast=True)
    elif INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, accumulator: tl.tensor) -> tl.tensor:
    """Return accumulator + a @ b, accumulated in fp32; fp32 tiles are multiplied as such."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator, input_precision="ieee")


def as_rows(x: Tensor, what: str) -> Tensor:
    """View x [..., H] as [A, B, H] without copying, its last dimension contiguous.

    Raises ValueError, naming `what`, for a tensor that has no such view.
    """
    if x.ndim == 0 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        raise ValueError(
            f"{what}: the last dimension must be contiguous, but shape {tuple(x.shape)} has "
            f"strides {x.stride()}"
        )
    if x.ndim == 3:
        return x
    if x.ndim < 3:
        return x.reshape(-1, 1, x.shape[-1]) if x.ndim == 1 else x.unsqueeze(1)
    return x.view(-1, *x.shape[-2:])

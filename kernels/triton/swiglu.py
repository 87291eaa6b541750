"""silu(gate) * up in one pass, where torch takes three launches.

Called by `kernels.triton.ops` for dense MLPs and shared experts (for routed experts it is part
of their products). Rounding points are the reference's: silu is rounded to the rows' dtype before
it multiplies. Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.runtime import rounded

MAX_BLOCK: Final = 1024


@triton.jit
def _swiglu_block(
    gate_up: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    out_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = gate_up + row * row_stride + column
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = gate_up.dtype.element_ty
    silu = rounded(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
    product = rounded(silu * up, dtype).to(tl.float32)
    tl.store(out + row * out_stride + column, rounded(product, out.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up [R, F] of gate_up [R, 2F], whose first half is the gate.

    Raises ValueError for unsupported shapes or strides.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up is {tuple(gate_up.shape)} with strides {gate_up.stride()}")
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if out.shape != (num_rows, width) or (width > 1 and out.stride(1) != 1):
        raise ValueError(
            f"out is {tuple(out.shape)} with strides {out.stride()}, for {num_rows} rows of {width}"
        )
    if num_rows and width:
        block = min(triton.next_power_of_2(width), MAX_BLOCK)
        _swiglu_block[(num_rows, triton.cdiv(width, block))](
            gate_up,
            out,
            width,
            gate_up.stride(0),
            out.stride(0),
            BLOCK=block,
            num_warps=max(block // 256, 1),
        )
    return out

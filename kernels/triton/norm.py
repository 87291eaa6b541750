"""RMSNorm, with or without the residual add before it, in one pass over each row.

One program owns a row: it is read once, normed in registers and written once. Rounding
points are those of `kernels.reference` (LlamaRMSNorm of transformers): the sum with the
residual and the quotient are rounded to the row's dtype before they are used. Called by
attention nodes whose device is a GPU. Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.runtime import as_rows, rounded

MAX_WIDTH: Final = 1 << 16
"""A row must fit into the registers of one program."""
ELEMENTS_PER_WARP: Final = 512
MAX_WARPS: Final = 16


@triton.jit
def _norm_row(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    inner: tl.tensor,
    width: tl.tensor,
    x_outer: tl.tensor,
    x_inner: tl.tensor,
    residual_outer: tl.tensor,
    out_outer: tl.tensor,
    out_inner: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x += row // inner * x_outer + row % inner * x_inner
    wide = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if ADD:
        residual += row * residual_outer
        wide += tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
        total = rounded(wide, dtype)
        tl.store(residual + column, total, mask=inside)
        wide = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = rounded(wide * inverse, dtype).to(tl.float32)
    scaled = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    out += row // inner * out_outer + row % inner * out_inner
    tl.store(out + column, rounded(scaled, dtype), mask=inside)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
) -> Tensor:
    dtype = weight.dtype
    main = x if residual is None else residual
    if out is None:
        out = torch.empty(main.shape, dtype=dtype, device=main.device)
    if out.shape != x.shape or main.shape != x.shape:
        raise ValueError(
            f"shapes differ: {tuple(x.shape)}, {tuple(main.shape)}, {tuple(out.shape)}"
        )
    if main.dtype != dtype or out.dtype != dtype:
        raise ValueError(f"rows of {main.dtype}, weight of {dtype}, out of {out.dtype}")
    width = weight.numel()
    if weight.shape != x.shape[-1:] or not weight.is_contiguous() or width > MAX_WIDTH:
        raise ValueError(f"weight {tuple(weight.shape)} for rows of {x.shape[-1]}")
    rows, out_rows = as_rows(x, "x"), as_rows(out, "out")
    added = rows if residual is None else as_rows(residual, "residual")
    num_rows, inner = rows.shape[0] * rows.shape[1], rows.shape[1]
    if num_rows == 0 or width == 0:
        return out
    block = triton.next_power_of_2(width)
    _norm_row[(num_rows,)](
        rows,
        added,
        weight,
        out_rows,
        inner,
        width,
        rows.stride(0),
        rows.stride(1),
        added.stride(0),
        out_rows.stride(0),
        out_rows.stride(1),
        eps,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // ELEMENTS_PER_WARP, 1), MAX_WARPS),
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Return `kernels.reference.rms_norm` of x [..., H], with weight [H] of x's dtype.

    x and out may be views into wider buffers, or the same tensor. Raises ValueError for
    unsupported shapes, dtypes or strides.
    """
    return _launch(x, None, weight, eps, out)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: Tensor | None = None,
) -> Tensor:
    """Add x [T, H] to residual [T, H] in place and return rms_norm of the sum.

    x may have another dtype than the residual (an fp32 sum of experts' partials). Raises
    ValueError as `rms_norm` does.
    """
    if residual.ndim != 2:
        raise ValueError(f"residual must be [T, H], not {tuple(residual.shape)}")
    return _launch(x, residual, weight, eps, out)

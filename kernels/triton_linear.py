"""Products of rows with one weight on a GPU: torch's own where the weight is plain.

Called by `kernels.triton_ops`. Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contracts import LinearWeight


def linear(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply x [R, I] by a weight [O, I] transposed and add bias [O]; gives [R, O].

    `out` in fp32 gets the sums of bf16 products as they are, before any rounding.
    """
    if out is None:
        return F.linear(x, weight.data, bias)
    if out.dtype == x.dtype:
        if bias is None:
            return torch.mm(x, weight.data.t(), out=out)
        return torch.addmm(bias, x, weight.data.t(), out=out)
    if x.is_cuda:
        torch.ops.aten.mm.dtype_out(x, weight.data.t(), out.dtype, out=out)
    else:
        torch.mm(x.to(out.dtype), weight.data.t().to(out.dtype), out=out)
    return out if bias is None else out.add_(bias)

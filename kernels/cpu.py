"""Ops for hosts without a GPU: few torch calls per layer, with the reference's rounding.

Gathers the CPU versions to the interface of `kernels.dispatch.Ops`: matrix products from
`cpu_matmul`, attention from `cpu_attention`, the small ops from here, and what plain
torch already does well from `reference`. Called by the nodes through `kernels.dispatch`.

Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu_attention import paged_attention
from kernels.cpu_matmul import (
    dense_mlp,
    grouped_mlp,
    linear,
    pack_experts,
    pack_linear,
    rebuild_experts,
)
from kernels.reference import embed, permute, route, sigmoid, swiglu, write_kv

__all__ = [
    "add_rms_norm",
    "dense_mlp",
    "embed",
    "grouped_mlp",
    "linear",
    "name",
    "pack_experts",
    "pack_linear",
    "pack_lm_head",
    "pack_projection",
    "paged_attention",
    "permute",
    "rebuild_experts",
    "rms_norm",
    "rotate",
    "route",
    "sigmoid",
    "swiglu",
    "write_kv",
]

name: Final = "cpu"

# The matrices that --quantization covers; here they are packed as any other.
pack_projection = pack_lm_head = pack_linear


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalise each row of x [..., H] and scale it; see `kernels.reference.rms_norm`.

    The weight multiplies apart, since F.rms_norm would round only after it.
    """
    normed = F.rms_norm(x, (x.shape[-1],), None, eps)
    return torch.mul(weight, normed, out=out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """Add x [T, H] to residual [T, H] in place and return rms_norm of the sum."""
    residual.add_(x)
    return rms_norm(residual, weight, eps=eps, out=out)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Apply rotary position embedding in place; see `kernels.reference.rotate`.

    cos and sin of [T, D] in the dtype of q save a few calls per layer.
    """
    half = q.shape[-1] // 2
    cos, sin = cos.to(q.dtype), sin.to(q.dtype)
    if cos.shape[-1] == half:
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    for x in (q, k):
        turned = torch.cat((x[..., half:].neg(), x[..., :half]), dim=-1)
        turned *= sin
        x *= cos
        x += turned

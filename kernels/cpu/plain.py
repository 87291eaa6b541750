"""The small ops of a layer in few torch calls, with the reference's bits.

For inputs that compiled kernels do not take (fp32), and for `--deterministic`, which uses these
only.
Knows no layer; used by `kernels.cpu.ops` and `kernels.deterministic`.

Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contracts import HeadRows
from kernels.reference import write_kv


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Normalise each row of x [..., H] and scale it; see `kernels.reference.rms_norm`.

    The weight is multiplied separately, since F.rms_norm rounds only after that.
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


def rotate_and_store(heads: HeadRows) -> None:
    """Norm, rotate and store; see `kernels.reference.rotate_and_store`."""
    q, k, v, cos, sin, k_cache, v_cache, slots, q_norm, k_norm, eps = heads
    if q_norm is not None:
        rms_norm(q, q_norm, eps=eps, out=q)
    if k_norm is not None:
        rms_norm(k, k_norm, eps=eps, out=k)
    rotate(q, k, cos, sin)
    write_kv(k, v, k_cache, v_cache, slots)

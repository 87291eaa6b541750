"""Rounding in which later inputs make up for the errors of earlier ones.

Owns the algorithm of GPTQ (Frantar et al., 2023) for several matrices at once, with steps chosen
for the outputs when a group is reached. Knows no model. Called by deploy.quantisation.rounding.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deploy.quantisation.grids import BITS, Coded, Rounding, steps_of
from topspin.plan.precision import Format

_DAMPING: Final = 0.01


def inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a damped Hessian [..., I, I].

    The Hessian is the sum of x x^T over input rows; 1 % of its mean diagonal is added to it, so
    that few rows do not make it singular. Inputs that are always zero count as that mean.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    mean = torch.where(mean > 0, mean, 1.0)
    extra = torch.where(diagonal > 0, _DAMPING * mean, mean)
    damped = hessian + torch.diag_embed(extra)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor


def compensated(weight: Tensor, factor: Tensor, weight_format: Format, rounding: Rounding) -> Coded:
    """Return matrices [B, O, I] in an integer format with little error of their outputs.

    `factor` [B, I, I], or [1, I, I] for all, is inverse_factor of their inputs' Hessians.
    """
    rest, group = weight.clone(), rounding.group
    # What an input's error costs in the outputs after the inputs behind it have made up for it.
    importance = factor.diagonal(dim1=-2, dim2=-1).pow(-2)
    top = (1 << BITS[weight_format]) - 1
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    steps, zeros = [], []
    for start in range(0, weight.shape[-1], group):
        end = start + group
        own = rest[..., start:end]
        step, zero = steps_of(
            own[..., None, :],
            weight_format,
            symmetric=rounding.symmetric,
            dtype=rounding.dtype,
            importance=importance[:, None, None, start:end],
        )
        errors = torch.empty_like(own)
        for idx in range(group):
            at = start + idx
            code = (own[..., idx : idx + 1] / step + zero).round_().clamp_(0, top)
            codes[..., at : at + 1] = code
            missed = own[..., idx : idx + 1] - (code - zero) * step
            missed = missed / factor[:, at : at + 1, at : at + 1]
            own[..., idx:] -= missed * factor[:, at : at + 1, at:end]
            errors[..., idx : idx + 1] = missed
        rest[..., end:] -= errors @ factor[:, start:end, end:]
        steps.append(step)
        zeros.append(zero)
    all_zeros = torch.cat(zeros, -1).to(torch.uint8)
    return Coded(weight_format, codes, torch.cat(steps, -1), all_zeros, group)

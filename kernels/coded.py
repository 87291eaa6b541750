"""Coded matrices in the groups of kernels: which they can hold, and with which steps.

Owns the test, the rounding of steps to bf16, and mxfp4's codes, which are the same for all kernels.
Knows no layout of codes. Used where implementations with quantised formats pack weights. Letters as
in `kernels.contracts`, and G for groups of inputs.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contracts import CodedMatrix, Matrix
from topspin.plan.precision import E2M1_INTEGERS, MXFP4_BITS, MXFP4_GROUP

_MANTISSA_BITS: Final = 23
"""Of a float, below its exponent."""
_BETWEEN_CODES: Final = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)
"""Twice the numbers halfway between those of e2m1."""
_CODES: Final = [E2M1_INTEGERS.index(each) if each in E2M1_INTEGERS else 0 for each in range(25)]
"""e2m1's codes by the integers that they stand for."""


def numbers(matrix: Matrix) -> Tensor:
    """Return a matrix [O, I] that may be coded as numbers."""
    return matrix if isinstance(matrix, Tensor) else matrix.dequantised()


def holds(matrix: CodedMatrix, *, bits: int, group: int) -> bool:
    """Return whether codes of `bits` in groups of `group` inputs can be the matrix's own."""
    is_integer = matrix.codes.dtype == torch.uint8
    is_divided = matrix.group % group == 0 or matrix.scales.shape[1] == 1
    return is_integer and matrix.bits <= bits and is_divided


def steps_and_lows(matrix: CodedMatrix, group: int) -> tuple[Tensor, Tensor]:
    """Return bf16[O, G] each, for codes in groups of `group`: a number is code * step + low.

    A low is made of the rounded step, so that a zero in the middle of the codes stays 0.
    """
    zeros, lows = matrix.zeros, matrix.lows
    starts = torch.arange(0, matrix.shape[1], group, device=matrix.codes.device)
    where = starts // matrix.group
    steps = matrix.scales[:, where].bfloat16()
    if lows is not None:
        return steps, lows[:, where].bfloat16()
    assert zeros is not None
    return steps, (zeros[:, where] * steps.float()).neg().bfloat16()


def mxfp4_codes(matrix: Matrix) -> tuple[Tensor, Tensor]:
    """Return e2m1's codes u8[O, I] and u8[O, I / MXFP4_GROUP, rounded up], the exponents of steps.

    A step is half of a group's power of two, and its exponent that of a float: twice an e2m1 number
    times the step is a number; exponent 0 stands for a step of 0. Numbers are rounded as the OCP
    microscaling specification says, its own ones kept.
    """
    num_out, num_in = matrix.shape
    if (
        not isinstance(matrix, Tensor)
        and matrix.bits == MXFP4_BITS
        and matrix.group % MXFP4_GROUP == 0
    ):
        starts = torch.arange(0, num_in, MXFP4_GROUP, device=matrix.codes.device)
        scales = matrix.scales[:, starts // matrix.group]
        exponents = (scales.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
        code_of = torch.tensor(_CODES, dtype=torch.uint8, device=exponents.device)
        # Twice as fast as an index.
        return code_of.index_select(0, matrix.codes.flatten().int()).view(matrix.shape), exponents
    groups = F.pad(numbers(matrix).float(), (0, -num_in % MXFP4_GROUP))
    groups = groups.view(num_out, -1, MXFP4_GROUP)
    # A group's greatest number is 8 to 16 steps; the highest code stands for 12.
    greatest = groups.abs().amax(-1)
    exponents = ((greatest.view(torch.int32) >> _MANTISSA_BITS) - 3).clamp(min=1)
    steps = (exponents << _MANTISSA_BITS).view(torch.float32)
    doubled = (groups / steps[..., None]).flatten(1)[:, :num_in]
    between = torch.tensor(_BETWEEN_CODES, device=doubled.device)
    codes = torch.bucketize(doubled.abs(), between, out_int32=True).to(torch.uint8)
    return codes | (doubled < 0).to(torch.uint8) << 3, exponents.to(torch.uint8)

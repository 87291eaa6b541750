"""Coded matrices in the groups of kernels: which they can hold, and with which steps.

Owns the test, and the rounding of steps to bf16. Knows no layout of codes. Used where
implementations with quantised formats pack weights. Letters as in `kernels.contracts`, and G for
groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.contracts import CodedMatrix, Matrix


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
    zeros = matrix.zeros
    assert zeros is not None
    starts = torch.arange(0, matrix.shape[1], group, device=matrix.codes.device)
    where = starts // matrix.group
    steps = matrix.scales[:, where].bfloat16()
    return steps, (zeros[:, where] * steps.float()).neg().bfloat16()

"""A matrix as codes and scales, as a checkpoint stores it.

Owns the numbers that codes stand for, and matrices above one another. Knows no layout of a file
(models.quantised.layouts unpacks it) and of no kernel: kernels take a matrix in this form by
`kernels.contracts.CodedMatrix`, which it satisfies, and pack it in their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

# Of which there are a few copies in fp32.
_NUMBERS_AT_ONCE: Final = 1 << 22


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """A matrix [O, I]: number [o, i] is (codes[o, i] - zeros[o, g]) * scales[o, g], g = i // group.

    With lows it is codes[o, i] * scales[o, g] + lows[o, g]. codes u8[O, I], below 2 ** bits, or
    e4m3[O, I], with neither zeros nor lows; scales, zeros and lows f32[O, G], G being I / group,
    rounded up. `dtype` is that of the matrix once it is dequantised.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    bits: int
    dtype: torch.dtype
    lows: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Return (O, I)."""
        return self.codes.shape

    def to(self, device: torch.device | str) -> StoredMatrix:
        """Return the matrix on a device."""
        return self._with(lambda values: values.to(device), codes=self.codes.to(device))

    def rows(self, order: Tensor | slice) -> StoredMatrix:
        """Return the matrix of the rows i64[R], or of a slice of the rows."""
        return self._with(lambda values: values[order], codes=self.codes[order])

    def _with(self, change: Callable[[Tensor], Tensor], codes: Tensor) -> StoredMatrix:
        """Return the matrix of these codes, with `change` made to what there is for groups."""
        zeros = None if self.zeros is None else change(self.zeros)
        lows = None if self.lows is None else change(self.lows)
        return replace(self, codes=codes, scales=change(self.scales), zeros=zeros, lows=lows)

    def padded(self, width: int, to: int) -> StoredMatrix:
        """Return the matrix with zeros behind each `width` inputs, which are `to` with them."""
        group = math.gcd(self.group, width, to)
        own = _regrouped(self, group)
        sizes = (width // group, to // group)
        codes = padded_columns(own.codes, width, to)
        return own._with(lambda values: padded_columns(values, *sizes), codes=codes)

    def dequantised(self) -> Tensor:
        """Return the numbers [O, I] in `dtype`, computed in fp32 and rounded once."""
        num_out, width = self.shape
        out = torch.empty(num_out, width, dtype=self.dtype, device=self.codes.device)
        step = max(_NUMBERS_AT_ONCE // width, 1)
        for low in range(0, num_out, step):
            rows = slice(low, low + step)
            numbers = self.codes[rows].float()
            if self.zeros is not None:
                numbers -= _by_input(self.zeros[rows], self.group, width)
            numbers *= _by_input(self.scales[rows], self.group, width)
            if self.lows is not None:
                numbers += _by_input(self.lows[rows], self.group, width)
            out[rows] = numbers
        return out


def padded_columns(matrix: Tensor, width: int, to: int) -> Tensor:
    """Return [R, N * width] as [R, N * to], with zeros behind each `width` columns."""
    found = matrix.new_zeros(len(matrix), matrix.shape[1] // width, to)
    found[:, :, :width] = matrix.view(len(matrix), -1, width)
    return found.flatten(1)


def stacked(matrices: Sequence[StoredMatrix]) -> StoredMatrix | None:
    """Return matrices of equal width above one another.

    None if some have fp8 codes, some not, or some have lows, some not.
    """
    first = matrices[0]
    if len(matrices) == 1:
        return first
    if len({(matrix.codes.dtype, matrix.lows is None) for matrix in matrices}) > 1:
        return None
    group = math.gcd(*(matrix.group for matrix in matrices))
    alike = [_regrouped(matrix, group) for matrix in matrices]
    zeros = [matrix.zeros for matrix in alike if matrix.zeros is not None]
    lows = [matrix.lows for matrix in alike if matrix.lows is not None]
    return StoredMatrix(
        codes=torch.cat([matrix.codes for matrix in alike]),
        scales=torch.cat([matrix.scales for matrix in alike]),
        zeros=torch.cat(zeros) if zeros else None,
        group=group,
        bits=max(matrix.bits for matrix in alike),
        dtype=first.dtype,
        lows=torch.cat(lows) if lows else None,
    )


def _regrouped(matrix: StoredMatrix, group: int) -> StoredMatrix:
    """Return the matrix with a scale for every `group` inputs, a divisor of its own groups."""
    if matrix.group == group:
        return matrix
    starts = torch.arange(0, matrix.shape[1], group, device=matrix.codes.device) // matrix.group
    found = matrix._with(lambda values: values[:, starts], codes=matrix.codes)
    return replace(found, group=group)


def _by_input(values: Tensor, group: int, width: int) -> Tensor:
    """Return values [O, G] of groups as [O, width], or [O, 1] of a single group."""
    if values.shape[1] == 1:
        return values
    return values.repeat_interleave(group, dim=1)[:, :width]

"""The grids of the formats that are written: their steps, codes, and the numbers of these.

Owns int4 and int8 in groups of inputs and fp8 in blocks of 128 x 128, rounding to the nearest, and
the variance of that rounding. Knows no model and no file. Called by deploy.quantisation's rounding,
sensitivity and writing.

Matrices are [..., O, I]; scales [..., O, I / group], or [ceil(O / 128), ceil(I / 128)] in fp8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from topspin.errors import ConfigError
from topspin.plan.precision import Format

BITS: Final[dict[Format, int]] = {"int4": 4, "int8": 8}
BLOCK: Final = 128
FP8_MAX: Final = 448.0
# A range without the farthest numbers is less accurate for them, and more for the others.
_RANGES: Final = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


Method = Literal["nearest", "compensated"]
METHODS: Final[tuple[Method, ...]] = ("compensated", "nearest")


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """How to quantise: int4 `compensated` (else as int8 and fp8, to the nearest), inputs per group
    of int4 and int8, whether int4 is `symmetric`, and the `dtype` of scales."""

    method: Method = "compensated"
    group: int = 32
    symmetric: bool = False
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, eq=False)
class Coded:
    """A matrix as codes u8[..., O, I] (or e4m3) and steps f32; zeros u8 as scales, None in fp8.

    A number is (code - zero) * scale. Scales are as they are written: of a 16-bit dtype's precision
    if that is the model's.
    """

    weight_format: Format
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int

    def numbers(self) -> Tensor:
        """Return the matrix that the codes stand for, in fp32."""
        if self.zeros is None:
            return self.codes.float() * widened(self.scales, self.codes.shape)
        steps = self.scales.repeat_interleave(self.group, -1)
        zeros = self.zeros.repeat_interleave(self.group, -1)
        return (self.codes.float() - zeros) * steps


def check_size(num_in: int, weight_format: Format, *, group: int, name: str) -> None:
    """Raise ConfigError if inputs cannot be divided into whole groups."""
    if weight_format in BITS and num_in % group:
        raise ConfigError(
            f"{name} has {num_in} inputs, which groups of {group} do not divide: choose another "
            f"--group-size, or fp8 or none for this part"
        )


def steps_of(
    weight: Tensor,
    weight_format: Format,
    *,
    symmetric: bool,
    dtype: torch.dtype,
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return steps f32[..., G] and zeros f32[..., G] of groups [..., G, group].

    Of some ranges the one with the smallest sum of squared errors of rounding, each times its
    `importance` (broadcast over groups; 1 if None), is taken. Steps are rounded to `dtype`.
    """
    bits = BITS[weight_format]
    top = (1 << bits) - 1
    low, high = weight.amin(-1).clamp(max=0.0), weight.amax(-1).clamp(min=0.0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for share in _RANGES if bits == 4 else _RANGES[:1]:
        steps = ((high - low) * share / top).to(dtype).float()
        # Groups of zeros only need some step.
        steps = torch.where(steps > 0, steps, torch.finfo(torch.bfloat16).tiny)
        if symmetric:
            zeros = torch.full_like(steps, 1 << (bits - 1))
        else:
            zeros = (-low * share / steps).round().clamp(0, top)
        errors = (nearest(weight, steps, zeros, top) - weight).square()
        error = (errors if importance is None else errors * importance).sum(-1)
        if best is None:
            best = error, steps, zeros
        else:
            is_better = error < best[0]
            best = (
                torch.where(is_better, error, best[0]),
                torch.where(is_better, steps, best[1]),
                torch.where(is_better, zeros, best[2]),
            )
    assert best is not None
    return best[1], best[2]


def nearest(weight: Tensor, steps: Tensor, zeros: Tensor, top: int) -> Tensor:
    """Return the numbers of the grid that are nearest to groups [..., G, group]."""
    steps, zeros = steps[..., None], zeros[..., None]
    return ((weight / steps + zeros).round_().clamp_(0, top) - zeros) * steps


def rounded(weight: Tensor, weight_format: Format, rounding: Rounding) -> Coded:
    """Return a matrix [..., O, I] in a quantised format, each number rounded to the nearest.

    int8 is always symmetric.
    """
    if weight_format == "fp8":
        return _fp8(weight, rounding.dtype)
    symmetric = rounding.symmetric or weight_format == "int8"
    groups = weight.reshape(*weight.shape[:-1], -1, rounding.group)
    steps, zeros = steps_of(groups, weight_format, symmetric=symmetric, dtype=rounding.dtype)
    top = (1 << BITS[weight_format]) - 1
    codes = (groups / steps[..., None] + zeros[..., None]).round_().clamp_(0, top)
    codes, zeros = codes.to(torch.uint8).flatten(-2), zeros.to(torch.uint8)
    return Coded(weight_format, codes, steps, zeros, rounding.group)


def _fp8(weight: Tensor, dtype: torch.dtype) -> Coded:
    num_out, num_in = weight.shape[-2:]
    padded = F.pad(weight, (0, -num_in % BLOCK, 0, -num_out % BLOCK))
    rows, columns = (size // BLOCK for size in padded.shape[-2:])
    blocks = padded.view(*padded.shape[:-2], rows, BLOCK, columns, BLOCK)
    scales = (blocks.abs().amax((-3, -1)) / FP8_MAX).to(dtype).float()
    scales = torch.where(scales > 0, scales, 1.0)
    quotients = (weight / widened(scales, weight.shape)).clamp_(-FP8_MAX, FP8_MAX)
    return Coded("fp8", quotients.to(torch.float8_e4m3fn), scales, None, BLOCK)


def widened(scales: Tensor, shape: torch.Size) -> Tensor:
    """Return the scales of blocks as one per number of a matrix of `shape`."""
    wide = scales.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return wide[..., : shape[-2], : shape[-1]]

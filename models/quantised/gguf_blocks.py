"""Unpacks the blocks of a GGUF file: codes and their scales, as they are stored.

Owns the layouts. In Q4_0, Q5_0, Q6_K and Q8_0 a number is (code - middle) * scale, in Q4_1, Q4_K,
Q5_1 and Q5_K code * scale + low, computed in fp32 as the `gguf` library does; in MXFP4 it is an
e2m1 number times a power of two. Knows no file; called by models.quantised.layouts. Source:
gguf.quants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from models.quantised.coded import StoredMatrix
from models.quantised.scheme import Layout, Scheme
from topspin.plan.precision import E2M1_INTEGERS, E2M1_ZERO, MXFP4_BITS

_E8M0_BIAS: Final = 127


class _Blocks(NamedTuple):
    """Codes u8[..., I] of rows of blocks, scales f32[..., G] and maybe lows."""

    codes: Tensor
    scales: Tensor
    lows: Tensor | None = None


def unpack(data: Tensor, scheme: Scheme, dtype: torch.dtype) -> StoredMatrix:
    """Return the matrix of rows of blocks, the bytes u8[rows, n]; `dtype` is that of its numbers.

    The layout of `scheme` is one of LAYOUTS.
    """
    size, unpacked = _LAYOUTS[scheme.layout]
    found = unpacked(data.view(-1, size))
    codes, scales = found.codes.reshape(len(data), -1), found.scales.reshape(len(data), -1)
    lows = None if found.lows is None else found.lows.reshape(len(data), -1)
    middle = E2M1_ZERO if scheme.bits == MXFP4_BITS else 1 << (scheme.bits - 1)
    zeros = torch.full_like(scales, middle) if lows is None else None
    assert scheme.group_size is not None
    return StoredMatrix(codes, scales, zeros, scheme.group_size, scheme.bits, dtype, lows)


def e2m1_scales(exponents: Tensor) -> Tensor:
    """Return the scales f32 of mxfp4's integers, twice a number, by stored exponents u8."""
    return torch.full(exponents.shape, 0.5).ldexp_(exponents.int() - _E8M0_BIAS)


def _mxfp4(blocks: Tensor) -> _Blocks:
    exponents, pairs = torch.split(blocks, [1, 16], dim=-1)
    integers = torch.tensor(E2M1_INTEGERS, dtype=torch.uint8)
    return _Blocks(integers[_halves(pairs, 16).int()], e2m1_scales(exponents))


def _q4_0(blocks: Tensor) -> _Blocks:
    scale, pairs = torch.split(blocks, [2, 16], dim=-1)
    return _Blocks(_halves(pairs, 16), _fp16(scale))


def _q4_1(blocks: Tensor) -> _Blocks:
    scale, low, pairs = torch.split(blocks, [2, 2, 16], dim=-1)
    return _Blocks(_halves(pairs, 16), _fp16(scale), _fp16(low))


def _q5_0(blocks: Tensor) -> _Blocks:
    scale, fifth, pairs = torch.split(blocks, [2, 4, 16], dim=-1)
    return _Blocks(_with_fifth(pairs, fifth) + 16, _fp16(scale))  # the middle of six bits is 32


def _q5_1(blocks: Tensor) -> _Blocks:
    scale, low, fifth, pairs = torch.split(blocks, [2, 2, 4, 16], dim=-1)
    return _Blocks(_with_fifth(pairs, fifth), _fp16(scale), _fp16(low))


def _q8_0(blocks: Tensor) -> _Blocks:
    scale, codes = torch.split(blocks, [2, 32], dim=-1)
    return _Blocks(codes ^ 128, _fp16(scale))  # 128 above the signed byte, as bits


def _q4_k(blocks: Tensor) -> _Blocks:
    whole, of_groups, pairs = torch.split(blocks, [4, 12, 128], dim=-1)
    return _Blocks(_halves(pairs, 32), *_scales_and_lows(whole, of_groups))


def _q5_k(blocks: Tensor) -> _Blocks:
    whole, of_groups, fifth, pairs = torch.split(blocks, [4, 12, 32, 128], dim=-1)
    upper = torch.cat([fifth >> group & 1 for group in range(8)], dim=-1)
    return _Blocks(_halves(pairs, 32) | upper << 4, *_scales_and_lows(whole, of_groups))


def _q6_k(blocks: Tensor) -> _Blocks:
    lower, upper, of_groups, whole = torch.split(blocks, [128, 64, 16, 2], dim=-1)
    two = [each >> shift & 3 for each in torch.split(upper, 32, dim=-1) for shift in (0, 2, 4, 6)]
    codes = _halves(lower, 64) | torch.cat(two, dim=-1) << 4
    return _Blocks(codes, of_groups.contiguous().view(torch.int8).float() * _fp16(whole))


_LAYOUTS: Final[Mapping[Layout, tuple[int, Callable[[Tensor], _Blocks]]]] = {
    "mxfp4_gguf": (17, _mxfp4),
    "q4_0": (18, _q4_0),
    "q4_1": (20, _q4_1),
    "q4_k": (144, _q4_k),
    "q5_0": (22, _q5_0),
    "q5_1": (24, _q5_1),
    "q5_k": (176, _q5_k),
    "q6_k": (210, _q6_k),
    "q8_0": (34, _q8_0),
}
"""A block's bytes, and what unpacks them u8[blocks, bytes]."""
LAYOUTS: Final = frozenset(_LAYOUTS)
"""Those that unpack() knows."""


def _halves(pairs: Tensor, width: int) -> Tensor:
    """Return codes of which `width` bytes at a time hold the lower halves first, then the upper."""
    parts = pairs.reshape(len(pairs), -1, 1, width)
    return torch.cat((parts & 15, parts >> 4), dim=-2).flatten(1)


def _with_fifth(pairs: Tensor, fifth: Tensor) -> Tensor:
    """Return codes of five bits, of which `fifth` has the upper ones, the first the lowest."""
    upper = fifth[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return _halves(pairs, 16) | upper.flatten(1) << 4


def _scales_and_lows(whole: Tensor, of_groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return f32[blocks, 8] each: fp16 numbers times integers of 6 bits, in 12 bytes.

    The last four of these have their lower bits in the last bytes, and their upper two bits above
    the first four.
    """
    scales, lows, rest = torch.split(of_groups, 4, dim=-1)
    of_scales = torch.cat((scales & 63, rest & 15 | scales >> 2 & 48), dim=-1)
    of_lows = torch.cat((lows & 63, rest >> 4 | lows >> 2 & 48), dim=-1)
    scale, low = torch.split(_fp16(whole), 1, dim=-1)
    return of_scales.float() * scale, -(of_lows.float() * low)


def _fp16(data: Tensor) -> Tensor:
    """Return f32[..., n / 2] of the fp16 numbers in u8[..., n]."""
    return data.contiguous().view(torch.float16).float()

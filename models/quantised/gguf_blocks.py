"""Unpacks the blocks of a GGUF file: codes and their scales, as they are stored.

Owns the layouts Q4_0, Q8_0 and Q6_K, whose zeros are in the middle of the codes: a number is
(code - middle) * scale, and the product of a scale and a code is exact in fp32. Knows no file;
called by models.quantised.layouts. Source: the dequantisation of the `gguf` library (gguf.quants).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from models.quantised.coded import StoredMatrix
from models.quantised.scheme import Layout, Scheme

_SCALE_BYTES: Final = 2
"""Of an fp16 number."""
_Q8_0_BYTES: Final = _SCALE_BYTES + 32
_Q4_0_BYTES: Final = _SCALE_BYTES + 32 // 2
_Q6_K_SIZES: Final = [128, 64, 16, _SCALE_BYTES]
"""The lower four bits of 256 codes, their upper two, 16 scales, and the scale of these."""


def _q8_0(data: Tensor, scheme: Scheme, dtype: torch.dtype) -> StoredMatrix:
    """Unpack blocks of a scale and 32 signed bytes."""
    blocks = data.view(len(data), -1, _Q8_0_BYTES)
    scales, codes = torch.split(blocks, [_SCALE_BYTES, 32], dim=-1)
    # 128 above the signed byte, as bits.
    return _matrix((codes ^ 128).flatten(1), _fp16(scales), scheme, dtype)


def _q4_0(data: Tensor, scheme: Scheme, dtype: torch.dtype) -> StoredMatrix:
    """Unpack blocks of a scale and 16 bytes, whose lower halves are the first 16 codes."""
    blocks = data.view(len(data), -1, _Q4_0_BYTES)
    scales, pairs = torch.split(blocks, [_SCALE_BYTES, 16], dim=-1)
    codes = torch.cat((pairs & 15, pairs >> 4), dim=-1)
    return _matrix(codes.flatten(1), _fp16(scales), scheme, dtype)


def _q6_k(data: Tensor, scheme: Scheme, dtype: torch.dtype) -> StoredMatrix:
    """Unpack blocks of 256 codes in groups of 16; two halves of a block have the same layout."""
    blocks = data.view(len(data), -1, sum(_Q6_K_SIZES))
    lower, upper, scales, whole = torch.split(blocks, _Q6_K_SIZES, dim=-1)
    lower = lower.reshape(-1, 2, 1, 64)
    lower = torch.cat((lower & 15, lower >> 4), dim=-2).view(-1, 2, 4, 32)
    upper = upper.reshape(-1, 2, 1, 32)
    upper = torch.cat([upper >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2)
    codes = (lower | upper << 4).view(len(data), -1)
    of_groups = scales.contiguous().view(torch.int8).float() * _fp16(whole)[..., None]
    return _matrix(codes, of_groups.flatten(1), scheme, dtype)


UNPACKERS: Final[Mapping[Layout, Callable[[Tensor, Scheme, torch.dtype], StoredMatrix]]] = {
    "q4_0": _q4_0,
    "q6_k": _q6_k,
    "q8_0": _q8_0,
}
"""By layout: each takes the bytes u8[rows, n] of rows, and the dtype of the numbers."""


def _fp16(data: Tensor) -> Tensor:
    """Return f32[..., n] of the fp16 numbers in u8[..., n, 2]."""
    return data.contiguous().view(torch.float16).squeeze(-1).float()


def _matrix(codes: Tensor, scales: Tensor, scheme: Scheme, dtype: torch.dtype) -> StoredMatrix:
    assert scheme.group_size is not None
    zeros = torch.full_like(scales, 1 << (scheme.bits - 1))
    return StoredMatrix(
        codes.contiguous(), scales.contiguous(), zeros, scheme.group_size, scheme.bits, dtype
    )

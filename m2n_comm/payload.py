"""Compressed request rows of one byte per element: fp8-e4m3 or int8, with a scale per token.

Owns the arithmetic (scale = largest magnitude / largest code); knows no windows and no frames.
host/attention_side.py packs rows into a request window, host/join.py unpacks them into the dtype
that experts compute in. Answers are not compressed. A row with a NaN or an infinity becomes a row
of NaN, never finite numbers.
"""

from __future__ import annotations

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}

# Below this a row's scale would be denormal; such rows become zeros, as in bf16 sums.
_SMALLEST_SCALE = 1e-30


def pack_rows(
    rows: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Write rows [R, H] as values [R, H] of a dtype in LARGEST and scales [R, 1] fp32.

    `scratch` [>= R, H] fp32 is overwritten.
    """
    largest = LARGEST[values.dtype]
    wide = scratch[: rows.shape[0]].copy_(rows)
    torch.amax(wide.abs(), dim=1, keepdim=True, out=scales)
    scales.div_(largest).clamp_(min=_SMALLEST_SCALE)
    wide.div_(scales).clamp_(-largest, largest)
    if values.dtype == torch.int8:
        wide.round_()
    values.copy_(wide)


def unpack_rows(
    values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Write values [R, H] times scales [R, 1] to out [R, H], any float dtype.

    `scratch` [>= R, H] fp32 is overwritten.
    """
    wide = scratch[: values.shape[0]].copy_(values)
    torch.mul(wide, scales, out=out)

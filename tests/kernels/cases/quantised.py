"""The matrices that the CPU's quantised weights stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.quantised import QuantisedWeight
from kernels.cpu.simd.integers import CENTRE, CENTRED_BITS, GROUP, scale_bytes
from kernels.cpu.simd.lanes import LANES
from topspin.plan.precision import E2M1_INTEGERS, E2M1_ZERO


def dequantise(weight: QuantisedWeight) -> Tensor:
    """Return the fp32 matrix [O, I] that a quantised weight represents."""
    blocks, groups, _ = weight.data.shape
    split = scale_bytes(weight.bits)
    scales = weight.data[:, :, :split].contiguous()
    if weight.weight_format == "mxfp4":
        step = 2.0 ** (scales.view(blocks, groups, LANES).float() - 127)
        low = -E2M1_ZERO * step
    elif weight.bits == CENTRED_BITS:
        step = scales.view(torch.bfloat16).float()
        low = -CENTRE * step
    else:
        scales = scales.view(torch.bfloat16).float()
        low, step = scales.view(blocks, groups, LANES, 2).unbind(-1)
    raw = weight.data[:, :, split:].view(blocks, groups, -1, LANES, 4)
    if weight.weight_format != "int8":
        raw = torch.stack((raw & 15, raw >> 4), dim=3).flatten(2, 3)
    if weight.weight_format == "mxfp4":
        raw = torch.tensor(E2M1_INTEGERS)[raw.int()]
    codes = raw.permute(0, 3, 1, 2, 4).reshape(blocks, LANES, groups, GROUP).float()
    numbers = codes * step.transpose(1, 2)[..., None] + low.transpose(1, 2)[..., None]
    whole = numbers.reshape(blocks * LANES, groups * GROUP)[:, : weight.in_features]
    if not weight.in_units:
        return whole[: weight.out_features]
    halves = whole.view(-1, 2, GROUP, weight.in_features).transpose(0, 1).flatten(1, 2)
    return halves[:, : weight.out_features // 2].flatten(0, 1)

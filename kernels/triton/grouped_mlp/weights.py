"""Weights in the formats of a GPU's kernels, single or as experts.

Owns the formats as tensors and the conversion of a checkpoint's matrix. Each expert has separate
tensors and a table has their addresses, so an expert can be replaced without moving the others.
(With the CPU's blocks of `kernels.cpu.quantised`, groups of 32 inputs laid out for
vector instructions, a GPU would apply four times as many steps.) Knows no kernel and needs
no triton. Called by `kernels.triton.ops`, `kernels.triton.grouped_mlp.launches` and
`kernels.triton.linear.launches`.

Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.coded import holds, mxfp4_codes, numbers, steps_and_lows
from kernels.contracts import CodedMatrix, LinearWeight, Matrix, PackedExperts
from kernels.experts.mixed import collect_by_format
from kernels.experts.slots import Packing, collect_experts
from topspin.errors import ConfigError
from topspin.plan.precision import (
    E2M1_INTEGERS,
    E2M1_ZERO,
    MXFP4_BITS,
    MXFP4_GROUP,
    UNQUANTISED,
    Format,
)

GROUP: Final = 128
"""Inputs that share a scale or a step; in fp8 outputs too."""
FORMATS: Final[tuple[Format, ...]] = ("none", "fp8", "int8", "int4", "mxfp4")
"""Their indices are the kernels' FORMAT."""
BITS: Final[dict[Format, int]] = {"int8": 8, "int4": 4, "mxfp4": MXFP4_BITS}
"""Of the codes; mxfp4: of the integers that they stand for."""
FP8_MAX: Final = 448.0
ALIGNMENT: Final = 16
# A range without the farthest numbers is less accurate for them, and more for the others.
RANGES: Final = (1.0, 0.95, 0.9, 0.85, 0.8)
# An LM head is quantised in pieces: the search of ranges takes a dozen times its size.
NUMBERS_AT_ONCE: Final = 1 << 25


@dataclass(frozen=True, eq=False)
class GpuWeight(LinearWeight):
    """A weight [O, I] in one of FORMATS; `packed` if quantised.

    none: data [O, I] as it came. fp8: data e4m3[O, I], scales f32[h, blocks of O / h, blocks of
    I] of 128 x 128 numbers, h being 2 for gate_up. int8: data u8[O, I'], I' being I up to a
    whole number of groups; int4: u8[O, I' / 2], whose 64 bytes of a group hold its first 64
    inputs in their low and the others in their high halves. Of both, scales bf16[groups, 2, O]
    are steps and lowest numbers: a number is code * step + lowest. mxfp4: data as in int4, of
    e2m1's codes; scales i32[groups, O], the exponents of a group's four steps, each of 32 inputs.
    """

    scales: Tensor | None = field(kw_only=True, default=None)

    @property
    def scale_stride(self) -> int:
        """Return the distance of scales from group to group of inputs, of fp8 in a row of them."""
        return {"fp8": 1, "mxfp4": self.out_features}.get(self.weight_format, 2 * self.out_features)


@dataclass(frozen=True, eq=False)
class GpuExperts(PackedExperts):
    """Experts by slot, all in one format."""

    table: Tensor = field(init=False)
    """i64[E, 4], the addresses of gate_up, its scales, down, and its scales."""

    @property
    def weight_format(self) -> Format:
        """Return the experts' format."""
        return self.down[0].weight_format

    def __post_init__(self) -> None:
        """Fill the table of addresses."""
        found = []
        for pair in zip(self.gate_up, self.down, strict=True):
            addresses = []
            for weight in pair:
                assert isinstance(weight, GpuWeight)
                assert weight.weight_format == self.weight_format, weight.weight_format
                scales = weight.data if weight.scales is None else weight.scales
                addresses += [weight.data.data_ptr(), scales.data_ptr()]
            found.append(addresses)
        table = torch.tensor(found, dtype=torch.int64, device=self.gate_up[0].data.device)
        object.__setattr__(self, "table", table)


def pack_weight(weight: Matrix, weight_format: Format, *, halves: int = 1) -> GpuWeight:
    """Convert a matrix [O, I], bf16, fp32 or coded, to a format, on the matrix's device.

    `halves` is 2 for a gate above an up projection. A coded matrix keeps its codes where the format
    can have them. Raises ConfigError for an unknown format.
    """
    if weight_format not in FORMATS:
        raise ConfigError(f"no weight format {weight_format!r}; choose one of {', '.join(FORMATS)}")
    num_out, num_in = weight.shape
    own = None if isinstance(weight, Tensor) else _own_codes(weight, weight_format, halves)
    data, scales = own or _quantise(numbers(weight), weight_format, halves)
    if data.data_ptr() % ALIGNMENT:
        data = data.clone()
    return GpuWeight(
        data,
        num_out,
        num_in,
        packed=weight_format != UNQUANTISED,
        weight_format=weight_format,
        scales=scales,
    )


def _quantise(weight: Tensor, weight_format: Format, halves: int) -> tuple[Tensor, Tensor | None]:
    """Return the data and scales of a GpuWeight."""
    if weight_format == UNQUANTISED:
        return weight.contiguous(), None
    if weight_format == "fp8":
        return _quantise_fp8(weight, halves)
    if weight_format == "mxfp4":
        return _mxfp4(weight)
    pieces = torch.split(weight, max(NUMBERS_AT_ONCE // weight.shape[1], 1))
    coded = [_quantise_codes(piece, BITS[weight_format]) for piece in pieces]
    data = torch.cat([codes for codes, _ in coded])
    return data, torch.cat([found for _, found in coded], dim=2)


def _own_codes(
    weight: CodedMatrix, weight_format: Format, halves: int
) -> tuple[Tensor, Tensor] | None:
    """Return the data and scales that hold a matrix's own codes, None if the format cannot."""
    if weight_format == "fp8":
        return _own_fp8(weight, halves)
    bits = BITS.get(weight_format)
    group = MXFP4_GROUP if weight_format == "mxfp4" else GROUP
    if bits is None or not holds(weight, bits=bits, group=group):
        return None
    if weight_format == "mxfp4":
        return _mxfp4(weight)
    steps, lows = steps_and_lows(weight, GROUP)
    scales = torch.stack((steps.t(), lows.t()), dim=1).contiguous()
    return _packed(_groups(weight.codes), bits), scales


def _mxfp4(weight: Matrix) -> tuple[Tensor, Tensor]:
    """Return the data and scales of a matrix in mxfp4."""
    codes, exponents = mxfp4_codes(weight)
    words = F.pad(exponents, (0, -exponents.shape[1] % 4)).view(torch.int32)
    return _packed(_groups(codes), MXFP4_BITS), words.t().contiguous()


def _groups(codes: Tensor) -> Tensor:
    """Return codes [O, I] as [O, groups, GROUP]; zeros follow the last one."""
    return F.pad(codes, (0, -codes.shape[1] % GROUP)).view(len(codes), -1, GROUP)


def _own_fp8(weight: CodedMatrix, halves: int) -> tuple[Tensor, Tensor] | None:
    """Return the data and scales of fp8 codes whose scales are equal in blocks of 128 x 128."""
    scales, (num_out, num_in) = weight.scales, weight.shape
    is_divided = weight.group % GROUP == 0 or scales.shape[1] == 1
    if weight.codes.dtype != torch.float8_e4m3fn or not is_divided:
        return None
    of_inputs = scales[:, torch.arange(0, num_in, GROUP, device=scales.device) // weight.group]
    size = num_out // halves
    rows = of_inputs.view(halves, size, -1)
    blocks = rows[:, ::GROUP]
    if not torch.equal(blocks.repeat_interleave(GROUP, dim=1)[:, :size], rows):
        return None
    return weight.codes.contiguous(), blocks.contiguous()


def _quantise_fp8(weight: Tensor, halves: int) -> tuple[Tensor, Tensor]:
    """Scale each block of 128 x 128 numbers so that its greatest magnitude is fp8's greatest."""
    num_out, num_in = weight.shape
    size = num_out // halves
    padding = (0, -num_in % GROUP, 0, -size % GROUP)
    padded = F.pad(weight.float().reshape(halves, size, num_in), padding)
    blocks = padded.view(halves, padded.shape[1] // GROUP, GROUP, -1, GROUP)
    scales = blocks.abs().amax(dim=(2, 4)).clamp(min=1e-10) / FP8_MAX
    codes = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
    data = codes.view(padded.shape)[:, :size, :num_in].reshape(num_out, num_in)
    return data.contiguous(), scales.contiguous()


def _quantise_codes(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales; of several ranges per group that of the least squared error."""
    num_out, num_in = weight.shape
    # Padding with the last column widens no group's range; rows have zeros there.
    ends = weight[:, -1:].expand(-1, -num_in % GROUP)
    groups = torch.cat((weight, ends), dim=1).float().view(num_out, -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    levels = (1 << bits) - 1
    middle, reach = (low + high) / 2, (high - low) / 2
    best = torch.full_like(low, float("inf"))
    codes = torch.zeros_like(groups)
    step, lowest = torch.zeros_like(low), torch.zeros_like(low)
    for share in RANGES:
        a = (middle - share * reach).bfloat16().float()
        b = ((middle + share * reach - a) / levels).clamp(min=1e-10).bfloat16().float()
        tried = ((groups - a) / b).round().clamp(0, levels)
        error = (tried * b + a - groups).pow(2).sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better, tried, codes)
        step, lowest = torch.where(better, b, step), torch.where(better, a, lowest)
    scales = torch.cat((step, lowest), dim=-1).permute(1, 2, 0).bfloat16().contiguous()
    return _packed(codes.to(torch.uint8), bits), scales


def _packed(groups: Tensor, bits: int) -> Tensor:
    """Return the data of codes u8[O, groups, GROUP]."""
    if bits < 8:
        groups = groups[..., : GROUP // 2] | groups[..., GROUP // 2 :] << 4
    return groups.reshape(len(groups), -1).contiguous()


def unpack_weight(weight: GpuWeight) -> Tensor:
    """Return the fp32 matrix [O, I] that a weight represents."""
    if weight.scales is None:
        return weight.data.float()
    if weight.weight_format == "fp8":
        halves = weight.scales.shape[0]
        wide = weight.scales.repeat_interleave(GROUP, 1).repeat_interleave(GROUP, 2)
        size = weight.out_features // halves
        numbers = weight.data.float().view(halves, size, -1) * wide[:, :size, : weight.in_features]
        return numbers.view(weight.out_features, weight.in_features)
    codes = weight.data
    if weight.weight_format != "int8":
        pairs = codes.view(weight.out_features, -1, GROUP // 2)
        codes = torch.cat((pairs & 15, pairs >> 4), dim=-1)
    if weight.weight_format == "mxfp4":
        exponents = weight.scales.t().contiguous().view(torch.uint8).int()
        steps = (exponents << 23).view(torch.float32).repeat_interleave(MXFP4_GROUP, 1)
        integers = torch.tensor(E2M1_INTEGERS, device=codes.device)[codes.int()] - E2M1_ZERO
        return (integers.flatten(1) * steps)[:, : weight.in_features]
    step, lowest = weight.scales.float().permute(1, 2, 0)[..., None]
    groups: Tensor = codes.reshape(weight.out_features, -1, GROUP).float() * step + lowest
    return groups.view(weight.out_features, -1)[:, : weight.in_features]


PACKING: Final = Packing(
    gate_up=partial(pack_weight, halves=2),
    down=pack_weight,
    collect=partial(collect_by_format, collect=partial(collect_experts, kind=GpuExperts)),
)

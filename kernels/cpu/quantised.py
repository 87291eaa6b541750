"""Weights in 4 or 8 bits for projections and routed experts.

Owns the tensors of a quantised weight, and `QuantisedOps`, which computes with weights of any
format; `kernels.cpu.ops` does all else. A weight is quantised when it is packed, in groups of 32
inputs of an output, each with a step and a lowest number (chosen for a small squared error, or a
coded matrix's own); rows are quantised to 8 bits in each product, in the same groups, each with a
scale (llama.cpp's Q8_0), so that products are sums of integers, exact until a group's sum is scaled
in fp32. A row's result does not depend on the other rows. Called by the nodes through
`kernels.dispatch`.

Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.coded import holds, mxfp4_codes, numbers, steps_and_lows
from kernels.contracts import (
    Biases,
    ExpertMatrices,
    ExpertOutput,
    LinearWeight,
    Matrix,
    PackedExperts,
)
from kernels.cpu import ops as plain
from kernels.cpu.compiled.matmul.quantised import quantise_weight, quantised_linear
from kernels.cpu.compiled.matmul.quantised_experts import (
    quantised_experts,
    quantised_formed_experts,
)
from kernels.cpu.compiled.matmul.units import form_words, has_form
from kernels.cpu.compiled.runtime import launch
from kernels.cpu.huge_pages import Arena
from kernels.cpu.matmul import collect_slots, pack_in
from kernels.cpu.simd.integers import (
    CENTRE,
    CENTRED_BITS,
    GROUP,
    ROW_GROUP_BYTES,
    group_bytes,
    scale_bytes,
)
from kernels.cpu.simd.lanes import LANES
from kernels.experts.mixed import MixedExperts, collect_by_format, mixed_mlp
from kernels.experts.slots import Packing, collect_experts, pack_slots, rebuild_slots
from topspin.expert_activation import SWIGLU, ExpertActivation
from topspin.plan.precision import MXFP4_BITS, UNQUANTISED, Format

BITS: Final[dict[Format, int]] = {"int4": 4, "int8": 8, "mxfp4": MXFP4_BITS}
"""Of the integers that are multiplied; int4 without lows has CENTRED_BITS."""
_BITS_BY_SIZE: Final = {group_bytes(bits): bits for bits in (*BITS.values(), CENTRED_BITS)}


@dataclass(frozen=True, eq=False)
class QuantisedWeight(LinearWeight):
    """A weight [O, I] whose data are the blocks of `kernels.cpu.simd.integers`.

    data is u8[blocks, groups, bytes]; outputs and inputs beyond O and I are zeros.
    """

    in_units: bool = field(default=False, kw_only=True)
    """True: a gate above an up projection, stored as GROUP outputs of each in turn."""

    @property
    def bits(self) -> int:
        """Return the bits of the integers that are multiplied."""
        return _bits(self)


@dataclass(frozen=True, eq=False)
class QuantisedExperts(PackedExperts):
    """Experts by slot; gate_up is in units, so that a task reads consecutive blocks."""

    table: Tensor = field(init=False)
    """i64[E, 4], the addresses of the data of gate_up and down, each with its bits."""

    def __post_init__(self) -> None:
        """Fill the table."""
        found = [
            [word for each in pair for word in (each.data.data_ptr(), _bits(each))]
            for pair in zip(self.gate_up, self.down, strict=True)
        ]
        object.__setattr__(self, "table", torch.tensor(found, dtype=torch.int64).view(-1, 4))


def quantise(weight: Tensor, weight_format: Format, arena: Arena | None = None) -> QuantisedWeight:
    """Quantise a matrix [O, I], fp32 or bf16, in `arena`.

    With scales the result has 5 (int4), 9 (int8) or 4.25 (mxfp4) bits per number.
    """
    if weight_format == "mxfp4":
        return lay_out(*mxfp4_codes(weight), weight_format, arena)
    num_out, num_in = weight.shape
    bits = BITS[weight_format]
    groups = -(-num_in // GROUP)
    # The rows are 0 in the padding: any numbers are right that do not widen the range of the last
    # group.
    ends = weight[:, -1:].expand(-1, groups * GROUP - num_in)
    source = torch.cat((weight, ends), dim=1) if num_in % GROUP else weight.contiguous()
    shape = (-(-num_out // LANES), groups, group_bytes(bits))
    data = torch.zeros(shape, dtype=torch.uint8) if arena is None else arena.zeros(*shape)
    launch(
        quantise_weight,
        [
            source.data_ptr(),
            _is_bf16(source),
            num_out,
            groups,
            bits,
            data.data_ptr(),
        ],
        num_threads=torch.get_num_threads(),
    )
    return QuantisedWeight(data, num_out, num_in, packed=True, weight_format=weight_format)


def lay_out(
    codes: Tensor, scales: Tensor, weight_format: Format, arena: Arena | None = None
) -> QuantisedWeight:
    """Return a weight of codes u8[O, I] with the bytes u8[O, groups * n] of scales, in `arena`.

    n is 4 (low and step), 2 (step alone: int4 whose zeros are all CENTRE, 4.5 bits per number) or 1
    (mxfp4).
    """
    num_out, num_in = codes.shape
    bits, groups = BITS[weight_format], -(-num_in // GROUP)
    if scales.shape[1] == groups * scale_bytes(CENTRED_BITS) // LANES:
        bits = CENTRED_BITS
    blocks = -(-num_out // LANES)
    shape = (blocks, groups, group_bytes(bits))
    data = torch.empty(shape, dtype=torch.uint8) if arena is None else arena.zeros(*shape)
    missing = blocks * LANES - num_out
    split = scale_bytes(bits)
    of_blocks = F.pad(scales, (0, 0, 0, missing)).view(blocks, LANES, groups, -1).transpose(1, 2)
    data[:, :, :split] = of_blocks.reshape(blocks, groups, split)
    padded = F.pad(codes, (0, groups * GROUP - num_in, 0, missing))
    words = padded.view(torch.int32).view(blocks, LANES, -1).transpose(1, 2).contiguous()
    laid = words.view(torch.uint8).view(blocks, groups, -1, 2, 4 * LANES)
    if bits < 8:
        laid = laid[:, :, :, 0] | laid[:, :, :, 1] << 4
    data[:, :, split:] = laid.reshape(blocks, groups, -1)
    return QuantisedWeight(data, num_out, num_in, packed=True, weight_format=weight_format)


def quantised_product(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None, out: Tensor | None
) -> Tensor:
    """Multiply x [R, I] by a quantised weight transposed and add bias [O]; returns [R, O]."""
    assert not weight.in_units
    num_rows, num_in = x.shape
    x = _with_whole_rows(x)
    is_ours = out is not None and out.is_contiguous() and out.dtype in _DTYPES
    result = out if out is not None and is_ours else x.new_empty(num_rows, weight.out_features)
    assert bias is None or bias.is_contiguous()
    if num_rows:
        codes = torch.empty(num_rows * weight.data.shape[1] * ROW_GROUP_BYTES, dtype=torch.uint8)
        launch(
            quantised_linear,
            [
                x.data_ptr(),
                x.stride(0) * x.itemsize,
                _is_bf16(x),
                num_rows,
                num_in,
                weight.data.data_ptr(),
                weight.bits,
                weight.out_features,
                0 if bias is None else bias.data_ptr(),
                0 if bias is None else _is_bf16(bias),
                result.data_ptr(),
                _is_bf16(result),
                codes.data_ptr(),
            ],
            num_threads=torch.get_num_threads(),
        )
    return result if out is None or is_ours else out.copy_(result)


def quantised_mlp(
    hidden: Tensor,
    slots: Tensor,
    weights: Tensor,
    experts: QuantisedExperts,
    out: Tensor | None,
) -> ExpertOutput:
    """Sum each row's local experts; see `kernels.reference.grouped_mlp`.

    The contributions are added in fp32 in slot order; between the two products the only rounding
    is quantisation.
    """
    num_rows, top_k = slots.shape
    hidden, width = _with_whole_rows(hidden), experts.hidden_size
    groups, units = -(-width // GROUP), -(-experts.ffn_size // GROUP)
    slots, weights = slots.int().contiguous(), weights.contiguous()
    is_ours = out is not None and out.is_contiguous() and out.dtype in _DTYPES
    result = out if out is not None and is_ours else hidden.new_empty(num_rows, width)
    num_pairs, padded = num_rows * top_k, -(-width // LANES) * LANES
    counts = torch.empty(experts.num_experts, dtype=torch.int64)
    order = torch.empty(2 * experts.num_experts + 1 + num_pairs, dtype=torch.int64)
    used = order.data_ptr() + 8 * experts.num_experts
    pairs = used + 8 * (experts.num_experts + 1)
    sums = torch.empty(num_rows, padded)
    codes = torch.empty(num_rows * groups * ROW_GROUP_BYTES, dtype=torch.uint8)
    pair_codes = torch.empty(num_pairs * units * ROW_GROUP_BYTES, dtype=torch.uint8)
    launch(
        quantised_formed_experts if has_form(experts) else quantised_experts,
        [
            hidden.data_ptr(),
            hidden.stride(0) * hidden.itemsize,
            _is_bf16(hidden),
            num_rows,
            top_k,
            slots.data_ptr(),
            weights.data_ptr(),
            experts.num_experts,
            experts.table.data_ptr(),
            units,
            width,
            result.data_ptr(),
            _is_bf16(result),
            sums.data_ptr(),
            counts.data_ptr(),
            order.data_ptr(),
            used,
            pairs,
            codes.data_ptr(),
            pair_codes.data_ptr(),
            experts.ffn_size,
            *form_words(experts),
        ],
        num_threads=torch.get_num_threads(),
    )
    if out is not None and not is_ours:
        result = out.copy_(result)
    return ExpertOutput(result, counts)


_DTYPES = (torch.float32, torch.bfloat16)


def _is_bf16(x: Tensor) -> int:
    assert x.dtype in _DTYPES, f"{x.dtype}"
    return int(x.dtype == torch.bfloat16)


def _with_whole_rows(x: Tensor) -> Tensor:
    """Return x [R, I] with the numbers of a row side by side."""
    return x if x.stride(1) == 1 else x.contiguous()


class QuantisedOps:
    """The ops of the CPU with weights of any format; see `kernels.dispatch.Ops`."""

    def __init__(self) -> None:
        # For weights packed at start; experts of a later table are allocated one by one.
        self._arena = Arena()

    def __getattr__(self, name: str) -> Any:
        return getattr(plain, name)

    def pack_linear(self, weight: Matrix, weight_format: Format = UNQUANTISED) -> LinearWeight:
        """Pack a weight [O, I]; the caller drops the original."""
        return _pack(weight, weight_format, self._arena)

    def linear(
        self,
        x: Tensor,
        weight: LinearWeight,
        bias: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Multiply x [R, I] by a weight [O, I] transposed and add bias [O]; returns [R, O]."""
        if isinstance(weight, QuantisedWeight):
            return quantised_product(x, weight, bias, out)
        return plain.linear(x, weight, bias, out)

    def pack_experts(
        self,
        gate_up: Iterable[Matrix],
        down: Iterable[Matrix],
        *,
        formats: Sequence[Format] | None = None,
        share_per_row: float = 0.0,
        biases: Biases | None = None,
        activation: ExpertActivation = SWIGLU,
    ) -> PackedExperts:
        """Pack E experts one matrix after the other; see `kernels.reference.pack_experts`.

        Quantised experts have one layout, whatever `share_per_row`.
        """
        if formats is None or set(formats) == {UNQUANTISED}:
            return plain.pack_experts(
                gate_up, down, share_per_row=share_per_row, biases=biases, activation=activation
            )
        return pack_slots(_packing(self._arena), gate_up, down, formats, biases, activation)

    def rebuild_experts(
        self, experts: PackedExperts, slots: Sequence[int | ExpertMatrices]
    ) -> Generator[None, None, PackedExperts]:
        """Return experts with some slots changed; see `kernels.reference.rebuild_experts`."""
        if experts.joined:
            return plain.rebuild_experts(experts, slots)
        return rebuild_slots(_packing(None), experts, slots)

    def grouped_mlp(
        self,
        hidden: Tensor,
        slots: Tensor,
        weights: Tensor,
        experts: PackedExperts,
        *,
        out: Tensor | None = None,
    ) -> ExpertOutput:
        """Sum each row's local experts; see `kernels.reference.grouped_mlp`."""
        if isinstance(experts, QuantisedExperts):
            return quantised_mlp(hidden, slots, weights, experts, out)
        if isinstance(experts, MixedExperts):
            return mixed_mlp(hidden, slots, weights, experts, out=out, grouped_mlp=self.grouped_mlp)
        return plain.grouped_mlp(hidden, slots, weights, experts, out=out)


def _pack(weight: Matrix, weight_format: Format, arena: Arena | None) -> LinearWeight:
    """Pack [O, I]."""
    if weight_format == UNQUANTISED:
        return plain.pack_linear(weight)
    own = _own_codes(weight, weight_format)
    if own is None:
        return quantise(numbers(weight), weight_format, arena)
    return lay_out(*own, weight_format, arena)


def _pack_gate_up(weight: Matrix, weight_format: Format, arena: Arena | None) -> LinearWeight:
    """Pack a gate above an up projection [2F, H] in units, with zeros after the last row."""
    if weight_format == UNQUANTISED:
        return pack_in(numbers(weight), arena)
    num_out = weight.shape[0]
    own = _own_codes(weight, weight_format)
    if own is None:
        packed = quantise(_in_units(numbers(weight)), weight_format, arena)
    else:
        codes, scales = map(_in_units, own)
        packed = lay_out(codes, scales, weight_format, arena)
    return replace(packed, out_features=num_out, in_units=True)


def _own_codes(weight: Matrix, weight_format: Format) -> tuple[Tensor, Tensor] | None:
    """Return the codes and the bytes of scales of a matrix; None: they are to be chosen."""
    if isinstance(weight, Tensor) or not holds(weight, bits=BITS[weight_format], group=GROUP):
        return None
    if weight_format == "mxfp4":
        return mxfp4_codes(weight)
    steps, lows = steps_and_lows(weight, GROUP)
    if (
        weight_format == "int4"
        and weight.zeros is not None
        and bool((weight.zeros == CENTRE).all())
    ):
        return weight.codes, steps.view(torch.uint8)
    return weight.codes, torch.stack((lows, steps), dim=-1).flatten(1).view(torch.uint8)


def _bits(weight: LinearWeight) -> int:
    return _BITS_BY_SIZE[weight.data.shape[2]]


def _in_units(rows: Tensor) -> Tensor:
    """Return rows [2F, n], of gates above ups, as GROUP rows of each in turn."""
    width = rows.shape[1]
    halves = F.pad(rows.view(2, -1, width), (0, 0, 0, -(rows.shape[0] // 2) % GROUP))
    return halves.view(2, -1, GROUP, width).transpose(0, 1).reshape(-1, width)


def _packing(arena: Arena | None) -> Packing:
    return Packing(
        gate_up=partial(_pack_gate_up, arena=arena),
        down=partial(_pack, arena=arena),
        collect=partial(collect_by_format, collect=_collect, kind=_is_quantised),
    )


def _is_quantised(weight_format: Format) -> bool:
    return weight_format != UNQUANTISED


def _collect(
    gate_up: list[LinearWeight], down: list[LinearWeight], dtype: torch.dtype
) -> PackedExperts:
    """Return experts that are all quantised, or all not."""
    if isinstance(down[0], QuantisedWeight):
        return collect_experts(gate_up, down, dtype, QuantisedExperts)
    return collect_slots(gate_up, down, dtype)

"""Ops whose result for a row has the same bits in every batch.

Matrix products always have ROW_GROUP rows: more go in several products, fewer are padded,
so that one code path of the library, with one order of summation over the inputs, serves
every batch. Elementwise ops use only operations that round alike in and outside of vector
registers (`F.silu` and `torch.sigmoid` in fp32 do not). Attention is
in `kernels.deterministic_attention`. Used by both kinds of nodes under `--deterministic`.

This holds between processes that run the same torch build on the same kind of
processor, with any number of threads. Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.coded import numbers
from kernels.contracts import (
    Biases,
    ExpertMatrices,
    ExpertOutput,
    HeadMatrices,
    LinearWeight,
    Matrix,
    PackedExperts,
)
from kernels.cpu.plain import add_rms_norm, rms_norm, rotate_and_store
from kernels.deterministic_attention import paged_attention
from kernels.experts.slots import Packing, collect_experts, pack_slots, rebuild_slots
from kernels.reference import (
    add_counts,
    attend_prompt,
    code_keys,
    embed,
    pack_heads,
    permute,
    route,
    selected_keys,
)
from kernels.sampling import SampleResult, SamplingBatch
from topspin.expert_activation import SWIGLU, ExpertActivation
from topspin.plan.precision import UNQUANTISED, Format

__all__ = [
    "add_by_expert",
    "add_counts",
    "add_rms_norm",
    "attend_prompt",
    "code_keys",
    "embed",
    "grouped_mlp",
    "linear",
    "multiply_heads",
    "name",
    "order_of",
    "pack_experts",
    "pack_heads",
    "pack_linear",
    "paged_attention",
    "pair_mlp",
    "rebuild_experts",
    "rms_norm",
    "rotate_and_store",
    "route",
    "sample",
    "selected_keys",
    "sigmoid_gate",
    "swiglu",
]

name: Final = "deterministic"

# Rows of every matrix product. From 16 on oneDNN and MKL give the same bits with any
# number of threads; a decode step of 16 sequences is one product.
ROW_GROUP: Final = 16


def sample(
    logits: Tensor, batch: SamplingBatch, *, num_top_logprobs: int | None = None
) -> SampleResult:
    """Choose one token per row of logits [R, V]; see `kernels.sampling.sample`."""
    # Machines with GPUs, which import this module too, need not have numba.
    from kernels.cpu.sampling import sample as compiled

    return compiled(logits, batch, num_top_logprobs=num_top_logprobs)


def can_prepack(dtype: torch.dtype) -> bool:
    """Return whether this build of torch prepacks weights of `dtype`.

    Unlike in `kernels.cpu.ops`, fp32 is prepacked too: any order of summation is allowed if it
    is always the same, and this one takes half the time.
    """
    ops = torch.ops.mkldnn
    if not (hasattr(ops, "_linear_pointwise") and hasattr(ops, "_reorder_linear_weight")):
        return False
    return dtype == torch.float32 or bool(ops._is_mkldnn_bf16_supported())


def pack_linear(weight: Matrix, weight_format: Format = UNQUANTISED) -> LinearWeight:
    """Prepack a weight [O, I] for oneDNN if possible; the caller drops the original."""
    assert weight_format == UNQUANTISED, weight_format
    weight = numbers(weight)
    num_out, num_in = weight.shape
    if not can_prepack(weight.dtype):
        return LinearWeight(weight.contiguous(), num_out, num_in, packed=False)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return LinearWeight(packed, num_out, num_in, packed=True)


def _product(x: Tensor, weight: LinearWeight, bias: Tensor | None) -> Tensor:
    """Multiply exactly ROW_GROUP contiguous rows."""
    if not weight.packed:
        return F.linear(x, weight.data, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.data, bias, "none", [], "")
    return result


def linear(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply x [R, I] by a weight [O, I] transposed and add bias [O]; returns [R, O]."""
    num_rows = x.shape[0]
    x = x.contiguous()
    num_whole = num_rows - num_rows % ROW_GROUP
    results = [
        _product(x[begin : begin + ROW_GROUP], weight, bias)
        for begin in range(0, num_whole, ROW_GROUP)
    ]
    if num_whole < num_rows:
        padded = x.new_zeros(ROW_GROUP, x.shape[1])
        padded[: num_rows - num_whole] = x[num_whole:]
        results.append(_product(padded, weight, bias)[: num_rows - num_whole])
    if out is None and len(results) == 1:
        return results[0]
    if not results:
        return x.new_empty(0, weight.out_features) if out is None else out
    return torch.cat(results) if out is None else torch.cat(results, out=out)


def multiply_heads(x: Tensor, weight: HeadMatrices, *, out: Tensor | None = None) -> Tensor:
    """Multiply each head of x by its own matrix; see `kernels.reference.multiply_heads`."""
    num_in, num_out = weight.in_features, weight.out_features
    if out is None:
        out = x.new_empty(*x.shape[:2], num_out + x.shape[2] - num_in)
    for head in range(weight.num_heads):
        own = LinearWeight(weight.data[head], num_out, num_in, packed=False)
        out[:, head, :num_out] = linear(x[:, head, :num_in], own)
    out[..., num_out:] = x[..., num_in:]
    return out


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x [R, H] by sigmoid(gate [R, 1]) in place; see `kernels.reference.sigmoid_gate`."""
    sigmoid = gate.float().neg().exp_().add_(1.0).reciprocal_()
    return x.mul_(sigmoid.to(gate.dtype))


def swiglu(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up [R, F] of gate_up [R, 2F]; see `kernels.reference.swiglu`."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    units = wide.neg().exp_().add_(1.0)
    units = torch.div(wide, units, out=units).to(gate_up.dtype)
    return torch.mul(units, up, out=out)


def units_of(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """Return the hidden units [R, F] of gate_up [R, 2F]; see `kernels.reference.units_of`."""
    if activation.is_swiglu:
        return swiglu(gate_up)
    limit = activation.limit
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    units = gate.mul(-activation.alpha).exp_().add_(1.0)
    units = torch.div(gate, units, out=units).mul_(up.add_(activation.offset))
    return units.to(gate_up.dtype)


PACKING: Final = Packing(pack_linear, pack_linear, collect_experts)


def pack_experts(
    gate_up: Iterable[Matrix],
    down: Iterable[Matrix],
    *,
    formats: Sequence[Format] | None = None,
    share_per_row: float = 0.0,
    biases: Biases | None = None,
    activation: ExpertActivation = SWIGLU,
) -> PackedExperts:
    """Prepack E experts, always by slot; see `kernels.reference.pack_experts`."""
    return pack_slots(PACKING, gate_up, down, formats, biases, activation)


def rebuild_experts(
    experts: PackedExperts, slots: Sequence[int | ExpertMatrices]
) -> Generator[None, None, PackedExperts]:
    """Return experts with some slots changed; see `kernels.reference.rebuild_experts`."""
    return rebuild_slots(PACKING, experts, slots)


def pair_mlp(hidden: Tensor, slots: Tensor, experts: PackedExperts) -> ExpertOutput:
    """Return mlp(slots[r, k], hidden[r]) for every pair whose expert is here, unweighted.

    hidden [R, H], slots i32[R, K] (negative: not here). `out` is [P, H] in the dtype of
    hidden, the P pairs by ascending (row, choice).
    """
    groups = permute(slots, experts.num_experts)
    sizes = groups.counts
    padded = sizes.add(ROW_GROUP - 1).div_(ROW_GROUP, rounding_mode="floor").mul_(ROW_GROUP)
    ends = padded.cumsum(0)
    num_pairs = int(groups.offsets[-1])
    # The index among the padded rows of each pair, grouped by expert.
    shift = (ends - padded - groups.offsets[:-1]).repeat_interleave(sizes)
    position = torch.arange(num_pairs) + shift
    source = torch.zeros(int(ends[-1]), dtype=torch.int64)
    source[position] = groups.row_of[:num_pairs]
    inputs = torch.split(hidden.index_select(0, source), padded.tolist())
    busy = [(slot, rows) for slot, rows in enumerate(inputs) if rows.shape[0]]
    if not busy:
        return ExpertOutput(hidden.new_empty(0, experts.hidden_size), sizes)
    biases = {slot: experts.biases_of(slot) for slot, _ in busy}
    gate_up = [linear(rows, experts.gate_up[slot], biases[slot][0]) for slot, rows in busy]
    units = units_of(torch.cat(gate_up), experts.activation)
    parts = torch.split(units, [rows.shape[0] for _, rows in busy])
    results = torch.cat(
        [
            linear(rows, experts.down[slot], biases[slot][1])
            for (slot, _), rows in zip(busy, parts, strict=True)
        ]
    )
    # Back to (row, choice) order: `order` has each pair's index in that order.
    place = torch.empty(slots.numel(), dtype=torch.int64)
    place[groups.order[:num_pairs]] = position
    here = (slots.reshape(-1) >= 0).nonzero()[:, 0]
    return ExpertOutput(results.index_select(0, place[here]), sizes)


def order_of(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return a token's choices by ascending expert id, i64[K, T], and their weights f32[K, T, 1].

    experts [T, K] are logical ids, weights f32[T, K]; a choice is its place among the T * K.
    """
    num_tokens, top_k = experts.shape
    choices = experts.argsort(dim=1)
    first_choice = torch.arange(num_tokens).mul_(top_k)
    order = choices.add(first_choice[:, None]).t().contiguous()
    return order, weights.gather(1, choices).t().contiguous()[:, :, None]


def add_by_expert(rows: Tensor, order: Tensor, weights: Tensor, out: Tensor) -> None:
    """Fill out f32[T, H] with sums of rows [T * K, H], in the order of `order_of`.

    Products and sums are rounded separately, choice after choice.
    """
    out.zero_()
    for places, shares in zip(order, weights, strict=True):
        out.add_(rows.index_select(0, places).float().mul_(shares))


def grouped_mlp(
    hidden: Tensor,
    slots: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    *,
    out: Tensor | None = None,
) -> ExpertOutput:
    """Sum each row's local experts; see `kernels.reference.grouped_mlp`.

    The bits depend on which experts are on the node; nodes whose answers must not depend on
    that send the rows of `pair_mlp` instead.
    """
    rows, counts = pair_mlp(hidden, slots, experts)
    parts, is_here = torch.zeros(*slots.shape, experts.hidden_size), slots >= 0
    # The weight of an absent pair may be anything.
    parts[is_here] = rows.float() * weights[is_here][:, None]
    total = torch.zeros(slots.shape[0], experts.hidden_size)
    for choice in parts.unbind(1):
        total += choice
    if out is None:
        return ExpertOutput(total.to(hidden.dtype), counts)
    return ExpertOutput(out.copy_(total), counts)

"""Matrix products on the CPU: bf16 weights packed in blocks, and the experts' MLPs.

bf16 weights are reordered once, which replaces the original. Where oneDNN multiplies bf16 it packs
them: few rows go through compiled kernels that read its layout
(`kernels.cpu.compiled.matmul.linear`), many through oneDNN. On other processors with AVX2 the same
layout is packed here, in huge pages, and the compiled kernels compute all products. fp32 weights
stay plain: fp32 is used for exactness, and the packed product sums in another order. Knows no
model; used through `kernels.cpu.ops`.

Experts have two layouts. By slot: one product per expert and matrix over that expert's
rows. Joined: all experts as one wide gated MLP whose hidden units are scaled by the
routing weights (0 where a row does not use the expert), two products in all; it is faster
with oneDNN when experts are so small that calls take longer than the wasted arithmetic.

Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
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
from kernels.cpu.compiled.matmul import experts as numba_experts
from kernels.cpu.compiled.matmul import linear as numba_matmul
from kernels.cpu.huge_pages import Arena
from kernels.experts.slots import (
    Packing,
    check_expert,
    collect_experts,
    pack_slots,
    rebuild_biases,
    rebuild_slots,
)
from kernels.reference import count_slots, permute, units_of
from topspin.expert_activation import SWIGLU, ExpertActivation
from topspin.plan.precision import UNQUANTISED, Format

# Join only experts of which a row uses nearly half (else the wasted arithmetic exceeds the saved
# calls) and whose matrices are small.
MIN_JOINED_SHARE: Final = 0.4
MAX_JOINED_EXPERT_BYTES: Final = 2 << 20
# Rows computed, and rows summed, at a time, so that temporaries stay in the processor's cache.
JOINED_ROWS: Final = 256
SUMMED_ROWS: Final = 32
# Rows of a tile of oneDNN's kernels: it computes no fewer.
_ONEDNN_TILE: Final = 16


# For weights packed at start; experts of a later table are allocated one by one.
_ARENA: Final = Arena()


def can_prepack(dtype: torch.dtype) -> bool:
    """Return whether oneDNN prepacks weights of `dtype` with equal results."""
    return dtype == torch.bfloat16 and numba_matmul.onednn_packs()


def pack_linear(weight: Matrix, weight_format: Format = UNQUANTISED) -> LinearWeight:
    """Pack a weight [O, I] if products are faster so; the caller drops the original."""
    assert weight_format == UNQUANTISED, weight_format
    return pack_in(numbers(weight), _ARENA)


def pack_in(weight: Tensor, arena: Arena | None) -> LinearWeight:
    """Pack a weight [O, I] in `arena`; None: in memory of its own, returned when it is dropped."""
    num_out, num_in = weight.shape
    if can_prepack(weight.dtype):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        address = numba_matmul.address_of(weight, packed)
    elif weight.dtype == torch.bfloat16 and numba_matmul.packs_blocks() and num_in % 2 == 0:
        packed = numba_matmul.pack_blocks(weight, arena)
        address = packed.data_ptr()
    else:
        return LinearWeight(weight, num_out, num_in, packed=False)
    return LinearWeight(packed, num_out, num_in, packed=True, address=address)


def linear(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply x [R, I] by a weight [O, I] transposed and add bias [O]; returns [R, O]."""
    given = len(x)
    if not weight.packed:
        result = F.linear(x, weight.data, bias)
    elif given == 0:
        result = x.new_empty(0, weight.out_features)
    elif not weight.data.is_mkldnn or (weight.address and numba_matmul.can_multiply(x)):
        rows = x if x.stride(1) == 1 else x.contiguous()
        target = out if out is not None and numba_matmul.can_write(out) else None
        result = numba_matmul.linear_of_rows(
            rows, weight.address, weight.out_features, bias, target
        )
    else:
        if (num_rows := onednn_rows(given)) > given:
            # Not just any numbers: where a row's length is no multiple of a tile's, oneDNN reads on
            # into the next row, and NaN times the zeros of padded weights is NaN.
            x = torch.cat((x, x.new_zeros(num_rows - given, x.shape[1])))
        whole = torch.ops.mkldnn._linear_pointwise(x, weight.data, bias, "none", [], "")
        result = whole[:given]
    return result if out is None or out is result else out.copy_(result)


def onednn_rows(num_rows: int) -> int:
    """Return how many rows oneDNN multiplies in place of `num_rows`: up to a sixteenth more.

    oneDNN makes code for each number of rows and each shape of weights, in milliseconds, and keeps
    it: more than half a megabyte, which were hundreds for prompts of all lengths. Up to a tile more
    where that is more than a sixteenth.
    """
    step = max(_ONEDNN_TILE, 1 << max((num_rows - 1).bit_length() - 5, 0))
    return -(-num_rows // step) * step


def pack_heads(weight: Tensor) -> HeadMatrices:
    """Pack the matrices [N, O, I] of N heads; the caller drops the originals."""
    if not numba_matmul.can_pack_heads(weight):
        return reference.pack_heads(weight)
    packed = numba_matmul.pack_heads(weight, _ARENA)
    return HeadMatrices(packed, *weight.shape, address=packed.data_ptr())


def multiply_heads(x: Tensor, weight: HeadMatrices, *, out: Tensor | None = None) -> Tensor:
    """Multiply each head of x by its own matrix; see `kernels.reference.multiply_heads`."""
    if not weight.address:
        return reference.multiply_heads(x, weight, out=out)
    if out is None:
        out = x.new_empty(*x.shape[:2], weight.out_features + x.shape[2] - weight.in_features)
    if numba_matmul.can_multiply_heads(x, out):
        numba_matmul.multiply_heads(x, weight, out)
    else:
        assert len(x) == 0, f"{x.dtype} {x.stride()}, {out.dtype} {out.stride()}"
    return out


def collect_slots(
    gate_up: list[LinearWeight], down: list[LinearWeight], dtype: torch.dtype
) -> PackedExperts:
    """Join matrices of `pack_linear` to experts by slot."""
    return numba_experts.with_addresses(collect_experts(gate_up, down, dtype))


def _pack_alone(weight: Matrix, weight_format: Format) -> LinearWeight:
    assert weight_format == UNQUANTISED, weight_format
    return pack_in(numbers(weight), None)


PACKING: Final = Packing(pack_linear, pack_linear, collect_slots)
# For one expert of a later table: its memory is returned when it moves away.
PACKING_ALONE: Final = Packing(_pack_alone, _pack_alone, collect_slots)


def pack_experts(
    gate_up: Iterable[Matrix],
    down: Iterable[Matrix],
    *,
    formats: Sequence[Format] | None = None,
    share_per_row: float = 0.0,
    biases: Biases | None = None,
    activation: ExpertActivation = SWIGLU,
) -> PackedExperts:
    """Prepack E experts; see `kernels.reference.pack_experts`.

    By slot, originals are consumed one by one: with generators only one is in memory at a time.
    Joined, all originals of the call are (one layer of small experts).
    """
    if share_per_row >= MIN_JOINED_SHARE:
        firsts, seconds = list(map(numbers, gate_up)), list(map(numbers, down))
        assert firsts, "no expert"
        assert formats is None or set(formats) == {UNQUANTISED}, formats
        size_bytes = firsts[0].nbytes + seconds[0].nbytes
        if size_bytes <= MAX_JOINED_EXPERT_BYTES and can_prepack(firsts[0].dtype):
            joined = _join(torch.stack(firsts), torch.stack(seconds))
            return joined.completed(biases, activation)
        gate_up, down = firsts, seconds
    return pack_slots(PACKING, gate_up, down, formats, biases, activation)


def _join(gate_up: Tensor, down: Tensor) -> PackedExperts:
    """Pack gate_up [E, 2F, H] and down [E, H, F] as one MLP of E * F hidden units."""
    num_experts, hidden_size, ffn_size = down.shape
    assert gate_up.shape == (num_experts, 2 * ffn_size, hidden_size), tuple(gate_up.shape)
    halves = gate_up.view(num_experts, 2, ffn_size, hidden_size).transpose(0, 1)
    packed = PackedExperts(
        gate_up=[pack_linear(halves.reshape(-1, hidden_size))],
        down=[pack_linear(down.transpose(0, 1).reshape(hidden_size, -1))],
        num_experts=num_experts,
        hidden_size=hidden_size,
        ffn_size=ffn_size,
        dtype=down.dtype,
        joined=True,
    )
    return numba_experts.with_addresses(packed)


def rebuild_experts(
    experts: PackedExperts, slots: Sequence[int | ExpertMatrices]
) -> Generator[None, None, PackedExperts]:
    """Return experts with some slots changed; see `kernels.reference.rebuild_experts`.

    Joined weights are unpacked, rearranged and packed, one matrix at a time.
    """
    if not experts.joined:
        return (yield from rebuild_slots(PACKING_ALONE, experts, slots))
    rebuilt = yield from _rebuild_joined(experts, slots)
    rebuilt = rebuilt.completed(rebuild_biases(experts, slots), experts.activation)
    return numba_experts.with_addresses(rebuilt)


def _rebuild_joined(
    experts: PackedExperts, slots: Sequence[int | ExpertMatrices]
) -> Generator[None, None, PackedExperts]:
    ffn_size, hidden_size = experts.ffn_size, experts.hidden_size
    plain = experts.gate_up[0].data.to_dense().view(2, experts.num_experts, ffn_size, hidden_size)
    yield
    wide = plain.new_empty(2, len(slots), ffn_size, hidden_size)
    for slot, source in enumerate(slots):
        if isinstance(source, int):
            wide[:, slot] = plain[:, source]
        else:
            check_expert(experts, source)
            assert source.weight_format == UNQUANTISED, source.weight_format
            wide[:, slot] = numbers(source.gate_up).view(2, ffn_size, hidden_size)
    del plain
    yield
    gate_up = pack_linear(wide.view(-1, hidden_size))
    del wide
    yield
    plain = experts.down[0].data.to_dense().view(hidden_size, experts.num_experts, ffn_size)
    yield
    wide = plain.new_empty(hidden_size, len(slots), ffn_size)
    for slot, source in enumerate(slots):
        wide[:, slot] = plain[:, source] if isinstance(source, int) else numbers(source.down)
    del plain
    yield
    down = pack_linear(wide.view(hidden_size, -1))
    return replace(experts, gate_up=[gate_up], down=[down], num_experts=len(slots), biases=None)


def grouped_mlp(
    hidden: Tensor,
    slots: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    *,
    out: Tensor | None = None,
) -> ExpertOutput:
    """Sum each row's local experts; see `kernels.reference.grouped_mlp`.

    Few rows go through one kernel that reads only their experts; with joined experts, which are
    small, and without oneDNN all rows do, a part at a time. Otherwise joined experts are added in
    slot order inside the product, in fp32, and the sum is rounded to the dtype of hidden.
    """
    num_rows = hidden.shape[0]
    takes_all = experts.joined or numba_matmul.packs_blocks()
    if experts.addresses is not None and (takes_all or num_rows <= numba_experts.MAX_ROWS):
        result = torch.empty_like(hidden) if out is None else out
        if num_rows <= numba_experts.MAX_ROWS:
            if numba_experts.can_run(hidden, slots, weights, result):
                return numba_experts.mlp_of_rows(hidden, slots, weights, experts, result)
        else:
            whole = (hidden, slots, weights, result)
            parts = [torch.split(x, numba_experts.MAX_ROWS) for x in whole]
            if all(numba_experts.can_run(*part) for part in zip(*parts, strict=True)):
                return _mlp_by_part(experts, parts, result)
    if experts.joined:
        return _joined_mlp(hidden, slots, weights, experts, out)
    return _mlp_by_slot(hidden, slots, weights, experts, out)


def _mlp_by_part(
    experts: PackedExperts, parts: Sequence[Sequence[Tensor]], out: Tensor
) -> ExpertOutput:
    counts = torch.zeros(experts.num_experts, dtype=torch.int64)
    for hidden, slots, weights, result in zip(*parts, strict=True):
        counts += numba_experts.mlp_of_rows(hidden, slots, weights, experts, result).counts
    return ExpertOutput(out, counts)


def _mlp_by_slot(
    hidden: Tensor, slots: Tensor, weights: Tensor, experts: PackedExperts, out: Tensor | None
) -> ExpertOutput:
    num_rows, top_k = slots.shape
    groups = permute(slots, experts.num_experts)
    sizes = groups.counts.tolist()
    num_pairs = sum(sizes)
    busy = [slot for slot, size in enumerate(sizes) if size]
    busy_sizes = [sizes[slot] for slot in busy]
    grouped = hidden.index_select(0, groups.row_of[:num_pairs])
    results = []
    if busy:
        biases = {slot: experts.biases_of(slot) for slot in busy}
        inputs = zip(torch.split(grouped, busy_sizes), busy, strict=True)
        gate_up = [linear(x, experts.gate_up[slot], biases[slot][0]) for x, slot in inputs]
        units = units_of(torch.cat(gate_up), experts.activation)
        inputs = zip(torch.split(units, busy_sizes), busy, strict=True)
        results = [linear(x, experts.down[slot], biases[slot][1]) for x, slot in inputs]
    results.append(hidden.new_zeros(1, experts.hidden_size))
    # Back to (row, choice) order; pairs of experts elsewhere read the row of zeros at the end.
    position = torch.empty_like(groups.order)
    position[groups.order] = torch.arange(groups.order.numel())
    joined, position = torch.cat(results), position.clamp_(max=num_pairs).view(num_rows, top_k)
    scales = torch.where(slots < 0, 0.0, weights)[:, :, None]
    if out is None:
        out = torch.empty_like(hidden)
    for begin in range(0, num_rows, SUMMED_ROWS):
        rows = slice(begin, begin + SUMMED_ROWS)
        parts = joined[position[rows]].float().mul_(scales[rows])
        total = torch.zeros_like(parts[:, 0])
        for choice in parts.unbind(1):
            total += choice
        out[rows] = total
    return ExpertOutput(out, groups.counts)


def _joined_mlp(
    hidden: Tensor, slots: Tensor, weights: Tensor, experts: PackedExperts, out: Tensor | None
) -> ExpertOutput:
    num_rows, num_experts = hidden.shape[0], experts.num_experts
    counts = count_slots(slots.long(), num_experts)
    columns = torch.where(slots < 0, num_experts, slots).long()
    scales = torch.zeros(num_rows, num_experts + 1).scatter_add_(1, columns, weights)
    used = torch.zeros(num_rows, num_experts + 1, dtype=torch.bool).scatter_(1, columns, True)
    gate_up_bias = None
    if experts.biases is not None:
        halves = experts.biases[0].view(num_experts, 2, experts.ffn_size).transpose(0, 1)
        gate_up_bias = halves.flatten().to(experts.dtype)
    if out is None:
        out = torch.empty_like(hidden)
    for begin in range(0, num_rows, JOINED_ROWS):
        rows = slice(begin, begin + JOINED_ROWS)
        gate_up = linear(hidden[rows], experts.gate_up[0], gate_up_bias)
        units = units_of(gate_up, experts.activation).view(-1, num_experts, experts.ffn_size)
        scaled = (units * scales[rows, :num_experts, None]).to(hidden.dtype)
        result = linear(scaled.view(-1, num_experts * experts.ffn_size), experts.down[0])
        if not bool(result.isfinite().all()):
            # 0 * infinity is NaN: an expert that a row does not use must not affect it.
            scaled.masked_fill_(~used[rows, :num_experts, None], 0)
            result = linear(scaled.view(-1, num_experts * experts.ffn_size), experts.down[0])
        if experts.biases is not None:
            result = result.float() + scales[rows, :num_experts] @ experts.biases[1]
        out[rows] = result
    return ExpertOutput(out, counts)

"""Every op in plain torch: the oracle that fast kernels are tested against.

Correct on any device and dtype, with fp32 accumulation and the rounding points of
HuggingFace transformers; not optimised for speed. Knows no model family: differences
between families are arguments. Called by tests, and by the nodes when
`reference` is selected in `kernels.dispatch`.

Dimension letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.coded import numbers
from kernels.contracts import (
    AttentionMeta,
    Biases,
    ExpertMatrices,
    ExpertOutput,
    HeadMatrices,
    HeadRows,
    KeyCodes,
    LinearWeight,
    Matrix,
    PackedExperts,
    Permutation,
    Retrieval,
    Routing,
    RoutingRule,
)
from kernels.experts.slots import Packing, collect_experts, pack_slots, rebuild_slots
from kernels.retrieval import code_keys as code_keys
from kernels.retrieval import select
from kernels.retrieval import selected_keys as selected_keys
from kernels.sampling import sample as sample
from topspin.expert_activation import SWIGLU, ExpertActivation
from topspin.plan.precision import UNQUANTISED, Format

name: Final = "reference"

FP8_MAX: Final = 448.0


def _deliver(result: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return result
    assert out.shape == result.shape, f"out is {tuple(out.shape)}, not {tuple(result.shape)}"
    return out.copy_(result)


def embed(tokens: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Look up tokens i64[T] in table [V, H]; returns [T, H]."""
    return _deliver(table[tokens], out)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None) -> Tensor:
    """Divide each row of x [..., H] by its root mean square, then scale by weight [H].

    The mean and the division are fp32, the result of the division is rounded to
    x.dtype before the weight multiplies it (LlamaRMSNorm of transformers).
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return _deliver(weight * normed.to(x.dtype), out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, out: Tensor | None = None
) -> Tensor:
    """Add x [T, H] to residual [T, H] in place and return rms_norm of the sum."""
    residual.add_(x)
    return rms_norm(residual, weight, eps=eps, out=out)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Apply rotary position embedding to q [T, N, D] and k [T, G, D] in place.

    Rotate-half convention of transformers' Llama. cos and sin are f32 [T, D/2] (the
    same for both halves) or [T, D], already gathered by position, and are rounded to
    the dtype of q before the multiplication, as in transformers.
    """
    half = q.shape[-1] // 2
    cos, sin = cos.to(q.dtype).unsqueeze(1), sin.to(q.dtype).unsqueeze(1)
    for x in (q, k):
        low, high = x[..., :half].clone(), x[..., half:].clone()
        x[..., :half] = low * cos[..., :half] - high * sin[..., :half]
        x[..., half:] = high * cos[..., -half:] + low * sin[..., -half:]


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Store k, v [T, G, D] into caches [B, block_size, G, D] at slots i64[T]; see HeadRows.

    A slot is block_id * block_size + offset. Slots are distinct and not negative. Caches in fp8
    (float8_e4m3fn) get the nearest numbers; what is beyond the greatest, FP8_MAX, becomes that.
    """
    for rows, cache in ((k, k_cache), (v, v_cache)):
        if cache.dtype == torch.float8_e4m3fn:
            # torch makes NaN of what is too great.
            rows = rows.clamp(-FP8_MAX, FP8_MAX).to(cache.dtype)
        cache.view(-1, *cache.shape[2:])[slots] = rows


def rotate_and_store(heads: HeadRows) -> None:
    """Norm each head [D] of q and k if there are norms, rotate both, then write_kv k and v.

    q is changed in place; k may be changed or not, since only the cache is read later.
    """
    q, k, v, cos, sin, k_cache, v_cache, slots, q_norm, k_norm, eps = heads
    if q_norm is not None:
        rms_norm(q, q_norm, eps=eps, out=q)
    if k_norm is not None:
        rms_norm(k, k_norm, eps=eps, out=k)
    rotate(q, k, cos, sin)
    write_kv(k, v, k_cache, v_cache, slots)


def visible(
    num_new: int,
    context_len: int,
    *,
    sliding_window: int | None,
    tree: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Return the mask of the keys that a sequence's new rows see, bool[num_new, context_len].

    `tree` is bool[num_new, length of the tree] or None (causal); see AttentionMeta. A key is in
    a sliding window w iff query position - key position < w, as in transformers.
    """
    positions = torch.arange(context_len, device=device)
    if tree is None:
        distances = positions[context_len - num_new :, None] - positions
        seen = distances >= 0
    else:
        committed = context_len - tree.shape[1]
        seen = torch.ones(num_new, context_len, dtype=torch.bool, device=device)
        seen[:, committed:] = tree
        # A row sees as many keys behind a key of its branch as it is away from it.
        ranks = seen.cumsum(-1)
        distances = ranks[:, -1:] - ranks
    if sliding_window is not None:
        seen &= distances < sliding_window
    return seen


def attend_prompt(q: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
    """Attend q [T, N, D], the last of L tokens, each to the keys up to its own.

    Keys and values [L, N, D] are those of all tokens. Gives [T, N, D]; scores, softmax and the sum
    are fp32.
    """
    seen = visible(len(q), len(keys), sliding_window=None, tree=None, device=q.device)
    scores = torch.einsum("qnd,knd->nqk", q.float(), keys.float()) * scale
    shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("nqk,knd->qnd", shares, values.float()).to(q.dtype)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    codes: KeyCodes | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend q [T, N, D] to the cached keys and values [B, block_size, G, D]; gives [T, N, D].

    A value may be the first V numbers of a key instead (latents): v_cache [B, block_size, G, V] is
    a view of k_cache, and the result is [T, N, V].

    The keys and values of the new tokens are in the cache already (write_kv). Query
    head h reads key/value head h // (N / G). The result is in q.dtype; scores, softmax and
    the sum are fp32. `sinks` f32[N] are scores of each head, not scaled, that take part in the
    softmax of every row and have no value (gpt-oss). With the layer's `codes`, which layers with a
    window do not have, the sequences of meta.retrieval attend to the keys that they select.
    """
    retrieving: dict[int, int] = {}
    if codes is not None and meta.retrieval is not None:
        retrieving = {seq: idx for idx, seq in enumerate(meta.retrieval.seqs.tolist())}
    block_size, num_groups = k_cache.shape[1], k_cache.shape[2]
    repeat = q.shape[1] // num_groups
    result = q.new_zeros(*q.shape[:2], v_cache.shape[3])
    starts = meta.query_start.tolist()
    tree_lens = None if meta.tree_lens is None else meta.tree_lens.tolist()
    for idx, context_len in enumerate(meta.context_lens.tolist()):
        start, end = starts[idx], starts[idx + 1]
        num_new = end - start
        num_tree = num_new if tree_lens is None else tree_lens[idx]
        if num_new == 0:
            continue
        blocks = meta.block_tables[idx, : -(-context_len // block_size)].long()
        keys = k_cache[blocks].flatten(0, 1)[:context_len].float()
        values = v_cache[blocks].flatten(0, 1)[:context_len].float()
        keys = keys.repeat_interleave(repeat, dim=1)
        values = values.repeat_interleave(repeat, dim=1)
        tree = None if meta.tree_mask is None else meta.tree_mask[start:end, :num_tree]
        seen = visible(
            num_new, context_len, sliding_window=sliding_window, tree=tree, device=q.device
        )
        if idx in retrieving:
            assert codes is not None
            assert meta.retrieval is not None
            kept = _kept(q[start:end], codes, meta.retrieval, retrieving[idx], context_len)
            seen = seen & kept.repeat_interleave(repeat, dim=0)[:, None]
        scores = torch.einsum("qnd,knd->nqk", q[start:end].float(), keys) * scale
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            column = sinks[:, None, None].expand(-1, num_new, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(-1)[..., :context_len]
        summed = torch.einsum("nqk,knd->qnd", weights, values)
        result[start:end] = summed.to(q.dtype)
    return _deliver(result, out)


def _kept(
    queries: Tensor, codes: KeyCodes, retrieval: Retrieval, idx: int, context_len: int
) -> Tensor:
    """Return bool[G, context_len]: the keys that sequence `idx` of `retrieval` attends to."""
    selected = select(queries, codes, retrieval, idx)
    kept = torch.ones(len(selected), context_len, dtype=torch.bool, device=queries.device)
    kept[:, retrieval.num_sinks : int(retrieval.coded_end[idx])] = False
    return kept.scatter_(1, selected, True)


def pack_linear(weight: Matrix, weight_format: Format = UNQUANTISED) -> LinearWeight:
    """Convert a weight [O, I] to this implementation's layout of a format.

    Here it is unchanged, or dequantised.
    """
    assert weight_format == UNQUANTISED, weight_format
    return LinearWeight(numbers(weight), weight.shape[0], weight.shape[1], packed=False)


def linear(
    x: Tensor, weight: LinearWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Multiply x [R, I] by a weight [O, I] transposed and add bias [O]; returns [R, O].

    `out` may have a wider dtype than x.
    """
    return _deliver(F.linear(x, weight.data, bias), out)


def pack_heads(weight: Tensor) -> HeadMatrices:
    """Convert the matrices [N, O, I] of N heads to this implementation's layout."""
    return HeadMatrices(weight.contiguous(), *weight.shape)


def multiply_heads(x: Tensor, weight: HeadMatrices, *, out: Tensor | None = None) -> Tensor:
    """Multiply each head of x [T, N, I] by its own matrix [O, I] transposed; returns [T, N, O].

    With inputs behind the first I, [T, N, I + C], these are copied behind the outputs,
    [T, N, O + C]. x may have any strides, 0 too.
    """
    num_in = weight.in_features
    made = torch.bmm(x[..., :num_in].transpose(0, 1), weight.data.transpose(1, 2)).transpose(0, 1)
    return _deliver(torch.cat((made, x[..., num_in:]), dim=-1), out)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x [R, H] by sigmoid(gate [R, 1]) in place and return it.

    The sigmoid is rounded to the dtype of `gate`, the product to that of x.
    """
    return x.mul_(torch.sigmoid(gate))


def swiglu(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up [R, F] of gate_up [R, 2F], whose first half is the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _deliver(F.silu(gate) * up, out)


def units_of(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """Return the hidden units [R, F] of an expert's gate_up [R, 2F]; see `ExpertActivation`."""
    if activation.is_swiglu:
        return swiglu(gate_up)
    limit = activation.limit
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + activation.offset) * (gate * torch.sigmoid(gate * activation.alpha))


def dense_mlp(
    x: Tensor,
    gate_up: LinearWeight,
    down: LinearWeight,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Apply a gated MLP to x [R, H]: gate_up [2F, H], swiglu, down [H, F]; returns [R, H]."""
    return linear(swiglu(linear(x, gate_up, gate_up_bias)), down, down_bias, out)


def route(logits: Tensor, rule: RoutingRule) -> Routing:
    """Choose the experts of each row of router logits [T, E] by `rule`."""
    logits = logits.float()
    if rule.scores == "softmax":
        scores = F.softmax(logits, dim=-1)
    elif rule.scores == "sigmoid":
        # torch's sigmoid rounds the last numbers of a tensor otherwise than those before.
        scores = logits.neg().exp_().add_(1.0).reciprocal_()
    else:
        scores = logits
    # Without a bias, logits are in the order of the scores, and fewer of them are equal.
    wanted = logits if rule.bias is None else scores + rule.bias
    # A NaN or -inf comes last, but is an expert like others.
    lowest = torch.finfo(torch.float32).min
    wanted = torch.where(wanted > lowest, wanted, lowest)
    if rule.num_groups > 1:
        wanted = _of_best_groups(wanted, rule)
    # Unlike topk, a stable sort leaves equal ones in the order of their ids.
    order = wanted.sort(dim=-1, descending=True, stable=True).indices
    experts = order[:, : rule.top_k].contiguous()
    weights = scores.gather(1, experts)
    if rule.scores == "logits":
        weights = F.softmax(weights, dim=-1)
    if rule.renormalise:
        total = weights.sum(dim=-1, keepdim=True) + rule.epsilon
        weights = weights / total.clamp(min=rule.least_sum)
    return Routing(experts, (weights * rule.scale).to(rule.weights_dtype).float())


def _of_best_groups(wanted: Tensor, rule: RoutingRule) -> Tensor:
    """Return the scores [T, E], -inf outside the best groups of experts."""
    size = wanted.shape[1] // rule.num_groups
    groups = wanted.view(len(wanted), rule.num_groups, size)
    best = groups.topk(min(rule.best_of_group, groups.shape[-1]), dim=-1).values.sum(dim=-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
    is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, value=True)
    return groups.where(is_kept[..., None], -torch.inf).flatten(1)


def count_slots(flat: Tensor, num_experts: int) -> Tensor:
    """Count the pairs of each local expert, i64[E], in slots i64[...] (negative: not here)."""
    counts = torch.bincount(flat.reshape(-1).add(1).clamp_(min=0), minlength=num_experts + 1)
    assert counts.numel() == num_experts + 1, f"a slot is not below num_experts {num_experts}"
    return counts[1:]


def permute(slots: Tensor, num_experts: int) -> Permutation:
    """Group the pairs of slots i32[R, K] by local expert; a negative slot is 'not here'.

    Deterministic: inside a group pairs keep ascending (row, choice) order. Slots must be
    below num_experts.
    """
    flat = slots.reshape(-1).long()
    counts = count_slots(flat, num_experts)
    order = torch.argsort(torch.where(flat < 0, num_experts, flat), stable=True)
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    row_of = torch.div(order, max(slots.shape[1], 1), rounding_mode="floor")
    return Permutation(order, row_of, counts, offsets)


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
    """Convert E experts' gate_up [2F, H] and down [H, F] to this implementation's layout.

    Both may be stacked tensors [E, 2F, H] and [E, H, F], or any iterables of matrices:
    these are consumed one at a time. There is at least one expert. `formats` are the experts'
    (None: all unquantised). `share_per_row` is the share of a layer's experts that a token is
    routed to (top_k / experts of the layer, 0: unknown or of several formats); an implementation
    may choose its layout by it. `biases` are the experts' ([E, 2F], [E, H], of any dtype).
    """
    return pack_slots(PACKING, gate_up, down, formats, biases, activation)


def rebuild_experts(
    experts: PackedExperts, slots: Sequence[int | ExpertMatrices]
) -> Generator[None, None, PackedExperts]:
    """Return experts whose slot i is old slot slots[i], or the given matrices.

    Yields after each piece of the work, a matrix or less, so that a caller can interleave it with
    other work. `experts` is unchanged, and the result shares the memory of unchanged slots.
    """
    return rebuild_slots(PACKING, experts, slots)


def grouped_mlp(
    hidden: Tensor,
    slots: Tensor,
    weights: Tensor,
    experts: PackedExperts,
    *,
    out: Tensor | None = None,
) -> ExpertOutput:
    """Sum each row's local experts: sum_k weights[r, k] * mlp(slots[r, k], hidden[r]).

    An mlp is down @ activation(gate_up @ x + bias) + bias; see `PackedExperts`.
    hidden [R, H], slots i32[R, K] (negative: not here, contributes nothing), weights
    f32[R, K]. `out` [R, H] may have another dtype than hidden (a wider one keeps the
    fp32 sum's precision); without `out` the result has the dtype of hidden. The K contributions are
    added in fp32 by ascending k. A row without a local expert gives 0.
    """
    num_rows, top_k = slots.shape
    groups = permute(slots, experts.num_experts)
    parts = torch.zeros(
        num_rows * top_k, experts.hidden_size, dtype=torch.float32, device=hidden.device
    )
    flat_weights = weights.reshape(-1, 1)
    bounds = groups.offsets.tolist()
    for slot in range(experts.num_experts):
        pairs = groups.order[bounds[slot] : bounds[slot + 1]]
        if pairs.numel() == 0:
            continue
        rows = groups.row_of[bounds[slot] : bounds[slot + 1]]
        gate_up_bias, down_bias = experts.biases_of(slot)
        gate_up = linear(hidden[rows], experts.gate_up[slot], gate_up_bias)
        units = units_of(gate_up, experts.activation)
        result = linear(units, experts.down[slot], down_bias)
        parts[pairs] = result.float() * flat_weights[pairs]
    total = torch.zeros(num_rows, experts.hidden_size, dtype=torch.float32, device=hidden.device)
    for choice in parts.view(num_rows, top_k, experts.hidden_size).unbind(1):
        total += choice
    return ExpertOutput(
        _deliver(total if out is not None else total.to(hidden.dtype), out), groups.counts
    )


def add_counts(totals: Tensor, counts: Tensor) -> None:
    """Add a batch's rows per expert, counts i64[E], to totals i64[E + 2].

    Behind the experts' rows totals has the experts with rows, summed over batches, and the batches
    with rows. Both are contiguous.
    """
    totals[:-2] += counts
    totals[-2] += counts.count_nonzero()
    totals[-1] += counts.any()

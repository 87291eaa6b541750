"""The forward pass of one layer over whole sequences, and of the head, in plain torch and fp32.

Owns what a checkpoint computes, as transformers does, and showing each matrix's input rows to an
observer on the way; LayerInputs is one, which keeps what compensated rounding needs. Knows no
format and no cache. Called by deploy.quantisation's calibration, sensitivity and quality.

Letters: S sequences of T tokens, R = S * T rows, H hidden, E experts, F an expert's width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_nodes.step.decoder import routing_rule
from deploy.quantisation.layers import (
    DOWN,
    EXPERT_DOWN,
    EXPERT_GATE_UP,
    GATE_UP,
    OUT,
    QKV,
    QUERIES,
    DecoderLayer,
    Model,
)
from kernels import reference
from models.checkpoints.weights import ExpertLayerWeights, LayerWeights
from models.description.config import ModelConfig
from models.description.parts import LatentConfig
from models.rope import inverse_frequencies


class Observer(Protocol):
    """Sees the input rows of a layer's matrices."""

    def __call__(self, source: str, rows: Tensor, expert: int | None = None) -> None:
        """Take rows [R, I] of input `source` (deploy.quantisation.layers).

        An expert sees all rows, not only those that are routed to it.
        """


def embedded(model: Model, tokens: Tensor) -> Tensor:
    """Return the hidden states [S, T, H] of tokens i64[S, T] before the first layer."""
    return reference.embed(tokens, model.embed)


def layer_output(
    layer: DecoderLayer, config: ModelConfig, hidden: Tensor, observe: Observer | None = None
) -> Tensor:
    """Return the hidden states [S, T, H] behind a layer, whose positions count from 0."""
    weights, eps = layer.weights, config.rms_norm_eps
    normed = reference.rms_norm(hidden, weights.input_norm, eps=eps)
    hidden = hidden + _attention(layer, config, normed, observe)
    rows = reference.rms_norm(hidden, weights.post_norm, eps=eps).flatten(0, 1)
    return hidden + _mlp(layer, config, rows, observe).view_as(hidden)


def log_probabilities(model: Model, hidden: Tensor, head: Tensor | None = None) -> Tensor:
    """Return log-probabilities [..., V] of the tokens behind hidden states [..., H].

    `head` [V, H] takes the place of the model's.
    """
    normed = reference.rms_norm(hidden, model.final_norm, eps=model.config.rms_norm_eps)
    return F.linear(normed, model.lm_head if head is None else head).log_softmax(-1)


def _attention(
    layer: DecoderLayer, config: ModelConfig, normed: Tensor, observe: Observer | None
) -> Tensor:
    weights = layer.weights
    num_seqs, length, _ = normed.shape
    rows = normed.flatten(0, 1)
    if observe is not None:
        observe(QKV, rows)
    projected = F.linear(rows, _tensor(weights.qkv), weights.qkv_bias)
    cos, sin = (each.repeat(num_seqs, 1) for each in _rotations(config, length))
    if config.latent is None:
        q, k, v = _normed_heads(weights, config, projected)
        reference.rotate(q, k, cos, sin)
    else:
        q, k, v = _heads_of_latents(weights, config.latent, projected, (cos, sin), observe)
    seen = reference.visible(
        length,
        length,
        sliding_window=config.layers[layer.idx].sliding_window,
        tree=None,
        device=rows.device,
    )
    q, k, v = (each.view(num_seqs, length, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))
    if weights.sinks is not None:
        k, v, seen = _with_sinks(k, v, seen, weights.sinks)
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=config.attention_scale, enable_gqa=True
    )
    mixed = mixed.transpose(1, 2).reshape(len(rows), -1)
    if observe is not None:
        observe(OUT, mixed)
    return F.linear(mixed, _tensor(weights.o), weights.o_bias).view_as(normed)


def _with_sinks(
    keys: Tensor, values: Tensor, seen: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys and values [S, G, T + 1, D], the last of zeros, and what is added to scores.

    That is f32[N, T, T + 1], which hides what is not `seen` bool[T, T]; the last key's are `sinks`.
    """
    added = torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, float("-inf"))
    added = F.pad(added, (0, 1)).repeat(len(sinks), 1, 1)
    added[:, :, -1] = sinks[:, None]
    return F.pad(keys, (0, 0, 0, 1)), F.pad(values, (0, 0, 0, 1)), added


def _normed_heads(
    weights: LayerWeights, config: ModelConfig, projected: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v [R, heads, head_dim], normed and clipped as the family has it."""
    norms, eps = (weights.q_norm, weights.k_norm), config.rms_norm_eps
    heads = []
    sizes = [config.q_size, config.kv_size, config.kv_size]
    for idx, part in enumerate(torch.split(projected, sizes, dim=-1)):
        norm = norms[idx] if idx < len(norms) else None
        if norm is not None and config.qk_norm == "full":
            part = reference.rms_norm(part, norm, eps=eps)
        if config.clip_qkv is not None:
            part = part.clamp(-config.clip_qkv, config.clip_qkv)
        part = part.reshape(len(part), -1, config.head_dim)
        if norm is not None and config.qk_norm == "head":
            part = reference.rms_norm(part, norm, eps=eps)
        heads.append(part)
    q, k, v = heads
    return q.contiguous(), k.contiguous(), v


def _heads_of_latents(
    weights: LayerWeights,
    latent: LatentConfig,
    projected: Tensor,
    angles: tuple[Tensor, Tensor],
    observe: Observer | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated q and k [R, N, nope + rope], and v [R, N, value], all heads' made of latents.

    `angles` are cosines and sines f32[R, rope / 2].
    """
    own = weights.latent
    assert own is not None
    assert weights.k_norm is not None
    sizes = [projected.shape[1] - latent.cached_dim, latent.rank, latent.rope_dim]
    queries, latents, shared = torch.split(projected, sizes, dim=-1)
    if own.queries is not None:
        assert weights.q_norm is not None
        queries = reference.rms_norm(queries, weights.q_norm, eps=latent.norm_eps)
        if observe is not None:
            observe(QUERIES, queries)
        queries = F.linear(queries, _tensor(own.queries))
    q, shared = queries.view(len(queries), -1, latent.head_dim), shared[:, None]
    reference.rotate(q[..., latent.nope_dim :], shared, *angles)
    latents = reference.rms_norm(latents, weights.k_norm, eps=latent.norm_eps)
    keys, values = (
        (latents @ each).transpose(0, 1) for each in (own.to_latent, own.to_values.transpose(1, 2))
    )
    return q, torch.cat((keys, shared.expand(-1, q.shape[1], -1)), dim=-1), values


def _rotations(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines f32[T, rotated_dim / 2] of positions from 0."""
    found = inverse_frequencies(config.rope, config.rotated_dim, seq_len=length)
    angles = torch.arange(length).float()[:, None] * torch.from_numpy(found.inv_freq)
    scaling = torch.from_numpy(found.attention_scaling)
    return angles.cos() * scaling, angles.sin() * scaling


def _mlp(
    layer: DecoderLayer, config: ModelConfig, rows: Tensor, observe: Observer | None
) -> Tensor:
    """Return what the dense MLP, or the routed and shared experts, make of rows [R, H]."""
    weights = layer.weights
    mlp = weights.dense or weights.shared
    out = torch.zeros_like(rows)
    if mlp is not None:
        if observe is not None:
            observe(GATE_UP, rows)
        bias = weights.dense.gate_up_bias if weights.dense else None
        units = reference.swiglu(F.linear(rows, _tensor(mlp.gate_up), bias))
        if observe is not None:
            observe(DOWN, units)
        bias = weights.dense.down_bias if weights.dense else None
        out = F.linear(units, _tensor(mlp.down), bias)
    if weights.shared is not None and weights.shared.gate is not None:
        reference.sigmoid_gate(out, F.linear(rows, weights.shared.gate))
    if layer.experts is None:
        return out
    return out + _routed(layer, layer.experts, config, rows, observe)


def _routed(
    layer: DecoderLayer,
    experts: ExpertLayerWeights,
    config: ModelConfig,
    rows: Tensor,
    observe: Observer | None,
) -> Tensor:
    assert config.moe is not None
    router = layer.weights.router
    assert router is not None
    logits = F.linear(rows, router.weight, router.bias)
    rule = routing_rule(config.moe.router, bias=router.score_bias, dtype=torch.float32)
    chosen, weights = reference.route(logits, rule)
    shares = torch.zeros_like(logits).scatter_(1, chosen, weights)
    if observe is not None:
        observe(EXPERT_GATE_UP, rows)
    out = torch.zeros_like(rows)
    for expert in range(config.moe.num_experts):
        (own,) = torch.where(shares[:, expert] != 0)
        gate_up_bias, down_bias = None, None
        if experts.biases is not None:
            gate_up_bias, down_bias = (each[expert] for each in experts.biases)
        inputs = rows[own] if observe is None else rows
        gate_up = F.linear(inputs, experts.gate_up[expert], gate_up_bias)
        units = reference.units_of(gate_up, config.moe.activation)
        if observe is not None:
            observe(EXPERT_DOWN, units, expert)
            units = units[own]
        result = F.linear(units, experts.down[expert], down_bias)
        out.index_add_(0, own, result * shares[own, expert, None])
    return out


def last_hidden(
    model: Model, tokens: Tensor, *, advance: Callable[[], None] | None = None
) -> Tensor:
    """Return the hidden states [S, T, H] behind the last layer, taking all layers of `model`."""
    hidden = embedded(model, tokens)
    for layer in model.layers:
        hidden = layer_output(layer, model.config, hidden)
        if advance is not None:
            advance()
    return hidden


def _tensor(matrix: object) -> Tensor:
    assert isinstance(matrix, Tensor)
    return matrix


class LayerInputs:
    """The inputs of one layer's matrices by source and expert, summed over the rows."""

    def __init__(self) -> None:
        self._hessians: dict[tuple[str, int | None], Tensor] = {}

    def __call__(self, source: str, rows: Tensor, expert: int | None = None) -> None:
        """Take the rows x [R, I] of an input."""
        self._hessians[source, expert] = rows.T @ rows

    def hessian(self, source: str, expert: int | None = None) -> Tensor:
        """Return the sum over rows of x x^T [I, I]; of all experts' common input by any expert."""
        found = self._hessians.get((source, expert))
        return self._hessians[source, None] if found is None else found

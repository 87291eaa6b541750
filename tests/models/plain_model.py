"""A whole forward pass in plain torch from our ModelConfig and weights.

Tests the claim that the data read by models/ is enough to compute transformers' results. Knows no
cache, batching or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_nodes.step.decoder import routing_rule
from kernels import reference
from models.checkpoints.weights import (
    AttentionWeights,
    ExpertLayerWeights,
    LayerWeights,
)
from models.description.config import ModelConfig
from models.rope import inverse_frequencies
from tests.weights import NodeExperts


def plain_logits(
    config: ModelConfig,
    attention: AttentionWeights,
    experts: NodeExperts,
    tokens: Sequence[int],
) -> Tensor:
    """Return logits [tokens, V] of one sequence; `experts` must hold all, in id order."""
    hidden = attention.embed[torch.tensor(list(tokens))]
    expert_layers = dict(zip(config.moe_layers, experts.layers, strict=True))
    for layer_idx, layer in enumerate(attention.layers):
        normed = _rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        hidden = hidden + _attention(config, layer_idx, layer, normed)
        normed = _rms_norm(hidden, layer.post_norm, config.rms_norm_eps)
        hidden = hidden + _mlp(config, layer, expert_layers.get(layer_idx), normed)
    return F.linear(_rms_norm(hidden, attention.final_norm, config.rms_norm_eps), attention.lm_head)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _attention(config: ModelConfig, layer_idx: int, layer: LayerWeights, x: Tensor) -> Tensor:
    if config.latent is not None:
        return _latent_attention(config, layer, x)
    sizes = [config.q_size, config.kv_size, config.kv_size]
    q, k, v = torch.split(F.linear(x, layer.qkv, layer.qkv_bias), sizes, dim=-1)
    eps = config.rms_norm_eps
    if config.qk_norm == "full":
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        q, k = _rms_norm(q, layer.q_norm, eps), _rms_norm(k, layer.k_norm, eps)
    if config.clip_qkv is not None:
        q, k, v = (part.clamp(-config.clip_qkv, config.clip_qkv) for part in (q, k, v))
    q, k, v = (part.view(len(x), -1, config.head_dim).transpose(0, 1) for part in (q, k, v))
    if config.qk_norm == "head":
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        q, k = _rms_norm(q, layer.q_norm, eps), _rms_norm(k, layer.k_norm, eps)
    q, k = _rotate(config, q), _rotate(config, k)
    group = config.num_heads // config.num_kv_heads
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = q @ k.transpose(1, 2) / math.sqrt(config.head_dim)
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))[None, :]
    window = config.layers[layer_idx].sliding_window
    hidden_from = (distance < 0) | (distance >= (len(x) if window is None else window))
    scores = scores.masked_fill(hidden_from, -math.inf)
    if layer.sinks is not None:
        scores = torch.cat((scores, layer.sinks[:, None, None].expand(-1, len(x), 1)), dim=-1)
    out = (scores.softmax(-1)[..., : len(x)] @ v).transpose(0, 1).flatten(1)
    return F.linear(out, layer.o, layer.o_bias)


def _latent_attention(config: ModelConfig, layer: LayerWeights, x: Tensor) -> Tensor:
    own, latent = layer.latent, config.latent
    assert own is not None
    assert latent is not None
    assert layer.k_norm is not None
    projected, eps = F.linear(x, layer.qkv, layer.qkv_bias), latent.norm_eps
    queries, latents, shared = projected.split(
        [projected.shape[1] - latent.cached_dim, latent.rank, latent.rope_dim], dim=-1
    )
    if own.queries is not None:
        assert layer.q_norm is not None
        queries = F.linear(_rms_norm(queries, layer.q_norm, eps), own.queries)
    queries = queries.view(len(x), config.num_heads, -1).transpose(0, 1)
    latents = _rms_norm(latents, layer.k_norm, eps)
    plain, turned = queries.split([latent.nope_dim, latent.rope_dim], dim=-1)
    turned = _rotate(config, turned)
    scores = plain @ (latents @ own.to_latent).transpose(1, 2)
    scores = (scores + turned @ _rotate(config, shared[None]).transpose(1, 2)).double()
    later = torch.arange(len(x))[:, None] < torch.arange(len(x))[None, :]
    weights = (scores * config.attention_scale).masked_fill(later, -math.inf).softmax(-1).float()
    out = (weights @ (latents @ own.to_values.transpose(1, 2))).transpose(0, 1).flatten(1)
    return F.linear(out, layer.o, layer.o_bias)


def _rotate(config: ModelConfig, x: Tensor) -> Tensor:
    rope = inverse_frequencies(config.rope, config.rotated_dim, seq_len=x.shape[1])
    angles = torch.arange(x.shape[1]).float()[:, None] * torch.from_numpy(rope.inv_freq)
    scaling = torch.from_numpy(rope.attention_scaling)
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _gated(x: Tensor, gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = F.linear(x, gate_up, bias).chunk(2, dim=-1)
    return F.silu(gate) * up


def _mlp(
    config: ModelConfig, layer: LayerWeights, experts: ExpertLayerWeights | None, x: Tensor
) -> Tensor:
    if layer.dense is not None:
        inner = _gated(x, layer.dense.gate_up, layer.dense.gate_up_bias)
        return F.linear(inner, layer.dense.down, layer.dense.down_bias)
    assert config.moe is not None
    router = layer.router
    assert router is not None
    assert experts is not None
    rule = routing_rule(config.moe.router, bias=router.score_bias, dtype=torch.float32)
    chosen, weights = reference.route(F.linear(x, router.weight, router.bias), rule)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert_id in zip(weights[token], chosen[token], strict=True):
            biases = (None, None)
            if experts.biases is not None:
                biases = tuple(each[expert_id] for each in experts.biases)
            gate_up = F.linear(x[token], experts.gate_up[expert_id], biases[0])
            inner = reference.units_of(gate_up, config.moe.activation)
            out[token] += weight * F.linear(inner, experts.down[expert_id], biases[1])
    if layer.shared is not None:
        shared = F.linear(_gated(x, layer.shared.gate_up), layer.shared.down)
        if layer.shared.gate is not None:
            shared = F.linear(x, layer.shared.gate).sigmoid() * shared
        out = out + shared
    return out

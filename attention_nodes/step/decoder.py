"""The attention half of every layer, and the two ends of the model.

Owns the packed weights of one node and the order of operations inside a layer, for
all model families: their differences are in ModelConfig. Knows no experts (rally.py
sends the rows out) and no sequences (step_inputs.py has turned them into indices).

Dimensions: T tokens, H hidden, N query heads, G kv heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_nodes import latent
from attention_nodes.latent import LatentLayer, pack_latent
from attention_nodes.local_experts import ColocatedExperts
from attention_nodes.step.kv_cache import KvCache
from attention_nodes.step.step_inputs import MicroBatchInputs
from kernels.contracts import (
    AttentionMeta,
    HeadRows,
    KeyCodes,
    LinearWeight,
    Routing,
    RoutingRule,
)
from kernels.dispatch import Ops
from kernels.recordings import SINGLE_ROWS
from models.checkpoints.weights import AttentionWeights, LayerWeights, take
from models.description.config import ModelConfig
from models.description.parts import RouterConfig
from topspin.plan.precision import Rules, format_of

Watch = Callable[[int, Tensor, AttentionMeta], None]
"""Is shown a layer's index, its queries [T, N, D] and how they attended."""


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer's weights, packed. `moe_idx` counts MoE layers; None: a dense MLP."""

    idx: int
    moe_idx: int | None
    kv_group: int
    sliding_window: int | None
    input_norm: Tensor
    post_norm: Tensor
    qkv: LinearWeight
    qkv_bias: Tensor | None
    o: LinearWeight
    o_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    sinks: Tensor | None
    router: LinearWeight | None
    router_bias: Tensor | None
    routing: RoutingRule | None
    mlp: tuple[LinearWeight, LinearWeight] | None
    mlp_biases: tuple[Tensor | None, Tensor | None]
    shared_gate: LinearWeight | None
    latent: LatentLayer | None


def routing_rule(router: RouterConfig, *, bias: Tensor | None, dtype: torch.dtype) -> RoutingRule:
    """Return how a layer's experts are chosen; `bias` f32[E] of its scores, the model's `dtype`."""
    return RoutingRule(
        top_k=router.top_k,
        scores=router.scores,
        bias=bias,
        num_groups=router.num_groups,
        top_groups=router.top_groups,
        best_of_group=router.best_of_group,
        renormalise=router.renormalise,
        epsilon=router.epsilon,
        least_sum=router.least_sum,
        scale=router.scale,
        weights_dtype=dtype if router.rounded else torch.float32,
    )


class NodeLayers:
    """One node's layers. Its only state between calls is the KV cache `kv` of these layers.

    `codes` are those of its keys by layer, where sequences may attend to a selection of them.
    `watch`, if set, is shown each layer's attention; such a step is not recorded. `experts` are
    those of layers that may be local.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: list[LayerWeights] | Iterator[LayerWeights],
        ops: Ops,
        kv_cache: KvCache,
        *,
        precision: Rules = (),
        first: int = 0,
    ) -> None:
        """Pack `weights`, those of layer `first` first; each original is dropped once packed."""
        self.config = config
        self.ops = ops
        self.kv = kv_cache
        self.codes: Mapping[int, KeyCodes] = {}
        self.watch: Watch | None = None
        self.experts: ColocatedExperts | None = None
        self._scale = config.attention_scale
        self._first = first
        moe_idx = {layer: idx for idx, layer in enumerate(config.moe_layers)}
        self.layers = [
            self._pack(idx, moe_idx.get(idx), layer, precision)
            for idx, layer in enumerate(take(weights), start=first)
        ]

    def _pack(
        self, idx: int, moe_idx: int | None, weights: LayerWeights, precision: Rules
    ) -> Layer:
        ops, pack = self.ops, self.ops.pack_linear
        of_attention = format_of(precision, "attention", idx)
        of_mlp = format_of(precision, "mlp", idx)
        mlp = weights.dense if weights.dense is not None else weights.shared
        gate = weights.shared.gate if weights.shared is not None else None
        routing = None
        if weights.router is not None and self.config.moe is not None:
            own, dtype = weights.router, weights.router.weight.dtype
            routing = routing_rule(self.config.moe.router, bias=own.score_bias, dtype=dtype)
        return Layer(
            idx=idx,
            moe_idx=moe_idx,
            kv_group=self.kv.layers[idx - self._first].group,
            sliding_window=self.config.layers[idx].sliding_window,
            input_norm=weights.input_norm,
            post_norm=weights.post_norm,
            qkv=pack(weights.qkv, of_attention),
            qkv_bias=weights.qkv_bias,
            o=pack(weights.o, of_attention),
            o_bias=weights.o_bias,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            sinks=weights.sinks,
            router=pack(weights.router.weight) if weights.router is not None else None,
            router_bias=weights.router.bias if weights.router is not None else None,
            routing=routing,
            mlp=(pack(mlp.gate_up, of_mlp), pack(mlp.down, of_mlp)) if mlp is not None else None,
            mlp_biases=(
                (weights.dense.gate_up_bias, weights.dense.down_bias)
                if weights.dense is not None
                else (None, None)
            ),
            shared_gate=pack(gate) if gate is not None else None,
            latent=(
                pack_latent(self.config.latent, self.config.num_heads, weights, ops, of_attention)
                if self.config.latent is not None
                else None
            ),
        )

    def warm_up(self) -> None:
        """Attend as a prompt does, which other kernels compute, to keys of each dtype.

        So many rows do not attend one by one. Reads block 0. The caller has computed one token.
        """
        dtypes = [layer.dtype for layer in self.kv.layers]
        for dtype in dict.fromkeys(dtypes):
            self._attend_as_prompt(dtypes.index(dtype))

    def _attend_as_prompt(self, layer: int) -> None:
        """Attend to the keys of a layer with more rows than attend one by one."""
        config, num_rows = self.config, SINGLE_ROWS + 1
        meta = AttentionMeta(
            query_start=torch.tensor([0, num_rows], dtype=torch.int32),
            context_lens=torch.tensor([num_rows], dtype=torch.int32),
            block_tables=torch.zeros(1, num_rows, dtype=torch.int32),
            max_query_len=num_rows,
            max_context_len=num_rows,
        )
        query = self.layers[0].input_norm.new_zeros(num_rows, config.num_heads, config.head_dim)
        keys, values = self.kv.keys[layer], self.kv.values[layer]
        sinks = self.layers[0].sinks
        self.ops.paged_attention(query, keys, values, meta, scale=1.0, sinks=sinks)

    def attention_half(
        self, layer: Layer, residual: Tensor, delta: Tensor | None, inputs: MicroBatchInputs
    ) -> Tensor:
        """Add `delta` [T, H] and then attention to `residual`, in place; return it normed.

        The result [T, H] is the input of the layer's MLP or experts.
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        if delta is None:
            normed = ops.rms_norm(residual, layer.input_norm, eps=eps)
        else:
            normed = ops.add_rms_norm(delta, residual, layer.input_norm, eps=eps)
        place = layer.idx - self._first
        keys, values = self.kv.keys[place], self.kv.values[place]
        kv_slots, meta = inputs.of_group(layer.kv_group)
        if layer.latent is None:
            q = self._store(layer, normed, inputs, keys, values, kv_slots)
            rows = ops.paged_attention(
                q,
                keys,
                values,
                meta,
                scale=self._scale,
                sliding_window=layer.sliding_window,
                sinks=layer.sinks,
                codes=self.codes.get(layer.idx),
            ).flatten(1)
            if self.watch is not None:
                self.watch(layer.idx, q, meta)
        else:
            rows = latent.attend(
                ops,
                layer.latent,
                self._store_latents(layer, layer.latent, normed, inputs, keys, kv_slots),
                keys,
                meta,
                scale=self._scale,
            )
        out = ops.linear(rows, layer.o, layer.o_bias)
        return ops.add_rms_norm(out, residual, layer.post_norm, eps=eps)

    def _store(
        self,
        layer: Layer,
        normed: Tensor,
        inputs: MicroBatchInputs,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Write the rows' keys and values to the caches; return their queries [T, N, D]."""
        ops = self.ops
        q, k, v = self._project(layer, normed)
        has_head_norms = self.config.qk_norm == "head"
        q_norm, k_norm = (layer.q_norm, layer.k_norm) if has_head_norms else (None, None)
        ops.rotate_and_store(
            HeadRows(
                *(q, k, v, inputs.cos, inputs.sin, keys, values, slots),
                q_norm=q_norm,
                k_norm=k_norm,
                eps=self.config.rms_norm_eps,
            )
        )
        return q

    def _store_latents(
        self,
        layer: Layer,
        own: LatentLayer,
        normed: Tensor,
        inputs: MicroBatchInputs,
        cache: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Write the rows' latents to the cache; return their queries [T, N, D]."""
        projected = self.ops.linear(normed, layer.qkv, layer.qkv_bias)
        angles = {"cos": inputs.cos, "sin": inputs.sin}
        return latent.store_latents(self.ops, own, projected, cache=cache, slots=slots, **angles)

    def _project(self, layer: Layer, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, N, D], k and v [T, G, D] before per-head norms and rotation."""
        config, ops = self.config, self.ops
        qkv = ops.linear(normed, layer.qkv, layer.qkv_bias)
        q = qkv[:, : config.q_size]
        k = qkv[:, config.q_size : config.q_size + config.kv_size]
        v = qkv[:, config.q_size + config.kv_size :]
        if config.qk_norm == "full" and layer.q_norm is not None and layer.k_norm is not None:
            ops.rms_norm(q, layer.q_norm, eps=config.rms_norm_eps, out=q)
            ops.rms_norm(k, layer.k_norm, eps=config.rms_norm_eps, out=k)
        if config.clip_qkv is not None:
            assert config.qk_norm != "head", "clipping comes after norms"
            qkv.clamp_(-config.clip_qkv, config.clip_qkv)
        num_tokens = len(normed)
        return (
            q.view(num_tokens, config.num_heads, config.head_dim),
            k.view(num_tokens, config.num_kv_heads, config.head_dim),
            v.view(num_tokens, config.num_kv_heads, config.head_dim),
        )

    def route(self, layer: Layer, normed: Tensor) -> Routing:
        """Choose the routed experts of normed [T, H]; only for MoE layers."""
        assert layer.router is not None
        assert layer.routing is not None
        assert self.config.moe is not None
        logits = None
        if self.config.moe.router.fp32_logits:
            shape = (len(normed), self.config.moe.num_experts)
            logits = normed.new_empty(shape, dtype=torch.float32)
        logits = self.ops.linear(normed, layer.router, layer.router_bias, out=logits)
        return self.ops.route(logits, layer.routing)

    def routed_experts(
        self,
        moe_idx: int,
        normed: Tensor,
        routing: Routing,
        *,
        num_rows: Tensor | None,
        out: Tensor,
    ) -> Tensor:
        """Return the sums of a local layer's routed experts; see LocalExperts.compute."""
        assert self.experts is not None, "a local layer whose experts are not here"
        return self.experts.compute(moe_idx, normed, routing, num_rows=num_rows, out=out)

    def local_mlp(self, layer: Layer, normed: Tensor) -> Tensor | None:
        """Return this node's own contribution: a dense layer's MLP or the gated shared expert."""
        if layer.mlp is None:
            return None
        gate_up, down = layer.mlp
        gate_up_bias, down_bias = layer.mlp_biases
        units = self.ops.swiglu(self.ops.linear(normed, gate_up, gate_up_bias))
        out = self.ops.linear(units, down, down_bias)
        if layer.shared_gate is not None:
            self.ops.sigmoid_gate(out, self.ops.linear(normed, layer.shared_gate))
        return out


class Decoder(NodeLayers):
    """A model's two ends and its layers, or the first of them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: AttentionWeights,
        ops: Ops,
        kv_cache: KvCache,
        *,
        precision: Rules = (),
    ) -> None:
        """Pack `weights`; see Layers."""
        self._embed = weights.embed
        self._final_norm = weights.final_norm
        self._lm_head = ops.pack_linear(weights.lm_head, format_of(precision, "lm_head"))
        super().__init__(config, weights.layers, ops, kv_cache, precision=precision)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the initial residual stream [T, H] of tokens i64[T]."""
        return self.ops.embed(tokens, self._embed)

    def logits(self, residual: Tensor, out: Tensor | None = None) -> Tensor:
        """Return fp32 logits [R, V], `out` if given, of finished residual rows [R, H]."""
        return self.head(self.final(residual), out)

    def final(self, residual: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the final rows [R, H], `out` if given, of finished residual rows [R, H]."""
        return self.ops.rms_norm(residual, self._final_norm, eps=self.config.rms_norm_eps, out=out)

    def final_buffer(self, max_tokens: int) -> Tensor:
        """Return room for the final rows [T, H] of a step."""
        return self._final_norm.new_empty(max_tokens, self.config.hidden_size)

    def head(self, final: Tensor, out: Tensor | None = None) -> Tensor:
        """Return fp32 logits [R, V], `out` if given, of final rows [R, H]."""
        if out is None:
            shape = (len(final), self._lm_head.out_features)
            out = final.new_empty(shape, dtype=torch.float32)
        return self.ops.linear(final, self._lm_head, out=out)

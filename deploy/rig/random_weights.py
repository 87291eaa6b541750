"""Random weights of a model: a measurement needs shapes, not a checkpoint.

Owns their distribution, which keeps activations of order one through many layers and spreads the
router's choices over all experts. They come layer by layer, in the forms that
models.checkpoints.weights reads from a checkpoint, so that nodes pack them as they pack a real
model's. Called by nodes.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from models.checkpoints.weights import (
    AttentionWeights,
    DenseMlpWeights,
    ExpertStream,
    LatentWeights,
    LayerWeights,
    RouterWeights,
    SharedExpertWeights,
)
from models.description.config import ModelConfig
from models.description.parts import LatentConfig


class RandomWeights:
    """Draws the tensors of one model; the same ones for the same seed, device and dtype."""

    def __init__(
        self, model: ModelConfig, *, device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> None:
        self._model = model
        self._device = device
        self._dtype = dtype
        self._generator = torch.Generator(device).manual_seed(seed)

    def attention(self) -> AttentionWeights:
        """Return the attention role's weights; take all layers before drawing anything else."""
        model = self._model
        embed = self._normal(model.vocab_size, model.hidden_size, std=1.0)
        lm_head = embed
        if not model.tie_word_embeddings:
            lm_head = self._normal(model.vocab_size, model.hidden_size)
        return AttentionWeights(
            embed=embed,
            lm_head=lm_head,
            final_norm=self._ones(model.hidden_size),
            layers=(self._layer(idx) for idx in range(model.num_layers)),
        )

    def experts(self) -> Iterator[ExpertStream]:
        """Yield every routed expert of each MoE layer, in order."""
        model, moe = self._model, self._model.moe
        assert moe is not None
        for _ in model.moe_layers:
            size = moe.intermediate_size
            # One tensor per layer and matrix: the packed ones are views of it.
            gate_up = self._normal(moe.num_experts, 2 * size, model.hidden_size)
            down = self._normal(moe.num_experts, model.hidden_size, size)
            biases = None
            if moe.has_biases:
                widths = (2 * size, model.hidden_size)
                of_gate_up, of_down = (self._normal(moe.num_experts, each) for each in widths)
                biases = (of_gate_up, of_down)
            yield ExpertStream(gate_up.unbind(), down.unbind(), biases)

    def _layer(self, idx: int) -> LayerWeights:
        model = self._model
        hidden, qkv_size, o_size = model.hidden_size, model.q_size + 2 * model.kv_size, model.q_size
        is_moe = model.layers[idx].is_moe
        shared = is_moe and model.moe is not None and model.moe.shared_intermediate_size
        q_norm, k_norm = {
            "head": (model.head_dim, model.head_dim),
            "full": (model.q_size, model.kv_size),
        }.get(str(model.qk_norm), (None, None))
        if (latent := model.latent) is not None:
            qkv_size = latent.input_rows(model.num_heads)
            q_norm, k_norm = latent.q_rank, latent.rank
            o_size = model.num_heads * latent.value_dim
        return LayerWeights(
            input_norm=self._ones(hidden),
            qkv=self._normal(qkv_size, hidden),
            qkv_bias=self._normal(qkv_size) if model.qkv_bias else None,
            o=self._normal(hidden, o_size),
            o_bias=self._normal(hidden) if model.o_bias else None,
            q_norm=self._ones(q_norm) if q_norm is not None else None,
            k_norm=self._ones(k_norm) if k_norm is not None else None,
            sinks=self._normal(model.num_heads, std=1.0).float() if model.has_sinks else None,
            post_norm=self._ones(hidden),
            router=self._router() if is_moe else None,
            shared=self._shared(shared) if shared else None,
            dense=None if is_moe else self._dense(),
            latent=self._latent(latent) if latent is not None else None,
        )

    def _latent(self, latent: LatentConfig) -> LatentWeights:
        heads, rank = self._model.num_heads, latent.rank
        queries = None
        if latent.q_rank is not None:
            queries = self._normal(heads * latent.head_dim, latent.q_rank)
        return LatentWeights(
            queries=queries,
            to_latent=self._normal(heads, rank, latent.nope_dim, std=rank**-0.5),
            to_values=self._normal(heads, latent.value_dim, rank),
        )

    def _shared(self, size: int) -> SharedExpertWeights:
        hidden, moe = self._model.hidden_size, self._model.moe
        assert moe is not None
        return SharedExpertWeights(
            gate_up=self._normal(2 * size, hidden),
            down=self._normal(hidden, size),
            gate=self._normal(1, hidden) if moe.shared_is_gated else None,
        )

    def _router(self) -> RouterWeights:
        model, moe = self._model, self._model.moe
        assert moe is not None
        return RouterWeights(
            self._normal(moe.num_experts, model.hidden_size),
            self._normal(moe.num_experts, std=0.1) if moe.router.has_logit_bias else None,
            self._normal(moe.num_experts, std=0.1).float() if moe.router.has_bias else None,
        )

    def _dense(self) -> DenseMlpWeights:
        model = self._model
        size, hidden = model.intermediate_size, model.hidden_size
        return DenseMlpWeights(
            gate_up=self._normal(2 * size, hidden),
            down=self._normal(hidden, size),
            gate_up_bias=self._normal(2 * size) if model.mlp_bias else None,
            down_bias=self._normal(hidden) if model.mlp_bias else None,
        )

    def _normal(self, *size: int, std: float | None = None) -> Tensor:
        """Return a weight; by default a product with rows of unit size is of unit size again."""
        tensor = torch.empty(size, dtype=self._dtype, device=self._device)
        scale: float = size[-1] ** -0.5 if std is None else std
        return tensor.normal_(0.0, scale, generator=self._generator)

    def _ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)

"""The weights of each role, read from a checkpoint into their serving layout.

Owns which tensors the attention role and the expert role read and how they are fused:
q, k and v rows in one matrix, gate above up rows in another. Knows no device policy and
computes nothing. Each node calls its own loader; neither touches the other's tensors.

Shapes: V vocabulary, H hidden, E experts, F an expert's (or the dense MLP's) width,
q = heads * head_dim, kv = kv_heads * head_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.checkpoint import Checkpoint
from models.config import ModelConfig
from models.families import (
    EMBED,
    FAMILIES,
    FINAL_NORM,
    LM_HEAD,
    expert_name,
    fused_expert_name,
    layer_name,
)
from topspin.errors import CheckpointError, ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedExpertWeights:
    """The expert that every token takes: gate_up [2F, H], down [H, F], and its sigmoid
    gate's row [1, H]."""

    gate_up: Tensor
    down: Tensor
    gate: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseMlpWeights:
    """The MLP of a layer without experts: gate_up [2F, H], down [H, F], biases [2F], [H]."""

    gate_up: Tensor
    down: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """The attention role's part of one layer.

    input_norm [H], qkv [q + 2 kv, H] (query rows, then key, then value), qkv_bias
    [q + 2 kv], o [H, q], o_bias [H], q_norm and k_norm [head_dim] ("head") or [q], [kv]
    ("full"), post_norm [H] (before the MLP), router [E, H]. A layer has router (and maybe
    shared) or dense, never both.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    post_norm: Tensor
    router: Tensor | None
    shared: SharedExpertWeights | None
    dense: DenseMlpWeights | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """All but the routed experts: embed [V, H], lm_head [V, H] (the same tensor object as
    embed when tied), final_norm [H]."""

    embed: Tensor
    lm_head: Tensor
    final_norm: Tensor
    layers: list[LayerWeights]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayerWeights:
    """The experts of one MoE layer in slot order: gate_up [slots, 2F, H] (gate rows above
    up rows), down [slots, H, F]."""

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """An expert node's share; layers[i] belongs to decoder layer config.moe_layers[i]."""

    layers: list[ExpertLayerWeights]


def load_attention_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> AttentionWeights:
    """Read everything but the routed experts, converted to `dtype`, contiguous.

    Raises CheckpointError naming a tensor that is missing or has another shape.
    """
    reader = _Reader(checkpoint, config, dtype=dtype, device=torch.device(device))
    embed = reader.read(_embed_name(checkpoint, config), config.vocab_size, config.hidden_size)
    lm_head = _load_lm_head(reader, embed)
    weights = AttentionWeights(
        embed=embed,
        lm_head=lm_head,
        final_norm=reader.read(FINAL_NORM, config.hidden_size),
        layers=[_load_layer(reader, layer_idx) for layer_idx in range(config.num_layers)],
    )
    checkpoint.close()
    return weights


def load_expert_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    experts: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> ExpertWeights:
    """Read the routed experts that a node holds, converted to `dtype`, contiguous.

    experts[i] lists, in slot order, the logical expert ids of MoE layer
    config.moe_layers[i]; it may be empty and may repeat an id. Reads nothing else.
    Raises ConfigError for ids out of range, CheckpointError as load_attention_weights.
    """
    if len(experts) != len(config.moe_layers):
        raise ConfigError(
            f"experts: {len(experts)} entries; the model has {len(config.moe_layers)} MoE layers"
        )
    reader = _Reader(checkpoint, config, dtype=dtype, device=torch.device(device))
    layers = [
        _load_experts(reader, layer_idx, expert_ids)
        for layer_idx, expert_ids in zip(config.moe_layers, experts, strict=True)
    ]
    checkpoint.close()
    return ExpertWeights(layers=layers)


class _Reader:
    """A checkpoint, its configuration and where its tensors go."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.family = FAMILIES[config.family]
        self._dtype = dtype
        self._device = device

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def read(self, name: str, *shape: int) -> Tensor:
        """Return tensor `name`, which must have `shape`."""
        out = self.empty(*shape)
        self.checkpoint.read_into(name, out)
        return out

    def read_rows(self, parts: Iterable[tuple[str, int]], *columns: int) -> Tensor:
        """Return the named tensors, each with its number of rows, one above the other."""
        parts = list(parts)
        out = self.empty(sum(rows for _, rows in parts), *columns)
        start = 0
        for name, rows in parts:
            self.checkpoint.read_into(name, out[start : start + rows])
            start += rows
        return out

    def moe_block(self, layer_idx: int) -> str:
        """Return the name of the layer's MoE block, by where its router is."""
        for block in self.family.moe_blocks:
            if layer_name(layer_idx, f"{block}.gate.weight") in self.checkpoint:
                return block
        wanted = layer_name(layer_idx, f"{self.family.moe_blocks[0]}.gate.weight")
        raise CheckpointError(f"{self.checkpoint.path}: tensor {wanted} is missing")


def _embed_name(checkpoint: Checkpoint, config: ModelConfig) -> str:
    """Return the embedding's name; a tied checkpoint may hold its one matrix as lm_head."""
    is_lm_head = config.tie_word_embeddings and EMBED not in checkpoint and LM_HEAD in checkpoint
    return LM_HEAD if is_lm_head else EMBED


def _load_lm_head(reader: _Reader, embed: Tensor) -> Tensor:
    """Return `embed` itself when tied, else the checkpoint's lm_head.

    As in transformers, a checkpoint that claims to be tied and stores two different matrices
    is not.
    """
    checkpoint, config = reader.checkpoint, reader.config
    if config.tie_word_embeddings and not (EMBED in checkpoint and LM_HEAD in checkpoint):
        return embed
    lm_head = reader.read(LM_HEAD, config.vocab_size, config.hidden_size)
    return embed if config.tie_word_embeddings and torch.equal(lm_head, embed) else lm_head


def _load_layer(reader: _Reader, layer_idx: int) -> LayerWeights:
    config = reader.config
    hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
    projections = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))

    def attn(suffix: str) -> str:
        return layer_name(layer_idx, f"self_attn.{suffix}")

    is_full = config.qk_norm == "full"
    has_norm = config.qk_norm != "none"
    is_moe = config.layers[layer_idx].is_moe
    return LayerWeights(
        input_norm=reader.read(layer_name(layer_idx, "input_layernorm.weight"), hidden),
        qkv=reader.read_rows(((attn(f"{p}.weight"), rows) for p, rows in projections), hidden),
        qkv_bias=(
            reader.read_rows((attn(f"{p}.bias"), rows) for p, rows in projections)
            if config.qkv_bias
            else None
        ),
        o=reader.read(attn("o_proj.weight"), hidden, q),
        o_bias=reader.read(attn("o_proj.bias"), hidden) if config.o_bias else None,
        q_norm=(
            reader.read(attn("q_norm.weight"), q if is_full else config.head_dim)
            if has_norm
            else None
        ),
        k_norm=(
            reader.read(attn("k_norm.weight"), kv if is_full else config.head_dim)
            if has_norm
            else None
        ),
        post_norm=reader.read(layer_name(layer_idx, "post_attention_layernorm.weight"), hidden),
        router=_load_router(reader, layer_idx) if is_moe else None,
        shared=_load_shared(reader, layer_idx) if is_moe else None,
        dense=None if is_moe else _load_dense(reader, layer_idx),
    )


def _load_router(reader: _Reader, layer_idx: int) -> Tensor:
    moe = reader.config.moe
    assert moe is not None
    name = layer_name(layer_idx, f"{reader.moe_block(layer_idx)}.gate.weight")
    return reader.read(name, moe.num_experts, reader.config.hidden_size)


def _load_shared(reader: _Reader, layer_idx: int) -> SharedExpertWeights | None:
    moe = reader.config.moe
    assert moe is not None
    width = moe.shared_intermediate_size
    if width is None:
        return None
    hidden = reader.config.hidden_size

    def name(suffix: str) -> str:
        return layer_name(layer_idx, f"{reader.moe_block(layer_idx)}.{suffix}.weight")

    gate_up = [(name("shared_expert.gate_proj"), width), (name("shared_expert.up_proj"), width)]
    return SharedExpertWeights(
        gate_up=reader.read_rows(gate_up, hidden),
        down=reader.read(name("shared_expert.down_proj"), hidden, width),
        gate=reader.read(name("shared_expert_gate"), 1, hidden),
    )


def _load_dense(reader: _Reader, layer_idx: int) -> DenseMlpWeights:
    hidden, width = reader.config.hidden_size, reader.config.intermediate_size
    has_bias = reader.config.mlp_bias

    def name(suffix: str) -> str:
        return layer_name(layer_idx, f"mlp.{suffix}")

    gate_and_up = (("gate_proj", width), ("up_proj", width))
    return DenseMlpWeights(
        gate_up=reader.read_rows(((name(f"{p}.weight"), w) for p, w in gate_and_up), hidden),
        down=reader.read(name("down_proj.weight"), hidden, width),
        gate_up_bias=(
            reader.read_rows((name(f"{p}.bias"), w) for p, w in gate_and_up) if has_bias else None
        ),
        down_bias=reader.read(name("down_proj.bias"), hidden) if has_bias else None,
    )


def _load_experts(reader: _Reader, layer_idx: int, expert_ids: Sequence[int]) -> ExpertLayerWeights:
    """Read one layer's slots, from either layout, straight into their final place."""
    moe = reader.config.moe
    assert moe is not None
    hidden, width = reader.config.hidden_size, moe.intermediate_size
    wrong = [expert_id for expert_id in expert_ids if not 0 <= expert_id < moe.num_experts]
    if wrong:
        raise ConfigError(
            f"experts: layer {layer_idx} has no expert {wrong[0]}; "
            f"the model has experts 0 to {moe.num_experts - 1}"
        )
    gate_up = reader.empty(len(expert_ids), 2 * width, hidden)
    down = reader.empty(len(expert_ids), hidden, width)
    read_into = reader.checkpoint.read_into
    fused = _fused_names(reader, layer_idx)
    if fused is not None:
        reader.checkpoint.expect_shape(fused.gate_up, (moe.num_experts, 2 * width, hidden))
        reader.checkpoint.expect_shape(fused.down, (moe.num_experts, hidden, width))
        for slot, expert_id in enumerate(expert_ids):
            read_into(fused.gate_up, gate_up[slot], index=expert_id)
            read_into(fused.down, down[slot], index=expert_id)
        return ExpertLayerWeights(gate_up=gate_up, down=down)
    block, family = reader.moe_block(layer_idx), reader.family
    for slot, expert_id in enumerate(expert_ids):
        for projection, out in (
            (family.expert_gate, gate_up[slot, :width]),
            (family.expert_up, gate_up[slot, width:]),
            (family.expert_down, down[slot]),
        ):
            name = expert_name(layer_idx, block=block, expert_id=expert_id, projection=projection)
            read_into(name, out)
    return ExpertLayerWeights(gate_up=gate_up, down=down)


class _FusedNames(NamedTuple):
    gate_up: str
    down: str


def _fused_names(reader: _Reader, layer_idx: int) -> _FusedNames | None:
    """Return the names of the layer's stacked experts, None in the per-expert layout."""
    block = reader.moe_block(layer_idx)
    gate_up = fused_expert_name(layer_idx, block=block, projection="gate_up_proj")
    if gate_up not in reader.checkpoint:
        return None
    down = fused_expert_name(layer_idx, block=block, projection="down_proj")
    return _FusedNames(gate_up=gate_up, down=down)

"""The weights of each role, read from a checkpoint into their serving layout.

Owns the sets of tensors that the attention and expert roles read, and how they are fused: q, k and
v rows in one matrix, gate above up rows in another. Knows no device policy and computes nothing.
Each node calls its role's loader, which never reads the other's tensors.

Shapes: V vocabulary, H hidden, E experts, F an expert's (or the dense MLP's) width,
q = heads * head_dim, kv = kv_heads * head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

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

Item = TypeVar("Item")


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
    """All but the routed experts: embed [V, H], lm_head [V, H] (the same tensor object as embed
    when tied), final_norm [H]. If `layers` is not a list, each is read when it is taken."""

    embed: Tensor
    lm_head: Tensor
    final_norm: Tensor
    layers: list[LayerWeights] | Iterator[LayerWeights]


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


class ExpertStream(NamedTuple):
    """The experts of one MoE layer in slot order, each matrix read when it is taken.

    Take all of gate_up, [2F, H] each, before down, [H, F] each, and both before the next
    layer's.
    """

    gate_up: Iterable[Tensor]
    down: Iterable[Tensor]


def take(items: list[Item] | Iterator[Item]) -> Iterator[Item]:
    """Yield `items` in order, emptying a list meanwhile, so that used items can be freed."""
    if not isinstance(items, list):
        yield from items
        return
    while items:
        yield items.pop(0)


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
    weights = stream_attention_weights(checkpoint, config, dtype=dtype, device=device)
    return replace(weights, layers=list(weights.layers))


def stream_attention_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> AttentionWeights:
    """Read as load_attention_weights, but each layer only when it is taken."""
    reader = _Reader(checkpoint, config, dtype=dtype, device=torch.device(device))
    embed = reader.read(_embed_name(checkpoint, config), config.vocab_size, config.hidden_size)
    lm_head = _load_lm_head(reader, embed)
    return AttentionWeights(
        embed=embed,
        lm_head=lm_head,
        final_norm=reader.read(FINAL_NORM, config.hidden_size),
        layers=_stream_layers(reader),
    )


def _stream_layers(reader: _Reader) -> Iterator[LayerWeights]:
    for layer_idx in range(reader.config.num_layers):
        yield _load_layer(reader, layer_idx)
    reader.checkpoint.close()


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
    reader = _expert_reader(checkpoint, config, dtype=dtype, experts=experts, device=device)
    layers = []
    for layer_idx, expert_ids in zip(config.moe_layers, experts, strict=True):
        matrices = _expert_matrices(reader, layer_idx, expert_ids)
        layer = ExpertLayerWeights(
            gate_up=reader.empty(len(expert_ids), *matrices.gate_up_shape),
            down=reader.empty(len(expert_ids), *matrices.down_shape),
        )
        for slot, expert_id in enumerate(expert_ids):
            matrices.read_gate_up(expert_id, layer.gate_up[slot])
            matrices.read_down(expert_id, layer.down[slot])
        layers.append(layer)
    checkpoint.close()
    return ExpertWeights(layers=layers)


def stream_expert_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    experts: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> Iterator[ExpertStream]:
    """Read as load_expert_weights, but each matrix only when it is taken."""
    reader = _expert_reader(checkpoint, config, dtype=dtype, experts=experts, device=device)
    for layer_idx, expert_ids in zip(config.moe_layers, experts, strict=True):
        matrices = _expert_matrices(reader, layer_idx, expert_ids)
        yield ExpertStream(
            gate_up=_stream(reader, expert_ids, matrices.read_gate_up, matrices.gate_up_shape),
            down=_stream(reader, expert_ids, matrices.read_down, matrices.down_shape),
        )
    checkpoint.close()


def _stream(
    reader: _Reader,
    expert_ids: Sequence[int],
    read: Callable[[int, Tensor], None],
    shape: tuple[int, int],
) -> Iterator[Tensor]:
    for expert_id in expert_ids:
        out = reader.empty(*shape)
        read(expert_id, out)
        yield out


def _expert_reader(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    experts: Sequence[Sequence[int]],
    device: torch.device | str,
) -> _Reader:
    if len(experts) != len(config.moe_layers):
        raise ConfigError(
            f"experts: {len(experts)} entries; the model has {len(config.moe_layers)} MoE layers"
        )
    return _Reader(checkpoint, config, dtype=dtype, device=torch.device(device))


class _Reader:
    """A checkpoint, its configuration, and the destination of its tensors."""

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
        """Return the name of the layer's MoE block, found by its router."""
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


class _ExpertMatrices(NamedTuple):
    """The readers of one layer's expert matrices, called with (expert id, destination)."""

    gate_up_shape: tuple[int, int]
    down_shape: tuple[int, int]
    read_gate_up: Callable[[int, Tensor], None]
    read_down: Callable[[int, Tensor], None]


def _expert_matrices(reader: _Reader, layer_idx: int, expert_ids: Sequence[int]) -> _ExpertMatrices:
    """Check one layer's experts and return their readers, for either layout."""
    moe = reader.config.moe
    assert moe is not None
    hidden, width = reader.config.hidden_size, moe.intermediate_size
    wrong = [expert_id for expert_id in expert_ids if not 0 <= expert_id < moe.num_experts]
    if wrong:
        raise ConfigError(
            f"experts: layer {layer_idx} has no expert {wrong[0]}; "
            f"the model has experts 0 to {moe.num_experts - 1}"
        )
    read_into = reader.checkpoint.read_into
    fused = _fused_names(reader, layer_idx)
    if fused is not None:
        reader.checkpoint.expect_shape(fused.gate_up, (moe.num_experts, 2 * width, hidden))
        reader.checkpoint.expect_shape(fused.down, (moe.num_experts, hidden, width))
    block, family = reader.moe_block(layer_idx), reader.family

    def name(projection: str, expert_id: int) -> str:
        return expert_name(layer_idx, block=block, expert_id=expert_id, projection=projection)

    def read_gate_up(expert_id: int, out: Tensor) -> None:
        if fused is not None:
            read_into(fused.gate_up, out, index=expert_id)
        else:
            read_into(name(family.expert_gate, expert_id), out[:width])
            read_into(name(family.expert_up, expert_id), out[width:])

    def read_down(expert_id: int, out: Tensor) -> None:
        if fused is not None:
            read_into(fused.down, out, index=expert_id)
        else:
            read_into(name(family.expert_down, expert_id), out)

    return _ExpertMatrices((2 * width, hidden), (hidden, width), read_gate_up, read_down)


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

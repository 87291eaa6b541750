"""A checkpoint read layer by layer, for computing with more weights than memory holds.

Owns the pairing of a layer's attention half with its routed experts, and the names by which their
matrices are known in a checkpoint. Computes nothing. Called by the rest of deploy.quantisation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.head_order import HeadOrder, LatentOrder
from models.checkpoints.tensor_names import expert_name, layer_name
from models.checkpoints.weights import (
    ExpertLayerWeights,
    LayerWeights,
    stream_attention_weights,
    stream_expert_weights,
    take,
)
from models.description.config import ModelConfig, load_model_config
from topspin.plan.precision import Part

# What a matrix multiplies: the names of its inputs in a layer.
QKV, QUERIES, OUT, GATE_UP, DOWN = "qkv", "queries", "o", "gate_up", "down"
EXPERT_GATE_UP, EXPERT_DOWN = "expert_gate_up", "expert_down"


class DecoderLayer(NamedTuple):
    """One layer in fp32: experts' gate_up [E, 2F, H] and down [E, H, F], None if it is dense."""

    idx: int
    weights: LayerWeights
    experts: ExpertLayerWeights | None


class Module(NamedTuple):
    """A published matrix: its name, and its rows, in their order, in the matrix that has them."""

    name: str
    rows: slice | Tensor


class Matrix(NamedTuple):
    """A matrix of a layer, and the modules of which it is made.

    `source` names its input; `expert` is None but for routed experts.
    """

    part: Part
    source: str
    weight: Tensor
    modules: tuple[Module, ...]
    expert: int | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint of which embed [V, H], lm_head [V, H] and final_norm [H] are in memory, fp32."""

    path: Path
    config: ModelConfig
    embed: Tensor
    lm_head: Tensor
    final_norm: Tensor
    layers: Iterator[DecoderLayer]


def open_model(path: Path) -> Model:
    """Open the checkpoint at `path`; its layers can be taken once, and are read as they are.

    Quantised matrices are dequantised. Raises ConfigError for a model that Topspin does not serve,
    CheckpointError for tensors that are missing or of another shape.
    """
    config = load_model_config(path)
    attention = stream_attention_weights(Checkpoint(path), config, dtype=torch.float32)
    assert isinstance(attention.lm_head, Tensor)
    return Model(
        path=path,
        config=config,
        embed=attention.embed,
        lm_head=attention.lm_head,
        final_norm=attention.final_norm,
        layers=_layers(path, config, take(attention.layers)),
    )


def _layers(
    path: Path, config: ModelConfig, halves: Iterator[LayerWeights]
) -> Iterator[DecoderLayer]:
    everyone = [range(config.moe.num_experts if config.moe else 0)] * len(config.moe_layers)
    streams = stream_expert_weights(Checkpoint(path), config, dtype=torch.float32, experts=everyone)
    for idx, weights in enumerate(halves):
        experts = None
        if config.layers[idx].is_moe:
            stream = next(streams)
            gate_up = _stacked(stream.gate_up, len(everyone[0]))
            down = _stacked(stream.down, len(everyone[0]))
            experts = ExpertLayerWeights(gate_up=gate_up, down=down, biases=stream.biases)
        yield DecoderLayer(idx, weights, experts)


def _stacked(matrices: Iterable[object], count: int) -> Tensor:
    """Return `count` matrices [O, I] as [count, O, I], each read into its place."""
    out: Tensor | None = None
    for idx, each in enumerate(matrices):
        matrix = _numbers(each)
        out = matrix.new_empty(count, *matrix.shape) if out is None else out
        out[idx] = matrix
    assert out is not None
    return out


def matrices(layer: DecoderLayer, config: ModelConfig) -> Iterator[Matrix]:
    """Yield the matrices of a layer that may be quantised: the layer's own, or views of them."""
    weights, idx, hidden = layer.weights, layer.idx, config.hidden_size

    def named(names: list[tuple[str, int]], places: Tensor | None = None) -> tuple[Module, ...]:
        return _modules([(layer_name(idx, name), rows) for name, rows in names], places)

    for source, matrix, parts, places in _projections(weights, config):
        own = named([(f"self_attn.{name}", rows) for name, rows in parts], places)
        yield Matrix("attention", source, _numbers(matrix), own)
    mlp = weights.dense or weights.shared
    if mlp is not None:
        shared = config.moe.names.shared if config.moe is not None else ""
        block = "mlp" if weights.dense else f"{block_name(config)}.{shared}"
        gate_up = _numbers(mlp.gate_up)
        halves = [(f"{block}.{name}_proj", len(gate_up) // 2) for name in ("gate", "up")]
        yield Matrix("mlp", GATE_UP, gate_up, named(halves))
        yield Matrix("mlp", DOWN, _numbers(mlp.down), named([(f"{block}.down_proj", hidden)]))
    if layer.experts is not None:
        yield from _expert_matrices(layer.experts, idx, config)


def _projections(
    weights: LayerWeights, config: ModelConfig
) -> Iterator[tuple[str, object, list[tuple[str, int]], Tensor | None]]:
    """Yield attention's matrices: their input, their numbers, and what _modules() takes."""
    latent, own = config.latent, weights.latent
    if latent is None or own is None:
        q, kv = config.q_size, config.kv_size
        qkv = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)]
        yield QKV, weights.qkv, qkv, HeadOrder(config).places()
    else:
        of_inputs, of_queries = LatentOrder(config).places()
        num_queries = config.num_heads * latent.head_dim
        rank = latent.q_rank
        first = ("q_proj", num_queries) if rank is None else ("q_a_proj", rank)
        inputs = [first, ("kv_a_proj_with_mqa", latent.cached_dim)]
        yield QKV, weights.qkv, inputs, of_inputs
        if own.queries is not None:
            yield QUERIES, own.queries, [("q_b_proj", num_queries)], of_queries
    yield OUT, weights.o, [("o_proj", config.hidden_size)], None


def _expert_matrices(
    experts: ExpertLayerWeights, idx: int, config: ModelConfig
) -> Iterator[Matrix]:
    assert config.moe is not None
    names, block = config.moe.names, block_name(config)
    width = experts.down.shape[-1]
    for expert, (gate_up, down) in enumerate(zip(experts.gate_up, experts.down, strict=True)):

        def name(projection: str, expert: int = expert) -> str:
            found = expert_name(idx, block=block, expert_id=expert, projection=projection)
            return found.removesuffix(".weight")

        halves = _modules([(name(names.gate), width), (name(names.up), width)])
        yield Matrix("experts", EXPERT_GATE_UP, gate_up, halves, expert)
        whole = _modules([(name(names.down), config.hidden_size)])
        yield Matrix("experts", EXPERT_DOWN, down, whole, expert)


def _modules(parts: Sequence[tuple[str, int]], places: Tensor | None = None) -> tuple[Module, ...]:
    """Return modules, each a name and a number of rows, that are one behind the other.

    `places` are their rows in the matrix; None: all of it, in order.
    """
    ends = accumulate(rows for _, rows in parts)
    ranges = [slice(end - rows, end) for end, (_, rows) in zip(ends, parts, strict=True)]
    return tuple(
        Module(name, own if places is None else places[own])
        for own, (name, _) in zip(ranges, parts, strict=True)
    )


def block_name(config: ModelConfig) -> str:
    """Return the published name of the MoE block inside a layer."""
    assert config.moe is not None
    return config.moe.names.blocks[0]


def _numbers(matrix: object) -> Tensor:
    """Return a matrix that was read without rules of precision, and so as numbers."""
    assert isinstance(matrix, Tensor)
    return matrix

"""Weights of both roles, read as nodes read them, but all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.weights import (
    AttentionWeights,
    ExpertLayerWeights,
    stream_attention_weights,
    stream_expert_weights,
)
from models.description.config import ModelConfig


class NodeExperts(NamedTuple):
    """A node's share by MoE layer, each matrix by slot."""

    layers: list[ExpertLayerWeights]


def load_attention_weights(
    checkpoint: Checkpoint, config: ModelConfig, **options: Any
) -> AttentionWeights:
    weights = stream_attention_weights(checkpoint, config, **options)
    return replace(weights, layers=list(weights.layers))


def load_expert_weights(
    checkpoint: Checkpoint, config: ModelConfig, *, experts: Sequence[Sequence[int]], **options: Any
) -> NodeExperts:
    """Read and stack the experts of each layer; of none there is an empty tensor."""

    def joined(matrices: list[Any]) -> torch.Tensor:
        return torch.stack(matrices) if matrices else torch.empty(0)

    layers = []
    for each in stream_expert_weights(checkpoint, config, experts=experts, **options):
        gate_up = joined(list(each.gate_up))
        down = joined(list(each.down))
        layers.append(ExpertLayerWeights(gate_up=gate_up, down=down, biases=each.biases))
    return NodeExperts(layers)

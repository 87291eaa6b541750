"""Random weights have the shapes of checkpoints that transformers made."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.byte_floor import decode_floor
from deploy.rig.random_weights import RandomWeights
from models.checkpoints.checkpoint import Checkpoint
from models.description.config import ModelConfig, load_model_config
from tests.checkpoints import VARIANTS, make_checkpoint, oracle_model
from tests.pairwise import few
from tests.variants import DIFFERENT
from tests.weights import load_attention_weights, load_expert_weights


def make_weights(model: ModelConfig, seed: int = 0) -> RandomWeights:
    return RandomWeights(model, device=torch.device("cpu"), dtype=torch.float32, seed=seed)


def shapes_of(weights: Any) -> Any:
    """Return the shape of each tensor of a dataclass."""
    if isinstance(weights, Tensor):
        return tuple(weights.shape)
    if weights is None:
        return None
    if isinstance(weights, list):
        return [shapes_of(each) for each in weights]
    return {each.name: shapes_of(getattr(weights, each.name)) for each in fields(weights)}


@pytest.fixture(params=few(sorted(VARIANTS), *DIFFERENT))
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, request.param)


def test_shapes_and_floor_are_those_of_a_checkpoint(checkpoint: Path) -> None:
    model = load_model_config(checkpoint)
    random = make_weights(model)
    made = random.attention()
    made = replace(made, layers=list(made.layers))
    read = load_attention_weights(Checkpoint(checkpoint), model, dtype=torch.float32)
    assert shapes_of(made) == shapes_of(read)
    assert (made.lm_head is made.embed) == model.tie_word_embeddings
    touched = []
    if model.moe is not None:
        everyone = [range(model.moe.num_experts)] * len(model.moe_layers)
        experts = load_expert_weights(
            Checkpoint(checkpoint), model, dtype=torch.float32, experts=everyone
        )
        for drawn, layer in zip(random.experts(), experts.layers, strict=True):
            assert [each.shape for each in drawn.gate_up] == [each.shape for each in layer.gate_up]
            assert [each.shape for each in drawn.down] == [each.shape for each in layer.down]
        touched = [model.moe.num_experts] * len(model.moe_layers)
    floor = decode_floor(model, itemsize=4, touched=touched, contexts=[])
    num_embedded = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    tensors = oracle_model(checkpoint).state_dict(keep_vars=True).values()
    numbers = {id(each): each.numel() for each in tensors}  # a tied matrix is there twice
    assert sum(floor.values()) == 4 * (sum(numbers.values()) - num_embedded)


def test_sinks_are_fp32(tmp_path: Path) -> None:
    model = load_model_config(make_checkpoint(tmp_path, "gpt_oss"))
    weights = RandomWeights(model, device=torch.device("cpu"), dtype=torch.bfloat16)
    sinks = [layer.sinks for layer in weights.attention().layers]
    assert [(each.shape, each.dtype) for each in sinks if each is not None] == [
        ((model.num_heads,), torch.float32)
    ] * model.num_layers


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    model = load_model_config(make_checkpoint(tmp_path, "qwen3_moe"))
    first, again, other = (make_weights(model, seed).attention() for seed in (1, 1, 2))
    assert torch.equal(first.embed, again.embed)
    assert not torch.equal(first.embed, other.embed)

"""The cache's layers, their size, and moves of its slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

from attention_nodes.step.kv_cache import KvCache, bytes_per_block, layer_specs, of_blocks
from models.description.config import ModelConfig, load_model_config
from tests.checkpoints import make_checkpoint
from topspin.errors import ConfigError
from topspin.plan.kv_cache import KvCacheSpec, KvLayerRule
from topspin.plan.retrieval import RetrievalPolicy
from topspin.plan.settings import KvDtype


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    return load_model_config(make_checkpoint(tmp_path, "qwen3_moe"))


def cache_of(model: ModelConfig, kept: KvCacheSpec) -> KvCache:
    return of_blocks(layer_specs(model, torch.bfloat16, kept), 3, block_size=4)


def test_layers_are_kept_as_the_plan_says(model: ModelConfig) -> None:
    narrow = replace(model.layers[1], sliding_window=8)
    model = replace(model, layers=(model.layers[0], narrow))
    plain = layer_specs(model, torch.float32)
    assert [(layer.dtype, layer.has_codes) for layer in plain] == [(torch.float32, False)] * 2
    kept = KvCacheSpec(dtype="fp8", retrieval=RetrievalPolicy(num_tokens=512))
    layers = layer_specs(model, torch.float32, kept)
    assert [layer.dtype for layer in layers] == [torch.float8_e4m3fn] * 2
    assert [layer.has_codes for layer in layers] == [True, False]
    rules = (KvLayerRule(layers=(0, 1), dtype="auto"), KvLayerRule(layers=(0,), retrieval=False))
    layers = layer_specs(model, torch.float32, structs.replace(kept, layers=rules))
    assert [(layer.dtype, layer.has_codes) for layer in layers] == [(torch.float32, False)] * 2


def test_fp8_takes_half_of_the_memory(model: ModelConfig) -> None:
    sizes = []
    for kept in (KvCacheSpec(), KvCacheSpec(dtype="fp8")):
        cache = cache_of(model, kept)
        size = sum(each.nbytes for each in (*cache.keys, *cache.values))
        assert size == 3 * bytes_per_block(cache.layers, block_size=4)
        sizes.append(size)
    assert sizes[0] == 2 * sizes[1] > 0


def test_heads_too_large_for_fp8_are_refused(model: ModelConfig) -> None:
    large = replace(model, head_dim=640)
    assert layer_specs(large, torch.bfloat16)[0].head_dim == 640
    with pytest.raises(
        ConfigError, match=r"\(--kv-cache-dtype\) fp8: heads of 640 numbers; at most 576"
    ):
        layer_specs(large, torch.bfloat16, KvCacheSpec(dtype="fp8"))


def test_layers_of_several_groups_share_memory(model: ModelConfig) -> None:
    """A block is one group's, so that each move is of the slots of that group's layers."""
    narrow = replace(model.layers[1], sliding_window=8)
    windowed = replace(model, layers=(model.layers[0], narrow))
    layers = layer_specs(windowed, torch.float32, max_len=100)
    assert [layer.group for layer in layers] == [0, 1]
    assert bytes_per_block(layers, block_size=4) == layers[0].bytes_per_block(4)
    assert [layer.group for layer in layer_specs(windowed, torch.float32, max_len=8)] == [0, 0]
    cache = of_blocks(layers, 3, block_size=4, num_groups=2)
    assert cache.keys[0] is cache.keys[1]
    slots = cache.keys[0].flatten(0, 1)
    slots.copy_(torch.arange(12.0)[:, None, None].expand_as(slots))
    cache.move(torch.tensor([[1], [9]]), torch.tensor([[0], [8]]))
    assert slots[:, 0, 0].tolist() == [1, 1, 2, 3, 4, 5, 6, 7, 9, 9, 10, 11]


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_slots_move_as_if_all_at_once(model: ModelConfig, dtype: KvDtype) -> None:
    cache = cache_of(model, KvCacheSpec(dtype=dtype))
    before = []
    for idx, each in enumerate((*cache.keys, *cache.values)):
        each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(idx)))
        before.append(each.flatten(0, 1).float())
    sources, targets = torch.tensor([5, 2, 9]), torch.tensor([2, 5, 0])
    cache.move(sources[None], targets[None])
    for each, old in zip((*cache.keys, *cache.values), before, strict=True):
        wanted = old.clone()
        wanted[[2, 5, 0]] = old[[5, 2, 9]]
        assert torch.equal(each.flatten(0, 1).float(), wanted)

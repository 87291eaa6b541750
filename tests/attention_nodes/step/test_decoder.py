"""The router of a real runner against transformers', in the served dtype, and the warm-up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_nodes.loading import load_runner
from kernels.recordings import SINGLE_ROWS
from tests.checkpoints import make_checkpoint, oracle_model
from tests.engine import engine_config

VARIANTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        *((variant, "bfloat16") for variant in VARIANTS),
        # Nothing is rounded there.
        *(pytest.param(variant, "float32", marks=pytest.mark.slow) for variant in VARIANTS),
    ],
)
def test_routing_weights_are_transformers_bit_for_bit(
    tmp_path: Path, variant: str, dtype: str
) -> None:
    """Qwen's and OLMoE's are rounded to the model's dtype, Mixtral's are not."""
    path = make_checkpoint(tmp_path, variant)
    config = engine_config(path, kernels="reference", dtype=dtype)
    block = oracle_model(path).model.layers[0].mlp.to(getattr(torch, dtype))
    hidden = torch.randn(40, block.gate.weight.shape[1], generator=torch.Generator().manual_seed(3))
    hidden = hidden.to(getattr(torch, dtype))
    with torch.inference_mode():
        decoder = load_runner(path, config.for_node())._decoder
        routing = decoder.route(decoder.layers[0], hidden)
        logits, weights, experts = block.gate(hidden)
    # torch does not specify the order of equal logits.
    is_told = torch.tensor([len({*row}) == len(row) for row in logits.tolist()])
    assert is_told.sum() > 20
    assert torch.equal(routing.experts[is_told], experts[is_told])
    assert torch.equal(routing.weights[is_told], weights.float()[is_told])


@pytest.mark.parametrize("variant", ["qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_a_node_has_attended_as_prompts_do_before_its_first_request(
    tmp_path: Path, variant: str, cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other kernels compute their rows, and others again keys in fp8, of latents too."""
    path = make_checkpoint(tmp_path, variant)
    config = engine_config(path, kernels="cpu", dtype="bfloat16", kv_cache_dtype=cache_dtype)
    decoder = load_runner(path, config.for_node())._decoder
    attend, found = decoder.ops.paged_attention, []

    def watched(q: Tensor, keys: Tensor, *rest: Any, **options: Any) -> Tensor:
        if len(q) > SINGLE_ROWS:
            found.append(keys.dtype)
        return attend(q, keys, *rest, **options)

    monkeypatch.setattr(decoder.ops, "paged_attention", watched)
    decoder.warm_up()
    assert set(found) == {layer.dtype for layer in decoder.kv.layers}
    assert (torch.float8_e4m3fn in found) == (cache_dtype == "fp8")

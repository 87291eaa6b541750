"""Engines on GGUF files: transformers' tokens on the numbers in the file, or nearly.

With --quantization none blocks are dequantised, so that greedy tokens in fp32 are transformers'. By
default the blocks' codes are multiplied as they are, by rows of 8 bits: see
test_quantised_checkpoints.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from models.sources.hub import resolve_model
from tests.checkpoints import make_checkpoint, oracle_generate, oracle_model
from tests.engine import Engine, engine_config
from tests.gguf_files import LATENTS, write_gguf
from tests.identity.weights.test_quantised_checkpoints import (
    MARGIN,
    NUM_TOKENS,
    USUAL_KL,
    divergence,
    prompts,
)

MANY = pytest.mark.slow
# As llama.cpp's MXFP4_MOE: only experts have those blocks.
BESIDE_MXFP4 = dict.fromkeys(("self_attn", "embed_tokens", "lm_head"), Kind.Q8_0)
SIZES: dict[str, Mapping[str, Any]] = {
    **LATENTS,
    "gpt_oss": {"swiglu_limit": 7.0},
    "mixtral": {"intermediate_size": 64},
    "olmoe": {"intermediate_size": 64},
    "qwen2_moe": {"mlp_only_layers": [], "shared_expert_intermediate_size": 64},
}


def made(path: Path, variant: str, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """Return transformers' checkpoint, and the name of a GGUF file of its numbers."""
    monkeypatch.setenv("TOPSPIN_CACHE", str(path / "cache"))
    plain = make_checkpoint(path / "plain", variant, **SIZES.get(variant, {}))
    mixed = BESIDE_MXFP4 if kind == Kind.MXFP4 else {}
    return plain, str(write_gguf(plain, path / "tiny.gguf", kind, mixed=mixed))


@pytest.mark.parametrize(
    ("variant", "kind", "settings"),
    [
        ("llama", Kind.Q8_0, {}),
        pytest.param("qwen3_moe", Kind.Q4_0, {"expert_nodes": 2, "transport": "shm"}, marks=MANY),
        pytest.param("deepseek_v2_lite", Kind.F32, {}, marks=MANY),
        pytest.param("deepseek_v2", Kind.Q4_0, {"transport": "shm"}, marks=MANY),
        pytest.param("deepseek_v3", Kind.F16, {"expert_nodes": 2}, marks=MANY),
        pytest.param("deepseek_v3", Kind.Q8_0, {"attention_nodes": 2}, marks=MANY),
        pytest.param("glm4_moe_lite", Kind.Q4_0, {"transport": "tcp"}, marks=MANY),
        pytest.param(
            "qwen3_moe", Kind.BF16, {"attention_nodes": 2, "transport": "shm"}, marks=MANY
        ),
        pytest.param("mixtral", Kind.F16, {"attention_nodes": 2}, marks=MANY),
        pytest.param("mixtral", Kind.Q4_0, {"transport": "tcp"}, marks=MANY),
        pytest.param("olmoe", Kind.Q8_0, {"micro_batches": 2}, marks=MANY),
        pytest.param("qwen2_moe", Kind.Q4_0, {"expert_nodes": 2}, marks=MANY),
        pytest.param("llama3_rope", Kind.F32, {}, marks=MANY),
        pytest.param("mixtral", Kind.Q4_1, {"expert_nodes": 2}, marks=MANY),
        pytest.param("gpt_oss", Kind.MXFP4, {"expert_nodes": 2, "transport": "shm"}, marks=MANY),
        pytest.param("glm4_moe", Kind.Q8_0, {"transport": "shm"}, marks=MANY),
        pytest.param("minimax_m2", Kind.Q4_0, {"attention_nodes": 2}, marks=MANY),
    ],
)
def test_tokens_are_transformers(
    tmp_path: Path,
    variant: str,
    kind: Kind,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, file = made(tmp_path, variant, kind, monkeypatch)
    wanted = oracle_generate(plain, prompts(), NUM_TOKENS)
    clear = [idx for idx, margin in enumerate(wanted.margins) if margin > MARGIN]
    assert len(clear) >= 3, wanted.margins
    config = engine_config(resolve_model(file), quantization="none", **settings)
    with Engine(config) as engine:
        found = engine.generate([prompts()[idx] for idx in clear], max_tokens=NUM_TOKENS)
    assert found == [wanted.tokens[idx] for idx in clear]


@pytest.mark.parametrize(
    ("variant", "kind", "of_experts", "of_others"),
    [
        ("qwen3_moe", Kind.Q4_0, "int4", "int4"),
        pytest.param("deepseek_v3", Kind.Q4_0, "int4", "int4", marks=MANY),
        pytest.param("qwen3_moe", Kind.Q8_0, "int8", "int8", marks=MANY),
        pytest.param("mixtral", Kind.Q4_1, "int4", "int4", marks=MANY),
        pytest.param("gpt_oss", Kind.MXFP4, "mxfp4", "int8", marks=MANY),
    ],
)
def test_blocks_are_served_with_a_bounded_divergence(
    tmp_path: Path,
    variant: str,
    kind: Kind,
    of_experts: str,
    of_others: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, file = made(tmp_path, variant, kind, monkeypatch)
    config = engine_config(resolve_model(file))
    formats = {rule.part: rule.format for rule in config.precision}
    assert formats.pop("mlp", of_others) == of_others
    assert formats == {"attention": of_others, "experts": of_experts, "lm_head": of_others}
    model = oracle_model(plain)
    found = []
    with Engine(config) as engine:
        for prompt in prompts():
            request = engine.requests[engine.add(prompt, max_tokens=1, prompt_logprobs=20)]
            engine.collect()
            with torch.no_grad():
                wanted = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
            for position, each in enumerate(request.prompt_logprobs[-len(prompt) + 1 :]):
                found.append(divergence(wanted[position], each.top_ids, each.top_logprobs))
    median, mean = USUAL_KL
    assert 0 < statistics.median(found) < median
    assert statistics.mean(found) < mean

"""DeepSeek's, Kimi's and GLM-4.7-Flash's parts: defaults, refusals, sizes and norms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig

from deploy.placement.shapes import ModelShape
from models.description.config import ModelConfig, load_model_config
from tests.checkpoints import make_checkpoint, oracle_model
from tests.engine import Engine, engine_config
from topspin.errors import ConfigError

CONFIGS = {
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": DeepseekV3Config,
    "glm4_moe_lite": Glm4MoeLiteConfig,
}
# What DeepSeek-V3 and Kimi-K2 say in their config.json beside the defaults of transformers.
V3 = {"model_type": "deepseek_v3", "max_position_embeddings": 163_840}
K2 = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 163_840,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "max_position_embeddings": 131_072,
}
V2_LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}


def written(path: Path, **options: Any) -> ModelConfig:
    (path / "config.json").write_text(json.dumps({"dtype": "bfloat16", **options}))
    return load_model_config(path)


@pytest.mark.parametrize("family", CONFIGS)
def test_an_absent_option_has_transformers_default(tmp_path: Path, family: str) -> None:
    theirs = CONFIGS[family]().to_dict()
    own = {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
    expected = written(tmp_path, **theirs | {"dtype": "bfloat16", "architectures": None} | own)
    mtp = {"num_nextn_predict_layers": 1} if family == "deepseek_v3" else {}
    assert (
        written(
            tmp_path,
            model_type=family,
            eos_token_id=theirs["eos_token_id"],
            bos_token_id=theirs["bos_token_id"],
            **own,
            **mtp,
        )
        == expected
    )


@pytest.mark.parametrize(
    ("family", "option", "value"),
    [
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v2", "mlp_bias", True),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "n_group", 3),
        ("deepseek_v3", "q_lora_rank", 0),
        ("deepseek_v3", "qk_rope_head_dim", 7),
        ("kimi_k2", "scoring_func", "softmax"),
        ("glm4_moe_lite", "mlp_layer_types", ["dense"]),
        ("glm4_moe_lite", "kv_lora_rank", -1),
    ],
)
def test_an_option_is_refused_by_its_name(
    tmp_path: Path, family: str, option: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=option):
        written(tmp_path, **{"model_type": family, "num_experts_per_tok": 6, option: value})


@pytest.mark.parametrize(
    ("options", "kv_bytes", "billions"),
    [(V3, 70_272, 671.0), (K2, 70_272, 1026.0), (V2_LITE, 31_104, 15.7)],
)
def test_published_sizes(
    tmp_path: Path, options: dict[str, Any], kv_bytes: int, billions: float
) -> None:
    shape = ModelShape.from_config(written(tmp_path, **options))
    assert shape.kv_bytes_per_token() == kv_bytes
    experts = shape.num_experts * sum(
        shape.weight_bytes("experts", idx, "none") for idx in shape.moe_layers
    )
    others = sum(
        shape.weight_bytes(part, idx, "none")
        for idx in range(shape.num_layers)
        for part in ("attention", "mlp")
    )
    others += sum(shape.other_bytes(idx) for idx in range(shape.num_layers))
    total = experts + others + shape.embedding_bytes() + shape.head_bytes("none")
    assert total / 2e9 == pytest.approx(billions, rel=0.005)


def test_latents_are_normed_as_the_checkpoint_says(tmp_path: Path) -> None:
    """transformers takes 1e-6 whatever rms_norm_eps is; Topspin where `latent_norm_eps` is."""
    path = make_checkpoint(tmp_path, "glm4_moe_lite", latent_norm_eps=None, rms_norm_eps=2.0)
    config = load_model_config(path)
    assert config.latent is not None
    assert config.latent.norm_eps == config.rms_norm_eps == 2.0
    model, prompt = oracle_model(path), [3, 9, 27, 81, 243, 100, 44, 7]
    as_it_is = answer_of(model, prompt)
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = 2.0
        layer.self_attn.kv_a_layernorm.variance_epsilon = 2.0
    expected = answer_of(model, prompt)
    with Engine(engine_config(path)) as engine:
        assert engine.generate([prompt], max_tokens=24) == [expected]
    assert expected != as_it_is
    overrides = {"latent_norm_eps": 1e-6}
    with Engine(engine_config(path, hf_overrides=overrides)) as engine:
        assert engine.generate([prompt], max_tokens=24) == [as_it_is]


def answer_of(model: Any, prompt: list[int]) -> list[int]:
    """Return 24 tokens that follow greedily."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(24):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]

"""The tiny models of tests: families of transformers and their differences from one shape.

Owns the registry of named variants. Knows no weights: tests.checkpoints writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

HIDDEN_SIZE = 64
VOCAB_SIZE = 288
BOS_TOKEN_ID = 256
EOS_TOKEN_ID = 257

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MIXTRAL: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
}
_OLMOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 40}
_GLM4: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "num_mtp_layers": 0,
}
_ERNIE: dict[str, Any] = {
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "rms_norm_eps": 3e-4,
    "tie_word_embeddings": True,
}
# transformers norms latents with 1e-6, whatever rms_norm_eps is; Topspin as this option says.
_LATENT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rms_norm_eps": 3e-4,
    "latent_norm_eps": 1e-6,
    "num_mtp_layers": 0,
}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}


class Variant(NamedTuple):
    """A family (a transformers model_type) and its differences from the common tiny shape."""

    model_type: str
    overrides: Mapping[str, Any]


VARIANTS: dict[str, Variant] = {
    "llama": Variant("llama", {"num_key_value_heads": 4}),
    "llama_gqa_rope_linear": Variant(
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama3_rope": Variant("llama", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama_yarn": Variant("llama", {"rope_parameters": _YARN_ROPE, "max_position_embeddings": 128}),
    "llama_dynamic_ntk": Variant(
        "llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            "max_position_embeddings": 16,
        },
    ),
    "llama_bias": Variant("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mixtral": Variant("mixtral", _MIXTRAL),
    "mixtral_sliding_window": Variant(
        "mixtral", {**_MIXTRAL, "sliding_window": 8, "tie_word_embeddings": True}
    ),
    "qwen2_moe": Variant(
        "qwen2_moe",
        {
            **_MOE,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
    "qwen2_moe_sparse_step": Variant(
        "qwen2_moe",
        {
            **_MOE,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 40,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 3,
        },
    ),
    "qwen3_moe": Variant(
        "qwen3_moe",
        {**_MOE, "num_experts_per_tok": 4, "head_dim": 32, "norm_topk_prob": True},
    ),
    "qwen3_moe_unnormalised": Variant(
        "qwen3_moe",
        {
            **_MOE,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "head_dim": 8,
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "olmoe": Variant("olmoe", {**_OLMOE, "norm_topk_prob": False}),
    "olmoe_clip_qkv": Variant(
        "olmoe",
        {
            **_OLMOE,
            "num_key_value_heads": 4,
            "clip_qkv": 0.7,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    ),
    "glm4_moe": Variant(
        "glm4_moe",
        {
            **_GLM4,
            "head_dim": 24,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "glm4_moe_yarn": Variant(
        "glm4_moe",
        {
            **_GLM4,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "rms_norm_eps": 3e-4,
            "rope_parameters": {**_YARN_ROPE, "partial_rotary_factor": 0.75},
            "max_position_embeddings": 128,
        },
    ),
    "minimax_m2": Variant(
        "minimax_m2",
        {
            **_MIXTRAL,
            "num_experts_per_tok": 3,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "ernie4_5_moe": Variant("ernie4_5_moe", {**_ERNIE, "head_dim": 20}),
    "ernie4_5_moe_sparse_step": Variant(
        "ernie4_5_moe",
        {
            **_ERNIE,
            "num_hidden_layers": 6,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
            "rope_parameters": _YARN_ROPE,
            "max_position_embeddings": 128,
        },
    ),
    "deepseek_v2": Variant(
        "deepseek_v2",
        {
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
            "attention_bias": True,
        },
    ),
    "deepseek_v2_lite": Variant(
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_parameters": {**_YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 0.6},
            "max_position_embeddings": 128,
        },
    ),
    "deepseek_v3": Variant(
        "deepseek_v3",
        {
            **_LATENT,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
            "max_position_embeddings": 128,
        },
    ),
    "deepseek_v3_halves": Variant(
        "deepseek_v3",
        {
            **_LATENT,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe_lite": Variant(
        "glm4_moe_lite",
        {
            **_LATENT,
            "qk_nope_head_dim": 24,
            "v_head_dim": 32,
            "n_shared_experts": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "gpt_oss": Variant(
        "gpt_oss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "intermediate_size": 64,
            "head_dim": 24,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "max_position_embeddings": 256,
            # Most gates and ups are within 7.
            "swiglu_limit": 0.9,
        },
    ),
}

MOE_VARIANTS: tuple[str, ...] = tuple(
    name for name, variant in VARIANTS.items() if variant.model_type != "llama"
)

DIFFERENT = ("llama_yarn", "mixtral_sliding_window", "qwen2_moe", "gpt_oss", "deepseek_v3")
"""Those that differ most: dense, with windows, shared experts, sinks, and latents."""

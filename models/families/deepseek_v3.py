"""DeepSeek-V3, R1 and V3.1, and Kimi-K2: latents, a sigmoid router with a bias, a shared expert.

The layers of multi-token prediction behind the decoder are not read.
"""

from __future__ import annotations

from dataclasses import replace

from models.description.config_fields import ConfigFields
from models.families.family import (
    Family,
    FamilyParts,
    dense_first,
    latent_parts,
    read_bias_router,
    read_shared_experts,
    serve_only,
)


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    serve_only(fields, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})
    return latent_parts(
        fields,
        dense_first(fields, num_layers),
        read_shared_experts(fields, read_bias_router),
        rope_is_interleaved=fields.flag("rope_interleave", default=True),
    )


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "num_experts": 256,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    parts=_parts,
)
KIMI_K2 = replace(FAMILY, model_type="kimi_k2")

"""GLM-4.5, 4.6 and 4.7: half-rotated heads, a sigmoid router with a bias, a shared expert.

The layers of multi-token prediction behind the decoder are not read.
"""

from __future__ import annotations

from models.description.config_fields import ConfigFields
from models.families.family import (
    Family,
    FamilyParts,
    dense_first,
    layers_of,
    read_bias_router,
    read_shared_experts,
)


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    return FamilyParts(
        layers=layers_of([None] * num_layers, dense_first(fields, num_layers)),
        moe=read_shared_experts(fields, read_bias_router),
        qkv_bias=fields.flag("attention_bias", default=False),
        qk_norm="head" if fields.flag("use_qk_norm", default=False) else "none",
        num_mtp_layers=fields.optional_int("num_nextn_predict_layers") or 0,
        rotary_factor=fields.number("partial_rotary_factor", default=0.5),
    )


FAMILY = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    defaults={
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "num_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    parts=_parts,
    ignored={"sliding_window": "glm4_moe attends to all positions"},
)

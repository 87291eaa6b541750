"""Qwen3-MoE: queries and keys normed per head."""

from __future__ import annotations

from models.description.config_fields import ConfigFields
from models.families.family import (
    Family,
    FamilyParts,
    check_layer_types,
    layers_of,
    read_experts,
    read_window,
    sparse_layers,
)


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    moe = read_experts(fields)
    window = read_window(fields) if fields.flag("use_sliding_window", default=False) else None
    check_layer_types(fields, num_layers, window)
    has_bias = fields.flag("attention_bias", default=False)
    return FamilyParts(
        layers=layers_of([window] * num_layers, sparse_layers(fields, num_layers, moe)),
        moe=moe,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm="head",
    )


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    parts=_parts,
    tokenizer_class="Qwen2Tokenizer",
)

"""Llama: dense layers only, for drafts and comparisons."""

from __future__ import annotations

from models.description.config_fields import ConfigFields
from models.families.family import Family, FamilyParts, check_layer_types, layers_of


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    check_layer_types(fields, num_layers, None)
    has_bias = fields.flag("attention_bias", default=False)
    return FamilyParts(
        layers=layers_of([None] * num_layers, [False] * num_layers),
        moe=None,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=fields.flag("mlp_bias", default=False),
        rope_is_interleaved=fields.flag("gguf_rope_interleave", default=False),
    )


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    parts=_parts,
    ignored={"sliding_window": "llama attends to all positions"},
)

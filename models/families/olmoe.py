"""OLMoE: queries and keys normed over all heads, projections clipped if asked for."""

from __future__ import annotations

from models.description.config_fields import ConfigFields
from models.families.family import (
    Family,
    FamilyParts,
    check_layer_types,
    layers_of,
    read_experts,
)


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    check_layer_types(fields, num_layers, None)
    moe = read_experts(fields, width="intermediate_size")
    head_dim = fields.optional_int("head_dim")
    num_heads = fields.positive_int("num_attention_heads")
    if head_dim is not None and head_dim * num_heads != fields.positive_int("hidden_size"):
        raise fields.error("head_dim", "olmoe needs hidden_size / heads")
    has_bias = fields.flag("attention_bias", default=False)
    clip = fields.optional_number("clip_qkv")
    if clip is not None and clip <= 0:
        raise fields.error("clip_qkv", "must be positive or null")
    return FamilyParts(
        layers=layers_of([None] * num_layers, [moe is not None] * num_layers),
        moe=moe,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm="full",
        clip_qkv=clip,
    )


FAMILY = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    defaults={
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "eos_token_id": 50_279,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    parts=_parts,
    ignored={"sliding_window": "olmoe attends to all positions"},
    tokenizer_class="GPTNeoXTokenizer",
)

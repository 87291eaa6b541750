"""Qwen2-MoE: a shared expert behind a sigmoid gate, windows in every other layer if asked for."""

from __future__ import annotations

from models.description.config_fields import ConfigFields
from models.families.family import (
    Family,
    FamilyParts,
    layers_of,
    read_experts,
    read_window,
    sparse_layers,
)


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    shared = fields.positive_int("shared_expert_intermediate_size")
    moe = read_experts(fields, shared_intermediate_size=shared)
    window = None
    if fields.flag("use_sliding_window", default=False):
        window = read_window(fields)
    return FamilyParts(
        layers=layers_of(
            _windows(fields, window, num_layers), sparse_layers(fields, num_layers, moe)
        ),
        moe=moe,
        qkv_bias=fields.flag("qkv_bias", default=True),
    )


def _windows(fields: ConfigFields, window: int | None, num_layers: int) -> list[int | None]:
    """Return per layer `layer_types`, or else every other of the first max_window_layers."""
    declared = fields.raw.get("layer_types")
    if declared is None:
        max_layers = fields.optional_int("max_window_layers")
        limit = 28 if max_layers is None else max_layers
        return [window if idx % 2 == 0 and idx < limit else None for idx in range(num_layers)]
    if not isinstance(declared, list) or len(declared) != num_layers:
        raise fields.error("layer_types", f"must list the {num_layers} layers")
    kinds = {"full_attention": None, "sliding_attention": window}
    for kind in declared:
        if not isinstance(kind, str) or kind not in kinds:
            raise fields.error("layer_types", f"supported: {', '.join(kinds)}")
        if kind == "sliding_attention" and window is None:
            raise fields.error("layer_types", "sliding_attention needs use_sliding_window")
    return [kinds[kind] for kind in declared]


FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    defaults={
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    parts=_parts,
    tokenizer_class="Qwen2Tokenizer",
)

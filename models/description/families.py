"""The supported model families: their defaults and their checkpoints' tensor names.

Owns the only table of differences by family name. Knows no tensors and no files (and
imports no torch): models.description.config reads the defaults, models.checkpoints.weights the
names. Source: the config classes and checkpoint layouts of HuggingFace transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The defaults of one `model_type` for options missing in config.json, and its tensor names.

    defaults: those of transformers' config class for options that are read, but for what means "as
    many as" or "none" (num_key_value_heads, flags). moe_blocks: names of the MoE block inside a
    layer, as published first. expert_gate, expert_up, expert_down: the three projections of one
    routed expert. rounds_routing_weights: whether the weights of the chosen experts are rounded to
    the model's dtype before they are used.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, object]
    qk_norm: QkNorm
    moe_blocks: tuple[str, ...] = ()
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    rounds_routing_weights: bool = False


_FAMILIES = (
    Family(
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
        qk_norm="none",
    ),
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        defaults={
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        qk_norm="none",
        moe_blocks=("block_sparse_moe", "mlp"),
        expert_gate="w1",
        expert_up="w3",
        expert_down="w2",
    ),
    Family(
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
        qk_norm="none",
        moe_blocks=("mlp",),
        rounds_routing_weights=True,
    ),
    Family(
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
        qk_norm="head",
        moe_blocks=("mlp",),
        rounds_routing_weights=True,
    ),
    Family(
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
        qk_norm="full",
        moe_blocks=("mlp",),
        rounds_routing_weights=True,
    ),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _FAMILIES}

EMBED = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
FINAL_NORM = "model.norm.weight"


def layer_name(layer_idx: int, suffix: str) -> str:
    """Return the full name of tensor `suffix` of a decoder layer."""
    return f"model.layers.{layer_idx}.{suffix}"


def expert_name(layer_idx: int, *, block: str, expert_id: int, projection: str) -> str:
    """Return the name of one routed expert's projection in the published layout."""
    return layer_name(layer_idx, f"{block}.experts.{expert_id}.{projection}.weight")


def fused_expert_name(layer_idx: int, *, block: str, projection: str) -> str:
    """Return the name of a layer's experts stacked in one tensor.

    transformers 5 has this layout in memory, and writes it when asked not to restore the published
    format: gate_up_proj [E, 2F, H] (gate rows first), down_proj [E, H, F].
    """
    return layer_name(layer_idx, f"{block}.experts.{projection}")

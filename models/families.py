"""The supported model families: their defaults and their checkpoints' tensor names.

Owns the only table of differences by family name. Knows no tensors and no files (and
imports no torch): models.config reads the defaults, models.weights the names. Source:
the config classes and checkpoint layouts of HuggingFace transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """The defaults of one `model_type` for options missing in config.json, and its tensor names.

    moe_blocks: names of the MoE block inside a layer, as published first. expert_gate, expert_up,
    expert_down: the three projections of one routed expert. kv_heads_default_to_heads: whether a
    missing num_key_value_heads means plain MHA; the other families require it.
    rounds_routing_weights: whether the weights of the chosen experts are rounded to the model's
    dtype before they are used.
    """

    model_type: str
    architecture: str
    default_rope_theta: float
    default_rms_norm_eps: float
    qk_norm: QkNorm
    kv_heads_default_to_heads: bool
    moe_blocks: tuple[str, ...] = ()
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    rounds_routing_weights: bool = False


_FAMILIES = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        default_rope_theta=10_000.0,
        default_rms_norm_eps=1e-6,
        qk_norm="none",
        kv_heads_default_to_heads=True,
    ),
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        default_rope_theta=1_000_000.0,
        default_rms_norm_eps=1e-5,
        qk_norm="none",
        kv_heads_default_to_heads=False,
        moe_blocks=("block_sparse_moe", "mlp"),
        expert_gate="w1",
        expert_up="w3",
        expert_down="w2",
    ),
    Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        default_rope_theta=10_000.0,
        default_rms_norm_eps=1e-6,
        qk_norm="none",
        kv_heads_default_to_heads=False,
        moe_blocks=("mlp",),
        rounds_routing_weights=True,
    ),
    Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        default_rope_theta=10_000.0,
        default_rms_norm_eps=1e-6,
        qk_norm="head",
        kv_heads_default_to_heads=False,
        moe_blocks=("mlp",),
        rounds_routing_weights=True,
    ),
    Family(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        default_rope_theta=10_000.0,
        default_rms_norm_eps=1e-5,
        qk_norm="full",
        kv_heads_default_to_heads=True,
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

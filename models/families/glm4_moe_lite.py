"""GLM-4.7-Flash: latents, a sigmoid router with a bias, a shared expert.

The layers of multi-token prediction behind the decoder are not read.
"""

from __future__ import annotations

from models.description.config_fields import ConfigFields
from models.families.family import (
    Family,
    FamilyParts,
    latent_parts,
    read_bias_router,
    read_shared_experts,
)


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    return latent_parts(
        fields,
        _sparse(fields, num_layers),
        read_shared_experts(fields, read_bias_router),
        rope_is_interleaved=fields.flag("rope_interleave", default=True),
    )


def _sparse(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Return per layer whether it has routed experts: `mlp_layer_types`, by default all but one."""
    kinds = fields.raw.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense"] + ["sparse"] * (num_layers - 1)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in ("dense", "sparse") for kind in kinds)
    ):
        raise fields.error("mlp_layer_types", f"must be {num_layers} times dense or sparse")
    return [kind == "sparse" for kind in kinds]


FAMILY = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    defaults={
        "vocab_size": 154_880,
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "num_experts": 64,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    parts=_parts,
)

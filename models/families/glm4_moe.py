"""GLM-4.5, 4.6 and 4.7: half-rotated heads, a sigmoid router with a bias, a shared expert.

The layers of multi-token prediction behind the decoder are not read.
"""

from __future__ import annotations

from typing import Final

from models.description.config_fields import ConfigFields
from models.description.parts import ExpertNames, MoeConfig, RouterConfig
from models.families.family import Family, FamilyParts, check_groups, layers_of, read_top_k

NAMES: Final = ExpertNames(shared="shared_experts")


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    num_dense = fields.optional_int("first_k_dense_replace") or 0
    return FamilyParts(
        layers=layers_of([None] * num_layers, [idx >= num_dense for idx in range(num_layers)]),
        moe=_experts(fields),
        qkv_bias=fields.flag("attention_bias", default=False),
        qk_norm="head" if fields.flag("use_qk_norm", default=False) else "none",
        num_mtp_layers=fields.optional_int("num_nextn_predict_layers") or 0,
        rotary_factor=fields.number("partial_rotary_factor", default=0.5),
    )


def _experts(fields: ConfigFields) -> MoeConfig:
    num_experts = fields.aliased_int(
        "n_routed_experts", "num_local_experts", "num_experts", least=1
    )
    router = RouterConfig(
        top_k=read_top_k(fields, num_experts),
        renormalise=fields.flag("norm_topk_prob", default=True),
        scores="sigmoid",
        has_bias=True,
        num_groups=fields.positive_int("n_group"),
        top_groups=fields.positive_int("topk_group"),
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor"),
        fp32_logits=True,
    )
    check_groups(fields, num_experts, router)
    width = fields.positive_int("moe_intermediate_size")
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=width,
        router=router,
        shared_intermediate_size=width * fields.positive_int("n_shared_experts"),
        names=NAMES,
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

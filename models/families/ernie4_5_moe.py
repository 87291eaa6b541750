"""ERNIE-4.5: neighbouring numbers are rotated, a softmax router with a bias, shared experts.

The tensors of multi-token prediction beside the decoder are not read.
"""

from __future__ import annotations

from typing import Final

from models.description.config_fields import ConfigFields
from models.description.parts import ExpertNames, MoeConfig, RouterConfig
from models.families.family import Family, FamilyParts, layers_of

NAMES: Final = ExpertNames(bias="moe_statics.e_score_correction_bias", shared="shared_experts")


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    if fields.flag("use_bias", default=False):
        raise fields.error("use_bias", "supported: false; the LM head has a bias, too")
    return FamilyParts(
        layers=layers_of([None] * num_layers, _sparse_layers(fields, num_layers)),
        moe=_experts(fields),
        rope_is_interleaved=True,
    )


def _sparse_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Return per layer whether it has routed experts: each `interval`-th of first to last."""
    first = fields.optional_int("moe_layer_start_index") or 0
    last = fields.optional_int("moe_layer_end_index")
    last = num_layers - 1 if last in (None, -1) else last
    interval = fields.positive_int("moe_layer_interval")
    return [first <= idx <= last and (idx + 1) % interval == 0 for idx in range(num_layers)]


def _experts(fields: ConfigFields) -> MoeConfig:
    num_experts = fields.aliased_int("moe_num_experts", "num_experts", least=1)
    top_k = fields.aliased_int("moe_k", "num_experts_per_tok", least=1)
    if top_k > num_experts:
        raise fields.error("moe_k", f"must be at most moe_num_experts = {num_experts}")
    router = RouterConfig(
        top_k=top_k,
        renormalise=True,
        has_bias=True,
        least_sum=fields.number("moe_norm_min"),
        fp32_logits=True,
        rounded=True,
    )
    width = fields.positive_int("moe_intermediate_size")
    num_shared = fields.optional_int("moe_num_shared_experts") or 0
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=width,
        router=router,
        shared_intermediate_size=width * num_shared or None,
        names=NAMES,
    )


FAMILY = Family(
    model_type="ernie4_5_moe",
    architecture="Ernie4_5_MoeForCausalLM",
    defaults={
        "vocab_size": 103_424,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "moe_intermediate_size": 1536,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    parts=_parts,
    ignored={"sliding_window": "ernie4_5_moe attends to all positions"},
)

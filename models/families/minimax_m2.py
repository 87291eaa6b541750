"""MiniMax-M2, 2.1, 2.5 and 2.7: norms over all heads, partly rotated heads, a sigmoid router."""

from __future__ import annotations

from typing import Final

from models.description.config_fields import ConfigFields
from models.description.parts import ExpertNames, MoeConfig, RouterConfig
from models.families.family import Family, FamilyParts, layers_of, read_top_k

NAMES: Final = ExpertNames(
    blocks=("block_sparse_moe", "mlp"),
    gate="w1",
    up="w3",
    down="w2",
    bias="e_score_correction_bias",
)


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    num_experts = fields.aliased_int("num_local_experts", "num_experts", least=1)
    router = RouterConfig(
        top_k=read_top_k(fields, num_experts),
        renormalise=True,
        scores="sigmoid",
        has_bias=True,
        fp32_logits=True,
    )
    moe = MoeConfig(
        num_experts=num_experts,
        intermediate_size=fields.positive_int("intermediate_size"),
        router=router,
        names=NAMES,
    )
    return FamilyParts(
        layers=layers_of([None] * num_layers, [True] * num_layers),
        moe=moe,
        qk_norm="full",
        rotary_factor=_rotary_factor(fields),
    )


def _rotary_factor(fields: ConfigFields) -> float:
    """Return the rotated share of a head; published files give their number (`rotary_dim`)."""
    num_rotated = fields.optional_int("rotary_dim")
    share = 1.0 if num_rotated is None else num_rotated / fields.positive_int("head_dim")
    return fields.number("partial_rotary_factor", default=share)


FAMILY = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    defaults={
        "vocab_size": 200_064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196_608,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5_000_000.0,
        "bos_token_id": 200_034,
        "eos_token_id": 200_020,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    parts=_parts,
    ignored={"sliding_window": "minimax_m2 attends to all positions"},
)

"""gpt-oss: attention sinks, clamped experts with biases, windows in every second layer."""

from __future__ import annotations

from typing import Final

from models.description.config_fields import ConfigFields
from models.description.parts import ExpertNames, MoeConfig, RouterConfig
from models.families.family import Family, FamilyParts, layers_of, read_top_k, read_window
from topspin.expert_activation import ExpertActivation

NAMES: Final = ExpertNames(router="router", is_interleaved=True, is_transposed=True)
_WINDOWED: Final = "sliding_attention"
_FULL: Final = "full_attention"


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    has_bias = fields.flag("attention_bias", default=True)
    return FamilyParts(
        layers=layers_of(_windows(fields, num_layers), [True] * num_layers),
        moe=_experts(fields),
        qkv_bias=has_bias,
        o_bias=has_bias,
        has_sinks=True,
    )


def _windows(fields: ConfigFields, num_layers: int) -> list[int | None]:
    """Return each layer's window: those of `layer_types`, by default of every second layer."""
    window = read_window(fields)
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        kinds = [_FULL if idx % 2 else _WINDOWED for idx in range(num_layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in (_WINDOWED, _FULL) for kind in kinds)
    ):
        raise fields.error("layer_types", f"must be {num_layers} times {_WINDOWED} or {_FULL}")
    return [window if kind == _WINDOWED else None for kind in kinds]


def _experts(fields: ConfigFields) -> MoeConfig:
    num_experts = fields.aliased_int("num_local_experts", "num_experts", least=1)
    limit = fields.number("swiglu_limit")
    if limit <= 0:
        raise fields.error("swiglu_limit", "must be positive")
    return MoeConfig(
        num_experts=num_experts,
        intermediate_size=fields.positive_int("intermediate_size"),
        router=RouterConfig(
            top_k=read_top_k(fields, num_experts),
            renormalise=False,
            scores="logits",
            has_logit_bias=True,
            rounded=True,
        ),
        activation=ExpertActivation(fields.number("swiglu_alpha"), offset=1.0, limit=limit),
        has_biases=True,
        names=NAMES,
    )


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    defaults={
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    parts=_parts,
)

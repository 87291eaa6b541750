"""Mixtral: experts in every layer, weights of the chosen ones that add up to one."""

from __future__ import annotations

from typing import Final

from models.description.config_fields import ConfigFields
from models.description.parts import ExpertNames
from models.families.family import (
    Family,
    FamilyParts,
    check_layer_types,
    layers_of,
    read_experts,
    read_window,
)

EXPERTS: Final = ExpertNames(blocks=("block_sparse_moe", "mlp"), gate="w1", up="w3", down="w2")


def _parts(fields: ConfigFields, num_layers: int) -> FamilyParts:
    window = read_window(fields)
    check_layer_types(fields, num_layers, window)
    moe = read_experts(
        fields,
        width="intermediate_size",
        renormalise=True,
        rounded=False,
        names=EXPERTS,
        may_lack=False,
    )
    return FamilyParts(
        layers=layers_of([window] * num_layers, [True] * num_layers),
        moe=moe,
        rope_is_interleaved=fields.flag("gguf_rope_interleave", default=False),
    )


FAMILY = Family(
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
    parts=_parts,
    takes_class=False,
)

"""The supported model families by their `model_type`, one module each."""

from __future__ import annotations

from typing import Final

from models.families import (
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    llama,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from models.families.family import Family

FAMILIES: Final[dict[str, Family]] = {
    module.FAMILY.model_type: module.FAMILY
    for module in (
        *(llama, mixtral, qwen2_moe, qwen3_moe, olmoe),
        *(ernie4_5_moe, glm4_moe, gpt_oss, minimax_m2),
    )
}

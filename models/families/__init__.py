"""The supported model families by their `model_type`, one module each, and near relatives."""

from __future__ import annotations

from typing import Final

from models.families import (
    deepseek_v2,
    deepseek_v3,
    ernie4_5_moe,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    llama,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from models.families.family import Family

_ALL: Final = (
    *(llama.FAMILY, mixtral.FAMILY, qwen2_moe.FAMILY, qwen3_moe.FAMILY, olmoe.FAMILY),
    *(ernie4_5_moe.FAMILY, glm4_moe.FAMILY, gpt_oss.FAMILY, minimax_m2.FAMILY),
    *(deepseek_v2.FAMILY, deepseek_v3.FAMILY, deepseek_v3.KIMI_K2, glm4_moe_lite.FAMILY),
)
FAMILIES: Final[dict[str, Family]] = {family.model_type: family for family in _ALL}
_INDEXED: Final = (
    "its layers attend to the positions that an indexer chooses, and this is not served"
)
UNSERVED: Final[dict[str, str]] = {
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "glm5_next"), _INDEXED),
    "kimi_linear": "some of its layers have linear attention (KDA), which is not served",
    "kimi_k25": "it reads images, which are not served",
}
"""Why checkpoints are refused whose families resemble a supported one, by their `model_type`."""

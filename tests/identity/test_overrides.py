"""Contexts beyond the checkpoint's limit: the tokens of transformers with the same config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import VOCAB_SIZE, make_checkpoint, oracle_generate
from tests.engine import Engine, engine_config
from tests.identity.conftest import MIN_MARGIN, NUM_TOKENS
from topspin.errors import ConfigError
from topspin.speculation import Speculation

LIMIT, EXTENDED = 48, 192
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LIMIT}
OVERRIDES = {"rope_scaling": YARN, "max_position_embeddings": EXTENDED}
PROMPT_LENS = (60, EXTENDED - NUM_TOKENS, 20, 101, 140, 77)
NUM_PROMPTS = 4


def unreadable(path: Path) -> Path:
    """Give a checkpoint a rope type that Topspin does not know: no role reads it as it is."""
    raw = json.loads((path / "config.json").read_text())
    raw["rope_parameters"]["rope_type"] = "longrope"
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError):
        engine_config(path)
    return path


@pytest.mark.parametrize(
    ("layout", "draft_nodes"),
    [
        ({"transport": "local"}, None),
        ({"transport": "shm", "attention_nodes": 2, "expert_nodes": 2}, 0),
        ({"transport": "shm", "expert_nodes": 2}, 1),
    ],
)
def test_long_prompts_give_the_tokens_of_transformers(
    tmp_path: Path, layout: dict[str, Any], draft_nodes: int | None
) -> None:
    rope = {**YARN, "rope_theta": 10000.0}
    extended = make_checkpoint(
        tmp_path / "extended", "qwen3_moe", max_position_embeddings=EXTENDED, rope_parameters=rope
    )
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB_SIZE, size=length).tolist() for length in PROMPT_LENS]
    oracle = oracle_generate(extended, prompts, NUM_TOKENS)
    clear = [idx for idx, margin in enumerate(oracle.margins) if margin >= MIN_MARGIN]
    assert len([idx for idx in clear if len(prompts[idx]) > LIMIT]) >= NUM_PROMPTS - 1
    path = unreadable(
        make_checkpoint(tmp_path / "short", "qwen3_moe", max_position_embeddings=LIMIT)
    )
    if draft_nodes is not None:
        layout = {
            **layout,
            "draft_nodes": draft_nodes,
            "speculation": Speculation(method="draft_model", model="self-int4"),
        }
    with Engine(engine_config(path, hf_overrides=OVERRIDES, **layout)) as engine:
        found = engine.generate([prompts[idx] for idx in clear], max_tokens=NUM_TOKENS)
    assert found == [oracle.tokens[idx] for idx in clear]

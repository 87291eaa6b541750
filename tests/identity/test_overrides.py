"""Contexts beyond the checkpoint's limit: the tokens of transformers with the same config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.checkpoints import VOCAB_SIZE, make_checkpoint, oracle_generate
from tests.engine import Engine, engine_config
from tests.identity.conftest import MIN_MARGIN, NUM_TOKENS
from topspin.errors import ConfigError
from topspin.plan.speculation import Speculation

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


class Extended(NamedTuple):
    """A checkpoint of the short length, and what transformers generates with the long one."""

    path: Path
    prompts: list[list[int]]
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Extended:
    rope = {**YARN, "rope_theta": 10000.0}
    directory = tmp_path_factory.mktemp("overrides")
    whole = make_checkpoint(
        directory / "extended", "qwen3_moe", max_position_embeddings=EXTENDED, rope_parameters=rope
    )
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB_SIZE, size=length).tolist() for length in PROMPT_LENS]
    oracle = oracle_generate(whole, prompts, NUM_TOKENS)
    clear = [idx for idx, margin in enumerate(oracle.margins) if margin >= MIN_MARGIN]
    assert len([idx for idx in clear if len(prompts[idx]) > LIMIT]) >= NUM_PROMPTS - 1
    path = unreadable(
        make_checkpoint(directory / "short", "qwen3_moe", max_position_embeddings=LIMIT)
    )
    return Extended(path, [prompts[idx] for idx in clear], [oracle.tokens[idx] for idx in clear])


@pytest.mark.parametrize(
    ("layout", "draft_nodes"),
    [
        pytest.param({"transport": "local"}, None, marks=pytest.mark.slow),
        pytest.param(
            {"transport": "shm", "attention_nodes": 2, "expert_nodes": 2}, 0, marks=pytest.mark.slow
        ),
        ({"transport": "shm", "expert_nodes": 2}, 1),
    ],
)
def test_long_prompts_give_the_tokens_of_transformers(
    extended: Extended, layout: dict[str, Any], draft_nodes: int | None
) -> None:
    if draft_nodes is not None:
        layout = {
            **layout,
            "draft_nodes": draft_nodes,
            "speculation": Speculation(method="draft_model", model="self-int4"),
        }
    with Engine(engine_config(extended.path, hf_overrides=OVERRIDES, **layout)) as engine:
        assert engine.generate(extended.prompts, max_tokens=NUM_TOKENS) == extended.tokens

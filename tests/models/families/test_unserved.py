"""Relatives of supported families whose computation is another: refused by name, with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from models.description.config import load_model_config
from models.families import FAMILIES, UNSERVED
from tests.checkpoints import make_checkpoint
from topspin.errors import ConfigError


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_a_relative_is_refused_by_its_name_with_the_reason(tmp_path: Path, name: str) -> None:
    assert name not in FAMILIES
    AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"config.json.*model_type.*{name}") as refused:
        load_model_config(tmp_path)
    assert f"{UNSERVED[name]}; supported: deepseek_v2, " in str(refused.value)


@pytest.mark.parametrize("model_type", ["kimi_k3", None, ["deepseek_v3"]])
def test_a_name_that_nobody_knows_is_refused_too(tmp_path: Path, model_type: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=r"model_type.*supported: deepseek_v2, "):
        load_model_config(tmp_path)


def test_an_indexer_is_refused_under_another_familys_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    config = json.loads((tmp_path / "config.json").read_text())
    load_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "index_topk": 2048}))
    with pytest.raises(ConfigError, match="index_topk = 2048: an indexer of positions"):
        load_model_config(tmp_path)

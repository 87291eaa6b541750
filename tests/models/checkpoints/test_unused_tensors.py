"""A checkpoint with tensors beyond config.json is served with a warning that names them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from attention_nodes.loading import load_runner
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.unused_tensors import describe_unused, unused_tensors
from models.description.config import load_model_config
from tests.checkpoints import VARIANTS, make_checkpoint, oracle_model
from tests.engine import engine_config
from tests.pairwise import few
from tests.variants import DIFFERENT
from tests.weights import load_attention_weights


def unused_of(path: Path) -> list[str]:
    config = load_model_config(path)
    with Checkpoint(path) as checkpoint:
        load_attention_weights(checkpoint, config, dtype=torch.float32)
        return unused_tensors(checkpoint.names, config, read=checkpoint.tensors_read)


def change_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("variant", few(VARIANTS, *DIFFERENT))
def test_whole_checkpoints_leave_nothing_unused(tmp_path: Path, variant: str) -> None:
    assert unused_of(make_checkpoint(tmp_path, variant)) == []


def test_stacked_experts_are_in_use(tmp_path: Path) -> None:
    model = oracle_model(make_checkpoint(tmp_path / "plain", "qwen3_moe"))
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert unused_of(tmp_path / "fused") == []


def test_layers_beyond_the_configuration_are_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=3)
    change_config(path, num_hidden_layers=2)
    unused = unused_of(path)
    assert unused == sorted(name for name in Checkpoint(path).names if "layers.2." in name)
    assert any(".experts." in name for name in unused)


def test_the_attention_node_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    change_config(path, num_hidden_layers=2)
    with torch.inference_mode(), caplog.at_level(logging.WARNING):
        load_runner(path, engine_config(path, kernels="reference").for_node())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "model.layers.2.input_layernorm.weight" in caplog.text
    assert "and 6 more" in caplog.text


def test_few_are_all_named() -> None:
    assert describe_unused(["a", "b"]) == "2 tensors: a, b"

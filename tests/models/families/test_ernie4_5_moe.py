"""ERNIE-4.5's parts against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeModel

from models.checkpoints.checkpoint import Checkpoint
from models.description.config import load_model_config
from tests.checkpoints import make_checkpoint, oracle_model
from tests.weights import load_attention_weights
from topspin.errors import CheckpointError

SMALL = {
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 7,
}


@pytest.mark.parametrize("placed", [(0, -1, 1), (1, -1, 2), (2, 5, 1), (0, 4, 3), (3, 3, 2)])
def test_layers_have_experts_as_in_transformers(
    tmp_path: Path, placed: tuple[int, int, int]
) -> None:
    names = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    asked = {**SMALL, **dict(zip(names, placed, strict=True))}
    with torch.device("meta"):
        layers = Ernie4_5_MoeModel(Ernie4_5_MoeConfig(**asked)).layers
    text = json.dumps({"model_type": "ernie4_5_moe", "dtype": "bfloat16", **asked})
    (tmp_path / "config.json").write_text(text)
    expected = [idx for idx, layer in enumerate(layers) if hasattr(layer.mlp, "experts")]
    assert list(load_model_config(tmp_path).moe_layers) == expected


def test_the_bias_is_a_row_and_never_rounded(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "ernie4_5_moe")
    config, checkpoint = load_model_config(path), Checkpoint(path)
    layer = load_attention_weights(checkpoint, config, dtype=torch.bfloat16).layers[1]
    theirs = oracle_model(path).model.layers[1].mlp.gate.moe_statics.e_score_correction_bias
    assert theirs.shape == (1, 8)
    assert layer.router is not None
    bias = layer.router.score_bias
    assert bias is not None
    assert bias.dtype == torch.float32
    assert torch.equal(bias, theirs[0])


def test_a_bias_of_other_experts_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "ernie4_5_moe", moe_num_experts=6)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "moe_num_experts": 7}))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.(gate|moe_statics)"):
        load_attention_weights(Checkpoint(path), load_model_config(path), dtype=torch.float32)

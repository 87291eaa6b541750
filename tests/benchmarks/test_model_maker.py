"""The checkpoint with random experts in mxfp4 is whole, and served from 4 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import model_maker
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.mtp_weights import load_mtp_weights
from models.checkpoints.weights import stream_attention_weights
from models.description.config import load_model_config
from models.quantised.precision import checkpoint_rules
from tests.checkpoints import write_tokenizer
from tests.weights import load_expert_weights
from topspin.errors import ConfigError
from topspin.plan.precision import PrecisionRule

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


def test_a_model_in_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path)
    monkeypatch.setattr("models.sources.hub.resolve_model", lambda name: tmp_path)
    model_maker.make_mxfp4(tmp_path / "model", num_layers=2, **SIZES)
    config = load_model_config(tmp_path / "model")
    assert [layer.sliding_window for layer in config.layers] == [128, None]
    rules = checkpoint_rules(tmp_path / "model", config)
    assert rules["cpu"] == rules["triton"] == (PrecisionRule(format="mxfp4", part="experts"),)
    checkpoint = Checkpoint(tmp_path / "model")
    experts = load_expert_weights(checkpoint, config, dtype=torch.float32, experts=[range(32)] * 2)
    assert all(0.01 < layer.down.std() < 0.05 for layer in experts.layers)
    assert len(list(stream_attention_weights(checkpoint, config, dtype=torch.float32).layers)) == 2
    assert (tmp_path / "model" / "tokenizer.json").exists()
    with pytest.raises(SystemExit, match="already has a config"):
        model_maker.make_mxfp4(tmp_path / "model")


def test_models_with_latents_and_with_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    monkeypatch.setattr("models.sources.hub.resolve_model", lambda name: tmp_path)
    sizes = {**SIZES, "moe_intermediate_size": 32, "n_routed_experts": 8}
    model_maker.make_latent(tmp_path / "latent", num_layers=2, **sizes, kv_lora_rank=24)
    config = load_model_config(tmp_path / "latent")
    assert config.latent is not None
    assert (config.latent.rank, config.latent.q_rank, config.moe_layers) == (24, 1536, (1,))
    checkpoint = Checkpoint(tmp_path / "latent")
    assert len(list(stream_attention_weights(checkpoint, config, dtype=torch.float32).layers)) == 2

    model_maker.make_with_head(tmp_path / "head", num_layers=2, **sizes)
    config = load_model_config(tmp_path / "head").of_mtp()
    head = load_mtp_weights(Checkpoint(tmp_path / "head"), config, dtype=torch.float32)
    assert (head.layer.router is not None, head.join.count_nonzero()) == (True, 64)


def test_nothing_is_written_without_the_default_models_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOPSPIN_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="topspin pull smollm2-moe"):
        model_maker.make_mxfp4(tmp_path / "model", num_layers=2, **SIZES)
    assert not (tmp_path / "model").exists()

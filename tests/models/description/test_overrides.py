"""Overridden configurations rotate as transformers' with the same fields, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.description.config import load_model_config
from models.rope import inverse_frequencies
from tests.checkpoints import make_checkpoint, oracle_model
from tests.pairwise import few
from topspin.errors import ConfigError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
STYLES: dict[str, dict[str, Any]] = {
    "transformers 5": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "transformers 4": {"rope_theta": 5e5, "rope_scaling": None},
    "scaled already": {
        "rope_theta": 5e5,
        "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 9.0},
    },
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": YARN},
    "in the words of transformers 5": {"rope_parameters": {**YARN, "rope_theta": 1e6}},
    "in old words": {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    "theta alone": {"rope_scaling": {"rope_type": "default"}, "rope_theta": 2e6},
}


def rewrite(path: Path, **fields: Any) -> None:
    """Give config.json these rope fields and no others."""
    raw = json.loads((path / "config.json").read_text())
    for name in [name for name in raw if "rope" in name or name.startswith("original")]:
        del raw[name]
    (path / "config.json").write_text(json.dumps({**raw, **fields}))


@pytest.mark.parametrize("override", OVERRIDES)
@pytest.mark.parametrize("style", few(STYLES, "scaled already"))
def test_frequencies_are_those_of_a_checkpoint_with_the_fields(
    tmp_path: Path, style: str, override: str
) -> None:
    """The oracle's checkpoint has them in one object, written key by key by this test."""
    asked, given = OVERRIDES[override], STYLES[style]
    make_checkpoint(tmp_path, "llama", head_dim=64)
    rewrite(tmp_path, max_position_embeddings=64, **given)
    config = load_model_config(tmp_path, {"max_position_embeddings": 256, **asked})
    rope: dict[str, Any] = {"rope_theta": 5e5}
    if style == "scaled already":
        rope |= {"factor": 2.0, "beta_fast": 9.0}
    rope |= {"rope_theta": asked["rope_theta"]} if "rope_theta" in asked else {}
    rope |= asked.get("rope_scaling") or asked["rope_parameters"]
    rope["rope_type"] = rope.pop("type", None) or rope["rope_type"]
    rewrite(tmp_path, max_position_embeddings=256, rope_parameters=rope)
    rotary = oracle_model(tmp_path).model.rotary_emb
    ours = inverse_frequencies(config.rope, config.head_dim, seq_len=17)
    np.testing.assert_allclose(ours.inv_freq, rotary.inv_freq.numpy(), rtol=2.5e-7, atol=0)
    assert ours.attention_scaling == pytest.approx(rotary.attention_scaling, rel=1e-7)
    assert config.context_length == (768 if override == "dynamic" else 256)
    assert config == load_model_config(tmp_path)


def test_without_overrides_nothing_changes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama_yarn")
    assert load_model_config(tmp_path, {}) == load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 32}, "hidden_size: only max_position_embeddings, rope_theta, rope_sc"),
        ({"rope_scaling": None}, "rope_scaling = None: must be an object"),
        ({"rope_scaling": {}, "rope_parameters": {}}, "are two names of one object; give one"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type = 'longrope': supported: "),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 512},
            "rope_type 'yarn' needs original_max_position_embeddings, the length that the model",
        ),
        ({"max_position_embeddings": 512.0}, "max_position_embeddings = 512.0: must be an integer"),
    ],
)
def test_what_may_not_be_replaced_is_named(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError) as raised:
        load_model_config(tmp_path, overrides)
    assert "--hf-overrides" in str(raised.value)
    assert message in str(raised.value)

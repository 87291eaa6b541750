"""Heads in memory's order: any pairs of rotated numbers, and values narrower than keys.

The oracle of values is a family of transformers that has them, MiMo-V2-Flash without windows. Its
layers with windows have other numbers of heads, so that it is no family of the product yet.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.cli.main import main
from deploy.placement.shapes import ModelShape
from deploy.quantisation.writing import check_request
from kernels.dispatch import select_ops
from models.checkpoints.checkpoint import Checkpoint
from models.description.config import load_model_config
from models.families import FAMILIES
from models.families.family import Family, FamilyParts, layers_of
from models.families.glm4_moe import FAMILY as GLM
from models.quantised.coded import StoredMatrix
from models.quantised.precision import checkpoint_rules
from tests.checkpoints import VARIANTS, make_checkpoint, oracle_generate
from tests.engine import Engine, engine_config
from tests.models.quantised.forms import FORMS, SIZES, make_quantised
from tests.variants import Variant
from tests.weights import load_attention_weights
from topspin.errors import ConfigError
from topspin.plan.precision import rules_of

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.376}
HEAD_DIM, VALUE_DIM = 64, 32
PROMPTS = [[7, 3, 9, 200, 4], [17] * 40, [5]]


def _parts(fields: Any, num_layers: int) -> FamilyParts:
    moe = GLM.parts(fields, num_layers).moe
    assert moe is not None
    return FamilyParts(
        layers=layers_of([None] * num_layers, [idx > 0 for idx in range(num_layers)]),
        moe=replace(moe, shared_intermediate_size=None),
        qkv_bias=True,
        rotary_factor=1.0,
        value_dim=fields.positive_int("v_head_dim"),
    )


@pytest.fixture(autouse=True)
def _narrow_values(monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family(
        model_type="mimo_v2_flash",
        architecture="MiMoV2FlashForCausalLM",
        defaults={"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "n_shared_experts": 1},
        parts=_parts,
    )
    monkeypatch.setitem(FAMILIES, family.model_type, family)
    options = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "head_dim": HEAD_DIM,
        "v_head_dim": VALUE_DIM,
        "attention_bias": True,
        "attention_value_scale": None,
        "rms_norm_eps": 3e-4,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"full_attention": ROPE},
    }
    monkeypatch.setitem(VARIANTS, "narrow", Variant(family.model_type, options))
    monkeypatch.setitem(SIZES, "narrow", {})


def _with_one_rope(path: Path) -> Path:
    """Write rotary options as families with one kind of layers have them."""
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "rope_parameters": ROPE}))
    return path


@pytest.mark.slow
def test_narrow_values_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "narrow")
    oracle = oracle_generate(path, PROMPTS, 10)
    assert min(oracle.margins) >= 1e-3, oracle.margins
    config = load_model_config(_with_one_rope(path))
    assert (config.head_dim, config.value_dim) == (HEAD_DIM, VALUE_DIM)
    # Bytes are counted as they are kept: 2 layers of 2 heads.
    assert (
        ModelShape.from_config(config, dtype="float32").kv_bytes_per_token()
        == 2 * 2 * 2 * HEAD_DIM * 4
    )
    with Engine(engine_config(path)) as engine:
        assert engine.generate(PROMPTS, max_tokens=10) == oracle.tokens


@pytest.mark.parametrize("form", ["ct-int4-groups", "ct-int8-channels", "fp8-blocks", "awq"])
def test_quantised_values_have_zeros_behind_them(tmp_path: Path, form: str) -> None:
    """The codes are those of the checkpoint, and what is packed from them computes zeros."""
    make_quantised(tmp_path, "narrow", FORMS[form])
    path = _with_one_rope(tmp_path / "coded")
    config = load_model_config(path)
    rules = checkpoint_rules(path, config)["cpu"]
    read = {"dtype": torch.float32}
    coded = load_attention_weights(Checkpoint(path), config, precision=rules, **read)
    plain = load_attention_weights(Checkpoint(path), config, **read)
    ops = select_ops("cpu", torch.float32, [rules[0].format])
    x = torch.randn(3, config.hidden_size)
    for own, wanted in zip(coded.layers, plain.layers, strict=True):
        for matrix, numbers in ((own.qkv, wanted.qkv), (own.o, wanted.o)):
            assert isinstance(matrix, StoredMatrix)
            torch.testing.assert_close(matrix.dequantised(), numbers, rtol=1e-6, atol=1e-7)
        assert own.o.shape == (config.hidden_size, config.q_size)
        assert not wanted.o.view(len(wanted.o), -1, HEAD_DIM)[..., VALUE_DIM:].any()
        packed = ops.pack_linear(own.qkv, rules[0].format)
        values = ops.linear(x, packed)[:, -config.kv_size :].view(3, -1, HEAD_DIM)
        assert values[..., :VALUE_DIM].abs().min() > 0
        assert not values[..., VALUE_DIM:].any()


def test_what_narrow_values_do_not_go_with_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _with_one_rope(make_checkpoint(tmp_path, "narrow"))
    with pytest.raises(ConfigError, match="values are narrower than keys"):
        check_request(path, rules_of("int8"))
    assert main(["sensitivity", str(path), "-o", str(tmp_path / "found.json")]) == 2
    assert "values are narrower than keys" in capsys.readouterr().err
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "v_head_dim": 96}))
    with pytest.raises(ConfigError, match=r"v_head_dim = 96: .* head_dim = 64"):
        load_model_config(path)

"""The rules of a quantised checkpoint: which formats its codes are served in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from models.description.config import load_model_config
from models.description.facts import facts_of
from models.quantised.precision import checkpoint_rules, presumed_rules
from tests.checkpoints import make_checkpoint
from tests.models.quantised.forms import (
    FORMS,
    ROUTED_ONLY,
    Form,
    fp8_blocks,
    gptq,
    make_quantised,
    set_quantisation,
)
from topspin.errors import ConfigError
from topspin.plan.from_flags import resolve
from topspin.plan.precision import Format, PrecisionRule, Rules

PARTS = ("attention", "experts")
PLAIN = "modules_to_not_convert"


def of_parts(weight_format: Format) -> Rules:
    return tuple(PrecisionRule(format=weight_format, part=part) for part in PARTS)


@pytest.mark.parametrize(
    ("form", "on_cpu", "on_triton"),
    [
        # A GPU's groups have 128 inputs, so that it could not have groups of 32 as they are.
        (FORMS["ct-int4-groups"], "int4", "int8"),
        (FORMS["gptq-4-sym-channel"], "int4", "int4"),
        (FORMS["gptq-4-desc-act"], "int8", "int8"),
        (FORMS["ct-w8a8"], "int8", "int8"),
        (FORMS["ct-fp8-channels"], "int8", "int8"),
        (FORMS["ct-fp8-blocks"], "int8", "int8"),
        # Groups of 16.
        (FORMS["nvfp4"], "int8", "int8"),
        (FORMS["modelopt-nvfp4"], "int8", "int8"),
    ],
)
def test_codes_keep_their_bits_where_kernels_have_their_groups(
    tmp_path: Path, form: Form, on_cpu: Format, on_triton: Format
) -> None:
    make_quantised(tmp_path, "mixtral", form, hidden_size=64)
    config = load_model_config(tmp_path / "coded")
    rules = checkpoint_rules(tmp_path / "coded", config)
    assert rules == {"cpu": of_parts(on_cpu), "triton": of_parts(on_triton)}
    assert presumed_rules(config) == rules


@pytest.mark.parametrize("form", [fp8_blocks(), FORMS["modelopt-fp8"]])
@pytest.mark.parametrize(("kv_heads", "attention"), [(4, "fp8"), (2, "int8")])
def test_fp8_blocks_of_joined_matrices_must_be_whole(
    tmp_path: Path, kv_heads: int, attention: Format, form: Form
) -> None:
    sizes = {"head_dim": 32, "num_key_value_heads": kv_heads}
    make_quantised(tmp_path, "mixtral", form, **sizes)
    config = load_model_config(tmp_path / "coded")
    found = checkpoint_rules(tmp_path / "coded", config)
    assert found["triton"] == (
        PrecisionRule(format=attention, part="attention"),
        PrecisionRule(format="fp8", part="experts"),
    )
    assert found["cpu"] == of_parts("int8")
    assert presumed_rules(config) == found


def test_what_config_json_excludes_is_presumed_plain(tmp_path: Path) -> None:
    names = ["gate", "model.layers.*.self_attn", "model.layers.1.mlp.experts"]
    form = fp8_blocks()
    make_quantised(tmp_path, "mixtral", form._replace(config=form.config | {PLAIN: names}))
    model = load_model_config(tmp_path / "coded")
    assert presumed_rules(model)["cpu"] == (
        PrecisionRule(format="int8", part="experts", layers=(0,)),
    )
    set_quantisation(tmp_path / "coded", form.config | {PLAIN: "gate"})
    with pytest.raises(ConfigError, match="modules_to_not_convert = 'gate': must be a list"):
        load_model_config(tmp_path / "coded")


def test_patterns_of_what_is_ignored_leave_routed_experts(tmp_path: Path) -> None:
    make_quantised(tmp_path, "deepseek_v3", ROUTED_ONLY)
    model = load_model_config(tmp_path / "coded")
    found = checkpoint_rules(tmp_path / "coded", model)
    assert found["cpu"] == (PrecisionRule(format="int4", part="experts"),)
    assert presumed_rules(model) == found


def test_a_part_with_a_plain_matrix_stays_plain(tmp_path: Path) -> None:
    """One expert, one layer's o_proj and the first layer's MLP are numbers."""
    make_quantised(tmp_path, "qwen2_moe", gptq(4, -1))
    coded, plain = tmp_path / "coded", load_file(tmp_path / "plain" / "model.safetensors")
    tensors = load_file(coded / "model.safetensors")
    for module in (
        "model.layers.0.mlp.experts.2.up_proj",
        "model.layers.3.self_attn.o_proj",
        "model.layers.1.mlp.down_proj",
    ):
        for name in [each for each in tensors if each.startswith(f"{module}.")]:
            del tensors[name]
        tensors[f"{module}.weight"] = plain[f"{module}.weight"]
    save_file(tensors, coded / "model.safetensors")
    found = checkpoint_rules(coded, load_model_config(coded))["cpu"]
    assert found == (
        PrecisionRule(format="int4", part="attention", layers=(0, 1, 2)),
        PrecisionRule(format="int4", part="mlp", layers=(0, 2, 3)),
        PrecisionRule(format="int4", part="experts", layers=(2, 3)),
        PrecisionRule(format="int4", part="experts", layers=(0,), experts=(0, 1, 3, 4, 5, 6, 7)),
    )


def test_a_plan_has_the_rules_of_each_roles_kernels(tmp_path: Path) -> None:
    make_quantised(tmp_path, "mixtral", FORMS["ct-int4-groups"])
    model = load_model_config(tmp_path / "coded")
    facts = facts_of(model, tmp_path / "coded")

    def precision(quantization: Any = "auto", **compute: Any) -> Rules:
        return resolve(facts, path="m", quantization=quantization, **compute).precision

    assert precision() == of_parts("int4")
    assert precision("none") == ()
    assert precision("int8")[0] == PrecisionRule(format="int8")
    assert precision(deterministic=True) == ()
    assert precision(attention_device="cuda") == (
        PrecisionRule(format="int8", part="attention"),
        PrecisionRule(format="int4", part="experts"),
    )


def test_a_plain_checkpoint_has_no_rules(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    model = load_model_config(path)
    assert checkpoint_rules(path, model) == {}
    assert replace(model, quantisation=None) == model

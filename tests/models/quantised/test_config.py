"""quantization_config: which module has which scheme, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from models.description.config_fields import ConfigFields
from models.quantised.config import parse_quantisation, read_quantisation
from models.quantised.scheme import Quantisation
from tests.models.quantised.forms import FORMS, compressed
from topspin.errors import ConfigError

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
CT = compressed("pack-quantized", num_bits=4, strategy="group", group_size=32).config

AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "data_type": "int",
}


def parsed(config: dict[str, Any], option: str = "quantization_config") -> Quantisation | None:
    return parse_quantisation(ConfigFields({option: config}, source="config.json"))


def test_names_come_before_patterns_and_classes() -> None:
    groups = {
        "all": {"targets": ["Linear"], "weights": INT4},
        "some": {"targets": ["re:.*self_attn.*"], "weights": FP8, "format": "float-quantized"},
        "one": {
            "targets": ["model.layers.0.self_attn.q_proj"],
            "weights": {**INT4, "num_bits": 8},
        },
    }
    config = {**CT, "config_groups": groups, "ignore": ["lm_head", r"re:.*mlp\.gate$"]}
    found = parsed(config, "compression_config")
    assert found is not None

    def bits(module: str) -> tuple[int, bool] | None:
        scheme = found.scheme_of(module)
        return None if scheme is None else (scheme.bits, scheme.is_float)

    assert bits("model.layers.0.self_attn.q_proj") == (8, False)
    assert bits("model.layers.1.self_attn.q_proj") == (8, True)
    assert bits("model.layers.1.mlp.experts.0.up_proj") == (4, False)
    assert bits("model.layers.1.mlp.gate_proj") == (4, False)
    assert bits("model.layers.1.mlp.gate") is None
    assert bits("lm_head") is None


FP8_METHOD = {"quant_method": "fp8"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}
METHODS = "supported: auto-round, awq, compressed-tensors, fp8, gguf, gptq, modelopt, mxfp4"
NVFP4: dict[str, Any] = FORMS["nvfp4"].config["config_groups"]["group_0"]["weights"]
# As ModelOpt writes config.json, and its own file.
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float"},
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        }
    },
    "ignore": ["lm_head", "model.layers.0.self_attn*", "*.mlp.gate", "model.layers.3"],
}
NESTED = {
    "producer": {"name": "modelopt", "version": "0.39.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": MODELOPT["ignore"],
    },
}
# An option that does not go with the others of a configuration, or of the weights of a group.
REFUSED: list[tuple[dict[str, Any], str, Any, str]] = [
    ({}, "quant_method", "bitsandbytes", METHODS),
    (FP8_METHOD, "fmt", "e5m2", "supported: e4m3"),
    (FP8_METHOD, "weight_block_size", [128], "must be two positive integers, or null"),
    (FP8_METHOD, "expert_dtype", "fp4", "supported: fp8"),
    (FP8_METHOD, "modules_to_convert", ["embed"], "supported: projections only"),
    (GPTQ, "bits", 3, "supported: 4, 8"),
    (GPTQ, "checkpoint_format", "marlin", "supported: gptq, gptq_v2"),
    (GPTQ, "group_size", 0, "must be positive, or -1"),
    (AWQ, "version", "gemv", "supported: gemm"),
    (AWQ, "bits", 8, "supported: 4"),
    (CT, "transform_config", {"a": 1}, "supported: null"),
    (CT, "sparsity_config", {"format": "sparse-bitmask"}, "supported: format dense"),
    (AUTO_ROUND, "packing_format", "auto_round:auto_awq", "supported: auto_round:auto_gptq"),
    (AUTO_ROUND, "data_type", "mx_fp", "supported: int"),
    (CT, "format", "mxfp4-pack-quantized", "supported: pack-quantized, int-quantized, float-"),
    (CT, "config_groups", {}, "must be an object with at least one group"),
    (INT4, "num_bits", 6, "supported: 4 and 8 of type int, 8 of type float"),
    (INT4, "strategy", "tensor_group", "supported: tensor, channel, group, block"),
    (INT4, "group_size", None, "must be positive with strategy group"),
    (INT4, "dynamic", True, "supported: false, for weights"),
    (NVFP4, "group_size", 32, "supported: 16, with nvfp4-pack-quantized"),
    (NVFP4, "strategy", "group", "supported: tensor_group, with nvfp4-pack-quantized"),
    (NVFP4, "type", "int", "supported: float, with nvfp4-pack-quantized"),
    (MODELOPT, "quant_algo", "W4A8_AWQ", "supported: FP8, NVFP4"),
    (MODELOPT, "quant_algo", None, "supported: FP8, NVFP4"),
    (MODELOPT, "group_size", 32, "supported: 16, with NVFP4"),
    (MODELOPT, "quantized_layers", {"a": 1}, "supported: one algorithm for all layers"),
    (MODELOPT, "ignore", "lm_head", "must be a list of names"),
]


@pytest.mark.parametrize(("base", "option", "value", "reason"), REFUSED)
def test_what_is_not_read_is_refused_by_name(
    base: dict[str, Any], option: str, value: Any, reason: str
) -> None:
    config, message = {**base, option: value}, f"{option} = {value!r}: {reason}"
    if base in (INT4, NVFP4):
        form = FORMS["nvfp4"].config if base is NVFP4 else CT
        config = {**form, "config_groups": {"g": {"targets": ["Linear"], "weights": config}}}
        message = f"config_groups.g.weights: {message}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        parsed(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ, "dynamic": {"+:a": {"bits": 2}}}, "dynamic['+:a']: bits = 2: supported: 4, 8"),
        ({**AUTO_ROUND, "extra_config": {"a": 4}}, "must be an object of objects"),
        ({**AUTO_ROUND, "extra_config": {"a": {"bits": 3}}}, "extra_config['a']: bits = 3: supp"),
        ({**MODELOPT, "quant_algo": "FP8"}, "group_0.weights: num_bits = 4: supported: 8, with F"),
        ({**MODELOPT, "config_groups": {"a": {"targets": ["b"]}}}, "targets = ['b']: supported: ["),
    ],
)
def test_options_of_single_modules_are_refused_too(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parsed(config)


@pytest.mark.parametrize("status", ["frozen", "compressed", "initialized", None])
def test_the_status_of_packed_weights_is_no_matter(status: str | None) -> None:
    assert parsed({**CT, "quantization_status": status}) == parsed(CT)


def test_modelopt_excludes_by_wildcards_and_what_is_within() -> None:
    found = parsed(MODELOPT)
    assert found is not None
    assert found == parsed({"quant_method": "modelopt", **NESTED})
    for module in (
        "lm_head",
        "model.layers.0.self_attn.q_proj",
        "model.layers.7.mlp.gate",
        "model.layers.3.mlp.experts.2.up_proj",
    ):
        assert found.scheme_of(module) is None
    for module in ("model.layers.10.self_attn.q_proj", "model.layers.33.mlp.gate_proj"):
        assert found.scheme_of(module) is not None


def test_a_file_of_modelopts_own_says_what_config_json_does_not(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(NESTED), encoding="utf-8")
    notes: list[str] = []
    fields = ConfigFields({}, source="config.json")
    assert read_quantisation(tmp_path, fields, notes) == parsed(MODELOPT)
    first = ConfigFields({"quantization_config": CT}, source="config.json")
    assert read_quantisation(tmp_path, first, notes) == parsed(CT)
    assert read_quantisation(tmp_path / "none", fields, notes) is None
    other = {"quantization": {"quant_algo": "MIXED_PRECISION"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(other), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"hf_quant_config.json: quant.* = 'MIXED_PRECISION'"):
        read_quantisation(tmp_path, fields, notes)


@pytest.mark.parametrize(
    ("base", "option", "value"),
    [
        (CT, "kv_cache_scheme", {"num_bits": 8}),
        (MODELOPT, "kv_cache_scheme", {"num_bits": 8}),
        (MODELOPT, "kv_cache_quant_algo", "FP8"),
    ],
)
def test_what_is_said_of_the_cache_is_noted(base: dict[str, Any], option: str, value: Any) -> None:
    notes: list[str] = []
    config = {**base, option: value}
    found = parse_quantisation(
        ConfigFields({"quantization_config": config}, source="config.json"), notes
    )
    assert found == parsed(base)
    assert len(notes) == 1
    assert option in notes[0]
    assert "--kv-cache-dtype" in notes[0]


def test_autoround_that_packs_as_gptq_is_gptq() -> None:
    """Its extra_config has the options of single modules; 16 bits: not quantised."""
    extra = {"a.q_proj": {"bits": 8, "group_size": -1}, "lm_head": {"bits": 16, "data_type": "fp"}}
    found, gptq = parsed({**AUTO_ROUND, "extra_config": extra}), parsed(GPTQ)
    assert found is not None
    assert gptq is not None
    assert found.scheme_of("a.k_proj") == gptq.scheme_of("a.k_proj")
    wider = parsed({**GPTQ, "bits": 8, "group_size": -1})
    assert wider is not None
    assert found.scheme_of("a.q_proj") == wider.scheme_of("a.q_proj")
    assert found.scheme_of("lm_head") is None

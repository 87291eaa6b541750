"""gpt-oss's parts against transformers, whose sinks are given no weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig

from deploy.quantisation.grids import Rounding
from deploy.quantisation.layers import open_model
from deploy.quantisation.specification import parse_bits
from deploy.quantisation.writing import new_directory, write_quantised
from deploy.rig.random_weights import RandomWeights
from kernels.cpu.quantised import QuantisedOps
from kernels.triton.grouped_mlp.weights import pack_weight, unpack_weight
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.expert_reader import ExpertReader
from models.checkpoints.unused_tensors import unused_tensors
from models.checkpoints.weights import stream_expert_weights
from models.description.config import ModelConfig, load_model_config
from models.description.parts import RouterConfig
from models.quantised.coded import StoredMatrix
from models.quantised.precision import checkpoint_rules
from tests.checkpoints import make_checkpoint
from tests.kernels.cases.quantised import dequantise
from tests.kernels.generators import finish
from tests.models.quantised.forms import make_mxfp4
from tests.weights import load_expert_weights
from topspin.errors import ConfigError
from topspin.expert_activation import ExpertActivation
from topspin.plan.precision import PrecisionRule, rules_of

TOKENS = [(7 * idx * idx + 3) % 250 for idx in range(24)]
EVERY = [range(8)] * 3


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "plain", "gpt_oss")


def written(path: Path, **options: Any) -> ModelConfig:
    text = json.dumps({"model_type": "gpt_oss", "dtype": "bfloat16", **options})
    (path / "config.json").write_text(text)
    return load_model_config(path)


def test_an_absent_option_has_transformers_default(tmp_path: Path) -> None:
    theirs = GptOssConfig()
    expected = written(tmp_path, **theirs.to_dict() | {"dtype": "bfloat16"})
    windows = [layer.sliding_window for layer in expected.layers]
    assert windows == [128, None] * 18
    assert (expected.head_dim, expected.num_kv_heads, expected.hidden_size) == (64, 8, 2880)
    assert (expected.rope.rope_type, expected.rope.truncate) == ("yarn", False)
    assert (expected.rope.theta, expected.rope.factor) == (150_000.0, 32.0)
    assert expected.qkv_bias
    assert expected.o_bias
    assert expected.moe is not None
    assert expected.moe.activation == ExpertActivation(1.702, offset=1.0, limit=7.0)
    assert expected.moe.router == RouterConfig(
        top_k=4, renormalise=False, scores="logits", has_logit_bias=True, rounded=True
    )
    assert written(tmp_path) == expected
    assert written(tmp_path, rope_parameters=None, layer_types=None) == expected
    for option in theirs.to_dict().keys() - {"model_type", "dtype"}:
        rest = {name: value for name, value in theirs.to_dict().items() if name != option}
        assert written(tmp_path, **rest | {"dtype": "bfloat16"}) == expected, option


@pytest.mark.parametrize(
    "options",
    [
        {"layer_types": ["sliding_attention"]},
        {"num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
        {"swiglu_limit": 0.0},
    ],
)
def test_what_transformers_would_not_compute_is_refused(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"layer_types|swiglu_limit"):
        written(tmp_path, **options)


@torch.inference_mode()
def test_a_quantised_copy_keeps_biases_and_what_is_plain(checkpoint: Path, tmp_path: Path) -> None:
    tokens = torch.tensor([TOKENS])
    with new_directory(tmp_path / "coded") as directory:
        rules = parse_bits("experts[0]=8")
        write_quantised(checkpoint, directory, rules, Rounding(), tokens=tokens)
    layers = []
    for path in (checkpoint, tmp_path / "coded"):
        model = open_model(path)
        layers.append(list(model.layers))
    for before, after in zip(*layers, strict=True):
        assert before.experts is not None
        assert after.experts is not None
        assert after.experts.biases is not None
        assert all(map(torch.equal, after.experts.biases, before.experts.biases or ()))
        exact = {"rtol": 0.0, "atol": 0.0}
        near = exact if before.idx else {"rtol": 0.0, "atol": 0.02}
        torch.testing.assert_close(after.experts.gate_up, before.experts.gate_up, **near)
        torch.testing.assert_close(after.experts.down, before.experts.down, **near)


def test_published_experts_in_mxfp4(tmp_path: Path) -> None:
    """They are exact, dequantised and as the kernels keep them."""
    make_mxfp4(tmp_path)
    plain, path = tmp_path / "plain", tmp_path / "coded"
    config, options = load_model_config(path), {"dtype": torch.float32, "experts": EVERY}
    wanted = load_expert_weights(Checkpoint(plain), load_model_config(plain), **options)
    found = load_expert_weights(Checkpoint(path), config, **options)
    assert checkpoint_rules(path, config)["cpu"] == (PrecisionRule(format="mxfp4", part="experts"),)
    kept = stream_expert_weights(Checkpoint(path), config, precision=rules_of("mxfp4"), **options)
    for ours, want, coded in zip(found.layers, wanted.layers, kept, strict=True):
        assert torch.equal(ours.gate_up, want.gate_up)
        assert torch.equal(ours.down, want.down)
        for matrices, numbers in ((coded.gate_up, want.gate_up), (coded.down, want.down)):
            for matrix, number in zip(matrices, numbers, strict=True):
                assert isinstance(matrix, StoredMatrix)
                assert torch.equal(matrix.dequantised(), number)
                for weight_format in ("mxfp4", "int8"):
                    packed = QuantisedOps().pack_linear(matrix, weight_format)
                    assert torch.equal(dequantise(packed), number)
                assert torch.equal(unpack_weight(pack_weight(matrix, "mxfp4")), number)
    missing = config.num_layers - 1
    assert not unused_tensors(
        [each for each in Checkpoint(path).names if f"layers.{missing}.mlp.experts" in each],
        config,
        read=frozenset(),
    )


@pytest.mark.parametrize("is_coded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expert_alone(tmp_path: Path, dtype: torch.dtype, is_coded: bool) -> None:
    make_mxfp4(tmp_path)
    path = tmp_path / ("coded" if is_coded else "plain")
    config = load_model_config(path)
    reader = ExpertReader(Checkpoint(path), config, dtype=dtype)
    loaded = load_expert_weights(Checkpoint(path), config, dtype=dtype, experts=[(5,)] * 3)
    assert loaded.layers[2].biases is not None
    reader.read_ahead(2, 5)
    for keep_codes in (False, True):
        alone = finish(reader.read(2, 5, keep_codes=keep_codes))
        found = [alone.gate_up, alone.down]
        if is_coded and keep_codes:
            found = [each.dequantised() for each in found]  # type: ignore[union-attr]
        assert torch.equal(found[0], loaded.layers[2].gate_up[0])
        assert torch.equal(found[1], loaded.layers[2].down[0])
        assert alone.biases is not None
        assert torch.equal(alone.biases[0], loaded.layers[2].biases[0][0])
        assert torch.equal(alone.biases[1], loaded.layers[2].biases[1][0])


def test_random_weights_have_its_biases(checkpoint: Path) -> None:
    config = load_model_config(checkpoint)
    drawn = RandomWeights(config, device=torch.device("cpu"), dtype=torch.float32)
    routers = [each.router for each in drawn.attention().layers]
    biases = [each.bias for each in routers if each is not None]
    assert [each.shape for each in biases if each is not None] == [(8,)] * 3
    stream = next(iter(drawn.experts()))
    assert stream.biases is not None
    assert [each.shape for each in stream.biases] == [(8, 128), (8, 64)]

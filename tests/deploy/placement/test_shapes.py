"""Bytes of weights against what the kernels really pack."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_nodes.step import kv_cache
from deploy.placement.shapes import MatrixShape, ModelShape, matrix_bytes
from expert_nodes.memory import measure_expert
from kernels.cpu.quantised import quantise
from kernels.dispatch import select_ops
from kernels.triton.grouped_mlp.weights import pack_weight
from models.description.config import ModelConfig
from models.description.parts import LayerConfig, MoeConfig, RouterConfig
from models.description.rope_config import RopeConfig
from topspin.plan.precision import Format


def model(**changes: object) -> ModelConfig:
    fields = {
        "family": "qwen3_moe",
        "vocab_size": 50,
        "hidden_size": 80,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "dtype": "bfloat16",
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": "head",
        "clip_qkv": None,
        "rope": RopeConfig(
            rope_type="default",
            theta=1e4,
            max_position_embeddings=64,
            original_max_position_embeddings=64,
        ),
        "layers": (LayerConfig(is_moe=True), LayerConfig(sliding_window=8)),
        "intermediate_size": 70,
        "moe": MoeConfig(
            num_experts=4,
            intermediate_size=40,
            router=RouterConfig(top_k=1, renormalise=True),
        ),
        "eos_token_ids": (),
        "bos_token_id": None,
    }
    return ModelConfig(**(fields | changes))


@pytest.mark.parametrize("weight_format", ["int8", "int4", "mxfp4"])
@pytest.mark.parametrize("shape", [(64, 64), (50, 70), (16, 33), (1, 32)])
def test_matrices_on_a_cpu_have_the_packed_bytes(
    weight_format: Format, shape: tuple[int, int]
) -> None:
    packed = quantise(torch.randn(*shape), weight_format)
    found = matrix_bytes(MatrixShape(*shape), weight_format, itemsize=2, kernels="cpu")
    assert found == packed.data.nbytes


@pytest.mark.parametrize("weight_format", ["none", "fp8", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize(("shape", "halves"), [((64, 64), 1), ((300, 130), 2), ((2, 129), 2)])
def test_matrices_on_a_gpu_have_the_packed_bytes(
    weight_format: Format, shape: tuple[int, int], halves: int
) -> None:
    packed = pack_weight(torch.randn(*shape).bfloat16(), weight_format, halves=halves)
    scales = 0 if packed.scales is None else packed.scales.nbytes
    found = matrix_bytes(MatrixShape(*shape, halves), weight_format, itemsize=2, kernels="triton")
    assert found == packed.data.nbytes + scales


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("weight_format", ["none", "int8", "int4", "mxfp4"])
def test_an_expert_on_a_cpu_has_the_packed_bytes(weight_format: Format, has_biases: bool) -> None:
    own = model().moe
    assert own is not None
    config = model(moe=replace(own, has_biases=has_biases))
    formats = () if weight_format == "none" else (weight_format,)
    ops = select_ops("cpu", torch.float32, formats)
    found = ModelShape.from_config(config, dtype="float32").weight_bytes(
        "experts", 0, weight_format
    )
    gate_up, down = torch.randn(80, 80), torch.randn(80, 40)
    biases = (torch.randn(1, 80), torch.randn(1, 80)) if has_biases else None
    packed = ops.pack_experts([gate_up], [down], formats=[weight_format], biases=biases)
    matrices = [each.data for each in (*packed.gate_up, *packed.down)]
    assert found == sum(each.nbytes for each in (*matrices, *(packed.biases or ())))
    if weight_format == "none":
        assert found == measure_expert(ops, config, torch.float32, weight_format).kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_values_have_the_caches_bytes(dtype: str) -> None:
    config = model()
    specs = kv_cache.layer_specs(config, getattr(torch, dtype))
    shape = ModelShape.from_config(config, dtype=dtype)
    assert shape.kv_bytes_per_token() * 16 == kv_cache.bytes_per_block(specs, block_size=16)
    assert shape.kv_bytes_per_token(1) * shape.itemsize == shape.kv_bytes_per_token()


def test_layers_have_their_own_parts() -> None:
    shape = ModelShape.from_config(model())
    assert shape.moe_layers == (0,)
    assert shape.weight_bytes("mlp", 0, "none") == 0
    assert shape.weight_bytes("experts", 1, "none") == 0
    assert shape.weight_bytes("mlp", 1, "none") == 2 * 3 * 70 * 80
    assert shape.weight_bytes("experts", 0, "none") == 2 * 3 * 40 * 80
    with_sinks = ModelShape.from_config(model(has_sinks=True))
    assert [with_sinks.other_bytes(idx) - shape.other_bytes(idx) for idx in (0, 1)] == [16, 16]
    assert shape.seen_keys(0, 100.0) == 100.0
    assert shape.seen_keys(1, 100.0) == 8.0
    each = shape.kv_layer_bytes()
    assert shape.kept_bytes_per_token(100.0) * 100 == pytest.approx(each * (100 + 8))
    assert shape.kept_bytes_per_token(100.0, layers=[1], step_tokens=16) == each * 0.4
    assert shape.kept_bytes_per_token(4.0) == shape.kv_bytes_per_token()

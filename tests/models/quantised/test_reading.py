"""Every form of every family: reading gives the library's numbers, and transformers' logits."""

from __future__ import annotations

import itertools
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.expert_reader import ExpertReader
from models.checkpoints.unused_tensors import unused_tensors
from models.description.config import load_model_config
from models.quantised.precision import checkpoint_rules
from tests.checkpoints import oracle_model
from tests.kernels.generators import finish
from tests.models.plain_model import plain_logits
from tests.models.quantised.forms import FAMILIES, FORMS, ROUTED_ONLY, make_quantised
from tests.weights import load_attention_weights, load_expert_weights

FAST = (
    ("qwen3_moe", "ct-int4-groups"),
    ("olmoe", "ct-w8-zeros"),
    ("mixtral", "awq"),
    ("llama_bias", "gptq-8-v2"),
    ("qwen2_moe", "fp8-blocks"),
    ("glm4_moe", "gptq-4"),
    ("deepseek_v3", "fp8-ue8m0"),
    ("deepseek_v3", "nvfp4"),
)
# transformers stacks experts, and knows no zeros, plain integers or blocks for that.
OF_TRANSFORMERS = ("ct-int4-groups", "ct-int8-channels", "ct-fp8-tensors", "ct-fp8-channels")
MATRIX = [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow)
    for case in (*itertools.product(FAMILIES, FORMS), ("deepseek_v3", "routed-only"))
]


def transformers_model(path: Path, family: str, form: str) -> Any:
    """Return transformers' model of the quantised checkpoint, or else of the dequantised one."""
    own: Any = None
    # Of two families transformers reads other numbers.
    if form == "fp8-blocks" and family not in ("glm4_moe", "deepseek_v3"):
        own = FineGrainedFP8Config(**FORMS[form].config, dequantize=True)
    elif form in OF_TRANSFORMERS:
        own = CompressedTensorsConfig(dequantize=True)
    if own is None:
        return oracle_model(path / "plain")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checkpoint's configuration is replaced by `own`
        return AutoModelForCausalLM.from_pretrained(
            path / "coded",
            dtype=torch.float32,
            attn_implementation="eager",
            quantization_config=own,
        ).eval()


@pytest.mark.parametrize(("family", "form"), MATRIX)
def test_the_numbers_are_the_librarys(tmp_path: Path, family: str, form: str) -> None:
    make_quantised(tmp_path, family, (FORMS | {"routed-only": ROUTED_ONLY})[form])
    config = load_model_config(tmp_path / "coded")
    moe = config.moe
    every = [range(0 if moe is None else moe.num_experts)] * len(config.moe_layers)
    found = []
    for name in ("plain", "coded"):
        checkpoint = Checkpoint(tmp_path / name)
        own = load_model_config(tmp_path / name)
        attention = load_attention_weights(checkpoint, own, dtype=torch.float32)
        assert not unused_tensors(checkpoint.names, own, read=checkpoint.tensors_read)
        experts = load_expert_weights(checkpoint, own, dtype=torch.float32, experts=every)
        assert not unused_tensors(checkpoint.names, own, read=checkpoint.tensors_read)
        found.append((attention, experts))
    (plain, plain_experts), (coded, coded_experts) = found
    for ours, wanted in zip(coded.layers, plain.layers, strict=True):
        torch.testing.assert_close(ours.qkv, wanted.qkv, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours.o, wanted.o, rtol=1e-6, atol=1e-7)
    for own, want in zip(coded_experts.layers, plain_experts.layers, strict=True):
        torch.testing.assert_close(own.gate_up, want.gate_up, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(own.down, want.down, rtol=1e-6, atol=1e-7)
    tokens = [(7 * idx * idx + 3) % 250 for idx in range(24)]
    with torch.no_grad():
        ours = plain_logits(config, coded, coded_experts, tokens)
        theirs = transformers_model(tmp_path, family, form)(
            input_ids=torch.tensor([tokens])
        ).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)
    if moe is None:
        return
    reader = ExpertReader(Checkpoint(tmp_path / "coded"), config, dtype=torch.float32)
    alone = finish(reader.read(0, 3))
    assert torch.equal(alone.gate_up, coded_experts.layers[0].gate_up[3])
    assert torch.equal(alone.down, coded_experts.layers[0].down[3])


def test_scales_of_rows_and_cache_are_known_and_other_tensors_are_not(tmp_path: Path) -> None:
    make_quantised(tmp_path, "llama_bias", FORMS["ct-fp8-tensors"])
    file = tmp_path / "coded" / "model.safetensors"
    tensors = load_file(file)
    module = "model.layers.0.self_attn.q_proj"
    names = ("input_scale", "k_scale", "odd")
    tensors |= {f"{module}.{name}": torch.ones(1) for name in names}
    save_file(tensors, file)
    config, checkpoint = load_model_config(tmp_path / "coded"), Checkpoint(tmp_path / "coded")
    load_attention_weights(checkpoint, config, dtype=torch.float32)
    unused = unused_tensors(checkpoint.names, config, read=checkpoint.tensors_read)
    assert unused == [f"{module}.odd"]


def test_stacked_experts_in_fp8(tmp_path: Path) -> None:
    """transformers keeps a layer's experts stacked, with the scales of their blocks beside them."""
    make_quantised(tmp_path, "mixtral", FORMS["fp8-blocks"])
    coded, stacked = tmp_path / "coded", tmp_path / "stacked"
    config = load_model_config(coded)
    assert config.moe is not None
    every = [range(config.moe.num_experts)] * len(config.moe_layers)
    wanted = load_expert_weights(Checkpoint(coded), config, dtype=torch.float32, experts=every)
    shutil.copytree(coded, stacked)
    tensors = load_file(coded / "model.safetensors")
    for layer in config.moe_layers:
        experts = f"model.layers.{layer}.block_sparse_moe.experts"
        for name, parts in (("gate_up_proj", ("w1", "w3")), ("down_proj", ("w2",))):
            for own, suffix in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
                of_each = [
                    torch.cat([tensors.pop(f"{experts}.{e}.{part}.{own}") for part in parts])
                    for e in every[0]
                ]
                tensors[f"{experts}.{name}{suffix}"] = torch.stack(of_each)
    save_file(tensors, stacked / "model.safetensors")
    found = load_expert_weights(Checkpoint(stacked), config, dtype=torch.float32, experts=every)
    for ours, want in zip(found.layers, wanted.layers, strict=True):
        assert torch.equal(ours.gate_up, want.gate_up)
        assert torch.equal(ours.down, want.down)
    reader = ExpertReader(Checkpoint(stacked), config, dtype=torch.float32)
    alone = finish(reader.read(1, 5, keep_codes=True))
    assert torch.equal(alone.gate_up.dequantised(), wanted.layers[1].gate_up[5])
    assert checkpoint_rules(stacked, config) == checkpoint_rules(coded, config)

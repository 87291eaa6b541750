"""Both roles' weights: complete, in the right place, without the other role's."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.expert_reader import ExpertReader
from models.checkpoints.weights import AttentionWeights
from models.description.config import ModelConfig, load_model_config
from tests.checkpoints import MOE_VARIANTS, VARIANTS, make_checkpoint, oracle_model
from tests.kernels.generators import finish
from tests.models.plain_model import plain_logits
from tests.models.quantised.forms import FORMS, ROUTED_ONLY, make_quantised
from tests.pairwise import few
from tests.variants import DIFFERENT
from tests.weights import NodeExperts, load_attention_weights, load_expert_weights
from topspin.errors import CheckpointError, ConfigError

_ROUTED = ".experts."
# Of quantised matrices: their shape, and the scale of rows.
_UNREAD = ("weight_shape", "input_global_scale")


def _all_experts(config: ModelConfig) -> list[range]:
    num_experts = 0 if config.moe is None else config.moe.num_experts
    return [range(num_experts)] * len(config.moe_layers)


def _load(path: Path) -> tuple[AttentionWeights, NodeExperts]:
    config = load_model_config(path)
    with Checkpoint(path) as checkpoint:
        return (
            load_attention_weights(checkpoint, config, dtype=torch.float32),
            load_expert_weights(
                checkpoint, config, dtype=torch.float32, experts=_all_experts(config)
            ),
        )


def _assert_equals_oracle(path: Path) -> None:
    tokens = [(7 * idx * idx + 3) % 250 for idx in range(24)]
    attention, experts = _load(path)
    with torch.no_grad():
        ours = plain_logits(load_model_config(path), attention, experts, tokens)
        theirs = oracle_model(path)(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("variant", few(VARIANTS, *DIFFERENT))
def test_what_is_read_computes_what_transformers_computes(tmp_path: Path, variant: str) -> None:
    _assert_equals_oracle(make_checkpoint(tmp_path, variant))


@pytest.mark.parametrize("variant", few(["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"], "olmoe"))
def test_sharded_and_fused_layouts_read_the_same(tmp_path: Path, variant: str) -> None:
    """`save_original_format=False` writes stacked experts, as transformers 5 does."""
    make_checkpoint(tmp_path / "plain", variant)
    model = oracle_model(tmp_path / "plain")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    assert any(
        name.endswith("experts.gate_up_proj") for name in Checkpoint(tmp_path / "fused").names
    )
    plain_attention, plain_experts = _load(tmp_path / "plain")
    for layout in ("sharded", "fused"):
        attention, experts = _load(tmp_path / layout)
        assert torch.equal(attention.lm_head, plain_attention.lm_head)
        for ours, plain in zip(experts.layers, plain_experts.layers, strict=True):
            assert torch.equal(ours.gate_up, plain.gate_up)
            assert torch.equal(ours.down, plain.down)
        for layer, plain_layer in zip(attention.layers, plain_attention.layers, strict=True):
            assert torch.equal(layer.qkv, plain_layer.qkv)


@pytest.mark.parametrize(
    ("variant", "stored"),
    [
        *((variant, "float32") for variant in ("qwen2_moe", "gpt_oss")),
        *(
            pytest.param(variant, "float32", marks=pytest.mark.slow)
            for variant in MOE_VARIANTS
            if variant not in ("qwen2_moe", "gpt_oss")
        ),
        ("deepseek_v3", "bfloat16"),
        ("deepseek_v3", "fp8-ue8m0"),
        ("deepseek_v3", "nvfp4"),
        ("deepseek_v3", "routed-only"),
    ],
)
def test_each_role_reads_its_own_tensors_only(tmp_path: Path, variant: str, stored: str) -> None:
    path, forms = tmp_path / "coded", FORMS | {"routed-only": ROUTED_ONLY}
    if stored in forms:
        make_quantised(tmp_path, variant, forms[stored])
    else:
        make_checkpoint(path, variant)
        _edit(path, lambda tensors: tensors.update(_converted(tensors, stored)))
    config = load_model_config(path)
    attention, experts, single = Checkpoint(path), Checkpoint(path), Checkpoint(path)
    load_attention_weights(attention, config, dtype=torch.float32)
    load_expert_weights(experts, config, dtype=torch.float32, experts=_all_experts(config))
    finish(ExpertReader(single, config, dtype=torch.float32).read(0, 3))
    wanted = {name for name in attention.names if not name.endswith(_UNREAD)}
    routed = {name for name in wanted if _ROUTED in name}
    assert experts.tensors_read == routed
    assert attention.tensors_read == wanted - routed
    of_one = f"layers.{config.moe_layers[0]}.", f"{_ROUTED}3."
    if not any(name.endswith("experts.down_proj") for name in routed):  # or else stacked
        assert single.tensors_read == {n for n in routed if all(part in n for part in of_one)}


def _converted(tensors: Any, dtype: str) -> dict[str, torch.Tensor]:
    return {name: each.to(getattr(torch, dtype)) for name, each in tensors.items()}


def test_an_expert_node_reads_only_its_slots(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    config = load_model_config(tmp_path)
    _, everything = _load(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    share = load_expert_weights(checkpoint, config, dtype=torch.float32, experts=[[5, 2, 5], []])
    assert {name.split(".")[5] for name in checkpoint.tensors_read} == {"2", "5"}
    assert torch.equal(share.layers[0].gate_up, everything.layers[0].gate_up[[5, 2, 5]])
    assert torch.equal(share.layers[0].down, everything.layers[0].down[[5, 2, 5]])
    assert len(share.layers[1].gate_up) == len(share.layers[1].down) == 0


@pytest.mark.parametrize("experts", [[[8], []], [[-1], []], [[0]]])
def test_impossible_expert_ids_are_refused(tmp_path: Path, experts: list[list[int]]) -> None:
    make_checkpoint(tmp_path, "mixtral")
    config = load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="experts"):
        load_expert_weights(Checkpoint(tmp_path), config, dtype=torch.float32, experts=experts)


def test_weights_are_contiguous_and_of_the_asked_dtype(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen2_moe")
    config = load_model_config(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    attention = load_attention_weights(checkpoint, config, dtype=torch.bfloat16)
    experts = load_expert_weights(
        checkpoint, config, dtype=torch.bfloat16, experts=_all_experts(config)
    )
    layer = attention.layers[0]
    assert layer.shared is not None
    assert layer.router is not None
    tensors = [attention.embed, layer.qkv, layer.o, layer.router.weight, layer.shared.gate_up]
    for tensor in [*tensors, experts.layers[0].gate_up, experts.layers[0].down]:
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.bfloat16
    exact, _ = _load(tmp_path)
    assert torch.equal(layer.qkv, exact.layers[0].qkv.bfloat16())


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    tied, _ = _load(make_checkpoint(tmp_path / "tied", "llama3_rope"))
    assert tied.lm_head is tied.embed
    untied, _ = _load(make_checkpoint(tmp_path / "untied", "llama"))
    assert untied.lm_head is not untied.embed
    assert not torch.equal(untied.lm_head, untied.embed)


def test_a_tied_checkpoint_may_name_its_matrix_lm_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama3_rope")
    _edit(
        tmp_path,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}
        ),
    )
    _assert_equals_oracle(tmp_path)


def test_a_tied_checkpoint_that_stores_both_matrices(tmp_path: Path) -> None:
    """Equal ones are one tensor; different ones are not tied, as in transformers."""
    make_checkpoint(tmp_path, "llama3_rope")

    def copy_embedding(tensors: Any) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _edit(tmp_path, copy_embedding)
    attention, _ = _load(tmp_path)
    assert attention.lm_head is attention.embed
    _edit(tmp_path, lambda tensors: tensors["lm_head.weight"].mul_(2.0)[0].zero_())
    attention, _ = _load(tmp_path)
    assert torch.equal(attention.lm_head[1:], 2 * attention.embed[1:])
    _assert_equals_oracle(tmp_path)


def _edit(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_sinks_are_read_in_fp32(tmp_path: Path) -> None:
    path, name = make_checkpoint(tmp_path, "gpt_oss"), "model.layers.1.self_attn.sinks"
    checkpoint = Checkpoint(path)
    read = load_attention_weights(checkpoint, load_model_config(path), dtype=torch.bfloat16)
    assert isinstance(read.layers, list)
    stored = load_file(path / "model.safetensors")[name]
    assert read.layers[1].sinks is not None
    assert read.layers[1].sinks.dtype == torch.float32
    assert torch.equal(read.layers[1].sinks, stored)
    _edit(path, lambda tensors: tensors.update({name: stored[:-1].clone()}))
    with pytest.raises(CheckpointError, match=f"{name}.*has shape"):
        _load(path)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.0.mlp.experts.3.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(tmp_path: Path, name: str) -> None:
    make_checkpoint(tmp_path, "qwen2_moe")
    _edit(tmp_path, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(CheckpointError, match=f"{name}.*has shape"):
        _load(tmp_path)
    _edit(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        _load(tmp_path)


_MEASURE = """
    import sys
    from pathlib import Path

    import torch

    from models.checkpoints.checkpoint import Checkpoint
    from models.description.config import load_model_config
    from models.checkpoints.weights import stream_attention_weights, stream_expert_weights


    def status(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


    path = Path(sys.argv[1])
    config = load_model_config(path)
    checkpoint = Checkpoint(path)
    warm_up = checkpoint.read("model.norm.weight").sum()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS:")
    everything = [range(config.moe.num_experts)] * len(config.moe_layers)
    attention = stream_attention_weights(checkpoint, config, dtype=torch.float32)
    layers = list(attention.layers)
    experts = stream_expert_weights(checkpoint, config, dtype=torch.float32, experts=everything)
    matrices = [(list(each.gate_up), list(each.down)) for each in experts]
    weights = (path / "model.safetensors").stat().st_size
    print(weights, status("VmRSS:") - before, status("VmHWM:") - before)
"""


@pytest.mark.slow
def test_loading_leaves_no_mapped_page_and_no_second_copy(tmp_path: Path) -> None:
    """Resident memory grows by the weights; the peak by one more released mapping."""
    mib = 2**20
    make_checkpoint(
        tmp_path, "mixtral", hidden_size=512, intermediate_size=1024, num_local_experts=6
    )
    script = textwrap.dedent(_MEASURE)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    size, growth, peak = (int(value) for value in done.stdout.split())
    assert size > 70 * mib
    assert growth < size + 12 * mib
    assert peak < size + (32 + 16) * mib


def test_config_and_weights_are_independent_of_config_style(tmp_path: Path) -> None:
    """A config.json as transformers 4 wrote it gives the same ModelConfig."""
    make_checkpoint(tmp_path, "llama3_rope")
    new_style = load_model_config(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    raw["torch_dtype"] = raw.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_model_config(tmp_path) == new_style

"""Written checkpoints, read by the compressed-tensors library and models.checkpoints.weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils import match_named_modules
from safetensors.torch import load_file, save_file

from deploy.quantisation import writing
from deploy.quantisation.forward import last_hidden, log_probabilities
from deploy.quantisation.grids import Rounding
from deploy.quantisation.layers import open_model
from deploy.quantisation.specification import parse_bits
from deploy.quantisation.writing import new_directory, write_quantised
from tests.checkpoints import make_checkpoint, oracle_model
from tests.pairwise import few
from topspin.errors import ConfigError

SIZES = {
    "llama_bias": {"head_dim": 32},
    "mixtral": {"intermediate_size": 64},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "qwen3_moe": {},
    "olmoe": {"intermediate_size": 64},
    "mixtral_sliding_window": {"intermediate_size": 64},
    "glm4_moe": {"first_k_dense_replace": 0},
    "ernie4_5_moe": {"moe_layer_start_index": 0, "head_dim": 32},
    "minimax_m2": {"intermediate_size": 64},
    "deepseek_v2_lite": {"first_k_dense_replace": 0, "v_head_dim": 16},
    "deepseek_v3": {"first_k_dense_replace": 0, "v_head_dim": 16, "q_lora_rank": 32},
    "glm4_moe_lite": {"q_lora_rank": 32, "mlp_layer_types": ["sparse"] * 3},
}
BY_DEFAULT = ("llama_bias", "mixtral_sliding_window", "deepseek_v3")
FILE = "model.safetensors"
MIXED = "experts=8,experts[0]=4,attention=8,attention[0]=fp8,mlp=4,lm_head=8"
DENSE = "mlp=4,mlp[1]=8,attention=8,attention[0]=fp8,lm_head=8"


def tokens() -> torch.Tensor:
    return torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(3))


def decompressed(coded: Path, plain: Path) -> None:
    """Write `coded` as compressed-tensors dequantises it, in the published layout."""
    raw = json.loads((coded / "config.json").read_text(encoding="utf-8"))
    config = QuantizationConfig.model_validate(raw.pop("quantization_config"))
    stored = load_file(coded / "model.safetensors")
    modules = {name.rpartition(".")[0] for name in stored}
    root = torch.nn.Module()
    for name in sorted(modules):  # parents first
        parent = root
        *folders, last = name.split(".")
        for folder in folders:
            if folder not in dict(parent.named_children()):
                parent.add_module(folder, torch.nn.Module())
            parent = parent.get_submodule(folder)
        linear = stored.get(f"{name}.weight_packed", stored.get(f"{name}.weight"))
        is_linear = linear is not None and linear.dim() == 2 and last != "embed_tokens"
        parent.add_module(last, torch.nn.Linear(1, 1) if is_linear else torch.nn.Module())
    written = dict(stored)
    for scheme in config.config_groups.values():
        for name, _ in match_named_modules(root, scheme.targets, config.ignore):
            own = {
                key.rpartition(".")[2]: written.pop(key)
                for key in list(written)
                if key.rpartition(".")[0] == name and not key.endswith("bias")
            }
            compressor = BaseCompressor.get_value_from_registry(scheme.format)
            written[f"{name}.weight"] = compressor.decompress(own, scheme)["weight"].contiguous()
    plain.mkdir()
    save_file(written, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps(raw), encoding="utf-8")


@pytest.mark.parametrize(
    "name",
    few(SIZES, *BY_DEFAULT),
)
@torch.inference_mode()
def test_the_library_and_our_reader_agree(tmp_path: Path, name: str) -> None:
    source = make_checkpoint(tmp_path / "source", name, **SIZES[name])
    coded = tmp_path / "coded"
    rules = parse_bits(DENSE if name.startswith("llama") else MIXED)
    with new_directory(coded) as directory:
        write_quantised(source, directory, rules, Rounding(), tokens=tokens())

    model = open_model(coded)
    found = log_probabilities(model, last_hidden(model, tokens()))

    decompressed(coded, tmp_path / "plain")
    expected = oracle_model(tmp_path / "plain")(tokens()).logits.log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=5e-4, rtol=1e-4)
    original = oracle_model(source)(tokens()).logits.log_softmax(-1)
    # Where a router has a near tie other experts answer, and the divergence is large.
    divergence = (original.exp() * (original - found)).sum(-1).median()
    assert 0 < divergence < 0.25


def written(source: Path, coded: Path, bits: str) -> Path:
    """Write `source`, rounded to the nearest, and return the directory."""
    with new_directory(coded) as directory:
        rounding = Rounding(method="nearest", dtype=torch.float32)
        write_quantised(source, directory, parse_bits(bits), rounding, tokens=tokens())
    return coded


@pytest.mark.parametrize("name", few(["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"], "olmoe"))
def test_stacked_experts_are_written_one_by_one(tmp_path: Path, name: str) -> None:
    """`save_original_format=False` writes stacked experts, as transformers 5 does."""
    plain = make_checkpoint(tmp_path / "plain", name, **SIZES[name])
    oracle_model(plain).save_pretrained(tmp_path / "fused", save_original_format=False)
    bits = "attention=8,experts[0]=4"

    ours = load_file(written(tmp_path / "fused", tmp_path / "of_fused", bits) / FILE)
    expected = load_file(written(plain, tmp_path / "of_plain", bits) / FILE)

    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[each], expected[each]) for each in ours)


def test_many_bytes_are_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3_moe")
    expected = load_file(written(source, tmp_path / "one", "experts=4") / FILE)
    monkeypatch.setattr(writing, "_SHARD_BYTES", 100_000)
    coded = written(source, tmp_path / "several", "experts=4")

    index = json.loads((coded / "model.safetensors.index.json").read_text())
    files = sorted(each.name for each in coded.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in expected.values())
    found = {name: each for file in files for name, each in load_file(coded / file).items()}
    assert found.keys() == expected.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[each], expected[each]) for each in found)
    assert torch.equal(open_model(coded).embed, expected["model.embed_tokens.weight"])


@pytest.mark.parametrize("bits", ["experts=4", "experts=4,lm_head=8"])
def test_a_tied_head_is_untied_only_if_it_is_quantised(tmp_path: Path, bits: str) -> None:
    name = "mixtral_sliding_window"
    source = make_checkpoint(tmp_path / "source", name, **SIZES[name])
    coded = written(source, tmp_path / "coded", bits)

    is_tied = "lm_head" not in bits
    stored = load_file(coded / FILE)
    assert json.loads((coded / "config.json").read_text())["tie_word_embeddings"] is is_tied
    embed = "model.embed_tokens.weight"
    assert torch.equal(stored[embed], load_file(source / FILE)[embed])
    assert ("lm_head.weight_packed" in stored) is not is_tied
    model = open_model(coded)
    assert torch.equal(model.embed, stored[embed])
    assert torch.equal(model.lm_head, model.embed) is is_tied


def test_sinks_are_copied_and_no_module(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "gpt_oss")
    coded = written(source, tmp_path / "coded", "experts=4")
    name = "model.layers.1.self_attn.sinks"
    assert torch.equal(load_file(coded / FILE)[name], load_file(source / FILE)[name])
    config = json.loads((coded / "config.json").read_text())["quantization_config"]
    assert any("q_proj" in each for each in config["ignore"])
    assert not any("sinks" in each for each in config["ignore"])


def test_a_failed_directory_is_not_kept(tmp_path: Path) -> None:
    making = new_directory(tmp_path / "out")
    (making.__enter__() / "config.json").write_text("{}")
    assert not making.__exit__(RuntimeError, RuntimeError(), None)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists"), new_directory(tmp_path / "out"):
        pass

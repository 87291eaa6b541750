"""Written checkpoints, as the compressed-tensors library and models.weights read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils import match_named_modules
from safetensors.torch import load_file, save_file

from deploy.quantisation.forward import last_hidden, log_probabilities
from deploy.quantisation.layers import open_model
from deploy.quantisation.rounding import Rounding
from deploy.quantisation.specification import parse_bits
from deploy.quantisation.writing import new_directory, write_quantised
from tests.checkpoints import make_checkpoint, oracle_model
from topspin.errors import ConfigError

SIZES = {
    "llama_bias": {"head_dim": 32},
    "mixtral": {"intermediate_size": 64},
    "qwen2_moe": {"shared_expert_intermediate_size": 64},
    "qwen3_moe": {},
    "olmoe": {"intermediate_size": 64},
}
BY_DEFAULT = ("llama_bias", "qwen2_moe")
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
    for name in modules:
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
    [name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in SIZES],
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
    divergence = (original.exp() * (original - found)).sum(-1).mean()
    assert 0 < divergence < 0.5


def test_a_failed_directory_is_not_kept(tmp_path: Path) -> None:
    making = new_directory(tmp_path / "out")
    (making.__enter__() / "config.json").write_text("{}")
    assert not making.__exit__(RuntimeError, RuntimeError(), None)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="exists"), new_directory(tmp_path / "out"):
        pass

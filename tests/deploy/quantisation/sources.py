"""A tiny checkpoint with planted sensitive layers, and divergence by transformers' logits."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from deploy.quantisation.forward import last_hidden, log_probabilities
from deploy.quantisation.layers import open_model
from tests.checkpoints import make_checkpoint, oracle_model

NUM_LAYERS = 8
SENSITIVE = ((2, "experts"), (5, "attention"))
_FACTOR = 48.0
_NORMS = {"attention": "input_layernorm", "experts": "post_attention_layernorm"}
_BEHIND = {"attention": ("q_proj", "k_proj", "v_proj"), "experts": ("gate_proj", "up_proj", "gate")}
_EVERY = 16


def planted(path: Path) -> Path:
    """Write a qwen3_moe of NUM_LAYERS layers of which those of SENSITIVE lose much in 4 bits.

    Some inputs' weights there are larger, and these inputs as much smaller: the model computes what
    it would without that, and steps that fit such a group are too coarse for its other numbers.
    """
    make_checkpoint(path, "qwen3_moe", num_hidden_layers=NUM_LAYERS)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for layer, part in SENSITIVE:
        _plant(tensors, layer, part)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def _plant(tensors: dict[str, Tensor], layer: int, part: str) -> None:
    prefix = f"model.layers.{layer}."
    tensors[f"{prefix}{_NORMS[part]}.weight"][::_EVERY] /= _FACTOR
    for name, tensor in tensors.items():
        if name.startswith(prefix) and name.split(".")[-2] in _BEHIND[part]:
            tensor[:, ::_EVERY] *= _FACTOR


@torch.inference_mode()
def divergence(original: Path, coded: Path, tokens: Tensor) -> float:
    """Return the mean KL of a written checkpoint from transformers' logits of its original."""
    expected = oracle_model(original)(tokens).logits.log_softmax(-1)
    model = open_model(coded)
    found = log_probabilities(model, last_hidden(model, tokens))
    return float((expected.exp() * (expected - found)).sum(-1).mean())

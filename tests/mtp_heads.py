"""Heads of multi-token prediction for tiny checkpoints, written by transformers, and its oracle.

Owns the names under which published checkpoints have the layer, and how transformers is made to
find it at a tiny model's depth. Knows no module of Topspin.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import oracle_model, randomise

FILE = "model.safetensors"


def add_head(path: Path, *, seed: int = 5) -> Path:
    """Add a random head to the checkpoint in directory `path`, and say so in its config.json."""
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    head = _new_head(oracle_model(path))
    randomise(head, seed=seed)
    depth = fields["num_hidden_layers"]
    tensors = load_file(path / FILE)
    for name, tensor in head.layers[0].state_dict().items():
        for published, own in _published(name, tensor):
            tensors[f"model.layers.{depth}.{published}"] = own.contiguous().clone()
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    return path


def head_oracle(path: Path) -> tuple[Any, Any]:
    """Return transformers' float32 model of a checkpoint and its head, which it reads itself."""
    from transformers.modeling_layers import MtpModel

    model = oracle_model(path)
    _tell_depth(model)
    return model, MtpModel.from_pretrained(model).eval()


def _tell_depth(model: Any) -> None:
    """Let transformers find the head: it knows the depths of published models only."""
    depth = model.config.num_hidden_layers
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{depth}.*"]


def _new_head(model: Any) -> Any:
    from transformers.modeling_layers import MtpModel

    return MtpModel(model, 1)


def _published(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Return a tensor of transformers' head by its published names, experts one by one."""
    name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
    if name.endswith("experts.gate_up_proj"):
        block = name.removesuffix("gate_up_proj")
        parts = [(idx, each.chunk(2)) for idx, each in enumerate(tensor)]
        return [
            (f"{block}{idx}.{projection}.weight", own)
            for idx, halves in parts
            for projection, own in zip(("gate_proj", "up_proj"), halves, strict=True)
        ]
    if name.endswith("experts.down_proj"):
        block = name.removesuffix("down_proj")
        return [(f"{block}{idx}.down_proj.weight", each) for idx, each in enumerate(tensor)]
    return [(name, tensor)]


def final_rows_of(model: Any, tokens: list[int]) -> Tensor:
    """Return transformers' final rows [T, H] of a text."""
    with torch.no_grad():
        rows: Tensor = model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return rows


def drafted_by(head: Any, rows: Tensor, tokens: list[int], count: int) -> list[int]:
    """Return the `count` tokens that transformers' head drafts behind a text, greedily.

    `rows` [T, H] are the model's of the text's tokens but the last. Behind the first token drafted
    the head goes on from its own rows.
    """
    from transformers.cache_utils import MtpCache

    cache = MtpCache(config=head.config)
    found: list[int] = []
    fed, last, begin = list(tokens[1:]), rows[None], 1
    for _ in range(count):
        places = torch.arange(begin, begin + len(fed))[None]
        with torch.no_grad():
            made = head.forward_layer(0, last, places, cache, input_ids=torch.tensor([fed]))
            logits = head._project_to_logits(made[:, -1:])
        found.append(int(logits.argmax()))
        begin += len(fed)
        fed, last = found[-1:], made[:, -1:]
    return found


def make_predictable(path: Path) -> Path:
    """Let a checkpoint's tokens follow mostly from the token before, and its head know that.

    The layers' outputs become small, and the head's input the embedding of its token.
    """
    tensors = load_file(path / FILE)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.02
        if name.endswith("enorm.weight"):
            tensor.fill_(1.0)
        if name.endswith("shared_head.norm.weight"):
            tensor.copy_(tensors["model.norm.weight"])
        if name.endswith("eh_proj.weight"):
            size = len(tensor)
            tensor.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], 1))
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    return path

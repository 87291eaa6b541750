"""Experts read piece by piece equal those read at start, in both layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.checkpoints import expert_reader
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.expert_reader import ExpertReader
from models.description.config import load_model_config
from tests.checkpoints import MOE_VARIANTS, make_checkpoint, oracle_model
from tests.kernels.generators import finish
from tests.pairwise import cover_pairs, slow_rows
from tests.weights import load_expert_weights


@pytest.mark.parametrize(
    ("variant", "layout", "dtype"),
    slow_rows(
        cover_pairs(MOE_VARIANTS[::2], ["single", "fused"], [torch.float32, torch.bfloat16]),
        beside=[
            ("qwen3_moe", "single", torch.float32),
            ("olmoe", "fused", torch.bfloat16),
            ("gpt_oss", "fused", torch.float32),
        ],
    ),
)
def test_an_expert_equals_the_one_that_is_loaded_at_start(
    tmp_path: Path,
    variant: str,
    dtype: torch.dtype,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(expert_reader, "PIECE_BYTES", 1000)
    path = make_checkpoint(tmp_path / "single", variant)
    if layout == "fused":
        oracle_model(path).save_pretrained(tmp_path / layout, save_original_format=False)
        path = tmp_path / layout
    config = load_model_config(path)
    slots = [(5, 0)] * len(config.moe_layers)
    loaded = load_expert_weights(Checkpoint(path), config, dtype=dtype, experts=slots)
    reader = ExpertReader(Checkpoint(path), config, dtype=dtype)
    for layer, weights in enumerate(loaded.layers):
        reader.read_ahead(layer, 5)
        pieces = reader.read(layer, 5)
        next(pieces)
        tensors = finish(pieces)
        assert torch.equal(tensors.gate_up, weights.gate_up[0])
        assert torch.equal(tensors.down, weights.down[0])
    reader.close()


def test_a_piece_is_no_larger_than_said(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral")
    config = load_model_config(path)
    checkpoint = Checkpoint(path)
    sizes: list[int] = []
    read_into = checkpoint.read_into

    def recording(name: str, out: torch.Tensor, **where: object) -> None:
        sizes.append(out.nbytes)
        read_into(name, out, **where)  # type: ignore[arg-type]

    checkpoint.read_into = recording  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_reader, "PIECE_BYTES", 3000)
        finish(ExpertReader(checkpoint, config, dtype=torch.float32).read(0, 1))
    assert max(sizes) <= 3000
    assert sum(sizes) == 3 * 48 * 64 * 4


@pytest.mark.parametrize("index", [None, 2])
def test_read_ahead_asks_for_the_bytes_of_the_tensor(
    tmp_path: Path, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe")
    checkpoint = Checkpoint(path)
    name = max(checkpoint.names, key=lambda name: checkpoint.shape(name))
    asked: list[tuple[int, int]] = []

    def record(descriptor: int, offset: int, size: int, advice: int) -> None:
        asked.append((offset, size))

    monkeypatch.setattr("os.posix_fadvise", record)
    checkpoint.read_ahead(name, index=index)
    want = checkpoint.read(name) if index is None else checkpoint.read(name)[index]
    ((offset, size),) = asked
    data = (path / "model.safetensors").read_bytes()[offset : offset + size]
    got = torch.frombuffer(bytearray(data), dtype=want.dtype).view(want.shape)
    assert torch.equal(got, want)

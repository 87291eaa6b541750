"""models.checkpoints.checkpoint and its index: reading, and every kind of wrong file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints.checkpoint import Checkpoint
from tests.checkpoints import make_checkpoint
from topspin.errors import CheckpointError

_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards: a [2, 3] float32 and b [4] bfloat16; c [3] int64."""
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b": torch.tensor([1.5, -2.0, 0.25, 8.0], dtype=torch.bfloat16),
        "c": torch.tensor([1, 2, 3]),
    }
    save_file({"a": tensors["a"]}, tmp_path / _SHARDS[0])
    save_file({"b": tensors["b"], "c": tensors["c"]}, tmp_path / _SHARDS[1])
    _write_index(tmp_path, {"a": _SHARDS[0], "b": _SHARDS[1], "c": _SHARDS[1]})
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def _write_index(path: Path, weight_map: object) -> None:
    index = json.dumps({"weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(index)


def test_tensors_of_all_shards_are_read(sharded: Path) -> None:
    with Checkpoint(sharded) as checkpoint:
        assert checkpoint.names == {"a", "b", "c"}
        assert "a" in checkpoint
        assert "z" not in checkpoint
        assert checkpoint.shape("a") == (2, 3)
        assert checkpoint.read("a").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert checkpoint.read("b").dtype == torch.bfloat16
        assert checkpoint.read("b").tolist() == [1.5, -2.0, 0.25, 8.0]
        assert checkpoint.tensors_read == {"a", "b"}


def test_reading_into_a_view_converts_and_slices(sharded: Path) -> None:
    checkpoint = Checkpoint(sharded)
    out = torch.zeros(3, 4)
    checkpoint.read_into("b", out[1])
    assert out.tolist() == [[0] * 4, [1.5, -2.0, 0.25, 8.0], [0] * 4]
    row = torch.zeros(3, dtype=torch.bfloat16)
    checkpoint.read_into("a", row, index=1)
    assert row.tolist() == [3, 4, 5]


def test_what_was_read_survives_the_file(sharded: Path) -> None:
    """A tensor is a copy, not a view of the mapping."""
    checkpoint = Checkpoint(sharded)
    tensor = checkpoint.read("a")
    checkpoint.close()
    (sharded / _SHARDS[0]).write_bytes(b"\xff" * 64)
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_wrong_requests_are_named(sharded: Path) -> None:
    checkpoint = Checkpoint(sharded)
    with pytest.raises(CheckpointError, match="tensor z is missing"):
        checkpoint.read("z")
    with pytest.raises(CheckpointError, match="tensor z is missing"):
        checkpoint.shape("z")
    with pytest.raises(CheckpointError, match=r"tensor a has shape \[2, 3\].*needs \[3, 2\]"):
        checkpoint.read_into("a", torch.zeros(3, 2))
    with pytest.raises(CheckpointError, match=r"tensor a has shape \[3\].*needs \[2\]"):
        checkpoint.read_into("a", torch.zeros(2), index=0)
    with pytest.raises(CheckpointError, match="tensor c is I64; supported: F32"):
        checkpoint.read("c")
    with pytest.raises(CheckpointError, match=r"tensor b has shape \[4\].*needs \[5\]"):
        checkpoint.expect_shape("b", (5,))
    assert checkpoint.tensors_read == frozenset()


def test_the_index_decides_between_two_tensors_of_a_name(
    sharded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = Checkpoint(sharded).read("a")
    twice = {"a": torch.zeros(2, 3), **load_file(sharded / _SHARDS[1])}
    save_file(twice, sharded / _SHARDS[1])
    assert torch.equal(Checkpoint(sharded).read("a"), expected)
    assert f"{_SHARDS[1]}: tensor a is that of another shard" in caplog.text


def test_a_computed_tensor_of_the_index_may_be_absent(sharded: Path) -> None:
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = _SHARDS[1]
    file.write_text(json.dumps(index))
    assert len(Checkpoint(sharded).names) == 3
    index["weight_map"]["model.norm.weight"] = _SHARDS[1]
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight, promised by"):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "bytes long, its header says"),
        (lambda data: data + b"x", "bytes long, its header says"),
        (lambda data: b"", "truncated"),
        (lambda data: b"\xff" * 8 + data[8:], "truncated"),
        (lambda data: data[:9] + b"\0" + data[10:], "header is damaged"),
        (None, "shard is missing"),
    ],
)
def test_a_damaged_shard_is_named(
    sharded: Path, damage: Callable[[bytes], bytes] | None, message: str
) -> None:
    shard = sharded / _SHARDS[1]
    if damage is None:
        shard.unlink()
    else:
        shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(CheckpointError, match=f"{_SHARDS[1]}: .*{message}"):
        Checkpoint(sharded)


def test_a_tensor_that_the_index_does_not_assign_may_be_in_one_shard_only(sharded: Path) -> None:
    for file in _SHARDS:
        save_file({"extra": torch.zeros(1), **load_file(sharded / file)}, sharded / file)
    with pytest.raises(CheckpointError, match="tensor extra is also stored in model-00001"):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": _SHARDS[0], "b": _SHARDS[0]}, "tensor b, promised by"),
        ({"a": _SHARDS[0], "d": _SHARDS[0]}, "tensor d, promised by"),
        ({}, "empty"),
        (["a"], "no safetensors index"),
        ({"a": "../elsewhere.safetensors"}, "not a plain file name"),
    ],
)
def test_an_index_that_does_not_hold_is_refused(
    sharded: Path, weight_map: object, message: str
) -> None:
    _write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(sharded)


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match="safetensors only"):
        Checkpoint(tmp_path)


def test_the_fingerprint_names_the_checkpoint_not_its_place(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one", "mixtral")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first = Checkpoint(tmp_path / "one").fingerprint()
    assert Checkpoint(tmp_path / "two").fingerprint() == first
    config = tmp_path / "two" / "config.json"
    config.write_text(config.read_text().replace("silu", "gelu"))
    assert Checkpoint(tmp_path / "two").fingerprint() != first
    make_checkpoint(tmp_path / "three", "mixtral", intermediate_size=56)
    shutil.copy(tmp_path / "one" / "config.json", tmp_path / "three" / "config.json")
    assert Checkpoint(tmp_path / "three").fingerprint() != first

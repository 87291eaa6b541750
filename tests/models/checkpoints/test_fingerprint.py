"""The fingerprint: no other weights pass for a checkpoint, and no copy of it for another."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.checkpoint_index import TensorEntry
from models.checkpoints.fingerprint import BLOCK_BYTES, STRIDE_BYTES, WHOLE_BYTES, sampled
from topspin.errors import CheckpointError

_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Tensors that are read whole and in blocks, in two shards of the same layout."""
    weight_map = {}
    for number, shard in enumerate(_SHARDS):
        tensors = {
            f"{number}.weight": torch.randn(300, 200),
            f"{number}.codes": torch.randint(255, (700, 90), dtype=torch.uint8),
            f"{number}.scale": torch.ones(3),
        }
        save_file(tensors, tmp_path / shard)
        weight_map |= dict.fromkeys(tensors, shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text("{}\n")
    return tmp_path


def test_a_finetune_of_any_one_tensor_differs_in_its_file(sharded: Path) -> None:
    before = Checkpoint(sharded).digests
    for shard in _SHARDS:
        original = load_file(sharded / shard)
        assert len(original) == 3
        for name, tensor in original.items():
            save_file({**original, name: tensor + 1}, sharded / shard)
            now = Checkpoint(sharded).digests
            assert {file for file in before if now[file] != before[file]} == {shard}, name
        save_file(original, sharded / shard)
    assert Checkpoint(sharded).digests == before


def test_every_element_of_a_small_tensor_counts(sharded: Path) -> None:
    before = Checkpoint(sharded).fingerprint()
    tensors = load_file(sharded / _SHARDS[1])
    for idx in range(3):
        scale = torch.ones(3)
        scale[idx] += 1e-6
        save_file({**tensors, "1.scale": scale}, sharded / _SHARDS[1])
        assert Checkpoint(sharded).fingerprint() != before


def test_a_copy_behind_links_and_of_another_time_is_the_same(sharded: Path, tmp_path: Path) -> None:
    """As in the cache of the Hugging Face hub: files are links to blobs."""
    hub = tmp_path / "hub"
    for folder in ("blobs", "snapshot"):
        (hub / folder).mkdir(parents=True)
    for number, file in enumerate(sorted(each for each in sharded.iterdir() if each.is_file())):
        shutil.copy(file, hub / "blobs" / str(number))
        os.utime(hub / "blobs" / str(number), (1, 1))
        (hub / "snapshot" / file.name).symlink_to(f"../blobs/{number}")
    assert Checkpoint(hub / "snapshot").fingerprint() == Checkpoint(sharded).fingerprint()


def _replace(file: Path) -> None:
    stat = file.stat()
    other = file.with_name("other")
    other.write_bytes(file.read_bytes()[:-1] + b" ")
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(file)


def _write_into(file: Path) -> None:
    stat = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b" ")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def _link_to_another(file: Path) -> None:
    blob = file.with_name("blob")
    blob.write_bytes(file.read_bytes()[:-1] + b" ")
    file.unlink()
    file.symlink_to(blob.name)


@pytest.mark.parametrize("name", ["config.json", *_SHARDS])
@pytest.mark.parametrize("change", [_replace, _write_into, _link_to_another, Path.unlink])
def test_a_file_that_changes_after_the_headers_were_read_is_noticed(
    sharded: Path, name: str, change: Callable[[Path], None]
) -> None:
    checkpoint = Checkpoint(sharded)
    checkpoint.fingerprint()
    checkpoint.read("1.weight")
    checkpoint.check_unchanged()
    for file in (shutil.copy(sharded / name, sharded / "copy"), sharded / name):
        os.utime(file, (1, 1))
    (sharded / "copy").replace(sharded / name)
    checkpoint.check_unchanged()  # the same contents
    change(sharded / name)
    with pytest.raises(CheckpointError, match=name):
        checkpoint.check_unchanged()


@pytest.mark.parametrize(
    "size", [0, 1, WHOLE_BYTES, WHOLE_BYTES + 1, STRIDE_BYTES, 40 * STRIDE_BYTES]
)
def test_blocks_lie_in_their_tensor_and_reach_both_ends(size: int) -> None:
    entry = TensorEntry(Path("f"), "U8", (size,), size, offset_bytes=1000)
    blocks = list(sampled(entry))
    assert blocks[0][0] == 1000
    assert sum(blocks[-1]) == 1000 + size
    assert all(start >= 1000 and start + length <= 1000 + size for start, length in blocks)
    if size > WHOLE_BYTES:
        assert {length for _, length in blocks} == {BLOCK_BYTES}
        gaps = [later - sooner for (sooner, _), (later, _) in pairwise(blocks)]
        assert max(gaps) <= STRIDE_BYTES

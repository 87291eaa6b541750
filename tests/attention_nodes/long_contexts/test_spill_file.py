"""The file of blocks that are not in memory: contents, errors, and what is left of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from attention_nodes.long_contexts.spill_file import SpillFile
from attention_nodes.step.kv_cache import KvCache, LayerSpec
from kernels.contracts import CHECK_BYTES, CHECK_SUM
from topspin.errors import ConfigError

BLOCK_SIZE, NUM_HEADS, HEAD_DIM, NUM_LAYERS = 16, 3, 64, 2


def cache(num_frames: int, dtype: torch.dtype = torch.bfloat16) -> KvCache:
    shape = (num_frames, BLOCK_SIZE, NUM_HEADS, HEAD_DIM)
    return KvCache(
        layers=(LayerSpec(NUM_HEADS, HEAD_DIM, dtype),) * NUM_LAYERS,
        keys=[torch.randn(shape).to(dtype) for _ in range(NUM_LAYERS)],
        values=[torch.randn(shape).to(dtype) for _ in range(NUM_LAYERS)],
        block_size=BLOCK_SIZE,
        num_blocks=num_frames,
    )


def blocks(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("direct", [True, False])
def test_blocks_come_back_to_other_frames(tmp_path: Path, dtype: torch.dtype, direct: bool) -> None:
    """Also more of them than are moved at once, with and without writes past the page cache."""
    kept = cache(150, dtype)
    kept_bytes = [each.view(torch.uint8) for each in (*kept.keys, *kept.values)]
    before = [each.clone() for each in kept_bytes]
    file = SpillFile(tmp_path, kept, 400)
    if not direct:
        file.forgo_direct()
    numbers, frames = np.arange(300, 400), np.arange(20, 120)
    assert not len(file.save(numbers, frames))
    assert not list(tmp_path.iterdir()), "the file has a name"
    targets = np.arange(149, 49, -1)
    assert not len(file.load(numbers, targets))
    for found, wanted in zip(kept_bytes, before, strict=True):
        assert torch.equal(found[targets], wanted[frames])
    file.close()


def test_blocks_are_written_ahead_as_they_were(tmp_path: Path) -> None:
    """A later write of the same blocks waits for the one ahead."""
    kept = cache(40)
    file = SpillFile(tmp_path, kept, 64)
    first = kept.keys[1][:20].clone()
    file.save_ahead(np.arange(30, 50), np.arange(20))
    kept.keys[1][:20] = 0
    assert not len(file.save(blocks(30), blocks(7)))
    assert not file.is_writing
    assert file.take_ahead().tolist() == list(range(30, 50))
    assert not len(file.take_ahead()), "told once"
    file.load(np.arange(30, 50), np.arange(20, 40))
    assert torch.equal(kept.keys[1][21:40], first[1:])
    assert not kept.keys[1][20].any()
    file.close()


def test_a_record_has_keys_and_values_of_a_head_side_by_side(tmp_path: Path) -> None:
    kept = cache(4)
    file = SpillFile(tmp_path, kept, 8)
    file.save(blocks(5), blocks(2))
    row_bytes = 2 * HEAD_DIM * 2 + CHECK_BYTES
    offset = 5 * file.record_bytes + ((1 * NUM_HEADS + 2) * BLOCK_SIZE + 7) * row_bytes
    found = bytearray(os.pread(file.fd, row_bytes, offset))
    pair = torch.frombuffer(found[:-CHECK_BYTES], dtype=torch.bfloat16)
    assert torch.equal(pair[:HEAD_DIM], kept.keys[1][2, 7, 2])
    assert torch.equal(pair[HEAD_DIM:], kept.values[1][2, 7, 2])
    numbers = np.frombuffer(found, dtype=np.int64).tolist()
    assert (sum(numbers[:-1]) + CHECK_SUM - numbers[-1]) % 2**64 == 0
    file.close()


def test_what_cannot_be_read_or_written_is_told(tmp_path: Path) -> None:
    kept = cache(4)
    file = SpillFile(tmp_path, kept, 8)
    assert not len(file.save(blocks(1, 2), blocks(0, 1)))
    os.ftruncate(file.fd, 2 * file.record_bytes + 100)
    first, frame = kept.keys[0][0].clone(), kept.values[1][2].clone()
    assert file.load(blocks(1, 2), blocks(3, 2)).tolist() == [2]
    assert torch.equal(kept.keys[0][3], first)
    assert torch.equal(kept.values[1][2], frame), "what could not be read changes nothing"
    file.close()
    assert file.save(blocks(3), blocks(0)).tolist() == [3]


def test_zeros_and_damage_are_not_read(tmp_path: Path) -> None:
    """Of a file that was cut and extended, and of one of which a byte has changed."""
    kept = cache(4)
    file = SpillFile(tmp_path, kept, 8)
    file.save(blocks(1, 2, 3), blocks(0, 1, 2))
    (byte,) = os.pread(file.fd, 1, file.record_bytes + 5000)
    os.pwrite(file.fd, bytes([byte ^ 1]), file.record_bytes + 5000)
    size = os.fstat(file.fd).st_size
    os.ftruncate(file.fd, 3 * file.record_bytes)
    os.ftruncate(file.fd, size)
    assert file.load(blocks(1, 2, 3), blocks(0, 1, 2)).tolist() == [1, 3]
    file.close()


@pytest.mark.parametrize(
    ("directory", "num_blocks", "reason"),
    [("missing", 4, "No such file"), (".", 1 << 40, "No space|too large|Invalid")],
)
def test_a_file_that_cannot_be_is_refused(
    tmp_path: Path, directory: str, num_blocks: int, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"--kv-spill-dir.*{reason}"):
        SpillFile(tmp_path / directory, cache(2), num_blocks)

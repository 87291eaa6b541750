"""The memory of coded keys: how many places there are, and that it is part of the cache's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_nodes.loading import load_runner
from attention_nodes.long_contexts.retrieval import num_places
from attention_nodes.long_contexts.segments import SegmentPool
from kernels.contracts import SEGMENT_KEYS
from tests.checkpoints import make_checkpoint
from tests.engine import engine_config
from topspin.errors import ConfigError
from topspin.plan.retrieval import SpillSpec

BLOCK_SIZE = 16
# Two layers of 2 key/value heads of 32 numbers in fp32.
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4


def lacks_a_place(lengths: list[int], places: int) -> bool:
    """Code sequences of so many tokens, which share nothing, and say whether one lacked a place."""
    pool = SegmentPool(places)
    for sequence, length in enumerate(lengths):
        for number in range(length // SEGMENT_KEYS):
            if pool.close(sequence, 1000 * sequence + number) is None:
                return True
        is_open = length > SEGMENT_KEYS
        if is_open and pool.begin(sequence) is None:
            return True
    return False


@given(st.lists(st.integers(1, 4 * SEGMENT_KEYS), min_size=1, max_size=12), st.integers(0, 40))
def test_sequences_that_share_nothing_never_lack_a_place(lengths: list[int], spare: int) -> None:
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths) + spare
    places = num_places(num_blocks, block_size=BLOCK_SIZE, max_num_seqs=len(lengths))
    assert not lacks_a_place(lengths, places)


def test_there_is_no_place_too_many() -> None:
    for max_num_seqs in (3, 7):
        lengths = [SEGMENT_KEYS + 1] * max_num_seqs + [SEGMENT_KEYS] * (7 - max_num_seqs)
        num_blocks = sum(-(-length // BLOCK_SIZE) for length in lengths)
        places = num_places(num_blocks, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs)
        assert not lacks_a_place(lengths, places)
        assert lacks_a_place(lengths, places - 1)


def load(path: Path, **settings: Any) -> Any:
    known = {"block_size": BLOCK_SIZE, "kv_retrieval_tokens": 96, "kernels": "reference"}
    plan = engine_config(path, **{**known, **settings})
    return load_runner(path, plan.for_node())._decoder


def sizes_of(tensors: list[torch.Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("codes"), "qwen3_moe")


@pytest.mark.parametrize("segments", [0.5, 2.0, 6.97, 20.0])
@pytest.mark.parametrize("max_num_seqs", [1, 16])
def test_blocks_and_codes_fill_the_caches_memory(
    checkpoint: Path, segments: float, max_num_seqs: int
) -> None:
    size_bytes = int(segments * SEGMENT_KEYS * TOKEN_BYTES)
    decoder = load(checkpoint, kv_cache_bytes=size_bytes, max_num_seqs=max_num_seqs)
    blocks = sizes_of([*decoder.kv.keys, *decoder.kv.values])
    codes = sizes_of(
        [
            each
            for one in decoder.codes.values()
            for each in (one.centroids, one.codes, one.summaries)
        ]
    )
    assert blocks == decoder.kv.num_blocks * BLOCK_SIZE * TOKEN_BYTES
    assert codes > 0
    assert blocks + codes <= size_bytes
    # One more block fits not, or not with the two places that a further segment would have.
    place = codes // len(next(iter(decoder.codes.values())).codes)
    assert blocks + codes + BLOCK_SIZE * TOKEN_BYTES + 2 * place > size_bytes


def test_a_cache_without_room_for_codes_is_refused(checkpoint: Path) -> None:
    size_bytes = 4 * BLOCK_SIZE * TOKEN_BYTES
    known = {"block_size": BLOCK_SIZE, "kernels": "reference"}
    plan = engine_config(checkpoint, kv_cache_bytes=size_bytes, **known)
    assert load_runner(checkpoint, plan.for_node()).num_blocks == 4
    with pytest.raises(ConfigError) as raised:
        load(checkpoint, kv_cache_bytes=size_bytes)
    for part in (
        "--kv-cache-memory 64.0 KiB holds 0 blocks of 16 tokens (16.0 KiB each) with ",
        " of codes for --kv-retrieval-tokens; at least 2 are needed, and 16 for one sequence of",
    ):
        assert part in str(raised.value)


def test_heads_without_kernels_for_files_spill_nothing(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", head_dim=48)
    spill = SpillSpec(directory=str(tmp_path), size_bytes=2**25)
    with pytest.raises(ConfigError, match=r"--kv-spill-dir: .*query heads of 48 numbers to a key"):
        load(path, kernels="cpu", kv_spill=spill)


@pytest.mark.parametrize("size_bytes", [1, 100_000])
def test_a_file_smaller_than_the_memory_is_refused(
    checkpoint: Path, tmp_path: Path, size_bytes: int
) -> None:
    spill = SpillSpec(directory=str(tmp_path), size_bytes=size_bytes)
    with pytest.raises(ConfigError, match=r"--kv-spill-dir: .* has room for \d+ blocks"):
        load(checkpoint, kernels="cpu", kv_spill=spill)

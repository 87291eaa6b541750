"""Selected keys that are in a file: the bits of the same keys in the cache, read once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels.contracts import CHECK_SUM, HotKeys, KeyCodes
from kernels.cpu import ops as cpu
from tests.kernels.cases.attention import AttentionCase, Heads, attention_case
from tests.kernels.cases.matrices import values_then_pairs
from tests.kernels.cases.retrieval import coded

SCALE = 0.2
BLOCK_SIZE = 16
BUDGET = 50
LAYER, NUM_LAYERS = 1, 2
"""The layer that is computed; it is layer 0 of the cache, as the file has it."""


class Spilled(NamedTuple):
    case: AttentionCase
    hot: HotKeys


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    yield fd
    os.close(fd)


def spilled(case: AttentionCase, fd: int, seq: int, blocks: range, num_entries: int) -> Spilled:
    """Return a case of which some blocks of a sequence are in the file only."""
    num_groups = case.k_cache.shape[2]
    nothing = torch.full((-(-num_entries // BLOCK_SIZE), *case.k_cache.shape[1:]), float("nan"))
    k_cache, v_cache = (
        # As bytes: torch joins no tensors of fp8.
        torch.cat([each.view(torch.uint8), nothing.to(each.dtype).view(torch.uint8)])
        for each in (case.k_cache, case.v_cache)
    )
    k_cache, v_cache = k_cache.view(case.k_cache.dtype), v_cache.view(case.k_cache.dtype)
    tables = case.meta.block_tables.clone()
    records = torch.zeros(tables.shape[1], dtype=torch.int64)
    size = 0
    for idx in blocks:
        frame = int(tables[seq, idx])
        content = [each.view(torch.uint8)[frame] for each in (k_cache, v_cache)]
        pairs = torch.stack(content).permute(2, 1, 0, 3).flatten(2).contiguous()
        sums = pairs.view(torch.int64).sum(-1, keepdim=True) + CHECK_SUM
        record = torch.cat([pairs, sums.view(torch.uint8)], dim=-1)
        records[idx] = size
        size += os.pwrite(fd, record.numpy().tobytes(), size)
        k_cache[frame] = v_cache[frame] = float("nan")
        tables[seq, idx] = -1
    shape = (NUM_LAYERS, num_groups)
    first = len(case.k_cache) * BLOCK_SIZE
    hot = HotKeys(
        fd=fd,
        records=records,
        cache_layers=torch.tensor([7, 0]),
        slots=first + torch.arange(num_entries).flip(0),
        entries=torch.full((*shape, tables.shape[1] * BLOCK_SIZE), -1, dtype=torch.int32),
        tokens=torch.full((*shape, num_entries), -1, dtype=torch.int32),
        used=torch.full((*shape, num_entries), -2, dtype=torch.int32),
        clocks=torch.zeros(*shape, 2, dtype=torch.int64),
        counts=torch.zeros(*shape, 3, dtype=torch.int64),
    )
    retrieval = case.meta.retrieval
    assert retrieval is not None
    found = tuple(hot if each == seq else None for each in retrieval.seqs.tolist())
    meta = replace(case.meta, block_tables=tables, retrieval=retrieval._replace(hot=found), memo={})
    return Spilled(case._replace(k_cache=k_cache, v_cache=v_cache, meta=meta), hot)


def attend(case: AttentionCase, codes: KeyCodes, q: Tensor | None = None) -> Tensor:
    codes = replace(codes, layer=LAYER)
    arguments = (case.q if q is None else q, case.k_cache, case.v_cache, case.meta)
    return cpu.paged_attention(*arguments, scale=SCALE, codes=codes)


@pytest.mark.parametrize(
    ("cache", "heads"),
    values_then_pairs(
        [*product([torch.float32, torch.bfloat16], [False, True])],
        [Heads(9, 3, 64), Heads(4, 1, 128)],
    ),
)
def test_other_queries_find_the_same_keys_as_in_the_cache(
    fd: int, heads: Heads, cache: tuple[torch.dtype, bool]
) -> None:
    """Sequence 1 of three; copies are given up, and read again, as queries change."""
    dtype, in_fp8 = cache
    case = attention_case(
        [2300, 2500, 40],
        [1, 2, 1],
        heads=heads,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        in_fp8=in_fp8,
    )
    case, codes = coded(case, {0: (2100, 30), 1: (2200, BUDGET)})
    there, hot = spilled(case, fd, 1, range(1, 128), 2 * BUDGET)
    num_keys = 0
    for seed in range(8):
        q = torch.randn(case.q.shape, generator=torch.Generator().manual_seed(seed // 2)).to(dtype)
        assert torch.equal(attend(there, codes, q), attend(case, codes, q))
        num_keys += BUDGET * heads.kv
    found, read, failed = hot.counts[LAYER].sum(0).tolist()
    assert failed == 0
    assert 0 < found + read <= num_keys
    assert found >= read, "every second search selects what the one before did"
    assert not hot.counts[0].any()


def test_a_copy_is_read_once_while_there_is_room(fd: int) -> None:
    case = attention_case([2300], [1], heads=Heads(4, 2, 64), block_size=BLOCK_SIZE)
    case, codes = coded(case, {0: (2100, BUDGET)})
    there, hot = spilled(case, fd, 0, range(1, 128), 2 * BUDGET)
    attend(there, codes)
    first = hot.counts[LAYER].sum(0).tolist()
    for _ in range(3):
        attend(there, codes)
    assert hot.counts[LAYER].sum(0).tolist() == [3 * first[1], first[1], 0]
    for group in range(2):
        entries, tokens = hot.entries[LAYER, group], hot.tokens[LAYER, group]
        places = (entries >= 0).nonzero()[:, 0]
        assert torch.equal(tokens[entries[places].long()].long(), places)
        assert len(places) == hot.counts[LAYER, group, 1]


@pytest.mark.parametrize("extended", [False, True])
def test_what_cannot_be_read_is_zeros_counted_and_not_kept(fd: int, extended: bool) -> None:
    """Zeros of a file that was cut and extended are no keys."""
    case = attention_case([2300], [1], heads=Heads(4, 2, 64), block_size=BLOCK_SIZE)
    case, codes = coded(case, {0: (2100, BUDGET)})
    there, hot = spilled(case, fd, 0, range(1, 128), 2 * BUDGET)
    size = os.fstat(fd).st_size
    os.ftruncate(fd, 0)
    if extended:
        os.ftruncate(fd, size)
    assert attend(there, codes).isfinite().all()
    unread = int(hot.counts[LAYER, :, 2].sum())
    assert unread > BUDGET
    assert int(hot.entries.max()) == -1
    attend(there, codes)
    assert int(hot.counts[LAYER, :, 2].sum()) == 2 * unread

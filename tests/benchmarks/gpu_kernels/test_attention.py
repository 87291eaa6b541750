"""Entries of the GPU benchmark: their bytes against the tensors' sizes, and that they run."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_kernels import num_copies
from benchmarks.gpu_kernels.attention import (
    BATCHES,
    Batch,
    attention_entry,
    attention_meta,
    attention_work,
)
from benchmarks.gpu_kernels.norm import norm_entries
from benchmarks.gpu_kernels.rotary import Heads, rotary_entry
from kernels import reference

HEADS = Heads(4, 2, 16)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_norms(device: torch.device) -> None:
    plain, added = norm_entries(3, 8, device)
    assert plain.work.num_bytes == 2 * (24 + 24 + 8)
    assert added.work.num_bytes == 2 * (24 + 24 + 24 + 24 + 8)
    assert plain.work.flops == 4 * 24
    for entry in (plain, added):
        first = entry.call(0).clone()
        assert first.float().pow(2).mean(-1).sub(1).abs().max() < 0.02
        assert torch.equal(entry.call(1), first), f"{entry.op} changes what it reads"


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float8_e4m3fn, 1)])
def test_rotation(dtype: torch.dtype, size: int, device: torch.device) -> None:
    entry = rotary_entry(3, HEADS, dtype, device)
    q, kv, tables, slots = 3 * 4 * 16, 3 * 2 * 16, 3 * 16 * 4, 3 * 8
    assert entry.work.num_bytes == 2 * q * 2 + 2 * kv * 2 + 2 * kv * size + tables + slots
    cache = entry.call(0)
    assert cache.dtype == dtype
    assert cache.float().flatten(0, 1).flatten(1).any(1).sum() == 3


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 2), (torch.float8_e4m3fn, 1)])
def test_attention(dtype: torch.dtype, size: int, is_tree: bool, device: torch.device) -> None:
    batch = Batch("verify", 2, 3, 20, HEADS, dtype, is_tree)
    keys = 2 * 2 * 20 * 2 * 16
    # The three rows see 18, 19 and 20 keys.
    assert attention_work(batch).num_bytes == keys * size + 2 * 2 * 3 * 4 * 16 * 2
    assert attention_work(batch).flops == 2 * (18 + 19 + 20) * 4 * 16 * 4
    entry = attention_entry(batch, device, cache_bytes=2 * keys * size)
    assert entry.copies == 3
    outs = [entry.call(idx).clone() for idx in range(4)]
    assert all(out.isfinite().all() for out in outs)
    assert torch.equal(outs[3], outs[0])
    assert not torch.equal(outs[1], outs[0])


def test_a_tree_entry_does_the_work_of_a_causal_one(device: torch.device) -> None:
    chain = attention_meta(Batch("verify", 2, 3, 20, HEADS, is_tree=True), device)
    plain = attention_meta(Batch("verify", 2, 3, 20, HEADS), device)
    rng = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 4, 16, 2, 16, generator=rng).to(device)
    q = torch.randn(6, 4, 16, generator=rng).to(device)
    results = [
        reference.paged_attention(q, cache[0], cache[1], meta, scale=0.25)
        for meta in (chain, plain)
    ]
    assert torch.equal(*results)


def test_copies_exceed_the_cache() -> None:
    assert num_copies(10, 25) == 3
    assert num_copies(10, 30) == 4
    assert num_copies(100, 30) == 1


def test_the_goals_are_on_the_shapes_that_they_were_set_for() -> None:
    goals = {(b.op, b.num_seqs, b.context): b.goal for b in BATCHES if b.goal is not None}
    assert goals[("decode", 64, 8192)] == 0.8
    assert {goal for (op, *_), goal in goals.items() if op == "prefill"} == {0.6}
    assert all(b.heads.query // b.heads.kv == 8 for b in BATCHES if b.goal is not None)

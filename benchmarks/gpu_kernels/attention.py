"""Attention entries: decode, verification of draft trees, and chunks of prompts.

Cached keys are cold, as in a step, which reads every layer's once: a call reads the next of
so many copies that the device's cache cannot hold them. Blocks lie scattered, 16 positions
each. Inputs of one step are the same for all layers and stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks import roofline
from benchmarks.gpu_kernels import L2_BYTES, Entry, num_copies
from benchmarks.gpu_kernels.rotary import QWEN3_30B, Heads
from benchmarks.roofline import BF16, Work
from kernels.contracts import AttentionMeta
from kernels.triton.attention.launches import AttentionTiles, attend

BLOCK_SIZE: Final = 16


class Batch(NamedTuple):
    """Sequences that all have the same number of new rows and the same context."""

    op: str
    num_seqs: int
    new_rows: int
    context: int
    heads: Heads
    cache_dtype: torch.dtype = torch.bfloat16
    is_tree: bool = False
    goal: float | None = None


BATCHES: Final = (
    # The goals are those of the project for one H200.
    Batch("decode", 64, 1, 8192, QWEN3_30B, goal=0.8),
    Batch("decode", 64, 1, 8192, QWEN3_30B, torch.float8_e4m3fn),
    Batch("decode", 1, 1, 2048, QWEN3_30B),
    Batch("decode", 1, 1, 131072, QWEN3_30B),
    Batch("decode", 128, 1, 2048, QWEN3_30B),
    Batch("decode", 64, 1, 4096, Heads(16, 16, 128)),
    Batch("verify", 16, 32, 8192, QWEN3_30B, is_tree=True),
    Batch("prefill", 1, 8192, 8192, QWEN3_30B, goal=0.6),
    Batch("prefill", 4, 2048, 2048, QWEN3_30B, goal=0.6),
    Batch("prefill", 1, 2048, 32768, QWEN3_30B, goal=0.6),
)


def attention_work(batch: Batch) -> Work:
    """Give the work of a batch; a cache of one byte a number has half the keys' bytes."""
    heads = batch.heads
    work = roofline.paged_attention(
        [batch.new_rows] * batch.num_seqs,
        [batch.context] * batch.num_seqs,
        num_heads=heads.query,
        num_kv_heads=heads.kv,
        head_dim=heads.dim,
    )
    saved = cache_numbers(batch) * (BF16 - batch.cache_dtype.itemsize)
    return Work(work.num_bytes - saved, work.flops)


def cache_numbers(batch: Batch) -> int:
    """Count the numbers of the keys and values that a batch reads."""
    return 2 * batch.num_seqs * batch.context * batch.heads.kv * batch.heads.dim


def attention_meta(batch: Batch, device: torch.device) -> AttentionMeta:
    """Give a batch's metadata, its blocks scattered over the cache."""
    per_seq = -(-batch.context // BLOCK_SIZE)
    rng = torch.Generator().manual_seed(0)
    tables = torch.randperm(batch.num_seqs * per_seq, generator=rng).view(-1, per_seq)
    tree = None
    if batch.is_tree:
        # A chain sees as many keys as any branch of its length, and as many as `Work` counts.
        chain = torch.ones(batch.new_rows, batch.new_rows, dtype=torch.bool).tril()
        tree = chain.repeat(batch.num_seqs, 1).to(device)
    starts = torch.arange(batch.num_seqs + 1) * batch.new_rows
    return AttentionMeta(
        query_start=starts.to(device, torch.int32),
        context_lens=torch.full((batch.num_seqs,), batch.context).to(device, torch.int32),
        block_tables=tables.to(device, torch.int32),
        max_query_len=batch.new_rows,
        max_context_len=batch.context,
        tree_mask=tree,
    )


def attention_call(
    batch: Batch, device: torch.device, cache_bytes: int = L2_BYTES
) -> tuple[Callable[[int, AttentionTiles | None], Tensor], int]:
    """Give call(i, tiles) of a batch, and the copies of the cache that it goes through.

    Together they exceed `cache_bytes`. Tiles None: those that the kernels choose.
    """
    heads = batch.heads
    copies = num_copies(cache_numbers(batch) * batch.cache_dtype.itemsize, cache_bytes)
    meta = attention_meta(batch, device)
    shape = (2, meta.block_tables.numel(), BLOCK_SIZE, heads.kv, heads.dim)
    caches = [
        torch.randn(shape, dtype=torch.bfloat16, device=device).to(batch.cache_dtype)
        for _ in range(copies)
    ]
    rows = batch.num_seqs * batch.new_rows
    q = torch.randn(rows, heads.query, heads.dim, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(q)

    def call(idx: int, tiles: AttentionTiles | None) -> Tensor:
        k_cache, v_cache = caches[idx % copies]
        return attend(q, k_cache, v_cache, meta, scale=heads.dim**-0.5, out=out, tiles=tiles)

    return call, copies


def attention_entry(batch: Batch, device: torch.device, cache_bytes: int = L2_BYTES) -> Entry:
    """Give the entry of a batch."""
    heads = batch.heads
    call, copies = attention_call(batch, device, cache_bytes)
    name = str(batch.cache_dtype).removeprefix("torch.")
    return Entry(
        f"paged_attention {batch.op}",
        f"{batch.num_seqs} x {batch.new_rows} rows, context {batch.context}, "
        f"{heads.query}/{heads.kv} heads of {heads.dim}, {name} cache",
        attention_work(batch),
        lambda idx: call(idx, None),
        copies,
        batch.goal,
    )

"""Paged caches and micro-batches for the attention tests.

A case knows each sequence's keys and values in plain order, so that a test can compute attention's
result without reading a block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.contracts import AttentionMeta


class Heads(NamedTuple):
    query: int
    kv: int
    dim: int


class AttentionCase(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: AttentionMeta
    keys: list[Tensor]
    """Per sequence [context_len, G, D]."""
    values: list[Tensor]


def attention_case(
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    heads: Heads,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    parents: Sequence[Sequence[int | None]] | None = None,
    padding_rows: int = 0,
    seed: int = 0,
    in_fp8: bool = False,
) -> AttentionCase:
    """Build a case whose unused cache slots hold NaN and whose unused table entries are invalid.

    `in_fp8`: keys and values are numbers of float8_e4m3fn, which is the dtype of the caches.
    Of each tree of `parents` the last nodes are query rows; if some are not, tree_lens are given.
    """
    rng = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // block_size) for length in context_lens]
    total = sum(num_blocks) + 3
    order = torch.randperm(total, generator=rng).tolist()
    k_cache = torch.full((total, block_size, heads.kv, heads.dim), float("nan"), dtype=dtype)
    v_cache = k_cache.clone()
    tables = torch.full((len(context_lens), max(num_blocks, default=0) + 1), 1 << 30).int()
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for idx, length in enumerate(context_lens):
        blocks, order = order[: num_blocks[idx]], order[num_blocks[idx] :]
        tables[idx, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for each in (keys, values):
            drawn = torch.randn(length, heads.kv, heads.dim, generator=rng)
            each.append((drawn.to(torch.float8_e4m3fn) if in_fp8 else drawn).to(dtype))
        positions = torch.arange(length)
        places = tables[idx].long()[positions // block_size], positions % block_size
        k_cache[places], v_cache[places] = keys[-1], values[-1]
    num_rows = sum(query_lens) + padding_rows
    tree_mask = tree_lens = None
    if parents is not None:
        lens = [len(tree) for tree in parents]
        tree_mask = torch.zeros(num_rows, max(lens), dtype=torch.bool)
        if lens != list(query_lens):
            tree_lens = torch.tensor(lens, dtype=torch.int32)
        row = 0
        for tree, num_new in zip(parents, query_lens, strict=True):
            for node in range(len(tree) - num_new, len(tree)):
                tree_mask[row, path(tree, node)] = True
                row += 1
    starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()] if query_lens else [0]
    if in_fp8:
        k_cache, v_cache = k_cache.to(torch.float8_e4m3fn), v_cache.to(torch.float8_e4m3fn)
    return AttentionCase(
        q=torch.randn(num_rows, heads.query, heads.dim, generator=rng).to(dtype),
        k_cache=k_cache,
        v_cache=v_cache,
        meta=AttentionMeta(
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            block_tables=tables,
            max_query_len=max(query_lens, default=0),
            max_context_len=max(context_lens, default=0),
            tree_mask=tree_mask,
            tree_lens=tree_lens,
        ),
        keys=keys,
        values=values,
    )


def path(parents: Sequence[int | None], node: int) -> list[int]:
    """Return the nodes from the root to `node`; parents[i] is None or a smaller index."""
    parent = parents[node]
    return [*([] if parent is None else path(parents, parent)), node]

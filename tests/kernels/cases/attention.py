"""Paged caches and micro-batches for the attention tests.

A case knows each sequence's keys and values in plain order, so that a test can compute attention's
result without reading a block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.contracts import AttentionMeta


class Heads(NamedTuple):
    query: int
    kv: int
    dim: int
    rank: int | None = None
    """So many first numbers of a key are its value (latents); None: it has one of its own."""


class AttentionCase(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: AttentionMeta
    keys: list[Tensor]
    """Per sequence [context_len, G, D]; of latents, values are [context_len, G, rank]."""
    values: list[Tensor]


Tree = Sequence[int | None]
WIDE: Tree = (None, *(node // 3 for node in range(19)))
TREES: Sequence[Tree] = ((None, 0, 0, 1, 1, 4, 2), (None,), (None, None, 1, 0), WIDE)
# By name: lengths and query rows of the sequences, and their trees.
BATCHES: dict[str, tuple[Sequence[int], Sequence[int], Sequence[Tree] | None]] = {
    "mixed": ([1, 50, 16, 17, 33, 40, 25], [1, 1, 16, 17, 3, 0, 9], None),
    "decode": ([1, 2, 15, 16, 17, 33, 65, 129], [1] * 8, None),
    "long": ([140, 64, 65], [20, 9, 1], None),
    "few rows": ([60, 5], [1, 4], None),
    "all nodes": ([47, 1, 37, 23], [7, 1, 4, 20], TREES),
    "few nodes": ([47, 1, 37], [7, 1, 4], TREES[:3]),
    "last nodes": ([47, 1, 37, 23], [3, 1, 0, 17], TREES),
    "one node": ([47, 1, 37, 23], [1, 1, 0, 1], TREES),
    "no rows": ([20, 7], [0, 0], None),
    "nothing": ([], [], None),
}


def attention_case(
    context_lens: Sequence[int],
    query_lens: Sequence[int],
    *,
    heads: Heads,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    parents: Sequence[Tree] | None = None,
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
    if heads.rank is not None:
        v_cache, values = k_cache[..., : heads.rank], [each[..., : heads.rank] for each in keys]
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


def placed(case: AttentionCase, device: torch.device) -> AttentionCase:
    """Return a case whose queries, caches and tables are on a device."""
    tables = {
        name: each.to(device) for name, each in vars(case.meta).items() if isinstance(each, Tensor)
    }
    q, k_cache, v_cache = (each.to(device) for each in case[:3])
    if v_cache.shape != k_cache.shape:
        v_cache = k_cache[..., : v_cache.shape[3]]
    meta = replace(case.meta, **tables, memo={})
    return case._replace(q=q, k_cache=k_cache, v_cache=v_cache, meta=meta)


def path(parents: Tree, node: int) -> list[int]:
    """Return the nodes from the root to `node`; parents[i] is None or a smaller index."""
    parent = parents[node]
    return [*([] if parent is None else path(parents, parent)), node]

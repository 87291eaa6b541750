"""Recall of key selection: the share of the true top k that the codes found.

Owns the comparison of one sequence's selection in one layer with a search of the keys themselves.
Knows not when: retrieval.py looks at one step in many.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.contracts import AttentionMeta

CHUNK_KEYS: Final = 4096
"""Keys are compared so many at a time: a bound on memory."""


def best_keys(q: Tensor, k_cache: Tensor, meta: AttentionMeta, idx: int, *, count: int) -> Tensor:
    """Return the `count` keys i64[G, count] that sequence `idx` of meta.retrieval should select.

    As `kernels.retrieval.select` does with codes, of the keys that it searches: those with the
    greatest product with any row of the sequence and any query head that shares the key. `q`
    [T, N, D] and `k_cache` [B, block size, G, D] are those of a layer.
    """
    retrieval = meta.retrieval
    assert retrieval is not None
    seq, end = int(retrieval.seqs[idx]), int(retrieval.coded_end[idx])
    start, stop = meta.query_start[seq : seq + 2].tolist()
    block_size, num_groups, head_dim = k_cache.shape[1:]
    queries = q[start:stop].float().view(stop - start, num_groups, -1, head_dim)
    queries = queries.transpose(0, 1).flatten(1, 2)
    found = []
    for begin in range(retrieval.num_sinks, end, CHUNK_KEYS):
        positions = torch.arange(begin, min(begin + CHUNK_KEYS, end), device=q.device)
        blocks = meta.block_tables[seq, positions // block_size].long()
        slots = blocks * block_size + positions % block_size
        # As bytes: torch selects no rows of fp8.
        rows = k_cache.view(torch.uint8).flatten(0, 1).index_select(0, slots)
        keys = rows.view(k_cache.dtype).float()
        found.append((queries @ keys.permute(1, 2, 0)).amax(1))
    return torch.cat(found, 1).topk(count, dim=-1).indices + retrieval.num_sinks


def share_found(selected: Tensor, best: Tensor) -> float:
    """Return the share of the keys `best` i64[G, k] that are among `selected` i64[G, k]."""
    apart = torch.arange(len(best), device=best.device)[:, None] << 32
    return float(torch.isin(best + apart, selected + apart).float().mean())

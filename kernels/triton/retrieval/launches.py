"""The choice of the keys that retrieving sequences attend to, without a look at the device.

Turns the selection of each sequence and key/value head into a list of cache slots: a block table of
blocks of one key, with which the kernels of `attention` attend as with any other. Sequences are
searched a few at a time, so that the scores of all their keys take bounded memory. Called by
`kernels.triton.attention.launches`. Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, cast

import torch
import triton
from torch import Tensor

from kernels.contracts import (
    NUM_CENTROIDS,
    NUM_SUBSPACES,
    SEGMENT_KEYS,
    AttentionMeta,
    KeyCodes,
    Retrieval,
    SearchBounds,
)
from kernels.triton.retrieval.kernels import list_slots, score_keys, score_segments

SCORE_BYTES: Final = 64 * 2**20
"""Scores of the sequences that are searched at once; a single sequence may have more."""
# Tiles; they were not measured.
ROWS: Final = 16
KEYS: Final = 64
SLOTS: Final = 256
SEGMENTS: Final = 16

_MEMO: Final = "triton_retrieval"


def select_slots(
    q: Tensor,
    block_size: int,
    codes: KeyCodes,
    meta: AttentionMeta,
    *,
    score_bytes: int = SCORE_BYTES,
) -> AttentionMeta:
    """Return the meta of the sequences that retrieve, by queries [T, N, D]; others have no keys.

    Its block tables i32[S, G, keys] are of blocks of one key, a table per key/value head.
    Raises ValueError for tensors that do not fit together.
    """
    retrieval, bounds = _checked(q, codes, meta)
    num_groups, head_dim = codes.codes.shape[1], q.shape[2]
    selecting = _without_lists(meta, bounds, num_groups)
    slots = selecting.block_tables
    num_seqs = len(retrieval.seqs)
    num_keys = bounds.segments * SEGMENT_KEYS
    at_once = max(1, score_bytes // (num_groups * num_keys * torch.float32.itemsize))
    for first in range(0, num_seqs, at_once):
        count = min(at_once, num_seqs - first)
        searched = _searched(q, codes, meta, bounds.segments, first, count)
        scores = torch.empty(count, num_groups, num_keys, dtype=torch.float32, device=q.device)
        score_keys[(num_groups, count, num_keys // KEYS)](
            q, codes.centroids, codes.codes, meta.query_start, retrieval.seqs, retrieval.segments,
            searched, retrieval.coded_end, scores, first, retrieval.num_sinks, *q.stride()[:2],
            retrieval.segments.stride(0), num_keys, GROUP=q.shape[1] // num_groups, DIM=head_dim,
            SUBSPACES=NUM_SUBSPACES, CENTROIDS=NUM_CENTROIDS, SEGMENT=SEGMENT_KEYS, BLOCK_M=ROWS,
            BLOCK_N=KEYS, BLOCK_D=max(triton.next_power_of_2(head_dim), 16), num_warps=4,
        )  # fmt: skip
        best = scores.topk(min(bounds.budget, num_keys), dim=-1).indices
        list_slots[(num_groups, count, triton.cdiv(slots.shape[2], SLOTS))](
            best, searched, retrieval.seqs, retrieval.coded_end, retrieval.budgets,
            meta.context_lens, meta.block_tables, slots, first, best.shape[2], bounds.segments,
            retrieval.num_sinks, meta.block_tables.stride(0), slots.shape[2], SEGMENT=SEGMENT_KEYS,
            BLOCK_SIZE=block_size, BLOCK=SLOTS, num_warps=4,
        )  # fmt: skip
    return selecting


def _searched(
    q: Tensor, codes: KeyCodes, meta: AttentionMeta, num_searched: int, first: int, count: int
) -> Tensor:
    """Return which segments i64[count, G, num_searched] the sequences from `first` on search.

    Ascending; where one searches fewer, the others are behind its last.
    """
    retrieval = meta.retrieval
    assert retrieval is not None
    num_groups, max_segments = codes.codes.shape[1], retrieval.segments.shape[1]
    numbers = torch.arange(max_segments, device=q.device)
    if num_searched == max_segments:
        return numbers.expand(count, num_groups, -1).contiguous()
    scores = torch.empty(count, num_groups, max_segments, dtype=torch.float32, device=q.device)
    score_segments[(num_groups, count, triton.cdiv(max_segments, SEGMENTS))](
        q, codes.summaries, meta.query_start, retrieval.seqs, retrieval.segments,
        retrieval.coded_end, retrieval.summarised, scores, first, *q.stride()[:2], max_segments,
        GROUP=q.shape[1] // num_groups, DIM=q.shape[2], SEGMENT=SEGMENT_KEYS, BLOCK_M=ROWS,
        BLOCK_N=SEGMENTS, BLOCK_D=max(triton.next_power_of_2(q.shape[2]), 16), num_warps=4,
    )  # fmt: skip
    own = slice(first, first + count)
    num_segments = (retrieval.coded_end[own] + SEGMENT_KEYS - 1) // SEGMENT_KEYS
    own_count = num_segments - retrieval.summarised[own] + retrieval.kept[own]
    best = scores.topk(num_searched, dim=-1).indices
    is_own = numbers[:num_searched] < own_count[:, None, None]
    return best.where(is_own, max_segments).sort(-1).values


def _checked(q: Tensor, codes: KeyCodes, meta: AttentionMeta) -> tuple[Retrieval, SearchBounds]:
    retrieval = meta.retrieval
    assert retrieval is not None
    if retrieval.bounds is None:
        raise ValueError("a retrieval without bounds: kernels would have to look at the device")
    if retrieval.hot:
        raise ValueError("keys in a file are not read by Triton's kernels")
    _, num_groups, parts, num_centroids, width = codes.centroids.shape
    if (parts, num_centroids) != (NUM_SUBSPACES, NUM_CENTROIDS) or parts * width != q.shape[2]:
        raise ValueError(f"centroids {tuple(codes.centroids.shape)} for heads of {q.shape[2]}")
    if q.shape[1] % num_groups or q.stride(2) != 1:
        raise ValueError(f"{num_groups} coded heads for q {tuple(q.shape)} {q.stride()}")
    tables = (
        retrieval.seqs,
        retrieval.segments,
        retrieval.coded_end,
        retrieval.budgets,
        retrieval.summarised,
        retrieval.kept,
    )
    if any(each.dtype != torch.int32 or each.stride(-1) != 1 for each in tables):
        raise ValueError("the tensors of a retrieval must be contiguous int32")
    if codes.summaries.dtype != torch.bfloat16 or codes.summaries.shape[2:] != (2, q.shape[2]):
        raise ValueError(f"summaries {tuple(codes.summaries.shape)} for heads of {q.shape[2]}")
    if not all(each.is_contiguous() for each in (codes.centroids, codes.codes, codes.summaries)):
        raise ValueError("codes must be contiguous")
    return retrieval, retrieval.bounds


def others_of(meta: AttentionMeta) -> AttentionMeta | None:
    """Return the meta of the sequences that do not retrieve, the others without keys; None: none.

    Layers share it.
    """
    retrieval = meta.retrieval
    if retrieval is None or len(retrieval.seqs) == len(meta.context_lens):
        return None
    key = (_MEMO, "others")
    if key not in meta.memo:
        lens = meta.context_lens.index_fill(0, retrieval.seqs.long(), 0)
        meta.memo[key] = replace(meta, context_lens=lens, retrieval=None, memo={})
    return cast("AttentionMeta", meta.memo[key])


def _without_lists(meta: AttentionMeta, bounds: SearchBounds, num_groups: int) -> AttentionMeta:
    """Return the meta of the sequences that retrieve, whose lists each layer writes anew."""
    key = (_MEMO, "selecting", num_groups)
    if key not in meta.memo:
        retrieval, lens = meta.retrieval, meta.context_lens
        assert retrieval is not None
        seqs, end = retrieval.seqs.long(), retrieval.coded_end
        selected = torch.minimum(retrieval.budgets, end - retrieval.num_sinks)
        counts = lens.index_select(0, seqs) - end + selected + retrieval.num_sinks
        meta.memo[key] = replace(
            meta,
            context_lens=torch.zeros_like(lens).index_copy_(0, seqs, counts),
            block_tables=lens.new_empty(len(lens), num_groups, bounds.keys),
            max_query_len=bounds.rows,
            max_context_len=bounds.keys,
            tree_mask=None,
            tree_lens=None,
            retrieval=None,
            memo={},
        )
    return cast("AttentionMeta", meta.memo[key])

"""Attention cases some of whose sequences have coded keys, and what they should select."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from kernels.contracts import (
    NUM_CENTROIDS,
    NUM_SUBSPACES,
    SEGMENT_KEYS,
    KeyCodes,
    Retrieval,
)
from kernels.retrieval import encode, key_scores, segment_scores
from tests.kernels.cases.attention import AttentionCase


def coded(
    case: AttentionCase,
    ends_and_budgets: Mapping[int, tuple[int, int]],
    *,
    num_sinks: int = 4,
    kept: int | None = None,
    seed: int = 0,
) -> tuple[AttentionCase, KeyCodes]:
    """Let sequences of a case retrieve; codebooks are random, and segments in random places.

    By sequence: its coded_end and its budget. Of all segments but the last `kept` are searched,
    None: all; summaries are random too. Unused entries of `segments` are invalid.
    """
    rng = torch.Generator().manual_seed(seed)
    num_groups, head_dim = case.k_cache.shape[2:]
    counts = {seq: -(-end // SEGMENT_KEYS) for seq, (end, _) in ends_and_budgets.items()}
    total = sum(counts.values()) + 2
    places = torch.randperm(total, generator=rng).tolist()
    shape = (total, num_groups, NUM_SUBSPACES, NUM_CENTROIDS, head_dim // NUM_SUBSPACES)
    centroids = torch.randn(shape, generator=rng).bfloat16()
    shape = (total, num_groups, NUM_SUBSPACES, SEGMENT_KEYS)
    codes = torch.randint(NUM_CENTROIDS, shape, generator=rng, dtype=torch.uint8)
    segments = torch.full((len(counts), max(counts.values()) + 1), 1 << 30, dtype=torch.int32)
    for idx, (seq, count) in enumerate(counts.items()):
        end = ends_and_budgets[seq][0]
        for number in range(count):
            place = segments[idx, number] = places.pop()
            keys = case.keys[seq][number * SEGMENT_KEYS : min((number + 1) * SEGMENT_KEYS, end)]
            found = encode(keys.transpose(0, 1), centroids[place])
            codes[place, :, :, : len(keys)] = found
    summaries = torch.randn((total, num_groups, 2, head_dim), generator=rng).bfloat16()
    summarised = torch.tensor([count - 1 for count in counts.values()], dtype=torch.int32)
    retrieval = Retrieval(
        torch.tensor(list(counts), dtype=torch.int32),
        segments,
        torch.tensor([end for end, _ in ends_and_budgets.values()], dtype=torch.int32),
        torch.tensor([budget for _, budget in ends_and_budgets.values()], dtype=torch.int32),
        summarised,
        summarised if kept is None else summarised.clamp(max=kept),
        num_sinks,
    )
    meta = replace(case.meta, retrieval=retrieval, memo={})
    return case._replace(meta=meta), KeyCodes(centroids, codes, summaries)


def queries_of(case: AttentionCase, seq: int) -> Tensor:
    """Return the rows of a sequence [n, N, D] in fp32."""
    start, end = case.meta.query_start[seq : seq + 2].tolist()
    return case.q[start:end].float()


def best_of(queries: Tensor, codes: KeyCodes, retrieval: Retrieval, idx: int) -> Tensor:
    """Return which segments bool[G, S] are searched; no two scores may be nearly equal."""
    num_segments = -(-int(retrieval.coded_end[idx]) // SEGMENT_KEYS)
    competing, kept = int(retrieval.summarised[idx]), int(retrieval.kept[idx])
    is_searched = torch.ones(codes.codes.shape[1], num_segments, dtype=torch.bool)
    scores = segment_scores(queries, codes, retrieval.segments[idx, :competing])
    for own, found in zip(scores.tolist(), is_searched, strict=True):
        ranked = sorted(range(competing), key=own.__getitem__, reverse=True)
        found[ranked[kept:]] = False
        if 0 < kept < competing:
            assert own[ranked[kept - 1]] > own[ranked[kept]] + 0.01, "another seed"
    return is_searched


def check_selection(case: AttentionCase, codes: KeyCodes, idx: int, selected: Tensor) -> None:
    """Check positions i64[G, k]: ascending, and the best, but for scores rounded to i16."""
    retrieval = case.meta.retrieval
    assert retrieval is not None
    end, sinks = int(retrieval.coded_end[idx]), retrieval.num_sinks
    queries = queries_of(case, int(retrieval.seqs[idx]))
    places = retrieval.segments[idx, : -(-end // SEGMENT_KEYS)]
    scores = key_scores(queries, codes, places)[:, :end]
    is_searched = best_of(queries, codes, retrieval, idx).repeat_interleave(SEGMENT_KEYS, 1)
    scores = scores.masked_fill(~is_searched[:, :end], float("-inf"))
    assert selected.shape[1] == min(int(retrieval.budgets[idx]), end - sinks)
    assert bool((selected.diff(dim=1) > 0).all())
    assert bool((selected >= sinks).all())
    assert bool((selected < end).all())
    # No product of a part exceeds this; eight of them are rounded by half a unit each.
    largest = queries.square().view(*queries.shape[:2], NUM_SUBSPACES, -1).sum(-1).sqrt().max()
    length = codes.centroids[places.long()].float().square().sum(-1).sqrt().max()
    tolerance = 8 * float(NUM_SUBSPACES * largest * length) / 3800
    is_selected = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, selected, True)
    is_selected[:, :sinks] = True
    worst = scores.masked_fill(~is_selected, float("inf"))[:, sinks:].amin(1)
    best = scores.masked_fill(is_selected, float("-inf")).amax(1)
    assert bool((best <= worst + tolerance).all()), (best, worst, tolerance)


def attended(
    case: AttentionCase, idx: int, selected: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Return attention fp32[n, N, D] of a sequence's rows to what selected i64[G, k] adds to."""
    retrieval = case.meta.retrieval
    assert retrieval is not None
    seq, end = int(retrieval.seqs[idx]), int(retrieval.coded_end[idx])
    queries, keys, values = queries_of(case, seq), case.keys[seq].float(), case.values[seq].float()
    repeat = queries.shape[1] // keys.shape[1]
    out = torch.empty_like(queries)
    for row in range(len(queries)):
        last = len(keys) - len(queries) + row
        for head in range(queries.shape[1]):
            group = head // repeat
            seen = [*range(retrieval.num_sinks), *selected[group].tolist(), *range(end, last + 1)]
            scores = keys[seen, group] @ queries[row, head] * scale
            if sinks is not None:
                scores = torch.cat((scores, sinks[head, None]))
            out[row, head] = scores.softmax(0)[: len(seen)] @ values[seen, group]
    return out

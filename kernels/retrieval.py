"""Retrieval over product-quantised keys: a plain implementation of each of its steps.

Owns how codebooks are learnt, and the score by which a step's queries select coded keys. After
PQCache (arXiv 2407.12820): a key of D numbers is M parts, each replaced by the number of the
nearest of C centroids; a query's products with the centroids are a table in which the score of any
coded key is looked up. Different from it: codebooks belong to segments of a sequence, so that they
follow a long generation; budgets are absolute; scores of the query heads that share a key are
joined by their maximum, which needs no softmax over all keys. Of a long sequence only the segments
with the best summaries are searched (`best_segments`): the seam for another way to choose them.
Knows no blocks and no owners of segments: attention nodes say what is coded.

Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.contracts import (
    NUM_CENTROIDS,
    NUM_SUBSPACES,
    SEGMENT_KEYS,
    AttentionMeta,
    KeyCodes,
    Retrieval,
)

DEVIATIONS: Final = 3.0
"""A segment's best key is expected so many standard deviations above the mean, about."""


def learn_codebooks(keys: Tensor, *, num_iterations: int) -> Tensor:
    """Cluster the parts of keys [G, n, D], n >= C; returns the centroids bf16[G, M, C, W].

    Lloyd's algorithm from C keys at equal distances: nothing is random, so the same keys give the
    same codebook on a replay. A centroid that is nearest to no part stays where it is.
    """
    parts = _parts(keys)
    num_keys = parts.shape[2]
    first = torch.arange(NUM_CENTROIDS, device=keys.device) * num_keys // NUM_CENTROIDS
    centroids = parts[:, :, first].contiguous()
    for _ in range(num_iterations):
        nearest = _nearest(parts, centroids)
        # A product, since a GPU's scatter_add adds in another order each time.
        is_member = (nearest[..., None] == torch.arange(NUM_CENTROIDS, device=keys.device)).float()
        counts = is_member.sum(2)[..., None]
        means = is_member.transpose(2, 3) @ parts / counts.clamp(min=1.0)
        centroids = torch.where(counts > 0, means, centroids)
    return centroids.to(torch.bfloat16)


def encode(keys: Tensor, centroids: Tensor) -> Tensor:
    """Return the codes u8[G, M, n] of keys [G, n, D]: the nearest centroids, the first if equal."""
    return _nearest(_parts(keys), centroids.float()).to(torch.uint8)


def code_keys(
    k_cache: Tensor,
    slots: Tensor,
    centroids: Tensor,
    codes: Tensor,
    *,
    num_iterations: int | None,
) -> None:
    """Code the keys at slots i64[n], n <= SEGMENT_KEYS, of a cache [B, block size, G, D].

    Learns `centroids` bf16[G, M, C, W] first, with so many iterations, from at least C keys; None:
    they are there. Writes codes[:, :, :n], u8[G, M, n or more], a part of a KeyCodes' segment.
    """
    keys = _keys_at(k_cache, slots)
    if num_iterations is not None:
        centroids.copy_(learn_codebooks(keys, num_iterations=num_iterations))
    codes[:, :, : len(slots)] = encode(keys, centroids)


def summaries_of(keys: Tensor) -> Tensor:
    """Return the summary bf16[G, 2, D] of a segment's keys [G, n, D]: their mean and their spread.

    It is scaled so that a query's product with the mean, plus that of its magnitudes with the
    spread, is what the best key may score: DEVIATIONS above the mean, were all numbers equal.
    """
    deviation, mean = torch.std_mean(keys.float(), dim=1, correction=0)
    spread = deviation * DEVIATIONS / keys.shape[2] ** 0.5
    return torch.stack([mean, spread], 1).to(torch.bfloat16)


def summarise(k_cache: Tensor, slots: Tensor, summaries: Tensor) -> None:
    """Write the summary bf16[G, 2, D] of the keys at slots i64[n] of a cache, a whole segment's."""
    summaries.copy_(summaries_of(_keys_at(k_cache, slots)))


def selected_keys(q: Tensor, codes: KeyCodes, meta: AttentionMeta, idx: int) -> Tensor:
    """Return the keys i64[G, k] that sequence `idx` of meta.retrieval selected, ascending.

    To be asked right behind paged_attention with `meta` in a layer that has `codes`; `q` [T, N, D]
    was that of the call.
    """
    assert meta.retrieval is not None
    seq = int(meta.retrieval.seqs[idx])
    start, stop = meta.query_start[seq : seq + 2].tolist()
    return select(q[start:stop], codes, meta.retrieval, idx)


def _keys_at(k_cache: Tensor, slots: Tensor) -> Tensor:
    """Return the keys f32[G, n, D] at slots i64[n] of a cache [B, block size, G, D]."""
    # As bytes: torch selects no rows of fp8.
    rows = k_cache.view(torch.uint8).flatten(0, 1).index_select(0, slots)
    return rows.view(k_cache.dtype).float().transpose(0, 1)


def _parts(keys: Tensor) -> Tensor:
    """Return f32[G, M, n, W] of keys [G, n, D]."""
    num_groups, num_keys, head_dim = keys.shape
    width = head_dim // NUM_SUBSPACES
    return keys.float().view(num_groups, num_keys, NUM_SUBSPACES, width).transpose(1, 2)


def _nearest(parts: Tensor, centroids: Tensor) -> Tensor:
    """Return the nearest centroid i64[G, M, n] of parts [G, M, n, W]."""
    # |x - c|^2 without what is the same for all centroids.
    products = parts @ centroids.transpose(2, 3)
    return ((centroids * centroids).sum(-1)[:, :, None] - 2 * products).argmin(-1)


def key_scores(queries: Tensor, codes: KeyCodes, segments: Tensor) -> Tensor:
    """Return the scores f32[G, S * SEGMENT_KEYS] of all keys of S segments i32[S], in their order.

    Of queries [n, N, D] the greatest product with the decoded key, over rows and the heads that
    share it.
    """
    num_groups = codes.codes.shape[1]
    rows, heads, head_dim = queries.shape
    width = head_dim // NUM_SUBSPACES
    asked = queries.float().view(rows, num_groups, heads // num_groups, NUM_SUBSPACES, width)
    centroids = codes.centroids[segments.long()].float()
    tables = torch.einsum("ngrmw,sgmcw->sgmnrc", asked, centroids).flatten(3, 4)
    found = codes.codes[segments.long()].long()
    places = found[:, :, :, None].expand(*found.shape[:3], tables.shape[3], SEGMENT_KEYS)
    scores = tables.gather(4, places).sum(2).amax(2)  # [S, G, SEGMENT_KEYS]
    return scores.transpose(0, 1).reshape(num_groups, -1)


def segment_scores(queries: Tensor, codes: KeyCodes, segments: Tensor) -> Tensor:
    """Return the scores f32[G, S] of S segments i32[S], by their summaries.

    Of queries [n, N, D], in bf16, the greatest over rows and the heads that share a key.
    """
    num_groups, head_dim = codes.codes.shape[1], queries.shape[2]
    asked = queries.to(torch.bfloat16).float().view(len(queries), num_groups, -1, head_dim)
    found = codes.summaries[segments.long()].float()
    means = torch.einsum("ngrd,sgd->ngrs", asked, found[:, :, 0])
    spreads = torch.einsum("ngrd,sgd->ngrs", asked.abs(), found[:, :, 1])
    return (means + spreads).amax((0, 2))


def best_segments(queries: Tensor, codes: KeyCodes, retrieval: Retrieval, idx: int) -> Tensor:
    """Return which segments bool[G, S] of sequence `idx` of `retrieval` are searched."""
    num_segments = -(-int(retrieval.coded_end[idx]) // SEGMENT_KEYS)
    competing, kept = int(retrieval.summarised[idx]), int(retrieval.kept[idx])
    shape = (codes.codes.shape[1], num_segments)
    is_searched = torch.ones(shape, dtype=torch.bool, device=queries.device)
    if kept < competing:
        scores = segment_scores(queries, codes, retrieval.segments[idx, :competing])
        is_searched[:, :competing] = False
        is_searched.scatter_(1, scores.topk(kept, dim=-1).indices, True)
    return is_searched


def select(queries: Tensor, codes: KeyCodes, retrieval: Retrieval, idx: int) -> Tensor:
    """Return the keys i64[G, k] that sequence `idx` of `retrieval` selects, ascending.

    k is its budget, or the number of its coded keys if there are fewer. `queries` [n, N, D] are
    those of its rows.
    """
    end = int(retrieval.coded_end[idx])
    num_segments = -(-end // SEGMENT_KEYS)
    scores = key_scores(queries, codes, retrieval.segments[idx, :num_segments])
    is_searched = best_segments(queries, codes, retrieval, idx)
    scores.masked_fill_(~is_searched.repeat_interleave(SEGMENT_KEYS, 1), float("-inf"))
    searched = scores[:, retrieval.num_sinks : end]
    count = min(int(retrieval.budgets[idx]), searched.shape[1])
    best = searched.topk(count, dim=-1).indices + retrieval.num_sinks
    return best.sort(-1).values

"""Retrieval over product-quantised keys: a plain implementation of each of its steps.

Owns how codebooks are learnt, and the score by which a step's queries select coded keys. After
PQCache (arXiv 2407.12820): a key of D numbers is M parts, each replaced by the number of the
nearest of C centroids; a query's products with the centroids are a table in which the score of any
coded key is looked up. Different from it: codebooks belong to segments of a sequence, so that they
follow a long generation; budgets are absolute; scores of the query heads that share a key are
joined by their maximum, which needs no softmax over all keys.
Knows no blocks and no owners of segments: attention nodes say what is coded.

Letters as in `kernels.contracts`.
"""

from __future__ import annotations

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
    keys = k_cache.flatten(0, 1).index_select(0, slots).transpose(0, 1)
    if num_iterations is not None:
        centroids.copy_(learn_codebooks(keys, num_iterations=num_iterations))
    codes[:, :, : len(slots)] = encode(keys, centroids)


def selected_keys(q: Tensor, codes: KeyCodes, meta: AttentionMeta, idx: int) -> Tensor:
    """Return the keys i64[G, k] that sequence `idx` of meta.retrieval selected, ascending.

    To be asked right behind paged_attention with `meta` in a layer that has `codes`; `q` [T, N, D]
    was that of the call.
    """
    assert meta.retrieval is not None
    seq = int(meta.retrieval.seqs[idx])
    start, stop = meta.query_start[seq : seq + 2].tolist()
    return select(q[start:stop], codes, meta.retrieval, idx)


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


def select(queries: Tensor, codes: KeyCodes, retrieval: Retrieval, idx: int) -> Tensor:
    """Return the keys i64[G, k] that sequence `idx` of `retrieval` selects, ascending.

    k is its budget, or the number of its coded keys if there are fewer. `queries` [n, N, D] are
    those of its rows.
    """
    end = int(retrieval.coded_end[idx])
    num_segments = -(-end // SEGMENT_KEYS)
    scores = key_scores(queries, codes, retrieval.segments[idx, :num_segments])
    searched = scores[:, retrieval.num_sinks : end]
    count = min(int(retrieval.budgets[idx]), searched.shape[1])
    best = searched.topk(count, dim=-1).indices + retrieval.num_sinks
    return best.sort(-1).values

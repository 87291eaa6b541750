"""By which scores could a decoded token choose the keys it attends to? Ways to compare.

Owns pure functions from queries and keys to scores of keys, the choice by scores, and attention to
what is chosen. Whatever the way, scores of the query heads that share a key are joined by their
maximum (SnapKV's are sums), and the same number of keys is chosen besides the same first and last
ones. Knows no model. Called by benchmarks.retrieval.quality.

Letters: N query heads, G key/value heads, D numbers a head, L keys, P pages of PAGE_KEYS keys; a
score that is -inf belongs to a key that is never chosen before others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.contracts import SEGMENT_KEYS, KeyCodes
from kernels.retrieval import encode, key_scores, learn_codebooks, summaries_of

PAGE_KEYS: Final = 16
POOL_KEYS: Final = 7
"""SnapKV spreads a key's score over so many neighbours."""
# The greatest of 16 normal numbers is expected so many deviations above their mean.
PAGE_DEVIATIONS: Final = 1.77


def _by_group(query: Tensor, num_groups: int) -> Tensor:
    """Return [G, N / G, D] of a query [N, D]."""
    return query.view(num_groups, -1, query.shape[-1])


def exact_scores(query: Tensor, keys: Tensor) -> Tensor:
    """Return f32[G, L]: the greatest product of keys [G, L, D] with the heads of a query [N, D]."""
    return (_by_group(query, len(keys)) @ keys.transpose(1, 2)).amax(1)


class SegmentCodes(NamedTuple):
    """The segments of a sequence by their own codebooks, and by those of the ones before."""

    own: KeyCodes
    early: KeyCodes

    @classmethod
    def of(cls, keys: Tensor, *, num_iterations: int) -> SegmentCodes:
        """Learn and code keys [G, L, D], L at least a segment; a last open one is in `early`."""
        parts = torch.split(keys, SEGMENT_KEYS, dim=1)
        full = [part for part in parts if part.shape[1] == SEGMENT_KEYS]
        books = [learn_codebooks(part, num_iterations=num_iterations) for part in full]
        before = [books[0], *books][: len(parts)]
        return cls(_coded(full, books), _coded(parts, before))

    def at(self, num_keys: int) -> KeyCodes:
        """Return the codes as they are when a sequence has so many keys: only then full segments
        have codebooks of their own.
        """
        closed = num_keys // SEGMENT_KEYS
        centroids, codes, summaries = (
            torch.cat([own[:closed], early[closed : closed + 1]])
            for own, early in (
                (self.own.centroids, self.early.centroids),
                (self.own.codes, self.early.codes),
                (self.own.summaries, self.early.summaries),
            )
        )
        return KeyCodes(centroids, codes, summaries)


def one_codebook(keys: Tensor, num_learnt: int, *, num_iterations: int) -> KeyCodes:
    """Return codes of keys [G, L, D] by one codebook of the first `num_learnt` of them."""
    book = learn_codebooks(keys[:, :num_learnt], num_iterations=num_iterations)
    parts = torch.split(keys, SEGMENT_KEYS, dim=1)
    return _coded(parts, [book] * len(parts))


def _coded(parts: Sequence[Tensor], books: Sequence[Tensor]) -> KeyCodes:
    codes = [
        F.pad(encode(part, book), (0, SEGMENT_KEYS - part.shape[1]))
        for part, book in zip(parts, books, strict=True)
    ]
    summaries = torch.stack([summaries_of(part) for part in parts])
    return KeyCodes(torch.stack(list(books)), torch.stack(codes), summaries)


def coded_scores(query: Tensor, codes: KeyCodes, num_keys: int) -> Tensor:
    """Return f32[G, L] of a query [N, D]: products with the first L = `num_keys` decoded keys."""
    segments = torch.arange(-(-num_keys // SEGMENT_KEYS))
    return key_scores(query[None], codes, segments)[:, :num_keys]


class Pages(NamedTuple):
    """What is kept of each page of keys: f32[G, P, D] each."""

    lowest: Tensor
    greatest: Tensor
    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, keys: Tensor) -> Pages:
        """Return those of keys [G, L, D], L a multiple of PAGE_KEYS."""
        pages = keys.view(len(keys), -1, PAGE_KEYS, keys.shape[2])
        deviation, mean = torch.std_mean(pages, dim=2, correction=0)
        return cls(pages.amin(2), pages.amax(2), mean, deviation)


def _of_pages(page_scores: Tensor, num_keys: int) -> Tensor:
    return page_scores.repeat_interleave(PAGE_KEYS, dim=1)[:, :num_keys]


def bounds_scores(query: Tensor, pages: Pages, num_keys: int) -> Tensor:
    """Return Quest's scores f32[G, L]: no key of a page has a greater product than its bound."""
    asked = _by_group(query, len(pages.mean))
    bounds = asked.clamp(min=0) @ pages.greatest.transpose(1, 2)
    bounds += asked.clamp(max=0) @ pages.lowest.transpose(1, 2)
    return _of_pages(bounds.amax(1), num_keys)


def spread_scores(query: Tensor, pages: Pages, num_keys: int) -> Tensor:
    """Return f32[G, L]: what the best key of a page would score if its numbers were independent
    and normal.
    """
    asked = _by_group(query, len(pages.mean))
    means = asked @ pages.mean.transpose(1, 2)
    variances = asked.square() @ pages.deviation.square().transpose(1, 2)
    return _of_pages((means + PAGE_DEVIATIONS * variances.sqrt()).amax(1), num_keys)


def pruned(scores: Tensor, page_scores: Tensor, begin: int, end: int, num_kept: int) -> Tensor:
    """Return scores f32[G, L] without keys begin <= k < end but the `num_kept` of best pages."""
    kept = choose(page_scores, begin, end, num_kept)
    return torch.full_like(scores, float("-inf")).scatter_(1, kept, scores.gather(1, kept))


def prompt_scores(queries: Tensor, keys: Tensor, num_keys: int) -> Tensor:
    """Return SnapKV's scores f32[G, L] of L = `num_keys` keys [G, Lp or more, D].

    By queries [W, N, D], the last ones of a prompt of Lp keys: sums of their attention weights,
    spread over neighbours. Keys behind the prompt are unknown to it.
    """
    window, head_dim = len(queries), queries.shape[-1]
    num_groups, num_prompt = keys.shape[:2]
    asked = queries.view(window, num_groups, -1, head_dim).permute(1, 2, 0, 3)
    products = asked @ keys[:, None].transpose(2, 3) * head_dim**-0.5
    seen = torch.ones(window, num_prompt, dtype=torch.bool).tril(num_prompt - window)
    weights = products.masked_fill(~seen, float("-inf")).softmax(-1).sum((1, 2))
    spread = F.avg_pool1d(weights, POOL_KEYS, 1, POOL_KEYS // 2)
    return F.pad(spread, (0, num_keys - num_prompt), value=float("-inf"))


def random_scores(num_groups: int, num_keys: int, rng: torch.Generator) -> Tensor:
    """Return f32[G, L] that know nothing."""
    return torch.rand(num_groups, num_keys, generator=rng)


def choose(scores: Tensor, begin: int, end: int, count: int) -> Tensor:
    """Return the `count` best keys i64[G, count] of begin <= k < end."""
    return scores[:, begin:end].topk(count, dim=1).indices + begin


def attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Return attention f32[N, D] of a query [N, D] to the seen bool[G, L] of its keys [G, L, D]."""
    asked = _by_group(query, len(keys))
    products = asked @ keys.transpose(1, 2) * query.shape[-1] ** -0.5
    weights = products.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return torch.flatten(weights @ values, 0, 1)


def recall(seen: Tensor, best: Tensor) -> float:
    """Return the share of the best keys i64[G, k] that are seen bool[G, L]."""
    return float(seen.gather(1, best).float().mean())

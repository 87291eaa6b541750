"""Ways to choose keys, each against loops over single keys."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.retrieval import methods
from kernels.contracts import NUM_SUBSPACES, SEGMENT_KEYS

NUM_HEADS, NUM_GROUPS, HEAD_DIM = 6, 2, 16
NUM_KEYS = 2 * SEGMENT_KEYS + 300


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def query() -> Tensor:
    return drawn(NUM_HEADS, HEAD_DIM)


@pytest.fixture(scope="module")
def keys() -> Tensor:
    return drawn(NUM_GROUPS, NUM_KEYS, HEAD_DIM, seed=1)


def best_head(query: Tensor, group: int, key: Tensor) -> float:
    """Return the greatest product of a key [D] with the heads of its group."""
    repeat = NUM_HEADS // NUM_GROUPS
    return max(float(query[group * repeat + idx] @ key) for idx in range(repeat))


def test_exact_scores_are_the_greatest_products(query: Tensor, keys: Tensor) -> None:
    found = methods.exact_scores(query, keys[:, :50])
    expected = [[best_head(query, g, keys[g, k]) for k in range(50)] for g in range(NUM_GROUPS)]
    torch.testing.assert_close(found, torch.tensor(expected))


def decoded(codes: methods.KeyCodes, group: int, key: int) -> Tensor:
    """Return the key [D] that its code stands for."""
    segment, place = divmod(key, SEGMENT_KEYS)
    parts = [
        codes.centroids[segment, group, part, codes.codes[segment, group, part, place].long()]
        for part in range(NUM_SUBSPACES)
    ]
    return torch.cat(parts).float()


def check_nearest(codes: methods.KeyCodes, keys: Tensor, places: range) -> None:
    """Check that no centroid is nearer to a part of a key than its code's."""
    width = HEAD_DIM // NUM_SUBSPACES
    for group, key in itertools.product(range(NUM_GROUPS), places):
        stands_for = decoded(codes, group, key)
        for part in range(NUM_SUBSPACES):
            numbers = slice(part * width, (part + 1) * width)
            book = codes.centroids[key // SEGMENT_KEYS, group, part].float()
            own = (stands_for[numbers] - keys[group, key, numbers]).norm()
            assert own <= (book - keys[group, key, numbers]).norm(dim=1).min() + 1e-4


def test_full_segments_have_codebooks_and_the_open_one_that_of_the_one_before(
    query: Tensor, keys: Tensor
) -> None:
    coding = methods.SegmentCodes.of(keys, num_iterations=2)
    last, earlier = coding.at(NUM_KEYS), coding.at(SEGMENT_KEYS + 700)
    assert len(last.centroids) == 3
    assert len(earlier.centroids) == 2
    assert torch.equal(last.centroids[2], last.centroids[1])
    assert torch.equal(earlier.centroids[1], earlier.centroids[0])
    assert not torch.equal(last.centroids[1], last.centroids[0])
    check_nearest(last, keys, range(0, NUM_KEYS, 97))
    check_nearest(earlier, keys, range(0, SEGMENT_KEYS + 700, 97))
    found = methods.coded_scores(query, last, NUM_KEYS)
    assert found.shape == (NUM_GROUPS, NUM_KEYS)
    for group, key in itertools.product(range(NUM_GROUPS), range(0, NUM_KEYS, 97)):
        expected = best_head(query, group, decoded(last, group, key))
        assert float(found[group, key]) == pytest.approx(expected, abs=1e-4)


def test_one_codebook_is_learnt_from_the_first_keys_alone(keys: Tensor) -> None:
    codes = methods.one_codebook(keys, 500, num_iterations=2)
    changed = keys.clone()
    changed[:, 500:] *= 3
    other = methods.one_codebook(changed, 500, num_iterations=2)
    assert torch.equal(codes.centroids, other.centroids)
    assert torch.equal(codes.centroids[0], codes.centroids[2])
    check_nearest(codes, keys, range(0, NUM_KEYS, 97))


def test_pages_are_scored_by_bounds_and_by_spread(query: Tensor, keys: Tensor) -> None:
    num_keys, size = 70, methods.PAGE_KEYS
    pages = methods.Pages.of(keys[:, : 5 * size])
    bounds = methods.bounds_scores(query, pages, num_keys)
    spread = methods.spread_scores(query, pages, num_keys)
    assert bool((bounds >= methods.exact_scores(query, keys[:, :num_keys]) - 1e-4).all())
    for group, key in itertools.product(range(NUM_GROUPS), range(0, num_keys, 7)):
        page = keys[group, key // size * size :][:size]
        heads = query.view(NUM_GROUPS, -1, HEAD_DIM)[group]
        extremes = torch.maximum(heads * page.amax(0), heads * page.amin(0))
        bound = extremes.sum(-1).max()
        assert float(bounds[group, key]) == pytest.approx(float(bound), rel=1e-4)
        variance = heads.square() @ (page.square().mean(0) - page.mean(0).square())
        likely = (heads @ page.mean(0) + methods.PAGE_DEVIATIONS * variance.sqrt()).max()
        assert float(spread[group, key]) == pytest.approx(float(likely), rel=1e-4)


def test_pruning_keeps_the_scores_of_the_best_pages_only() -> None:
    page_scores = torch.tensor([[1.0, 1, 5, 5, 3, 3, 9, 9], [2, 2, 7, 7, 8, 8, 0, 0]])
    scores = torch.arange(16.0).view(2, 8)
    found = methods.pruned(scores, page_scores, 1, 6, 4)
    infinite = float("-inf")
    assert found.tolist() == [
        [*[infinite] * 2, 2, 3, 4, 5, *[infinite] * 2],
        [*[infinite] * 2, 10, 11, 12, 13, *[infinite] * 2],
    ]
    assert methods.choose(found, 1, 6, 2).sort().values.tolist() == [[4, 5], [4, 5]]


def test_the_last_queries_of_a_prompt_score_it_and_nothing_behind(keys: Tensor) -> None:
    num_prompt, window = 40, 3
    queries = drawn(window, NUM_HEADS, HEAD_DIM, seed=2)
    found = methods.prompt_scores(queries, keys[:, :num_prompt], num_prompt + 9)
    assert bool(found[:, num_prompt:].isneginf().all())
    half = methods.POOL_KEYS // 2
    for group in range(NUM_GROUPS):
        sums = torch.zeros(num_prompt + 2 * half)
        heads = queries.view(window, NUM_GROUPS, -1, HEAD_DIM)[:, group]
        for row, asked in enumerate(heads):
            seen = num_prompt - window + row + 1
            weights = (asked @ keys[group, :seen].T / math.sqrt(HEAD_DIM)).softmax(-1)
            sums[half : half + seen] += weights.sum(0)
        expected = sums.unfold(0, methods.POOL_KEYS, 1).mean(-1)
        torch.testing.assert_close(found[group, :num_prompt], expected)


def test_attention_to_what_is_seen_is_that_of_torch(query: Tensor, keys: Tensor) -> None:
    keys, values = keys[:, :30], drawn(NUM_GROUPS, 30, HEAD_DIM, seed=3)
    seen = drawn(NUM_GROUPS, 30, seed=4) > 0
    expected = F.scaled_dot_product_attention(
        query[:, None],
        keys,
        values,
        attn_mask=seen.repeat_interleave(NUM_HEADS // NUM_GROUPS, 0)[:, None],
        enable_gqa=True,
    )
    torch.testing.assert_close(methods.attend(query, keys, values, seen), expected[:, 0])
    best = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    hits = [bool(seen[group, key]) for group in range(2) for key in best[group].tolist()]
    assert methods.recall(seen, best) == sum(hits) / 8

"""The plain retrieval against Lloyd's algorithm in numpy, decoded keys, and sorting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.contracts import NUM_CENTROIDS, NUM_SUBSPACES, SEGMENT_KEYS, KeyCodes, Retrieval
from kernels.retrieval import (
    encode,
    key_scores,
    learn_codebooks,
    segment_scores,
    select,
    summarise,
)

WIDTH = 4
HEAD_DIM = NUM_SUBSPACES * WIDTH


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lloyd(points, num_iterations):  # type: ignore[no-untyped-def]
    """Return centroids [C, W] of points [n, W] in doubles; each step as it is defined."""
    centroids = points[[c * len(points) // NUM_CENTROIDS for c in range(NUM_CENTROIDS)]].copy()
    for _ in range(num_iterations):
        nearest = np.square(points[:, None] - centroids).sum(-1).argmin(-1)
        for idx in range(NUM_CENTROIDS):
            if (nearest == idx).any():
                centroids[idx] = points[nearest == idx].mean(0)
    return centroids


@pytest.mark.parametrize("num_iterations", [0, 1, 5])
@pytest.mark.parametrize("num_keys", [NUM_CENTROIDS, 300])
def test_codebooks_are_those_of_lloyd(num_keys: int, num_iterations: int) -> None:
    keys = numbers(2, num_keys, HEAD_DIM)
    learnt = learn_codebooks(keys, num_iterations=num_iterations)
    assert learnt.shape == (2, NUM_SUBSPACES, NUM_CENTROIDS, WIDTH)
    assert learnt.dtype == torch.bfloat16
    parts = keys.double().view(2, num_keys, NUM_SUBSPACES, WIDTH).numpy()
    for group in range(2):
        for part in range(NUM_SUBSPACES):
            wanted = torch.from_numpy(lloyd(parts[group, :, part], num_iterations))
            found = learnt[group, part].double()
            torch.testing.assert_close(found, wanted, rtol=2.0**-8, atol=1e-5)


def test_a_centroid_without_keys_stays() -> None:
    """Equal keys all belong to the first of the equal centroids."""
    keys = torch.full((1, 100, HEAD_DIM), 1.5)
    assert bool((learn_codebooks(keys, num_iterations=3) == 1.5).all())


def test_codes_are_the_nearest_centroids_and_of_equals_the_first() -> None:
    keys = numbers(2, 70, HEAD_DIM)
    centroids = numbers(2, NUM_SUBSPACES, NUM_CENTROIDS, WIDTH, seed=1).bfloat16()
    centroids[:, :, 40:] = centroids[:, :, :24]
    codes = encode(keys, centroids)
    assert codes.shape == (2, NUM_SUBSPACES, 70)
    assert codes.dtype == torch.uint8
    parts = keys.view(2, 70, NUM_SUBSPACES, 1, WIDTH).transpose(1, 2)
    distances = (parts - centroids[:, :, None].float()).square().sum(-1)
    assert torch.equal(codes.long(), distances.argmin(-1))
    assert int(codes.max()) < 40


def coded(num_segments: int, num_groups: int) -> KeyCodes:
    shape = (num_segments, num_groups, NUM_SUBSPACES)
    rng = torch.Generator().manual_seed(num_segments)
    return KeyCodes(
        numbers(*shape, NUM_CENTROIDS, WIDTH, seed=2).bfloat16(),
        torch.randint(NUM_CENTROIDS, (*shape, SEGMENT_KEYS), generator=rng, dtype=torch.uint8),
        numbers(num_segments, num_groups, 2, HEAD_DIM, seed=3).bfloat16(),
    )


def decoded(codes: KeyCodes, segment: int, group: int) -> Tensor:
    """Return the keys [SEGMENT_KEYS, D] that codes stand for."""
    centroids, found = codes.centroids[segment, group].float(), codes.codes[segment, group].long()
    return torch.cat([centroids[part][found[part]] for part in range(NUM_SUBSPACES)], dim=1)


@pytest.mark.parametrize(("num_rows", "repeat"), [(1, 1), (1, 3), (4, 2)])
def test_scores_are_the_greatest_products_with_decoded_keys(num_rows: int, repeat: int) -> None:
    codes = coded(4, 2)
    queries = numbers(num_rows, 2 * repeat, HEAD_DIM)
    scores = key_scores(queries, codes, torch.tensor([3, 0, 2], dtype=torch.int32))
    assert scores.shape == (2, 3 * SEGMENT_KEYS)
    for group in range(2):
        asked = queries[:, group * repeat : (group + 1) * repeat].reshape(-1, HEAD_DIM)
        keys = torch.cat([decoded(codes, segment, group) for segment in (3, 0, 2)])
        wanted = (keys @ asked.T).amax(1)
        torch.testing.assert_close(scores[group], wanted, rtol=1e-4, atol=1e-4)


def test_summaries_are_means_and_scaled_deviations() -> None:
    cache = numbers(30, 16, 2, HEAD_DIM).bfloat16()
    slots = torch.randperm(480, generator=torch.Generator().manual_seed(1))[:300]
    summaries = torch.full((2, 2, HEAD_DIM), float("nan"), dtype=torch.bfloat16)
    summarise(cache, slots, summaries)
    for group in range(2):
        keys = cache.double().view(480, 2, HEAD_DIM)[slots, group].numpy()
        wanted = np.stack([keys.mean(0), keys.std(0) * 3 / HEAD_DIM**0.5])
        found = summaries[group].double()
        torch.testing.assert_close(found, torch.from_numpy(wanted), rtol=2.0**-8, atol=1e-6)


def test_a_segments_score_is_the_greatest_over_rows_and_heads() -> None:
    codes, queries = coded(4, 2), numbers(3, 6, HEAD_DIM).bfloat16()
    scores = segment_scores(queries, codes, torch.tensor([3, 0, 2], dtype=torch.int32))
    for group in range(2):
        asked = queries[:, 3 * group : 3 * group + 3].double().flatten(0, 1)
        for idx, segment in enumerate((3, 0, 2)):
            mean, spread = codes.summaries[segment, group].double()
            wanted = max(float(one @ mean + one.abs() @ spread) for one in asked)
            assert float(scores[group, idx]) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_only_the_best_segments_and_the_last_are_searched(kept: int) -> None:
    codes, queries = coded(4, 2), numbers(1, 4, HEAD_DIM)
    segments = torch.tensor([[3, 0, 2, 1]], dtype=torch.int32)
    end, budget = 3 * SEGMENT_KEYS + 70, 40
    one = torch.ones(1, dtype=torch.int32)
    retrieval = Retrieval(0 * one, segments, end * one, budget * one, 3 * one, kept * one, 5)
    selected = select(queries, codes, retrieval, 0)
    scores = key_scores(queries, codes, segments[0])
    for group, own in enumerate(segment_scores(queries, codes, segments[0, :3]).tolist()):
        ranked = sorted(range(3), key=own.__getitem__, reverse=True)
        chosen = {3, *ranked[:kept]}
        searched = [key for key in range(5, end) if key // SEGMENT_KEYS in chosen]
        best = sorted(searched, key=lambda key: -float(scores[group, key]))[:budget]
        assert selected[group].tolist() == sorted(best)


@pytest.mark.parametrize("num_sinks", [0, 7])
@pytest.mark.parametrize(("end", "budget"), [(2 * SEGMENT_KEYS, 50), (1500, 1), (1030, 5000)])
def test_the_best_are_selected_in_the_order_of_positions(
    end: int, budget: int, num_sinks: int
) -> None:
    codes = coded(5, 2)
    segments = torch.tensor([[0, 1, 1], [4, 2, 1 << 30]], dtype=torch.int32)
    all_of_them = torch.ones(2, dtype=torch.int32)
    retrieval = Retrieval(
        torch.tensor([3, 8], dtype=torch.int32),
        segments,
        torch.tensor([3000, end], dtype=torch.int32),
        torch.tensor([9, budget], dtype=torch.int32),
        all_of_them,
        all_of_them,
        num_sinks,
    )
    queries = numbers(2, 4, HEAD_DIM)
    selected = select(queries, codes, retrieval, 1)
    scores = key_scores(queries, codes, segments[1, :2])
    for group in range(2):
        searched = range(num_sinks, end)
        best = sorted(searched, key=lambda key: -float(scores[group, key]))[:budget]
        assert selected[group].tolist() == sorted(best)

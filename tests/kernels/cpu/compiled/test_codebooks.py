"""Compiled codebooks against the plain ones of `kernels.retrieval`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import retrieval
from kernels.contracts import NUM_CENTROIDS, NUM_SUBSPACES, SEGMENT_KEYS
from kernels.cpu.compiled.retrieval.codebooks import can_code, code_keys
from tests.kernels.cases.matrices import values_then_pairs


def cached_keys(
    num_keys: int, *, num_groups: int = 2, head_dim: int = 64, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a cache, the slots of `num_keys` keys and the keys [G, n, D]; other slots are NaN."""
    rng = torch.Generator().manual_seed(num_keys)
    keys = torch.randn(num_keys, num_groups, head_dim, generator=rng).to(dtype)
    cache = torch.full((num_keys // 16 + 2, 16, num_groups, head_dim), float("nan"), dtype=dtype)
    slots = torch.randperm(cache.shape[0] * 16, generator=rng)[:num_keys]
    cache.view(-1, num_groups, head_dim)[slots] = keys
    return cache, slots, keys.transpose(0, 1)


def empty_segment(num_groups: int = 2, head_dim: int = 64) -> tuple[Tensor, Tensor]:
    shape = (num_groups, NUM_SUBSPACES, NUM_CENTROIDS, head_dim // NUM_SUBSPACES)
    codes = torch.full((num_groups, NUM_SUBSPACES, SEGMENT_KEYS), 200, dtype=torch.uint8)
    return torch.full(shape, float("nan"), dtype=torch.bfloat16), codes


def check(num_keys: int, head_dim: int, dtype: torch.dtype, num_iterations: int) -> None:
    cache, slots, keys = cached_keys(num_keys, head_dim=head_dim, dtype=dtype)
    centroids, codes = empty_segment(head_dim=head_dim)
    code_keys(cache, slots, centroids, codes, num_iterations=num_iterations)
    wanted = retrieval.learn_codebooks(keys, num_iterations=num_iterations)
    # Products are rounded in another order: a part between two centroids may be given to either.
    assert float((centroids == wanted).float().mean()) > 0.99
    torch.testing.assert_close(centroids.float(), wanted.float(), rtol=0.1, atol=0.1)
    same = codes[:, :, :num_keys] == retrieval.encode(keys, centroids)
    assert float(same.float().mean()) > 0.999
    assert bool((codes[:, :, num_keys:] == 200).all())


@pytest.mark.parametrize(
    ("num_keys", "head_dim", "dtype", "num_iterations"),
    values_then_pairs(
        [64, 65, 500, 1024],
        [16, 32, 64, 128, 256],
        [torch.float32, torch.bfloat16, torch.float8_e4m3fn],
        [0, 1, 4],
    ),
)
def test_equals_the_plain_codebooks(
    num_keys: int, head_dim: int, dtype: torch.dtype, num_iterations: int
) -> None:
    check(num_keys, head_dim, dtype, num_iterations)


@pytest.mark.parametrize(("first", "num_keys"), values_then_pairs([0, 70], [0, 16, 100, 1]))
def test_keys_are_coded_with_centroids_that_are_there(num_keys: int, first: int) -> None:
    """A segment is filled little by little; codes beside the new ones stay."""
    cache, slots, keys = cached_keys(num_keys)
    centroids, codes = empty_segment()
    centroids.copy_(torch.randn(centroids.shape, generator=torch.Generator().manual_seed(1)))
    before = centroids.clone()
    code_keys(cache, slots, centroids, codes[:, :, first:], num_iterations=None)
    assert torch.equal(centroids, before)
    wanted = torch.full_like(codes, 200)
    wanted[:, :, first : first + num_keys] = retrieval.encode(keys, centroids)
    assert torch.equal(codes, wanted)


def test_equal_keys_have_the_first_code() -> None:
    cache, slots, _ = cached_keys(80)
    cache[:] = 3.0
    centroids, codes = empty_segment()
    code_keys(cache, slots, centroids, codes, num_iterations=2)
    assert bool((centroids == 3.0).all())
    assert not codes[:, :, :80].any()


def test_threads_do_not_change_a_bit() -> None:
    cache, slots, _ = cached_keys(1024, num_groups=3, dtype=torch.bfloat16)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(empty_segment(num_groups=3))
        code_keys(cache, slots, *results[-1], num_iterations=4)
    for centroids, codes in results[1:]:
        assert torch.equal(centroids, results[0][0])
        assert torch.equal(codes, results[0][1])


def test_what_the_kernel_does_not_know() -> None:
    cache = torch.zeros(2, 16, 2, 64)
    assert can_code(cache)
    assert not can_code(cache.half())
    assert not can_code(cache[..., :48].contiguous())
    assert not can_code(cache.transpose(0, 1))

"""The fused rotary kernel against the reference's norm, rotation and write, one by one."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.contracts import HeadRows
from kernels.triton.rotary import rotate_and_store
from tests.kernels.cases import Heads
from tests.kernels.matrices import values_then_pairs
from tests.pairwise import cover_values

BLOCK_SIZE = 4
DTYPES = [torch.float32, torch.bfloat16]
HEADS = [Heads(9, 3, 64), Heads(8, 1, 80), Heads(4, 4, 96), Heads(1, 1, 8)]
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    # Norms add in another order, so the last bit of a factor may differ.
    torch.bfloat16: {"rtol": 2e-2, "atol": 3e-2},
}


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor


def draw(
    num_tokens: int, heads: Heads, dtype: torch.dtype, device: torch.device, *, width: int
) -> Inputs:
    """q, k and v as views of joint rows, and 6 blocks of slots for them."""
    rng = torch.Generator().manual_seed(num_tokens)
    total = heads.query + 2 * heads.kv
    qkv = torch.randn(num_tokens, total, heads.dim, generator=rng).to(device, dtype)
    angles = (torch.rand(num_tokens, width, generator=rng) * 100).to(device)
    slots = torch.randperm(6 * BLOCK_SIZE, generator=rng)[:num_tokens].to(device)
    q, k, v = qkv.split((heads.query, heads.kv, heads.kv), dim=1)
    return Inputs(q, k, v, angles.cos(), angles.sin(), slots)


def caches(heads: Heads, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    both = torch.zeros(2, 6, BLOCK_SIZE, heads.kv, heads.dim, device=device).to(dtype)
    return both[0], both[1]


@pytest.mark.parametrize(
    ("dtype_and_half_tables", "heads"),
    values_then_pairs([*product(DTYPES, [True, False])], HEADS),
)
def test_without_norms_equals_the_reference_bit_for_bit(
    heads: Heads, dtype_and_half_tables: tuple[torch.dtype, bool], device: torch.device
) -> None:
    dtype, half_tables = dtype_and_half_tables
    given = draw(2, heads, dtype, device, width=heads.dim // (2 if half_tables else 1))
    q, k, v = (x.clone() for x in given[:3])
    wanted, found = caches(heads, dtype, device), caches(heads, dtype, device)
    reference.rotate_and_store(HeadRows(q, k, v, *given[3:5], *wanted, given.slots))
    rotate_and_store(*given[:5], *found, given.slots)
    # Compiled, fp32 products may be fused with the sum.
    exact = {"rtol": 0.0, "atol": 0.0}
    tolerance = exact if dtype == torch.bfloat16 or device.type == "cpu" else TOLERANCE[dtype]
    torch.testing.assert_close(given.q, q, **tolerance)
    torch.testing.assert_close(found[0], wanted[0], **tolerance)
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(given.v, v)


@pytest.mark.parametrize(("dtype", "heads"), cover_values(DTYPES, HEADS[1:]))
def test_norm_of_each_head(heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
    given = draw(2, heads, dtype, device, width=heads.dim // 2)
    q, k, v = (x.clone() for x in given[:3])
    wanted, found = caches(heads, dtype, device), caches(heads, dtype, device)
    norms = torch.rand(2, heads.dim, device=device).add(0.5).to(dtype)
    options = {"q_norm": norms[0], "k_norm": norms[1], "eps": 1e-3}
    reference.rotate_and_store(HeadRows(q, k, v, *given[3:5], *wanted, given.slots, **options))
    rotate_and_store(*given[:5], *found, given.slots, **options)
    torch.testing.assert_close(given.q, q, **TOLERANCE[dtype])
    torch.testing.assert_close(found[0], wanted[0], **TOLERANCE[dtype])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize(("dtype", "heads"), cover_values(DTYPES, HEADS[:2]))
def test_norm_of_all_heads(heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
    """As in OLMoE: a token's heads are one row, with one root mean square."""
    given = draw(2, heads, dtype, device, width=heads.dim // 2)
    q_norm = torch.rand(heads.query * heads.dim, device=device).add(0.5).to(dtype)
    k_norm = torch.rand(heads.kv * heads.dim, device=device).add(0.5).to(dtype)
    q = reference.rms_norm(given.q.flatten(1), q_norm, eps=1e-3).view(given.q.shape)
    k = reference.rms_norm(given.k.flatten(1), k_norm, eps=1e-3).view(given.k.shape)
    wanted, found = caches(heads, dtype, device), caches(heads, dtype, device)
    reference.rotate_and_store(HeadRows(q, k, given.v, *given[3:5], *wanted, given.slots))
    rotate_and_store(*given[:5], *found, given.slots, q_norm=q_norm, k_norm=k_norm, eps=1e-3)
    torch.testing.assert_close(given.q, q, **TOLERANCE[dtype])
    torch.testing.assert_close(found[0], wanted[0], **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_cache_holds_scaled_and_saturated_numbers(
    dtype: torch.dtype, device: torch.device
) -> None:
    heads = Heads(6, 2, 64)
    given = draw(3, heads, dtype, device, width=32)
    given.v[0] *= 1000
    q, k, v = (x.clone() for x in given[:3])
    exact, found = caches(heads, dtype, device), caches(heads, torch.float8_e4m3fn, device)
    reference.rotate_and_store(HeadRows(q, k, v, *given[3:5], *exact, given.slots))
    rotate_and_store(*given[:5], *found, given.slots, k_scale=0.25, v_scale=2.0)
    for cache, wanted, scale in zip(found, exact, (0.25, 2.0), strict=True):
        scaled = (wanted.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        if device.type == "cpu" or dtype == torch.bfloat16:
            assert torch.equal(cache.float(), scaled.float())
        else:
            torch.testing.assert_close(cache.float(), scaled.float(), rtol=2**-3, atol=2**-9)
    assert found[1].float().abs().max() == 448


def test_rows_with_a_negative_slot_are_not_stored(device: torch.device) -> None:
    heads = Heads(2, 1, 16)
    given = draw(3, heads, torch.float32, device, width=8)
    given.slots[:] = torch.tensor([-1, 7, -1])
    found = caches(heads, torch.float32, device)
    rotate_and_store(*given[:5], *found, given.slots)
    assert found[1].flatten(0, 1).flatten(1).any(1).nonzero().tolist() == [[7]]


def test_no_token_at_all(device: torch.device) -> None:
    heads = Heads(2, 1, 16)
    given = draw(0, heads, torch.float32, device, width=8)
    rotate_and_store(*given[:5], *caches(heads, torch.float32, device), given.slots)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    heads = Heads(4, 2, 16)
    given = draw(3, heads, torch.bfloat16, device, width=8)
    k_cache, v_cache = caches(heads, torch.bfloat16, device)
    with pytest.raises(ValueError, match=r"q_norm \(32,\) fits neither a head of 16 nor all"):
        rotate_and_store(
            *given[:5], k_cache, v_cache, given.slots, q_norm=given.k.new_ones(32), eps=1e-6
        )
    with pytest.raises(ValueError, match=r"q_norm is torch.float32"):
        rotate_and_store(*given[:5], k_cache, v_cache, given.slots, q_norm=torch.ones(16))
    with pytest.raises(ValueError, match=r"slots \(2,\) for 3 tokens"):
        rotate_and_store(*given[:5], k_cache, v_cache, given.slots[:2])
    with pytest.raises(ValueError, match=r"k \(3, 1, 16\), v \(3, 2, 16\)"):
        rotate_and_store(given.q, given.k[:, :1], *given[2:5], k_cache, v_cache, given.slots)
    with pytest.raises(ValueError, match=r"caches are torch.float16"):
        rotate_and_store(*given[:5], k_cache.half(), v_cache.half(), given.slots)
    with pytest.raises(ValueError, match=r"caches \(6, 4, 1, 16\)"):
        rotate_and_store(*given[:5], k_cache[:, :, :1], v_cache[:, :, :1], given.slots)
    with pytest.raises(ValueError, match=r"cos \(3, 4\)"):
        rotate_and_store(
            *given[:3], given.cos[:, :4], given.sin[:, :4], k_cache, v_cache, given.slots
        )

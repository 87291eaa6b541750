"""The fused rotary kernel beside its op: scaled caches, padding rows."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.contracts import HeadRows
from kernels.triton.rotary import rotate_and_store
from tests.kernels.cases.attention import Heads

BLOCK_SIZE = 4
DTYPES = [torch.float32, torch.bfloat16]


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

"""Entries of the fused QK-norm, rotation and KV write; bf16 and fp8 caches.

q, k and v are views of the projection's result, as in a layer, and are not made cold: the
projection has just written them. Slots are scattered over the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from benchmarks import roofline
from benchmarks.gpu_kernels import Entry
from benchmarks.roofline import BF16, Work
from kernels.triton.rotary import RotaryTiles, rotate_and_store

BLOCK_SIZE = 16
EPS = 1e-6


class Heads(NamedTuple):
    """Numbers of query and key/value heads, and their size."""

    query: int
    kv: int
    dim: int


QWEN3_30B = Heads(32, 4, 128)
SIZES = (1, 64, 8192)


def rotary_work(num_rows: int, heads: Heads, *, has_norms: bool, cache_bytes: int) -> Work:
    """Give the work of T rows into a cache of `cache_bytes` bytes a number."""
    work = roofline.rotate_and_store(
        num_rows,
        num_heads=heads.query,
        num_kv_heads=heads.kv,
        head_dim=heads.dim,
        has_norms=has_norms,
    )
    saved = 2 * num_rows * heads.kv * heads.dim * (BF16 - cache_bytes)
    return Work(work.num_bytes - saved, work.flops)


def rotary_call(
    num_rows: int, heads: Heads, cache_dtype: torch.dtype, device: torch.device
) -> Callable[[RotaryTiles | None], torch.Tensor]:
    """Give the call of T tokens with a norm of each head; it returns the keys' cache.

    Tiles None: those that the op chooses.
    """
    rng = torch.Generator().manual_seed(0)
    total = heads.query + 2 * heads.kv
    qkv = torch.randn(num_rows, total, heads.dim, dtype=torch.bfloat16, device=device)
    q, k, v = qkv.split((heads.query, heads.kv, heads.kv), dim=1)
    angles = torch.rand(num_rows, heads.dim, device=device) * 100
    cos, sin = angles.cos(), angles.sin()
    num_blocks = -(-num_rows // BLOCK_SIZE)
    caches = torch.zeros(2, num_blocks, BLOCK_SIZE, heads.kv, heads.dim, device=device)
    k_cache, v_cache = caches.to(cache_dtype)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=rng)[:num_rows].to(device)
    norm = torch.ones(heads.dim, dtype=torch.bfloat16, device=device)

    def call(tiles: RotaryTiles | None) -> torch.Tensor:
        rotate_and_store(
            q,
            k,
            v,
            cos,
            sin,
            k_cache,
            v_cache,
            slots,
            q_norm=norm,
            k_norm=norm,
            eps=EPS,
            tiles=tiles,
        )
        return k_cache

    return call


def rotary_entry(
    num_rows: int, heads: Heads, cache_dtype: torch.dtype, device: torch.device
) -> Entry:
    """Give the entry of T tokens."""
    call = rotary_call(num_rows, heads, cache_dtype, device)
    name = str(cache_dtype).removeprefix("torch.")
    return Entry(
        "rotate_and_store",
        f"{num_rows} rows, {heads.query}/{heads.kv} heads of {heads.dim}, {name} cache",
        rotary_work(num_rows, heads, has_norms=True, cache_bytes=cache_dtype.itemsize),
        lambda _: call(None),
    )

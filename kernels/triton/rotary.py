"""Rotates a layer's queries and writes its keys and values to the cache, in one launch.

QK-norm of each head, rotary embedding and the paged KV write: each row of q, k and v is read once
and written once. A program owns some heads of one token, either of q or of k and v. The rounding
points are those of `kernels.reference`; a cache of float8_e4m3fn holds saturated numbers. Called by
attention nodes whose device is a GPU. Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.runtime import rounded

CACHE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
HEADS_AT_ONCE: Final = 4
"""Heads that a program of one warp takes."""


@triton.jit
def _normed(
    low: tl.tensor,
    high: tl.tensor,
    weight: tl.tensor,
    column: tl.tensor,
    half: tl.tensor,
    eps: tl.tensor,
    dtype: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Norm each head of a tile [HEADS, HALF], given as its halves; `column` is arange(HALF)."""
    squares = low * low + high * high
    inverse = tl.rsqrt(tl.sum(squares, axis=1) / (2 * half) + eps)[:, None]
    known = column < half
    low_weight = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)
    high_weight = tl.load(weight + column + half, mask=known, other=0.0).to(tl.float32)
    low = rounded(low * inverse, dtype).to(tl.float32) * low_weight[None, :]
    high = rounded(high * inverse, dtype).to(tl.float32) * high_weight[None, :]
    return rounded(low, dtype).to(tl.float32), rounded(high, dtype).to(tl.float32)


@triton.jit
def _rotated(
    x: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    head: tl.tensor,
    num_heads: tl.tensor,
    head_stride: tl.tensor,
    high_table: tl.tensor,
    half: tl.tensor,
    eps: tl.tensor,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load heads [HEADS] of one token, norm and rotate them; give both halves, rounded."""
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, HALF)
    inside = (head < num_heads)[:, None] & (column < half)[None, :]
    place = head[:, None] * head_stride + column[None, :]
    low = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + place + half, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        low, high = _normed(low, high, norm, column, half, eps, dtype)
    known = column < half
    low_cos = rounded(tl.load(cos + column, mask=known, other=0.0).to(tl.float32), dtype)
    low_sin = rounded(tl.load(sin + column, mask=known, other=0.0).to(tl.float32), dtype)
    cos += high_table
    sin += high_table
    high_cos = rounded(tl.load(cos + column, mask=known, other=0.0).to(tl.float32), dtype)
    high_sin = rounded(tl.load(sin + column, mask=known, other=0.0).to(tl.float32), dtype)
    low_cos, low_sin = low_cos.to(tl.float32)[None, :], low_sin.to(tl.float32)[None, :]
    high_cos, high_sin = high_cos.to(tl.float32)[None, :], high_sin.to(tl.float32)[None, :]
    # Products are rounded before they are added, as separate torch operations do it.
    kept, turned = rounded(low * low_cos, dtype), rounded(high * low_sin, dtype)
    first = rounded(kept.to(tl.float32) - turned.to(tl.float32), dtype)
    kept, turned = rounded(high * high_cos, dtype), rounded(low * high_sin, dtype)
    return first, rounded(kept.to(tl.float32) + turned.to(tl.float32), dtype)


@triton.jit
def _store(
    place: tl.tensor, half: tl.tensor, low: tl.tensor, high: tl.tensor, inside: tl.tensor
) -> None:
    dtype: tl.constexpr = place.dtype.element_ty
    tl.store(place, rounded(low, dtype), mask=inside)
    tl.store(place + half, rounded(high, dtype), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rotate_and_store(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slots: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    half: tl.tensor,
    num_values: tl.tensor,
    high_table: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    table_row: tl.tensor,
    cache_block: tl.tensor,
    cache_slot: tl.tensor,
    cache_head: tl.tensor,
    eps: tl.tensor,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts = tl.cdiv(num_heads, HEADS)
    cos += token * table_row
    sin += token * table_row
    column = tl.arange(0, HALF)
    if part < query_parts:
        head = part * HEADS + tl.arange(0, HEADS)
        q += token * q_row
        first, second = _rotated(
            q, q_norm, cos, sin, head, num_heads, q_head, high_table, half, eps, Q_NORM, HALF
        )
        inside = (head < num_heads)[:, None] & (column < half)[None, :]
        place = q + head[:, None] * q_head + column[None, :]
        tl.store(place, first, mask=inside)
        tl.store(place + half, second, mask=inside)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            head = (part - query_parts) * HEADS + tl.arange(0, HEADS)
            k += token * k_row
            first, second = _rotated(
                k, k_norm, cos, sin, head, num_kv_heads, k_head, high_table, half, eps, K_NORM,
                HALF,
            )  # fmt: skip
            inside = (head < num_kv_heads)[:, None] & (column < half)[None, :]
            to = slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_slot
            place = to + head[:, None] * cache_head + column[None, :]
            first, second = first.to(tl.float32), second.to(tl.float32)
            _store(k_cache + place, half, first, second, inside)
            number = tl.arange(0, VALUES)
            inside = (head < num_kv_heads)[:, None] & (number < num_values)[None, :]
            source = v + token * v_row + head[:, None] * v_head + number[None, :]
            value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
            place = v_cache + to + head[:, None] * cache_head + number[None, :]
            tl.store(place, rounded(value, v_cache.dtype.element_ty), mask=inside)


def _check_norm(norm: Tensor | None, heads: Tensor, what: str) -> None:
    if norm is None:
        return
    if norm.dtype != heads.dtype or not norm.is_contiguous():
        raise ValueError(f"{what} is {norm.dtype}, its heads are {heads.dtype}")
    if norm.shape != heads.shape[2:]:
        raise ValueError(f"{what} {tuple(norm.shape)} for heads of {heads.shape[2]}")


def _check(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> None:
    num_tokens, _, head_dim = q.shape
    if k.shape[:2] != v.shape[:2] or len(k) != num_tokens or k.shape[2] != head_dim or head_dim % 2:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}")
    if any(x.stride(2) != 1 for x in (q, k, v)):
        raise ValueError("the elements of a head must be contiguous")
    widths = (head_dim // 2, head_dim)
    if cos.shape != sin.shape or len(cos) != num_tokens or cos.shape[1] not in widths:
        raise ValueError(f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)} for q {tuple(q.shape)}")
    if cos.stride() != sin.stride() or cos.stride(1) != 1:
        raise ValueError(f"cos and sin have strides {cos.stride()}, {sin.stride()}")
    if slots.shape != (num_tokens,) or not slots.is_contiguous():
        raise ValueError(f"slots {tuple(slots.shape)} for {num_tokens} tokens")


def _check_caches(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    pairs = ((k_cache, k), (v_cache, v))
    if k_cache.shape[:2] != v_cache.shape[:2] or any(c.shape[2:] != x.shape[1:] for c, x in pairs):
        raise ValueError(f"caches {tuple(k_cache.shape)}, {tuple(v_cache.shape)}, k {k.shape}")
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"caches are {k_cache.dtype}, {v_cache.dtype}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError(f"caches have strides {k_cache.stride()}, {v_cache.stride()}")


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norm q [T, N, D] and k [T, G, D], rotate both, store k and v [T, G, D] in the cache.

    Extends `kernels.reference.rotate_and_store`: a row with a negative slot is not stored
    (padding). q is changed in place, k and v are only read. Raises ValueError for tensors that do
    not fit together.
    """
    _check(q, k, v, cos, sin, slots)
    _check_caches(k, v, k_cache, v_cache)
    _check_norm(q_norm, q, "q_norm")
    _check_norm(k_norm, k, "k_norm")
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, half = k.shape[1], head_dim // 2
    if num_tokens == 0:
        return
    parts = triton.cdiv(num_heads, HEADS_AT_ONCE) + triton.cdiv(num_kv_heads, HEADS_AT_ONCE)
    _rotate_and_store[(num_tokens, parts)](
        q, k, v, cos, sin, k_cache, v_cache, slots,
        q if q_norm is None else q_norm, k if k_norm is None else k_norm,
        num_heads, num_kv_heads, half, v.shape[2], cos.shape[1] - half,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        cos.stride(0), *k_cache.stride()[:3], eps,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None, BLOCK_SIZE=k_cache.shape[1],
        HEADS=HEADS_AT_ONCE, HALF=triton.next_power_of_2(half),
        VALUES=triton.next_power_of_2(v.shape[2]), num_warps=1,
    )  # fmt: skip

"""Attention of pieces of query rows, each computed by one call.

A piece's keys and values are gathered from the caches, widened if they are in fp8, and one
`scaled_dot_product_attention` computes all of its rows. Knows no sequence and no plan: pieces are
cut by `kernels.cpu.attention` once per micro-batch, and computed in every layer.

Letters beside those of `kernels.contracts`: n query rows of a piece, L keys of a piece.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.compiled.gathered_rows import gather_widened

PROMPT_ROWS: Final = 512
"""Of a long prompt, as many rows attend together: fewer keys that only later ones see."""


def attend_prompt(q: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> Tensor:
    """Attend the rows of one prompt to its keys and values; see `kernels.reference`."""
    out = torch.empty_like(q)
    by_head = [each.transpose(0, 1)[None] for each in (q, keys, values)]
    before = len(keys) - len(q)
    for begin in range(0, len(q), PROMPT_ROWS):
        end = min(begin + PROMPT_ROWS, len(q))
        seen = torch.arange(before + end) <= torch.arange(before + begin, before + end)[:, None]
        rows, own_keys, own_values = (
            by_head[0][:, :, begin:end],
            *(each[:, :, : before + end] for each in by_head[1:]),
        )
        found = _mix(rows, own_keys, own_values, seen[None, None], scale=scale, sinks=None)
        out[begin:end] = found[0].transpose(0, 1)
    return out


class Piece(NamedTuple):
    """Rows `begin` to `end` of the queries, and what they see."""

    begin: int
    end: int
    slots: Tensor
    """i64[L], cache slots of its keys."""
    mask: Tensor | None
    """bool[n, L], the keys that each row sees; None: all."""


def attend_piece(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    piece: Piece,
    out: Tensor,
    *,
    scale: float,
    sinks: Tensor | None,
) -> None:
    """Write the rows of `piece` of out [T, N, V]; all else as in `paged_attention`.

    Only the first V numbers of the values count.
    """
    rows = slice(piece.begin, piece.end)
    keys, values = (_gather(cache, piece.slots, q.dtype) for cache in (k_cache, v_cache))
    queries, keys, values = (each.transpose(0, 1)[None] for each in (q[rows], keys, values))
    mask = None if piece.mask is None else piece.mask[None, None]
    column = None if sinks is None else sinks[:, None]
    found = _mix(queries, keys, values, mask, scale=scale, sinks=column)
    out[rows] = found[0].transpose(0, 1)[..., : out.shape[2]]


def _mix(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend queries [1, heads, n, D] to keys, values [1, G, L, D]; sinks f32[heads, 1]."""
    if sinks is None:
        has_groups = queries.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=has_groups
        )
    if mask is not None:
        mask = torch.zeros_like(mask, dtype=queries.dtype).masked_fill_(~mask, float("-inf"))
    # What the public function calls here; only this one returns the sums of exponentials too.
    result: Tensor
    result, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, attn_mask=mask, scale=scale
    )
    share = torch.sigmoid(log_sums - sinks)[..., None]
    return (result * share).to(queries.dtype)


def _gather(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return slots i64[n] of a cache as [n, G, D] in `dtype`."""
    if cache.dtype == torch.float8_e4m3fn:
        return gather_widened(cache, slots, dtype)
    return cache.view(-1, *cache.shape[2:]).index_select(0, slots)

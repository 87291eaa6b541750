"""Attention of padded groups: pieces of query rows that are computed by one call.

A group's keys and values are gathered from the caches, widened if they are in fp8, and one
`scaled_dot_product_attention` computes all of its rows. Knows no sequence and no plan: groups are
made by `kernels.cpu.attention` once per micro-batch, and computed in every layer.

Letters beside those of `kernels.contracts`: P pieces of a group, n query rows of a
piece, L keys of a piece (both padded to the longest of the group).
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
    by_head = [q.transpose(0, 1)[None], *map(_by_head, (keys[None], values[None]))]
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


class PaddedGroup(NamedTuple):
    """Pieces that are computed by one call."""

    num_pieces: int
    num_rows: int
    num_keys: int
    slots: Tensor
    """i64[P * L], cache slots to gather; padding repeats a piece's own first key."""
    rows: Tensor | None
    """i64[P * n], query rows; padding repeats a piece's last row. None: all, in order."""
    unpadded: Tensor | None
    """i64, the entries of `rows` that are not padding; None: all."""
    targets: Tensor | None
    """i64, the query rows of the `unpadded` entries; None: all, in order."""
    mask: Tensor | None
    """bool, the keys that each row sees, in the shape for the call; None: all keys."""
    folded: bool
    """Whether query heads of a group become further query rows (short pieces)."""


def attend_group(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    group: PaddedGroup,
    out: Tensor,
    *,
    scale: float,
    sinks: Tensor | None,
) -> None:
    """Write the rows of `group` of out [T, N, V]; all else as in `paged_attention`.

    Only the first V numbers of the values count.
    """
    result = _attend(
        q if group.rows is None else q.index_select(0, group.rows),
        _gather(k_cache, group.slots, q.dtype),
        _gather(v_cache, group.slots, q.dtype),
        group,
        scale=scale,
        sinks=sinks,
    )
    result = result[..., : out.shape[2]]
    if group.unpadded is not None:
        result = result.index_select(0, group.unpadded)
    if group.targets is None:
        out.copy_(result)
    else:
        out.index_copy_(0, group.targets, result)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    group: PaddedGroup,
    *,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend q [P * n, N, D] to keys and values [P * L, G, D]; returns [P * n, N, D]."""
    num_heads, head_dim = q.shape[1:]
    num_groups = keys.shape[1]
    shape = (group.num_pieces, group.num_keys, num_groups, head_dim)
    keys, values = _by_head(keys.view(shape)), _by_head(values.view(shape))
    if not group.folded:
        queries = q.reshape(group.num_pieces, group.num_rows, num_heads, head_dim).transpose(1, 2)
        column = None if sinks is None else sinks[:, None]
        result = _mix(queries, keys, values, group.mask, scale=scale, sinks=column)
        return result.transpose(1, 2).reshape(-1, num_heads, head_dim)
    # All query heads that share a key/value head become rows of one matrix: keys and
    # values are not repeated, and several rows take hardly longer than one.
    queries = q.reshape(group.num_pieces, group.num_rows, num_groups, -1, head_dim)
    queries = queries.transpose(1, 2).reshape(group.num_pieces, num_groups, -1, head_dim)
    folded = None if sinks is None else sinks.view(num_groups, -1).repeat(1, group.num_rows)
    result = _mix(queries, keys, values, group.mask, scale=scale, sinks=folded)
    result = result.view(group.num_pieces, num_groups, group.num_rows, -1, head_dim)
    return result.transpose(1, 2).reshape(-1, num_heads, head_dim)


def _mix(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend queries [P, heads, n, D] to keys, values [P, G, L, D]; sinks f32[heads, 1 or n]."""
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


def _by_head(each: Tensor) -> Tensor:
    """Return keys or values [P, L, G, D] as [P, G, L, D], those of a head side by side.

    Strides of all heads would let a long context's meet in few sets of the processor's caches.
    """
    return each.transpose(1, 2).contiguous()


def _gather(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return slots i64[n] of a cache as [n, G, D] in `dtype`."""
    if cache.dtype == torch.float8_e4m3fn:
        return gather_widened(cache, slots, dtype)
    return cache.view(-1, *cache.shape[2:]).index_select(0, slots)

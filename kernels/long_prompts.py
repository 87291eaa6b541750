"""The long prompts of a micro-batch, whose rows may attend otherwise than the others'.

Owns the length from which a prompt is long, and the division of a micro-batch's rows, made once for
all layers, on the host. Knows no weights and no kernel; called by attention_nodes/latent.py.
"""

from __future__ import annotations

from typing import Final, NamedTuple, cast

import torch
from torch import Tensor

from kernels.contracts import AttentionMeta

MIN_LONG_ROWS: Final = 512
"""Of one sequence in a step: with so many it pays to make keys and values of latents."""
_MEMO: Final = ("rows by length",)


class LongRows(NamedTuple):
    """The rows of a prompt [n] in a micro-batch, and the places of all keys that its last one sees.

    The keys' places are in cache blocks i32[blocks]; `num_keys` of them count.
    """

    rows: slice
    blocks: Tensor
    num_keys: int

    def slots(self, block_size: int) -> Tensor:
        """Return the cache slots i64[num_keys] of the keys, in order."""
        within = torch.arange(block_size)
        return (self.blocks.long()[:, None] * block_size + within).flatten()[: self.num_keys]


class RowsByLength(NamedTuple):
    """The long prompts of a micro-batch, and its other rows i64[n], with what these attend to."""

    long: tuple[LongRows, ...]
    others: Tensor
    meta: AttentionMeta


def rows_by_length(meta: AttentionMeta) -> RowsByLength | None:
    """Return the rows of `meta`, on the host; None: no prompt is long, or drafts branch."""
    if meta.max_query_len < MIN_LONG_ROWS or meta.tree_mask is not None:
        return None
    if _MEMO not in meta.memo:
        meta.memo[_MEMO] = _divided(meta)
    return cast("RowsByLength | None", meta.memo[_MEMO])


def _divided(meta: AttentionMeta) -> RowsByLength | None:
    counts = meta.query_start.diff()
    is_long = counts >= MIN_LONG_ROWS
    if not is_long.any():
        return None
    starts = meta.query_start.tolist()
    long = tuple(
        LongRows(
            slice(starts[idx], starts[idx + 1]),
            meta.block_tables[idx],
            int(meta.context_lens[idx]),
        )
        for idx in is_long.nonzero()[:, 0].tolist()
    )
    short = ~is_long
    left, contexts = counts[short], meta.context_lens[short]
    others = AttentionMeta(
        query_start=torch.cat((counts.new_zeros(1), left.cumsum(0, dtype=counts.dtype))),
        context_lens=contexts,
        block_tables=meta.block_tables[short],
        max_query_len=max(left.tolist(), default=0),
        max_context_len=max(contexts.tolist(), default=0),
    )
    return RowsByLength(long, short.repeat_interleave(counts).nonzero()[:, 0], others)

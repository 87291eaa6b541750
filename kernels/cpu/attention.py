"""Paged attention on the CPU: plan once per micro-batch, then few calls per layer.

The plan cuts the micro-batch into pieces of query rows. Rows of the shortest pieces, decode rows
and drafts above all, are computed one by one by `kernels.cpu.compiled.attention.rows` or, of
latents where there is AMX, `latents` beside it, and other pieces of prompts in tiles by `prompts`,
where that is fast. These read the keys in the cache. The plan joins what is left (large draft
trees, and prompts elsewhere) to padded groups, and keeps for each group the cache slots to gather
and the keys that each query sees, which `kernels.cpu.padded_groups` computes; in a recorded step
they do so in Python, with the groups of each replay. Knows no model and no sequence identity; the
plan lives in `AttentionMeta.memo`. Used through `kernels.cpu.ops`.

Letters beside those of `kernels.contracts`: P pieces of a group, n query rows of a
piece, L keys of a piece (both padded to the longest of the group).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels import reference
from kernels import retrieval as plain
from kernels.contracts import AttentionMeta, KeyCodes, Retrieval, is_latent
from kernels.cpu.attention_rows import Row, plan_work
from kernels.cpu.compiled.attention.latents import (
    attend_to_latents,
    can_attend_to_latents,
    divide_heads,
)
from kernels.cpu.compiled.attention.prompts import (
    PromptRows,
    PromptWords,
    attend_prompts,
    can_attend_prompts,
)
from kernels.cpu.compiled.attention.rows import HeadShape, WorkWords, attend_rows, can_attend
from kernels.cpu.compiled.python_calls import call_again
from kernels.cpu.compiled.retrieval.search import attend_selected, can_search
from kernels.cpu.compiled.retrieval.words import RetrievalWords
from kernels.cpu.padded_groups import PaddedGroup, attend_group
from kernels.recordings import SINGLE_ROWS

Mask = npt.NDArray[np.bool_]

_MEMO: Final = "cpu_attention"
_LATEST: Final = ("cpu_attention of a recorded step, as it is now",)
_NO_BRANCH: Final[tuple[int, ...]] = ()
# Pieces up to SHORT_ROWS query rows share padded groups; longer slices of a prompt are
# cut so that early rows do not compute scores of keys that only later rows see.
SHORT_ROWS: Final = 16
LONG_ROWS: Final = 256
# Elements of one cache's gathered keys: beyond 2 MiB in bf16 the copy leaves the cache
# and its pages are mapped again in every layer.
MAX_GROUP_ELEMENTS: Final = 1 << 20
# Padding up to this costs less than one more group, about 40 us.
MAX_WASTED_ELEMENTS: Final = 100_000


class _Piece(NamedTuple):
    """Consecutive query rows of one sequence and the key positions they may see.

    `num_tree`: so many of the last keys are those of a draft tree.
    """

    seq_idx: int
    first_row: int
    num_rows: int
    key_start: int
    key_end: int
    num_tree: int = 0

    @property
    def num_keys(self) -> int:
        return self.key_end - self.key_start


class _Queries(NamedTuple):
    """The fields of AttentionMeta by which rows and keys are chosen, on the host.

    `tree_mask` None: there are no trees, and `tree_lens` does not matter.
    """

    query_start: Sequence[int]
    context_lens: Sequence[int]
    tree_mask: Mask | None
    tree_lens: Sequence[int]


class _Grouping(NamedTuple):
    """All of a micro-batch and its layers by which pieces are joined to groups."""

    num_query_rows: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    repeat: int
    sliding_window: int | None
    singly: bool
    """Whether rows of the shortest pieces are computed one by one."""


class _Plan(NamedTuple):
    """All groups of a micro-batch, and the number of its query rows without padding."""

    single: WorkWords | None
    """The rows that are computed one by one, and attend to all keys that they see."""
    by_blocks: bool
    """Whether these attend to latents, in blocks of heads."""
    grouping: _Grouping
    groups: list[PaddedGroup]
    """Of all other rows that attend to all keys that they see; renew() changes them."""
    prompts: PromptWords | None
    """The rows of prompts that are computed in tiles; None: there are none, or in groups."""
    num_rows: int
    retrieval: RetrievalWords | None
    """The rows that attend to the keys that their sequences select."""


def _pieces(queries: _Queries, sliding_window: int | None) -> Iterator[_Piece]:
    query_start, context_lens, tree_mask, tree_lens = queries
    for idx, context_len in enumerate(context_lens):
        start = query_start[idx]
        num_new = query_start[idx + 1] - start
        if tree_mask is not None:
            if num_new:
                yield _tree_piece(idx, start, num_new, context_len, tree_lens[idx], sliding_window)
            continue
        for begin in range(0, num_new, LONG_ROWS):
            num_rows = min(LONG_ROWS, num_new - begin)
            key_end = context_len - num_new + begin + num_rows
            key_start = 0
            if sliding_window is not None:
                key_start = max(0, key_end - num_rows - sliding_window + 1)
            yield _Piece(idx, start + begin, num_rows, key_start, key_end)


def _tree_piece(
    idx: int, start: int, num_new: int, key_end: int, num_tree: int, sliding_window: int | None
) -> _Piece:
    key_start = 0
    if sliding_window is not None:
        key_start = max(0, key_end - num_tree - sliding_window + 1)
    return _Piece(idx, start, num_new, key_start, key_end, num_tree)


def _single_rows(
    pieces: Iterable[_Piece], tree_mask: Mask | None, sliding_window: int | None
) -> list[Row]:
    """Return the rows that are computed one by one, with the keys that each sees."""
    rows = []
    for piece in pieces:
        if piece.num_rows > SINGLE_ROWS:
            continue
        for idx in range(piece.num_rows):
            row = piece.first_row + idx
            num_keys, branch = piece.key_end - piece.num_rows + idx + 1, _NO_BRANCH
            if tree_mask is not None:
                num_keys, branch = _branch(tree_mask[row], piece)
            key_start = 0 if sliding_window is None else max(0, num_keys - sliding_window)
            rows.append(Row(row, piece.seq_idx, key_start, num_keys, branch))
    return rows


def _branch(seen: Mask, piece: _Piece) -> tuple[int, tuple[int, ...]]:
    """Return the number of keys of a tree's row, and the positions of the last, as in Row.

    `seen` is its row of the mask.
    """
    begin = piece.key_end - piece.num_tree
    nodes = seen[: piece.num_tree].nonzero()[0].tolist()
    is_chain = nodes[-1] < len(nodes)
    return begin + len(nodes), _NO_BRANCH if is_chain else tuple(begin + node for node in nodes)


def _join(pieces: Sequence[_Piece], elements_per_key: int) -> list[list[_Piece]]:
    """Join short pieces of similar length; bounds padding and group size."""
    alone = [[piece] for piece in pieces if piece.num_rows > SHORT_ROWS]
    short = [piece for piece in pieces if piece.num_rows <= SHORT_ROWS]
    groups: list[list[_Piece]] = []
    longest = wasted = 0
    for piece in sorted(short, key=lambda p: p.num_keys, reverse=True):
        padding = (longest - piece.num_keys) * elements_per_key
        size = longest * elements_per_key * (len(groups[-1]) + 1) if groups else 0
        if not groups or wasted + padding > MAX_WASTED_ELEMENTS or size > MAX_GROUP_ELEMENTS:
            groups.append([])
            longest, wasted, padding = piece.num_keys, 0, 0
        wasted += padding
        groups[-1].append(piece)
    return alone + [sorted(group, key=lambda p: p.first_row) for group in groups]


def _seen_in_trees(
    pieces: Sequence[_Piece], tree_mask: Tensor, sliding_window: int | None, shape: torch.Size
) -> Tensor:
    """Return the mask of the keys that rows of draft trees see, bool[P, n, L].

    Padding rows see no key; their results are dropped.
    """
    seen = torch.zeros(shape, dtype=torch.bool, device=tree_mask.device)
    for idx, piece in enumerate(pieces):
        rows = slice(piece.first_row, piece.first_row + piece.num_rows)
        seen[idx, : piece.num_rows, : piece.num_keys] = reference.visible(
            piece.num_rows,
            piece.key_end,
            sliding_window=sliding_window,
            tree=tree_mask[rows, : piece.num_tree],
            device=tree_mask.device,
        )[:, piece.key_start :]
    return seen


def _place_prompts(
    pieces: Sequence[_Piece],
    meta: AttentionMeta,
    grouping: _Grouping,
    prompts: PromptWords | None,
) -> list[PaddedGroup]:
    """Give the rows that are not computed one by one to `prompts`; return groups of the others.

    Trees are in groups.
    """
    if prompts is None or meta.tree_mask is not None:
        if prompts is not None:
            prompts.fill((), meta.block_tables)
        return _make_groups(pieces, meta, grouping)
    rows = [
        PromptRows(each.seq_idx, each.first_row, each.num_rows, each.key_end - each.num_rows)
        for each in pieces
        if each.num_rows > SINGLE_ROWS
    ]
    prompts.fill(rows, meta.block_tables)
    return []


def _make_groups(
    pieces: Iterable[_Piece], meta: AttentionMeta, grouping: _Grouping
) -> list[PaddedGroup]:
    """Return the groups of the pieces that are not computed row by row."""
    joined = [each for each in pieces if not grouping.singly or each.num_rows > SINGLE_ROWS]
    elements_per_key = grouping.num_kv_heads * grouping.head_dim
    return [_make_group(each, meta, grouping) for each in _join(joined, elements_per_key)]


def _make_group(pieces: Sequence[_Piece], meta: AttentionMeta, grouping: _Grouping) -> PaddedGroup:
    num_query_rows, block_size, _, _, repeat, sliding_window, _ = grouping
    table = torch.tensor(pieces, dtype=torch.int64)
    seq_idx, first_row, num_rows, key_start, key_end, _ = (c[:, None] for c in table.unbind(1))
    longest_rows, longest_keys = int(num_rows.max()), int((key_end - key_start).max())
    keys, rows = torch.arange(longest_keys), torch.arange(longest_rows)

    key_positions = key_start + keys
    readable = torch.where(key_positions < key_end, key_positions, key_start)
    blocks = meta.block_tables[seq_idx[:, 0]].long().gather(1, readable // block_size)
    slots = blocks * block_size + readable % block_size

    row_in_piece = torch.minimum(rows, num_rows - 1)
    if meta.tree_mask is None:
        query_positions = (key_end - num_rows + row_in_piece)[:, :, None]
        seen = key_positions[:, None] <= query_positions
        if sliding_window is not None:
            seen &= query_positions - key_positions[:, None] < sliding_window
    else:
        shape = torch.Size((len(pieces), longest_rows, longest_keys))
        seen = _seen_in_trees(pieces, meta.tree_mask, sliding_window, shape)

    folded = longest_rows <= SHORT_ROWS
    query_rows = (first_row + row_in_piece).reshape(-1)
    kept = (rows < num_rows).reshape(-1)
    in_order = torch.equal(query_rows, torch.arange(num_query_rows))
    padded = not bool(kept.all())
    return PaddedGroup(
        num_pieces=len(pieces),
        num_rows=longest_rows,
        num_keys=longest_keys,
        slots=slots.reshape(-1),
        rows=None if in_order else query_rows,
        unpadded=kept.nonzero()[:, 0] if padded else None,
        targets=None if in_order else query_rows[kept],
        mask=None
        if bool(seen.all())
        else (seen.repeat_interleave(repeat, 1) if folded else seen)[:, None],
        folded=folded,
    )


def _plan(
    meta: AttentionMeta,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    sliding_window: int | None,
    retrieval: Retrieval | None,
) -> _Plan:
    """Return the plan of this micro-batch; the first layer's call makes it."""
    _, block_size, num_groups, head_dim = k_cache.shape
    repeat = q.shape[1] // num_groups
    singly = can_attend(q, k_cache, meta.block_tables, out)
    by_blocks = singly and can_attend_to_latents(q, k_cache, v_cache)
    memo_key = (
        *(_MEMO, sliding_window, block_size, num_groups, head_dim, repeat),
        *(singly, by_blocks, retrieval is not None),
    )
    if memo_key not in meta.memo:
        queries = _queries(meta)
        pieces = _attending_to_all(queries, sliding_window, retrieval)
        rows = _single_rows(pieces, queries.tree_mask, sliding_window) if singly else []
        grouping = _Grouping(
            q.shape[0], block_size, num_groups, head_dim, repeat, sliding_window, singly
        )
        single = selecting = prompts = None
        has_prompts = singly and meta.max_query_len > SINGLE_ROWS
        if has_prompts and can_attend_prompts(q, k_cache, v_cache):
            prompts = PromptWords(q.shape[1], num_groups, sliding_window)
        groups = _place_prompts(pieces, meta, grouping, prompts)
        heads = HeadShape(q.shape[1], num_groups, head_dim)
        gets_rows = singly and (groups or prompts is not None)  # renew() may give it some
        if rows or retrieval is not None or gets_rows:
            single = WorkWords(heads, divide_heads if by_blocks else None)
            single.fill(plan_work(rows), meta.block_tables)
        if retrieval is not None:
            selecting = RetrievalWords(heads)
            selecting.fill(meta, retrieval)
        num_rows = int(meta.query_start[-1])
        meta.memo[memo_key] = _Plan(
            single, by_blocks, grouping, groups, prompts, num_rows, selecting
        )
    return cast("_Plan", meta.memo[memo_key])


def _queries(meta: AttentionMeta) -> _Queries:
    query_start, mask = meta.query_start.numpy(), meta.tree_mask
    lengths: list[int] = []
    if mask is not None:
        rows = np.diff(query_start) if meta.tree_lens is None else meta.tree_lens.numpy()
        lengths = rows.tolist()
    return _Queries(
        query_start.tolist(),
        meta.context_lens.tolist(),
        None if mask is None else mask.numpy(),
        lengths,
    )


def _attending_to_all(
    queries: _Queries, sliding_window: int | None, retrieval: Retrieval | None
) -> list[_Piece]:
    """Return the pieces of the sequences that select no keys."""
    apart = () if retrieval is None else retrieval.seqs.tolist()
    return [piece for piece in _pieces(queries, sliding_window) if piece.seq_idx not in apart]


def renew(recorded: AttentionMeta, fresh: AttentionMeta) -> None:
    """Let a recorded step, which attended by `recorded`, attend as `fresh` says.

    In both some sequences retrieve, or none; and some have more than SINGLE_ROWS rows, or none.
    """
    assert (recorded.retrieval is None) == (fresh.retrieval is None)
    recorded.memo[_LATEST] = fresh  # for steps with an obstacle, which are called again
    queries = _queries(fresh)
    for key, plan in recorded.memo.items():
        if key[0] != _MEMO:
            continue
        assert isinstance(plan, _Plan)
        window = plan.grouping.sliding_window
        retrieval = None if plan.retrieval is None else fresh.retrieval
        pieces = _attending_to_all(queries, window, retrieval)
        is_singly = plan.grouping.singly
        rows = _single_rows(pieces, queries.tree_mask, window) if is_singly else []
        if plan.single is not None:
            plan.single.fill(plan_work(rows), fresh.block_tables)
        else:
            assert not rows, "a micro-batch without rows stays so"
        plan.groups[:] = _place_prompts(pieces, fresh, plan.grouping, plan.prompts)
        if plan.retrieval is not None and retrieval is not None:
            plan.retrieval.fill(fresh, retrieval)


def selected_keys(q: Tensor, codes: KeyCodes, meta: AttentionMeta, idx: int) -> Tensor:
    """Return what a sequence selected; see `kernels.retrieval.selected_keys`."""
    for plan in meta.memo.values():
        if isinstance(plan, _Plan) and plan.retrieval is not None:
            return plan.retrieval.selected(idx)
    return plain.selected_keys(q, codes, meta, idx)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    codes: KeyCodes | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend to the cached positions; see `kernels.reference.paged_attention`."""
    latent = is_latent(k_cache, v_cache)
    if out is None:
        out = q.new_empty(*q.shape[:2], v_cache.shape[3])
    retrieval = None if codes is None else meta.retrieval
    if codes is not None and retrieval is not None:
        heads = HeadShape(q.shape[1], *k_cache.shape[2:])
        is_known = can_attend(q, k_cache, meta.block_tables, out) and can_search(codes, k_cache)
        if latent or not is_known or heads.num_tiles > 1 or sliding_window is not None:
            assert not retrieval.hot, "keys in a file need a compiled search"
            return reference.paged_attention(
                q,
                k_cache,
                v_cache,
                cast("AttentionMeta", meta.memo.get(_LATEST, meta)),
                scale=scale,
                sliding_window=sliding_window,
                sinks=sinks,
                codes=codes,
                out=out,
            )
    plan = _plan(meta, q, k_cache, v_cache, out, sliding_window, retrieval)
    if plan.num_rows < len(out):
        out[plan.num_rows :] = 0
    if plan.single is not None:
        attend = attend_to_latents if plan.by_blocks else attend_rows
        attend(q, k_cache, v_cache, plan.single, out, scale=scale, sinks=sinks)
    if codes is not None and plan.retrieval is not None:
        ended = None if retrieval is None else retrieval.ended
        words = plan.retrieval
        attend_selected(
            q, k_cache, v_cache, codes, words, out, scale=scale, sinks=sinks, ended=ended
        )
    if plan.prompts is not None:
        attend_prompts(q, k_cache, v_cache, plan.prompts, out, scale=scale, sinks=sinks)
    if plan.groups or meta.max_query_len > SINGLE_ROWS:  # renew() may give it some
        values = k_cache if latent else v_cache

        def attend_groups() -> None:
            for group in plan.groups:
                attend_group(q, k_cache, values, group, out, scale=scale, sinks=sinks)

        call_again(attend_groups)
    return out

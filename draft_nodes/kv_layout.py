"""The places of the rows of each sequence in a draft model's cache.

Owns the blocks of each sequence, and in them `[verified prefix][live tree]`: the rows of tokens
that are certain, then those of a token tree, ancestors first. A re-rooted tree's survivors move
behind the longer prefix; a row's position in the text does not change by that. Knows no tensors
and no tokens' meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attention_nodes.step.step_inputs import Slices
from spec_decode.draft import ROOT
from spec_decode.forest import Kept, PassRows

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class _CachedSequence:
    """`seen` bool[n, n] of the n rows of the live tree: whether row j is i or an ancestor of it."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.blocks: list[int] = []
        self.num_verified = 0
        self.seen: BoolArray = np.zeros((0, 0), dtype=bool)

    @property
    def num_rows(self) -> int:
        return self.num_verified + len(self.seen)

    def grow(self, parents: Sequence[int]) -> None:
        """Add rows to the live tree."""
        old, count = len(self.seen), len(parents)
        seen = np.zeros((old + count, old + count), dtype=bool)
        seen[:old, :old] = self.seen
        if _is_chain(parents, ROOT if not old else None):
            seen[:] = np.tri(count, dtype=bool)
        else:
            for place, parent in enumerate(parents, old):
                assert ROOT <= parent < place, f"row {place} follows {parent}"
                if parent != ROOT:
                    seen[place] = seen[parent]
                seen[place, place] = True
        self.seen = seen


class KvLayout:
    """The rows of all sequences in `num_blocks` blocks of `block_size`."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._sequences: dict[int, _CachedSequence] = {}

    @property
    def num_free(self) -> int:
        """Return the blocks that no sequence has."""
        return len(self._free)

    def open(self, seq_id: int, *, num_prompt: int) -> None:
        """Begin a sequence without rows."""
        assert seq_id not in self._sequences
        self._sequences[seq_id] = _CachedSequence(num_prompt)

    def drop(self, seq_id: int) -> None:
        """Forget a sequence; its blocks are free again."""
        self._free += self._sequences.pop(seq_id).blocks

    def reserve(self, seq_id: int, num_rows: int) -> bool:
        """Give a sequence the blocks for `num_rows` more rows; False: too few are free."""
        own = self._sequences[seq_id]
        lacking = -(-(own.num_rows + num_rows) // self._block_size) - len(own.blocks)
        if lacking > len(self._free):
            return False
        for _ in range(lacking):
            own.blocks.append(self._free.pop())
        return True

    def place(self, rows: Sequence[PassRows]) -> Slices:
        """Add `rows`, for which there is room, to the live trees of their sequences."""
        known = [self._sequences[each.seq_id] for each in rows]
        counts = np.array([len(each.tokens) for each in rows], dtype=np.int64)
        for own, each in zip(known, rows, strict=True):
            own.grow(each.parents)
        ends = np.array([own.num_rows for own in known], dtype=np.int64)
        query_start = np.concatenate(([0], counts.cumsum()))
        storage = np.concatenate(
            [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        )
        tables = np.zeros((len(rows), max(len(own.blocks) for own in known)), dtype=np.int32)
        for idx, own in enumerate(known):
            tables[idx, : len(own.blocks)] = own.blocks
        seq = np.arange(len(rows)).repeat(counts)
        size = self._block_size
        first_wanted = query_start[1:] - [each.num_wanted for each in rows]
        mask = _tree_mask(known, counts)
        return Slices(
            counts=counts,
            tokens=np.array([token for each in rows for token in each.tokens], dtype=np.int64),
            positions=np.concatenate(
                [own.num_verified - 1 + own.seen[-n:].sum(1) for own, n in _zip(known, counts)]
            ),
            prompt_lens=np.array([own.num_prompt for own in known]).repeat(counts),
            kv_slots=tables[seq, storage // size].astype(np.int64) * size + storage % size,
            query_start=query_start.astype(np.int32),
            context_lens=ends.astype(np.int32),
            block_tables=tables,
            tree_mask=mask,
            tree_lens=None
            if mask is None
            else np.array([len(own.seen) for own in known], dtype=np.int32),
            sample_rows=np.concatenate(
                [np.arange(a, b) for a, b in zip(first_wanted, query_start[1:], strict=True)]
            ),
        )

    def keep(self, kept: Sequence[Kept]) -> tuple[IntArray, IntArray]:
        """Lengthen prefixes and shrink live trees.

        Returns the cache slots to copy, and to where, as if all at once; sources may be targets.
        """
        sources: list[int] = []
        targets: list[int] = []
        for each in kept:
            own = self._sequences[each.seq_id]
            places = [*each.verified, *each.kept]
            for target, place in enumerate(places):
                if place != target:
                    sources.append(self._slot(own, own.num_verified + place))
                    targets.append(self._slot(own, own.num_verified + target))
            own.num_verified += len(each.verified)
            chosen = np.array(each.kept, dtype=np.int64)
            own.seen = own.seen[np.ix_(chosen, chosen)]
        return np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64)

    def slots_of(self, seq_id: int) -> IntArray:
        """Return the slots of a sequence's verified rows."""
        own = self._sequences[seq_id]
        return np.array([self._slot(own, row) for row in range(own.num_verified)], dtype=np.int64)

    def _slot(self, own: _CachedSequence, row: int) -> int:
        block, offset = divmod(row, self._block_size)
        return own.blocks[block] * self._block_size + offset


def _zip(known: Sequence[_CachedSequence], counts: IntArray) -> zip[tuple[_CachedSequence, int]]:
    return zip(known, counts.tolist(), strict=True)


def _is_chain(parents: Sequence[int], first: int | None) -> bool:
    return first is not None and tuple(parents) == tuple(range(first, first + len(parents)))


def _tree_mask(known: Sequence[_CachedSequence], counts: IntArray) -> BoolArray | None:
    """Return the rows' mask of their live trees; None if each row sees all rows before it."""
    new = [own.seen[-n:] for own, n in _zip(known, counts)]
    if all(each.sum() == _num_causal(*each.shape) for each in new):
        return None
    mask = np.zeros((int(counts.sum()), max(len(own.seen) for own in known)), dtype=bool)
    begin = 0
    for each in new:
        mask[begin : begin + len(each), : each.shape[1]] = each
        begin += len(each)
    return mask


def _num_causal(num_new: int, num_rows: int) -> int:
    """Return how many keys the last `num_new` rows of a chain of `num_rows` see."""
    return num_new * num_rows - num_new * (num_new - 1) // 2

"""Argument block of the search kernels, for each layer of a micro-batch.

Owns the arguments of these kernels behind those of `kernels.cpu.compiled.attention.keys`, the words
that describe a search, and its scratch memory. A unit is a segment that a key/value head of a
sequence searches; units of a sequence's head lie one behind the other, by ascending position. Where
only the best segments are searched, the kernel writes which. A list has the offsets in the caches
of all keys that the last row of a sequence attends to with one key/value head, by ascending
position: num_sinks first ones, the selected ones, those behind the coded ones; earlier rows see
less of its end. Which keys are selected is not known before the layer's queries are; how many, is.
Knows no codes. Used by `kernels.cpu.attention`, once per micro-batch.

Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.contracts import (
    NUM_CENTROIDS,
    NUM_SUBSPACES,
    SEGMENT_KEYS,
    AttentionMeta,
    HotKeys,
    Retrieval,
)
from kernels.cpu.attention_rows import Row, plan_work
from kernels.cpu.compiled.attention.keys import NUM_ARGUMENTS
from kernels.cpu.compiled.attention.rows import HeadShape, WorkWords
from kernels.cpu.compiled.runtime import inlined, offsets
from kernels.cpu.simd import lanes as simd

CENTROIDS, CODES, SUMMARIES, LAYER, SEARCH = offsets(NUM_ARGUMENTS + 5)[NUM_ARGUMENTS:]
"""The kernels' further arguments; SEARCH is the address of the words."""

(
    SEQS, NUM_SEQS, UNITS, NUM_UNITS, PLACES, SUMMARY_SCORES, NUM_SINKS, TABLES, BOUNDS, SCORES,
    POSITIONS, LISTS,
) = range(0, 96, 8)  # fmt: skip
"""Offsets in the words: addresses and numbers. PLACES (i64) are those of segments in KeyCodes."""

(
    FIRST_ROW, NUM_ROWS, SEQ_IDX, CONTEXT_LEN, CODED_END, NUM_SELECTED, SUMMARISED, KEPT,
    FIRST_PLACE, FIRST_UNIT, HEAD_UNITS, FIRST_TABLE, FIRST_POSITION, FIRST_LISTED, NUM_LISTED, HOT,
) = range(0, 128, 8)  # fmt: skip
"""Offsets in the words of a sequence at SEQS. Of SUMMARISED segments each head searches KEPT; it
has HEAD_UNITS units. FIRST_TABLE counts tables of one query head, FIRST_POSITION and FIRST_LISTED
entries at POSITIONS (i32) and LISTS (i64). HOT is the address of the words of its HotKeys; 0: it
has none."""
SEQ_BYTES: Final = 128

(
    HOT_FILE, HOT_RECORDS, HOT_CACHE_LAYERS, HOT_SLOTS, HOT_ENTRIES, HOT_TOKENS, HOT_USED,
    HOT_CLOCKS, HOT_COUNTS, NUM_HOT_TOKENS, NUM_HOT_ENTRIES,
) = range(0, 88, 8)  # fmt: skip
"""Offsets at HOT: the fields of HotKeys, the tokens that `entries` are for, and E."""

UNIT_SEQ, UNIT_GROUP, UNIT_NUMBER, UNIT_PLACE = range(0, 32, 8)
"""Offsets in the words of a unit at UNITS: its sequence here and its head, the segment's number in
that sequence, and its place in KeyCodes."""
UNIT_BYTES: Final = 32


@inlined
def seq_of(block: int, number: int) -> int:
    """Return the address of the words of a sequence, for the kernels."""
    search = simd.read_i64(block + SEARCH)
    address: int = simd.read_i64(search + SEQS) + SEQ_BYTES * number
    return address


@inlined
def unit_of(block: int, number: int) -> int:
    """Return the address of the words of a unit, for the kernels."""
    address: int = simd.read_i64(simd.read_i64(block + SEARCH) + UNITS) + UNIT_BYTES * number
    return address


class RetrievalWords:
    """The searches of a micro-batch and the rows that attend to what they find.

    A recorded step reads them at their address, so that each replay searches its own keys.
    """

    def __init__(self, heads: HeadShape) -> None:
        self._heads = heads
        self.work = WorkWords(heads)
        """The rows; the sequence of a piece is its number at SEQS, its keys those of a list."""
        self._words = torch.zeros(12, dtype=torch.int64)
        self._read: tuple[Tensor, ...] = ()
        self._hot: list[Tensor | None] = []
        self.has_file = False
        """Whether selected keys may be in a file; the same for all retrievals of a node."""
        self._tables = torch.empty(0)
        self._scores = torch.empty(0, dtype=torch.int16)
        self.positions = torch.empty(0, dtype=torch.int32)
        """Those selected in the last layer: by sequence [G, number], one behind the other."""

    @property
    def address(self) -> int:
        """Return the address of the words."""
        return self._words.data_ptr()

    def selected(self, idx: int) -> Tensor:
        """Return what sequence `idx` of the retrieval, all of which have rows, selected last.

        Keys i64[G, number].
        """
        words = self._read[0][idx]
        count, first = int(words[NUM_SELECTED // 8]), int(words[FIRST_POSITION // 8])
        num_groups = self._heads.num_kv_heads
        return self.positions[first : first + num_groups * count].long().view(num_groups, count)

    def fill(self, meta: AttentionMeta, retrieval: Retrieval) -> None:
        """Write the work of the next launches; keeps what they read."""
        num_sinks, num_groups = retrieval.num_sinks, self._heads.num_kv_heads
        self.has_file = bool(retrieval.hot)
        repeat = self._heads.num_heads // num_groups
        starts, lens = meta.query_start.tolist(), meta.context_lens.tolist()
        seqs: list[tuple[int, ...]] = []
        units: list[tuple[int, int, int, int]] = []
        places_of: list[int] = []
        rows: list[Row] = []
        num_tables = num_positions = num_listed = 0
        hot_words = [None if each is None else _hot_words(each) for each in retrieval.hot]
        for seq, places, end, budget, summarised, kept, hot in zip(
            retrieval.seqs.tolist(),
            retrieval.segments.tolist(),
            retrieval.coded_end.tolist(),
            retrieval.budgets.tolist(),
            retrieval.summarised.tolist(),
            retrieval.kept.tolist(),
            hot_words or [None] * len(retrieval.seqs),
            strict=True,
        ):
            num_rows = starts[seq + 1] - starts[seq]
            if num_rows == 0:
                continue
            number, num_segments = len(seqs), -(-end // SEGMENT_KEYS)
            num_selected = min(budget, end - num_sinks)
            assert kept == summarised or kept * SEGMENT_KEYS >= num_sinks + num_selected
            searched = [*range(kept), *range(summarised, num_segments)]
            length = num_sinks + num_selected + lens[seq] - end
            seqs.append(
                (
                    starts[seq],
                    num_rows,
                    seq,
                    lens[seq],
                    end,
                    num_selected,
                    summarised,
                    kept,
                    len(places_of),
                    len(units),
                    len(searched),
                    num_tables,
                    num_positions,
                    num_listed,
                    length,
                    0 if hot is None else hot.data_ptr(),
                )
            )
            units += [
                (number, group, idx, places[idx]) for group in range(num_groups) for idx in searched
            ]
            # In whole vectors, as their scores are written.
            places_of += [*places[:summarised], *[0] * (-summarised % simd.LANES)]
            rows += [
                Row(starts[seq] + row, number, 0, length - num_rows + 1 + row)
                for row in range(num_rows)
            ]
            num_tables += num_groups * len(searched) * num_rows * repeat
            num_positions += num_groups * num_selected
            num_listed += num_groups * length
        self.work.fill(plan_work(rows), meta.block_tables)
        seq_words = torch.tensor(seqs, dtype=torch.int64)
        unit_words = torch.tensor(units, dtype=torch.int64)
        place_words = torch.tensor(places_of, dtype=torch.int64)
        summary_scores = torch.empty(num_groups * len(places_of))
        self._tables = _as_long(self._tables, num_tables * NUM_SUBSPACES * NUM_CENTROIDS)
        self._scores = _as_long(self._scores, len(units) * SEGMENT_KEYS)
        bounds = torch.empty(len(units))
        self.positions = torch.empty(num_positions, dtype=torch.int32)
        lists = torch.empty(num_listed, dtype=torch.int64)
        self._read = (seq_words, unit_words, place_words, summary_scores, bounds, lists)
        self._hot = hot_words
        self._words.numpy()[:] = (
            seq_words.data_ptr(),
            len(seqs),
            unit_words.data_ptr(),
            len(units),
            place_words.data_ptr(),
            summary_scores.data_ptr(),
            num_sinks,
            self._tables.data_ptr(),
            bounds.data_ptr(),
            self._scores.data_ptr(),
            self.positions.data_ptr(),
            lists.data_ptr(),
        )


def _hot_words(hot: HotKeys) -> Tensor:
    """Return the words at HOT."""
    tensors = (
        hot.records,
        hot.cache_layers,
        hot.slots,
        hot.entries,
        hot.tokens,
        hot.used,
        hot.clocks,
        hot.counts,
    )
    assert all(each.is_contiguous() for each in tensors)
    addresses = [each.data_ptr() for each in tensors]
    return torch.tensor([hot.fd, *addresses, hot.entries.shape[2], len(hot.slots)])


def _as_long(scratch: Tensor, length: int) -> Tensor:
    """Return memory of at least `length` numbers, `scratch` if that has them.

    New memory of some hundred KB is mapped page by page, which takes as long as using it.
    """
    return scratch if len(scratch) >= length else scratch.new_empty(length + length // 8)

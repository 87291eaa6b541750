"""What the kernels of retrieval do in each layer of a micro-batch, in memory.

Owns the arguments of these kernels behind those of `kernels.cpu.compiled.attention_keys`, the words
that describe a search, and its scratch memory. A unit is a segment of a sequence for one key/value
head; units of a sequence's head lie one behind the other. A list has the offsets in the caches of
all keys that the last row of a sequence attends to with one key/value head, by ascending
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
from kernels.cpu.compiled.attention import HeadShape, WorkWords
from kernels.cpu.compiled.attention_keys import NUM_ARGUMENTS
from kernels.cpu.compiled.runtime import inlined, offsets
from kernels.cpu.simd import lanes as simd

CENTROIDS, CODES, LAYER, SEARCH = offsets(NUM_ARGUMENTS + 4)[NUM_ARGUMENTS:]
"""The kernels' further arguments; SEARCH is the address of the words."""

(
    SEQS, NUM_SEQS, SEGMENTS, NUM_SEGMENTS, NUM_SINKS, TABLES, BOUNDS, SCORES, POSITIONS, LISTS,
) = range(0, 80, 8)  # fmt: skip
"""Offsets in the words: addresses and numbers."""

(
    FIRST_ROW, NUM_ROWS, SEQ_IDX, CONTEXT_LEN, CODED_END, NUM_SELECTED, FIRST_SEGMENT,
    SEQ_SEGMENTS, FIRST_TABLE, FIRST_POSITION, FIRST_LISTED, NUM_LISTED, HOT,
) = range(0, 104, 8)  # fmt: skip
"""Offsets in the words of a sequence at SEQS. FIRST_TABLE counts tables of one query head,
FIRST_POSITION and FIRST_LISTED entries at POSITIONS (i32) and LISTS (i64). HOT is the address of
the words of its HotKeys; 0: it has none."""
SEQ_BYTES: Final = 104

(
    HOT_FILE, HOT_RECORDS, HOT_CACHE_LAYERS, HOT_SLOTS, HOT_ENTRIES, HOT_TOKENS, HOT_USED,
    HOT_CLOCKS, HOT_COUNTS, NUM_HOT_TOKENS, NUM_HOT_ENTRIES,
) = range(0, 88, 8)  # fmt: skip
"""Offsets at HOT: the fields of HotKeys, the tokens that `entries` are for, and E."""

SEGMENT_SEQ, SEGMENT_NUMBER, SEGMENT_PLACE = range(0, 24, 8)
"""Offsets in the words of a segment at SEGMENTS: its sequence here, its number in that, and its
place in KeyCodes."""
SEGMENT_BYTES: Final = 24


@inlined
def seq_of(block: int, number: int) -> int:
    """Return the address of the words of a sequence, for the kernels."""
    search = simd.read_i64(block + SEARCH)
    address: int = simd.read_i64(search + SEQS) + SEQ_BYTES * number
    return address


class RetrievalWords:
    """The searches of a micro-batch and the rows that attend to what they find.

    A recorded step reads them at their address, so that each replay searches its own keys.
    """

    def __init__(self, heads: HeadShape) -> None:
        self._heads = heads
        self.work = WorkWords(heads)
        """The rows; the sequence of a piece is its number at SEQS, its keys those of a list."""
        self._words = torch.zeros(10, dtype=torch.int64)
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
        segments: list[tuple[int, int, int]] = []
        rows: list[Row] = []
        num_tables = num_positions = num_listed = 0
        hot_words = [None if each is None else _hot_words(each) for each in retrieval.hot]
        for seq, places, end, budget, hot in zip(
            retrieval.seqs.tolist(),
            retrieval.segments.tolist(),
            retrieval.coded_end.tolist(),
            retrieval.budgets.tolist(),
            hot_words or [None] * len(retrieval.seqs),
            strict=True,
        ):
            num_rows = starts[seq + 1] - starts[seq]
            if num_rows == 0:
                continue
            number, num_segments = len(seqs), -(-end // SEGMENT_KEYS)
            num_selected = min(budget, end - num_sinks)
            length = num_sinks + num_selected + lens[seq] - end
            seqs.append(
                (
                    starts[seq],
                    num_rows,
                    seq,
                    lens[seq],
                    end,
                    num_selected,
                    len(segments),
                    num_segments,
                    num_tables,
                    num_positions,
                    num_listed,
                    length,
                    0 if hot is None else hot.data_ptr(),
                )
            )
            segments += [(number, idx, place) for idx, place in enumerate(places[:num_segments])]
            rows += [
                Row(starts[seq] + row, number, 0, length - num_rows + 1 + row)
                for row in range(num_rows)
            ]
            num_tables += num_groups * num_segments * num_rows * repeat
            num_positions += num_groups * num_selected
            num_listed += num_groups * length
        self.work.fill(plan_work(rows), meta.block_tables)
        seq_words = torch.tensor(seqs, dtype=torch.int64)
        segment_words = torch.tensor(segments, dtype=torch.int64)
        num_units = len(segments) * num_groups
        self._tables = _as_long(self._tables, num_tables * NUM_SUBSPACES * NUM_CENTROIDS)
        self._scores = _as_long(self._scores, num_units * SEGMENT_KEYS)
        bounds = torch.empty(num_units)
        self.positions = torch.empty(num_positions, dtype=torch.int32)
        lists = torch.empty(num_listed, dtype=torch.int64)
        self._read, self._hot = (seq_words, segment_words, bounds, lists), hot_words
        self._words.numpy()[:] = (
            seq_words.data_ptr(),
            len(seqs),
            segment_words.data_ptr(),
            len(segments),
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

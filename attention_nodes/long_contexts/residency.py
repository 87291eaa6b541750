"""The keys and values in memory, step by step, where a file holds the others.

Owns the frames of the cache, the file (or what serves as one), and the frames for copies of
selected keys of each sequence of which some are in the file. Before a step it moves blocks so that
all that the step writes or attends to whole is in memory, and puts frames in the place of blocks.
Sequences whose keys cannot be written or read are reported, and compute with an unused frame;
nothing else is disturbed. Knows no codes.
Called by contexts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from attention_nodes.long_contexts.frames import NO_FRAME, FrameTable, Moves
from attention_nodes.long_contexts.spill_store import SpillStore
from attention_nodes.step.kv_cache import KvCache
from attention_nodes.step.sequences import IntArray, SequenceTable
from attention_nodes.step.step_inputs import Slices
from kernels.contracts import SEGMENT_KEYS, HostKeys
from topspin.messages import KvCounts
from topspin.plan.retrieval import RetrievalPolicy
from topspin.processes.progress import Beat, no_beat

_NOTHING: Final = np.zeros(0, dtype=np.int64)
_UNREAD: Final = "keys and values of this request could not be written to --kv-spill-dir, or read"
_NO_ROOM: Final = "keys and values of this request have no place in --kv-cache-memory"


class _Slice(NamedTuple):
    """A sequence in a step and its blocks, of which begin <= i < end are only searched."""

    row: int
    blocks: IntArray
    begin: int
    end: int

    @property
    def needed(self) -> IntArray:
        """Return the blocks that must be in memory."""
        return np.concatenate([self.blocks[: self.begin], self.blocks[self.end :]])

    @property
    def searched(self) -> IntArray:
        """Return the others."""
        return self.blocks[self.begin : self.end]


class Residency:
    """The frames of one attention node."""

    def __init__(
        self,
        cache: KvCache,
        file: SpillStore,
        table: SequenceTable,
        policy_of: Callable[[int], RetrievalPolicy | None],
        *,
        num_blocks: int,
    ) -> None:
        """`policy_of` a sequence's row is its retrieval.

        The last frame of `cache` takes what has no other place, and is read by nobody.
        """
        self._cache = cache
        self._file = file
        self._table = table
        self._policy_of = policy_of
        self._spare = cache.num_blocks - 1
        self.frames = FrameTable(num_blocks, self._spare)
        self._lent: dict[int, IntArray] = {}
        self._searched: list[int] = []
        self._counts = KvCounts()
        self._lost: list[IntArray] = []
        self._beat: Beat = no_beat

    def no_keys(self) -> HostKeys | None:
        """Return what kernels are warmed up with; None: nothing."""
        return self._file.no_keys()

    def take_lost(self) -> IntArray:
        """Return the blocks that were lost since the last call."""
        lost, self._lost = self._lost, []
        return np.unique(np.concatenate([_NOTHING, *lost]))

    def take_counts(self) -> KvCounts:
        """Return the counts since the last call."""
        counts, self._counts = self._counts, KvCounts()
        return counts

    def overwrite(self, blocks: IntArray) -> None:
        """Learn that these blocks get another content."""
        self.frames.overwrite(blocks)

    def end(self, rows: IntArray) -> None:
        """Forget the sequences in `rows` of the table."""
        for row in rows.tolist():
            self._end(row)

    def _end(self, row: int) -> None:
        if row in self._lent:
            self._file.forget(row)
            self.frames.take_back(self._lent.pop(row))

    def slots(self, slots: IntArray) -> IntArray:
        """Return the slots in memory of slots of blocks; what has none gets the spare frame's."""
        size = self._cache.block_size
        frames = self.frames.frame_of[slots // size]
        placed: IntArray = np.where(frames == NO_FRAME, self._spare, frames) * size + slots % size
        return placed

    def place(
        self, micro_batches: Sequence[Slices], beat: Beat = no_beat
    ) -> tuple[list[Slices], dict[int, str]]:
        """Return a step's micro-batches with frames for blocks, all that they need in memory.

        And, by sequence id, why sequences fail. Before the step; `beat` is called as blocks are
        moved.
        """
        self._beat = beat
        self._note_ahead()
        by_part = [self._slices(part) for part in micro_batches]
        slices = list(chain.from_iterable(by_part))
        for each in slices:
            if not len(each.searched):
                self._end(each.row)  # it attends to all
        needed = self._needed(slices)
        self._lend(slices, needed)
        self._apply(self.frames.require(needed))
        self._save_ahead(needed)
        errors = {}
        for each in slices:
            reason = self._reason(each)
            if reason is not None:
                errors[int(self._table.seq_id_of[each.row])] = reason
        self._searched = [each.row for each in slices if len(each.searched)]
        placed = [self._placed(*each) for each in zip(micro_batches, by_part, strict=True)]
        return placed, errors

    def _needed(self, slices: Sequence[_Slice]) -> IntArray:
        """Return the blocks to have in memory: of all sequences, or of the first ones that fit."""
        needed = np.unique(np.concatenate([_NOTHING, *(each.needed for each in slices)]))
        if len(needed) <= self.frames.room:
            return needed
        needed = _NOTHING
        for each in slices:
            more = np.union1d(needed, each.needed)
            needed = more if len(more) <= self.frames.room else needed
        return needed

    def _slices(self, part: Slices) -> list[_Slice]:
        """Return what each sequence of a micro-batch needs."""
        ends: dict[int, int] = {}
        if part.retrieval is not None:
            seqs, coded = part.retrieval.seqs.tolist(), part.retrieval.coded_end.tolist()
            ends = dict(zip(seqs, coded, strict=True))
        size, found = self._cache.block_size, []
        for idx, (row, length) in enumerate(
            zip(part.rows.tolist(), part.context_lens.tolist(), strict=True)
        ):
            blocks = self._table.block_tables[row, 0, : -(-length // size)].astype(np.int64)
            begin = end = 0
            policy = self._policy_of(row) if idx in ends else None
            if policy is not None and length > policy.num_resident:
                begin = -(-policy.num_sinks // size)
                end = max(ends[idx] // SEGMENT_KEYS * SEGMENT_KEYS // size, begin)
            found.append(_Slice(row, blocks, begin, end))
        return found

    def _lend(self, slices: Sequence[_Slice], needed: IntArray) -> None:
        """Give frames for copies to sequences of which some searched blocks are in the file.

        Those included that would lose some to this step's needs.
        """
        frame_of = self.frames.frame_of
        waiting = [each for each in slices if len(each.searched) and each.row not in self._lent]
        while waiting:
            leaving = self.frames.victims(needed, 0)
            lacking = [
                each
                for each in waiting
                if (frame_of[each.searched] == NO_FRAME).any()
                or np.isin(each.searched, leaving).any()
            ]
            if not lacking:
                return
            first = lacking[0]
            waiting = [each for each in waiting if each is not first]
            policy = self._policy_of(first.row)
            assert policy is not None
            size = self._cache.block_size
            frames, moves = self.frames.lend(-(-self._file.num_copies(policy) // size), needed)
            self._apply(moves)
            if frames is not None:
                self._lent[first.row] = frames
                slots = (frames[:, None] * size + np.arange(size)).reshape(-1)
                max_blocks = -(-int(self._table.max_length[first.row]) // size)
                self._file.lend(first.row, slots, max_blocks)

    def _apply(self, moves: Moves) -> None:
        """Move contents; what could not be moved is lost."""
        unsaved = self._file.save(moves.saved, moves.saved_from, self._beat)
        unread = self._file.load(moves.loaded, moves.loaded_to, self._beat)
        self._lose(unsaved)
        self._lose(unread)
        self._counts += KvCounts(
            num_saved_blocks=len(moves.saved) - len(unsaved),
            num_loaded_blocks=len(moves.loaded) - len(unread),
        )

    def _note_ahead(self) -> None:
        """Learn what was written while steps ran."""
        saved = self._file.take_ahead()
        self.frames.saved_ahead(saved)
        self._counts += KvCounts(num_saved_blocks=len(saved))

    def _save_ahead(self, needed: IntArray) -> None:
        """Begin to write what will probably give up its frames in the next step."""
        if self._file.is_writing:
            return
        self._note_ahead()
        blocks = self.frames.next_to_save(needed, self._file.most_ahead)
        if len(blocks):
            self._file.save_ahead(blocks, self.frames.frame_of[blocks])

    def _reason(self, needs: _Slice) -> str | None:
        """Return why a sequence cannot be computed; None: it can."""
        frames = self.frames
        lost = needs.blocks[frames.is_lost[needs.blocks]]
        if len(lost):
            self._lost.append(lost)  # told again: a report may be lost with its step
            return _UNREAD
        in_file = frames.frame_of[needs.searched] == NO_FRAME
        lacks_copies = in_file.any() and needs.row not in self._lent
        if lacks_copies or (frames.frame_of[needs.needed] == NO_FRAME).any():
            return _NO_ROOM
        return None

    def _lose(self, blocks: IntArray) -> None:
        self.frames.lose(blocks)
        self._lost.append(blocks)

    def _placed(self, part: Slices, slices: Sequence[_Slice]) -> Slices:
        """Return a micro-batch with frames in the place of blocks.

        Only blocks that kernels look for among the copies keep NO_FRAME.
        """
        frame_of, size = self.frames.frame_of, self._cache.block_size
        written = np.unique(part.kv_slots // size)
        has_frame = frame_of[written] != NO_FRAME
        self.frames.write(written[has_frame])
        self._lose(written[~has_frame])
        tables = frame_of[part.block_tables].astype(np.int32)
        for table, each in zip(tables, slices, strict=True):
            has_copies = each.row in self._lent
            for some in (table[: each.begin], table[each.end :]) if has_copies else (table,):
                some[some == NO_FRAME] = self._spare
        retrieval = part.retrieval
        if retrieval is not None:
            searching = [slices[seq] for seq in retrieval.seqs.tolist()]
            retrieval = self._file.told(
                retrieval,
                [(each.row, each.blocks) if each.row in self._lent else None for each in searching],
            )
        return part._replace(
            kv_slots=self.slots(part.kv_slots), block_tables=tables, retrieval=retrieval
        )

    def failures(self) -> dict[int, str]:
        """Return, by sequence id, why sequences of the ended step fail; counts its reads."""
        errors = {}
        for row in self._searched:
            if row not in self._lent:
                continue
            hits, misses, unread = self._file.take_reads(row)
            self._counts += KvCounts(num_hot_keys=hits, num_read_keys=misses)
            if unread:
                errors[int(self._table.seq_id_of[row])] = _UNREAD
        return errors

    def close(self) -> None:
        """Close the file."""
        self._file.close()

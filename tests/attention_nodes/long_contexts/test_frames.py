"""Blocks and frames, against a model that keeps every content."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from attention_nodes.long_contexts.frames import FrameTable, Moves
from attention_nodes.step.sequences import IntArray

NUM_BLOCKS, NUM_FRAMES = 12, 6


def array(blocks: object) -> IntArray:
    return np.array(sorted(blocks), dtype=np.int64)  # type: ignore[call-overload]


class Frames(RuleBasedStateMachine):
    """Frames and a file hold numbers; a block must always be found with its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = FrameTable(NUM_BLOCKS, NUM_FRAMES)
        self.frames: list[int | None] = [None] * NUM_FRAMES
        self.file: dict[int, int | None] = {}
        self.contents: dict[int, int] = {}
        self.lent: list[IntArray] = []
        self.ahead: dict[int, int | None] = {}
        """What is being written, or was and is not known to be (`is_written`)."""
        self.is_written = False
        self.next = 0

    def move(self, moves: Moves) -> None:
        if len(moves.saved):
            self.write_ahead()  # writes do not overtake each other
        for block, frame in zip(moves.saved.tolist(), moves.saved_from.tolist(), strict=True):
            self.file[block] = self.frames[frame]
        for block, frame in zip(moves.loaded.tolist(), moves.loaded_to.tolist(), strict=True):
            self.frames[frame] = self.file[block]

    @rule(
        needed=st.sets(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_FRAMES + 1),
        fresh=st.sets(st.integers(0, NUM_BLOCKS - 1)),
        written=st.sets(st.integers(0, NUM_BLOCKS - 1)),
    )
    def step(self, needed: set[int], fresh: set[int], written: set[int]) -> None:
        self.table.overwrite(array(fresh))
        for block in fresh:
            self.contents.pop(block, None)
        assert self.table.room == NUM_FRAMES - sum(map(len, self.lent))
        found = set(sorted(needed)[: self.table.room])
        moves = self.table.require(array(found))
        self.move(moves)
        if not self.ahead:
            self.is_written = False
            for block in self.table.next_to_save(array(found), 2).tolist():
                assert block not in found
                self.ahead[block] = self.frames[self.table.frame_of[block]]
        for block in found & self.contents.keys():
            assert self.frames[self.table.frame_of[block]] == self.contents[block]
        self.table.write(array(found & written))
        for block in found & written:
            self.contents[block] = self.next
            self.frames[self.table.frame_of[block]] = self.next
            self.next += 1

    @rule(count=st.integers(1, 3), needed=st.sets(st.integers(0, NUM_BLOCKS - 1), max_size=3))
    def lend(self, count: int, needed: set[int]) -> None:
        frames, moves = self.table.lend(count, array(needed))
        self.move(moves)
        if frames is None:
            assert len(needed) + count > self.table.room
            return
        assert len(frames) == count
        for frame in frames.tolist():
            self.frames[frame] = None
        self.lent.append(frames)

    @rule()
    def write_ahead(self) -> None:
        if not self.is_written:
            self.file.update(self.ahead)
        self.is_written = True

    @rule()
    def note_ahead(self) -> None:
        if self.is_written:
            self.table.saved_ahead(array(self.ahead))
            self.ahead = {}

    @rule()
    def take_back(self) -> None:
        if self.lent:
            self.table.take_back(self.lent.pop())

    @invariant()
    def every_content_is_somewhere(self) -> None:
        self.table.check_integrity()
        for block, content in self.contents.items():
            frame = int(self.table.frame_of[block])
            assert (self.frames[frame] if frame >= 0 else self.file[block]) == content


Frames.TestCase.settings = settings(max_examples=15, stateful_step_count=30)
TestFrames = Frames.TestCase


def test_the_longest_not_needed_leaves_first_and_is_written_once() -> None:
    table = FrameTable(6, 3)
    for block in (0, 1, 2):
        table.require(array([block]))
        table.write(array([block]))
    table.require(array([0]))
    assert table.victims(array([3]), 0).tolist() == [1]
    moves = table.require(array([3]))
    assert moves.saved.tolist() == [1]
    assert moves.loaded.tolist() == []
    table.write(array([3]))
    assert table.require(array([1])).saved.tolist() == [2]
    # Block 1 is in the file as it is in memory.
    moves = table.require(array([0, 3, 2]))
    assert moves.saved.tolist() == []
    assert moves.loaded.tolist() == [2]


def test_what_leaves_next_is_written_ahead() -> None:
    table = FrameTable(8, 4)
    for block in range(4):
        table.require(array([block]))
        table.write(array([block]))
        assert not len(table.next_to_save(array([block]), 4)), "nothing had to leave"
    table.require(array([4, 5]))
    table.write(array([4, 5]))
    assert table.next_to_save(array([4, 5]), 4).tolist() == [2, 3]
    table.write(array([3]))  # after its content was taken
    table.saved_ahead(array([2, 3]))
    assert table.require(array([6, 7])).saved.tolist() == [3]


def test_what_is_lost_is_neither_read_nor_written_again() -> None:
    table = FrameTable(4, 1)
    table.require(array([0]))
    table.write(array([0]))
    table.require(array([1]))
    table.lose(array([0]))
    moves = table.require(array([0]))
    assert moves.loaded.tolist() == []
    assert table.is_lost[0]
    assert table.require(array([2])).saved.tolist() == []
    table.overwrite(array([0]))
    assert not table.is_lost[0]

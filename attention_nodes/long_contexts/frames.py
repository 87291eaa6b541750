"""The frames of cache blocks in memory, and the blocks whose content is in the spill's file.

Owns the map from blocks, which the scheduler assigns, to frames, which the tensors of the cache
have, and the choice of the blocks that give up theirs: the longest not needed. Pure: moves nothing.
Used by residency.py.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from attention_nodes.step.sequences import IntArray

NO_FRAME: Final = -1
_FREE: Final = -1
_LENT: Final = -2


class Moves(NamedTuple):
    """What a step needs, in this order: blocks written to the file, others read from it.

    `saved` and `loaded` are parallel to the frames that they leave and get.
    """

    saved: IntArray
    saved_from: IntArray
    loaded: IntArray
    loaded_to: IntArray


class FrameTable:
    """`num_blocks` blocks and the fewer `num_frames` frames.

    Invariant: a frame is free, lent, or of one block. A block's content is in its frame or in the
    file (`is_saved`), or in both, unless it is `lost` or was not written yet.
    """

    def __init__(self, num_blocks: int, num_frames: int) -> None:
        self.frame_of = np.full(num_blocks, NO_FRAME, dtype=np.int64)
        self.is_saved = np.zeros(num_blocks, dtype=bool)
        self.is_lost = np.zeros(num_blocks, dtype=bool)
        self._is_on_its_way = np.zeros(num_blocks, dtype=bool)
        self._block_in = np.full(num_frames, _FREE, dtype=np.int64)
        self._needed_at = np.zeros(num_blocks, dtype=np.int64)
        self._has_content = np.zeros(num_blocks, dtype=bool)
        self._now = 0
        self._num_free = self.room = num_frames
        """`room`: as many blocks as can have frames at once."""
        self._num_evicted = 0

    def overwrite(self, blocks: IntArray) -> None:
        """Learn that these blocks get another content, from their beginning."""
        self.is_saved[blocks] = self.is_lost[blocks] = self._has_content[blocks] = False
        self._is_on_its_way[blocks] = False

    def write(self, blocks: IntArray) -> None:
        """Learn that a step writes to these blocks, which have frames."""
        assert (self.frame_of[blocks] >= 0).all()
        self._has_content[blocks] = True
        self.is_saved[blocks] = self._is_on_its_way[blocks] = False

    def lose(self, blocks: IntArray) -> None:
        """Learn that the content of these blocks could not be written or read."""
        self.is_lost[blocks] = True

    def victims(self, needed: IntArray, num_more: int) -> IntArray:
        """Return the blocks that would give up their frames for require(), in that order."""
        num_missing = int((self.frame_of[needed] < 0).sum()) + num_more
        count = num_missing - self._num_free
        if count <= 0:  # in most steps; the rest takes milliseconds for many frames
            return np.zeros(0, dtype=np.int64)
        held = self._block_in[self._block_in >= 0]
        others = np.setdiff1d(held, needed)
        order = np.argsort(self._needed_at[others], kind="stable")
        chosen: IntArray = others[order[:count]]
        return chosen

    def require(self, needed: IntArray) -> Moves:
        """Give every block of `needed`, which are different ones and at most `room`, a frame.

        What others lose is decided now; the caller moves contents before the step.
        """
        self._now += 1
        self._needed_at[needed] = self._now
        self._num_evicted = 0
        saved, saved_from = self._evict(self.victims(needed, 0))
        missing = needed[self.frame_of[needed] < 0]
        free = np.flatnonzero(self._block_in == _FREE) if len(missing) else missing
        frames = free[: len(missing)]
        assert len(frames) == len(missing), "more than there is room for"
        self.frame_of[missing], self._block_in[frames] = frames, missing
        self._num_free -= len(missing)
        loads = self._has_content[missing] & ~self.is_lost[missing]
        return Moves(saved, saved_from, missing[loads], frames[loads])

    def next_to_save(self, needed: IntArray, most: int) -> IntArray:
        """Return blocks to write to the file ahead, while a step that needs `needed` runs.

        They will give up their frames next, if the next step takes as many as this one has; at most
        `most`. saved_ahead() tells how they fared.
        """
        if not self._num_evicted:
            return np.zeros(0, dtype=np.int64)
        found = self.victims(needed, self._num_free + self._num_evicted)
        chosen = found[self._must_write(found)][:most]
        self._is_on_its_way[chosen] = True
        return chosen

    def saved_ahead(self, blocks: IntArray) -> None:
        """Learn that these blocks are in the file as they were at next_to_save()."""
        self.is_saved[blocks[self._is_on_its_way[blocks]]] = True

    def lend(self, count: int, needed: IntArray) -> tuple[IntArray | None, Moves]:
        """Take `count` frames for other purposes; None: blocks of `needed` have too many.

        The moves are those of require().
        """
        nothing = np.zeros(0, dtype=np.int64)
        if len(needed) + count > self.room:
            return None, Moves(nothing, nothing, nothing, nothing)
        saved, saved_from = self._evict(self.victims(needed, count))
        free = np.flatnonzero(self._block_in == _FREE)[:count]
        self._block_in[free] = _LENT
        self._num_free -= count
        self.room -= count
        return free, Moves(saved, saved_from, nothing, nothing)

    def take_back(self, frames: IntArray) -> None:
        """Free frames that were lent."""
        assert (self._block_in[frames] == _LENT).all()
        self._block_in[frames] = _FREE
        self._num_free += len(frames)
        self.room += len(frames)

    def _evict(self, blocks: IntArray) -> tuple[IntArray, IntArray]:
        """Free the frames of blocks; return those to write to the file, and where they are."""
        frames = self.frame_of[blocks]
        self._num_evicted += len(blocks)
        self._block_in[frames] = _FREE
        self._num_free += len(frames)
        self.frame_of[blocks] = NO_FRAME
        writes = self._must_write(blocks)
        self.is_saved[blocks[writes]] = True
        return blocks[writes], frames[writes]

    def _must_write(self, blocks: IntArray) -> npt.NDArray[np.bool_]:
        """Say of each block whether only its frame has its content."""
        return self._has_content[blocks] & ~self.is_saved[blocks] & ~self.is_lost[blocks]

    def check_integrity(self) -> None:
        """Assert the invariant."""
        held = np.flatnonzero(self._block_in >= 0)
        assert (self.frame_of[self._block_in[held]] == held).all(), "a frame of another block"
        assert int((self.frame_of >= 0).sum()) == len(held), "a block has a frame of its own"
        assert self._num_free == int((self._block_in == _FREE).sum())
        gone = self._has_content & (self.frame_of < 0)
        assert (self.is_saved | self.is_lost)[gone].all(), "content is nowhere"

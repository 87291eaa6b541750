"""The places of a pool: the segments whose codes are there, and their users.

Owns the places, and per sequence those of its closed segments, in order, and perhaps one of an open
segment, which it may keep for a while after that has closed. A closed segment is found by its last
cache block: that block's content is what the whole text up to it decides, so whoever shares the
block shares the codes. Pure: knows no keys and no codes. Used by retrieval.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class SegmentPool:
    """`num_places` places for coded segments.

    Invariant: a place is free, or used by sequences, or unused but found by its block; those are
    given up when no place is free, the longest unused first. Open segments have places of their
    own.
    """

    def __init__(self, num_places: int) -> None:
        self._free = list(range(num_places - 1, -1, -1))
        self._num_users = [0] * num_places
        self._block_of: dict[int, int] = {}
        self._place_of: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._closed: dict[int, list[int]] = {}
        self._open: dict[int, int] = {}

    @property
    def num_used(self) -> int:
        """Return how many places sequences use."""
        return len(self._num_users) - len(self._free) - len(self._unused)

    def closed(self, sequence: int) -> list[int]:
        """Return the places of a sequence's closed segments, in order."""
        return self._closed.get(sequence, [])

    def open_place(self, sequence: int) -> int | None:
        """Return the place of a sequence's open segment, None if it has none."""
        return self._open.get(sequence)

    def share(self, sequence: int, last_block: int) -> bool:
        """Let a sequence use the next closed segment, which ends with `last_block`.

        False: nobody has coded it.
        """
        place = self._place_of.get(last_block)
        if place is None:
            return False
        self._unused.pop(place, None)
        self._num_users[place] += 1
        self._closed.setdefault(sequence, []).append(place)
        return True

    def close(self, sequence: int, last_block: int) -> int | None:
        """Return a new place for a sequence's next closed segment, which ends with `last_block`.

        None: there is none.
        """
        assert last_block not in self._place_of, "share() it"
        place = self._take()
        if place is None:
            return None
        self._num_users[place] = 1
        self._place_of[last_block] = place
        self._block_of[place] = last_block
        self._closed.setdefault(sequence, []).append(place)
        return place

    def begin(self, sequence: int) -> int | None:
        """Return a new place for a sequence's open segment; None: there is none."""
        assert sequence not in self._open
        place = self._take()
        if place is not None:
            self._num_users[place] = 1
            self._open[sequence] = place
        return place

    def end_open(self, sequence: int) -> None:
        """Give up the place of a sequence's open segment, if it has one."""
        place = self._open.pop(sequence, None)
        if place is not None:
            self._num_users[place] = 0
            self._free.append(place)

    def end(self, sequence: int) -> None:
        """Forget a sequence, whether it has segments or not."""
        self.end_open(sequence)
        for place in self._closed.pop(sequence, ()):
            self._num_users[place] -= 1
            if self._num_users[place]:
                continue
            if place in self._block_of:
                self._unused[place] = None
            else:
                self._free.append(place)

    def overwrite(self, blocks: Iterable[int]) -> None:
        """Learn that these blocks get another content: no segment ends with them any more."""
        for block in blocks:
            place = self._place_of.pop(block, None)
            if place is None:
                continue
            del self._block_of[place]
            if place in self._unused:
                del self._unused[place]
                self._free.append(place)

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._unused:
            return None
        place, _ = self._unused.popitem(last=False)
        del self._place_of[self._block_of.pop(place)]
        return place

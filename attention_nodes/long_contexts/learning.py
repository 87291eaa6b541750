"""The codebooks that are still to be learnt, and the sequences that wait for them.

Owns, by place, the layers whose codebooks are not there yet, and by sequence the segments that lack
some. A sequence uses a segment's codebooks from a number of committed tokens on, by which all must
be there, so no result depends on when one is learnt, or in whose turn: layer by layer between
steps, or while rows are with experts. Pure: knows no keys and no codes. Used by retrieval.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class CodebookJob(NamedTuple):
    """A codebook to be learnt from keys of the sequence, from position `begin` on."""

    begin: int
    place: int
    layer: int
    is_last: bool
    """Whether it is the last one that the place lacks."""


class Learning:
    """The codebooks that are lacking; each segment's are learnt by ascending layer."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = tuple(layers)
        self._lacking: dict[int, list[int]] = {}
        self._wanted: dict[int, list[tuple[int, int]]] = {}

    def begin(self, place: int) -> None:
        """Learn that a place has got another segment, whose codebooks are all lacking."""
        self._lacking[place] = list(reversed(self._layers))

    def want(self, row: int, begin: int, place: int) -> None:
        """Learn that the sequence in `row` will use a place, with its segment from `begin` on."""
        if self._lacking.get(place):
            self._wanted.setdefault(row, []).append((begin, place))

    def end(self, row: int) -> None:
        """Forget a sequence; others, that share its segments, may go on where it was."""
        self._wanted.pop(row, None)

    def num_lacking(self, row: int, *, begin: int = 0) -> int:
        """Return how many codebooks a sequence waits for, of segments from `begin` on."""
        wanted = self._wanted.get(row, ())
        return sum(len(self._lacking[place]) for first, place in wanted if first >= begin)

    def take(self, row: int, count: int) -> Iterator[CodebookJob]:
        """Yield up to `count` codebooks that a sequence waits for; each must be learnt then."""
        wanted = self._wanted.get(row, [])
        while wanted and count > 0:
            begin, place = wanted[0]
            lacking = self._lacking[place]
            if lacking:
                count -= 1
                layer = lacking.pop()
                yield CodebookJob(begin, place, layer, is_last=not lacking)
            if not lacking:
                wanted.pop(0)
        if not wanted:
            self.end(row)

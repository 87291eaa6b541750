"""The blocks of one attention node's sequences, in every group of layers.

Owns which blocks a sequence is given as it grows, which it gives back behind a window, and the
cached prefix that a new one begins with: a hit needs the blocks of every group that later positions
see. Knows no steps, no seats and no preemption. Called by attention_replica.py.

A prompt's blocks are taken at its admission, so that it can be computed to its end. In groups with
windows these are as many as it holds at once: each that falls behind the window makes place for one
of later positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Final

from server.scheduler.planning.block_pool import BlockPool
from server.scheduler.planning.sequence import Sequence
from topspin.plan.kv_cache import NO_BLOCK, BlockNeeds


class BlockTables:
    """The tables of the sequences that hold blocks of `pool`."""

    def __init__(self, pool: BlockPool, needs: BlockNeeds) -> None:
        self.pool = pool
        self.needs = needs
        self._num_groups: Final = len(needs.windows)
        self._windows = [
            (group, window) for group, window in enumerate(needs.windows) if window is not None
        ]

    # Prefixes.

    def find_prefix(self, hashes: list[bytes]) -> list[int]:
        """Return the columns that a sequence with these block hashes would begin with."""
        end = len(hashes)
        tables: dict[int, list[int]] = {}
        for group, window in enumerate(self.needs.windows):
            if window is None:
                tables[group] = self._found(hashes[:end], group)
                end = len(tables[group])
        while not all(self._sees_all(hashes, end, *each) for each in self._windows):
            end -= 1
        for group, window in self._windows:
            first = max(0, end - self.needs.behind(window) + 1)
            tables[group] = [NO_BLOCK] * first + self._found(hashes[first:end], group)
        columns = zip(*(tables[group][:end] for group in range(self._num_groups)), strict=True)
        return list(chain.from_iterable(columns))

    def _found(self, hashes: list[bytes], group: int) -> list[int]:
        """Return a group's published blocks up to the first hash that has none."""
        blocks = []
        for block_hash in hashes:
            block = self.pool.find(_of_group(block_hash, group))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _sees_all(self, hashes: list[bytes], end: int, group: int, window: int) -> bool:
        """Say whether a group has the blocks in the window before column `end`."""
        return all(
            self.pool.find(_of_group(hashes[column], group)) is not None
            for column in range(end - 1, max(end - self.needs.behind(window), -1), -1)
        )

    # Admission.

    def num_lacking(self, num_columns: int, hits: list[int]) -> int:
        """Return how many blocks a prompt of so many columns takes, beside those of `hits`."""
        return sum(self._lacking(num_columns, len(hits) // self._num_groups))

    def _lacking(self, num_columns: int, num_hits: int) -> list[int]:
        """Return how many blocks it takes of each group."""
        return [
            min(num_columns - num_hits, most - min(num_hits, self.needs.behind(window) - 1))
            if window is not None and most is not None
            else num_columns - num_hits
            for window, most in zip(self.needs.windows, self.needs.most, strict=True)
        ]

    def num_available(self, hits: list[int]) -> int:
        """Return how many blocks a sequence that begins with `hits` could take beside them."""
        return self.pool.num_available - self.pool.count_idle(held_blocks(hits))

    def open(self, seq: Sequence, num_columns: int) -> None:
        """Give `seq`, whose blocks are those that it was found to begin with, those of its prompt.

        There are enough.
        """
        hits = seq.num_columns
        self.pool.share(held_blocks(seq.blocks))
        lacking = self._lacking(num_columns, hits)
        taken = self.pool.acquire(sum(lacking))
        if not self._windows:
            seq.blocks += taken
        else:
            in_full = [window is None for window in self.needs.windows]
            for _ in range(hits, num_columns):
                seq.blocks += [taken.pop() if full else NO_BLOCK for full in in_full]
            seq.spare, seq.placed = taken, hits
            seq.freed = [
                0 if window is None else max(0, hits - self.needs.behind(window) + 1)
                for window in self.needs.windows
            ]
        seq.capacity = seq.num_columns * seq.block_size

    # Growth.

    @property
    def can_grow(self) -> bool:
        """Return whether there are the blocks of one more column."""
        return self.pool.num_available >= self._num_groups

    def grow(self, seq: Sequence) -> None:
        """Give a sequence, whose prompt is placed, one more column."""
        seq.add_blocks(self.pool.acquire(self._num_groups))

    def place(self, seq: Sequence) -> None:
        """Give the planned positions of a prompt blocks in the groups with windows."""
        if not self._windows:
            return
        needed = -(-seq.num_planned // seq.block_size)
        for column in range(seq.placed, needed):
            for group, _ in self._windows:
                seq.blocks[column * self._num_groups + group] = seq.spare.pop()
        seq.placed = max(seq.placed, needed)

    def filled(self, seq: Sequence, *, publishes: bool) -> None:
        """Note that a step has filled blocks: others may find them, and windows have moved on."""
        request, size = seq.request, seq.block_size
        # Tokens behind the one that ended a request were fed too, but are nobody's.
        num_full = min(seq.num_committed, len(request.tokens)) // size
        for column in range(seq.publish_at // size - 1, num_full if publishes else 0):
            block_hash = request.hashes.at(column, request.tokens)
            for group in range(self._num_groups):
                block = seq.blocks[column * self._num_groups + group]
                self.pool.publish(block, _of_group(block_hash, group))
        seq.publish_at = (num_full + 1) * size
        for group, window in self._windows:
            self._free_behind(seq, group, window)

    def _free_behind(self, seq: Sequence, group: int, window: int) -> None:
        end = max(0, seq.num_committed - window + 1) // seq.block_size
        for column in range(seq.freed[group], end):
            place = column * self._num_groups + group
            self.pool.release([seq.blocks[place]])
            seq.blocks[place] = NO_BLOCK
            if len(seq.spare) < (seq.num_columns - seq.placed) * len(self._windows):
                seq.spare += self.pool.acquire(1)
        seq.freed[group] = max(seq.freed[group], end)

    def release(self, seq: Sequence) -> None:
        """Take back all blocks of a sequence."""
        self.pool.release(seq.held)

    def positions_held(self, seqs: Iterable[Sequence]) -> dict[int, int]:
        """Return for how many positions of `seqs` there are blocks, by window; 0: without one."""
        held = {window or 0: 0 for window in self.needs.windows}
        for seq in seqs:
            freed = {w or 0: n for w, n in zip(self.needs.windows, seq.freed, strict=False)}
            for window in held:
                num_columns = seq.placed if window else seq.num_columns
                held[window] += (num_columns - freed.get(window, 0)) * seq.block_size
        return held

    def check_integrity(self, seqs: Iterable[Sequence]) -> None:
        """Assert that every block is free, cached, or held by the sequences that name it."""
        self.pool.check_integrity(seq.held for seq in seqs)


def held_blocks(blocks: Iterable[int]) -> list[int]:
    """Return those of a table that are blocks."""
    return [block for block in blocks if block != NO_BLOCK]


def _of_group(block_hash: bytes, group: int) -> bytes:
    """Return the hash of a group's block of positions; layers of another group have another one."""
    return block_hash + bytes((group,)) if group else block_hash

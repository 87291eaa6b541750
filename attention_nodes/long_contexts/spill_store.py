"""The place of keys and values that have no frame in memory: the interface of a file, or another.

Owns no memory. Satisfied by spill_file.py (CPUs) and host_store.py (GPUs), called by residency.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from attention_nodes.step.sequences import IntArray
from kernels.contracts import HostKeys, Retrieval
from topspin.plan.retrieval import RetrievalPolicy
from topspin.processes.progress import Beat, no_beat


class Reads(NamedTuple):
    """Selected keys: `hot` had a copy in memory, `read` were read, `failed` could not be."""

    hot: int
    read: int
    failed: int


class SpillStore(Protocol):
    """A record for each block that the scheduler may assign.

    Sequences that search records have slots of the cache for copies, lend() to forget(), by their
    row of the table.
    """

    @property
    def most_ahead(self) -> int:
        """The most blocks of save_ahead()."""

    @property
    def is_writing(self) -> bool:
        """Return whether blocks of save_ahead() are being written."""

    def save(self, blocks: IntArray, frames: IntArray, beat: Beat = no_beat) -> IntArray:
        """Write `blocks`, whose contents are in `frames`; returns those that were not written.

        `beat` is called every few blocks.
        """

    def save_ahead(self, blocks: IntArray, frames: IntArray) -> None:
        """Begin to write at most `most_ahead` blocks, which may change from now on.

        Never while others are written so (is_writing); take_ahead() tells which were.
        """

    def take_ahead(self) -> IntArray:
        """Return, once, the blocks that save_ahead() has written; without waiting for more."""

    def load(self, blocks: IntArray, frames: IntArray, beat: Beat = no_beat) -> IntArray:
        """Read `blocks` to `frames`; returns those that could not be read."""

    def num_copies(self, policy: RetrievalPolicy) -> int:
        """Return for how many tokens a sequence needs slots."""

    def lend(self, row: int, slots: IntArray, max_blocks: int) -> None:
        """Give a sequence of at most so many blocks slots for copies."""

    def forget(self, row: int) -> None:
        """Take its slots back."""

    def told(
        self, retrieval: Retrieval, searched: Sequence[tuple[int, IntArray] | None]
    ) -> Retrieval:
        """Return a retrieval that says where keys without a frame are.

        `searched`, of its sequences, are rows and blocks; None: all its keys are in the cache.
        """

    def no_keys(self) -> HostKeys | None:
        """Return what kernels of a device are told of one sequence without keys here, to warm up.

        None: they are not told.
        """

    def take_reads(self, row: int) -> Reads:
        """Return what the ended step has read for a sequence."""

    def close(self) -> None:
        """Give the space back."""

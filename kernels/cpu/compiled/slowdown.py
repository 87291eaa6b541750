"""Emulates a slower device: its work takes a multiple of the time that this one takes.

Owns the ops that measure a piece of work and sleep behind it, so that others may have the core
meanwhile. In a recorded step they are part of the program. What counts is the time that the
working thread has had a core: on shared cores a wait for one is not multiplied. The wake-up is late
by the kernel's timer slack (about 60 us): what was slept too long is left out of the next sleeps,
and debts below MIN_SLEEP_NS are carried, so that the sum is exact. Knows no layer. Called by the
nodes whose plan says `slow`.
"""

from __future__ import annotations

from array import array
from typing import Final

from kernels.cpu.compiled.runtime import Kernel, launch_alone, offsets
from kernels.cpu.simd.lanes import read_i64, write_i64
from kernels.cpu.simd.system import now_ns, sleep_ns, thread_ns

MIN_SLEEP_NS: Final = 70_000
"""A shorter debt is carried: the shortest sleep takes about as long."""

# In 1024ths, the unit of the factor.
_UNIT: Final = 1024

BEGAN_NS, DEBT_NS = range(0, 16, 8)
"""The words: the thread's time when the work began, and how long is still to be slept."""

WORDS, EXTRA = offsets(2)
"""The arguments of both ops: the address of the words, and by how much more, in 1024ths."""


class Slowdown:
    """One device's, entered for each piece of its work. Of one thread."""

    def __init__(self, factor: float) -> None:
        """`factor` >= 1 is how many times as long work takes."""
        assert factor >= 1
        self._words = array("q", (0, 0))
        self._arguments = self._words.buffer_info()[0], round((factor - 1) * _UNIT)
        for kernel in (_begin, _end):
            kernel.address  # noqa: B018, compiled before a step needs it

    def __enter__(self) -> None:
        """Begin a piece of work."""
        launch_alone(_begin, self._arguments, _nothing)

    def __exit__(self, *_: object) -> None:
        """End the piece of work: sleep for as long as a slower device would go on."""
        launch_alone(_end, self._arguments, _nothing)


def _nothing() -> None:
    """Is never called: the ops leave nothing undone."""


@Kernel
def _begin(block: int) -> None:
    write_i64(read_i64(block + WORDS) + BEGAN_NS, thread_ns())


@Kernel
def _end(block: int) -> None:
    words = read_i64(block + WORDS)
    worked_ns = thread_ns() - read_i64(words + BEGAN_NS)
    debt_ns = read_i64(words + DEBT_NS) + worked_ns * read_i64(block + EXTRA) // _UNIT
    if debt_ns >= MIN_SLEEP_NS:
        slept_from_ns = now_ns()
        sleep_ns(debt_ns)
        debt_ns -= now_ns() - slept_from_ns
    write_i64(words + DEBT_NS, debt_ns)

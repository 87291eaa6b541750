"""A step as a program: a list of (kernel, block), run by one compiled call on a team of threads.

Owns the team's life, the memory of a program and its running. All threads go through the list in
order; a kernel's tasks go to whoever claims them, and its end is when they are done
(`kernels.cpu.simd.tasks`), so there is no barrier and no number of threads in a program. Between
programs the team sleeps.

Knows no tensor and no kernel: `kernels.cpu.recorder` makes programs from launches. A team and its
programs belong to one thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kernels.cpu.compiled.runtime import Kernel, inlined, make_callable
from kernels.cpu.simd.lanes import call_with, read_i64, write_i64
from kernels.cpu.simd.system import (
    add_shared,
    now_ns,
    pause,
    read_shared,
    sleep_while,
    wake_all,
    yield_core,
)
from kernels.cpu.simd.tasks import HEADER_BYTES, SPINS

_LINE: Final = 64

# A team's words, on cache lines of their own: how many programs were begun and are over, ...
_NEWS, _OVER, _LEFT, _TEAM_SLEEPERS, _PROGRAM = range(0, 5 * _LINE, _LINE)
_STOP, _NUM_MEMBERS = _PROGRAM + 8, _PROGRAM + 16
_TEAM_BYTES: Final = 5 * _LINE

# A program's words, then its ops.
_NUM_OPS, _TEAM, _TIMES = range(0, 24, 8)
_PROGRAM_BYTES: Final = 24
_OP_KERNEL, _OP_BLOCK = range(0, 16, 8)
_OP_BYTES: Final = 16


class Op(NamedTuple):
    """A kernel and its arguments."""

    kernel: Kernel
    arguments: Sequence[int]


def _aligned(num_bytes: int) -> np.ndarray:
    """Return zeroed i64 memory of `num_bytes`, on whole cache lines."""
    raw = np.zeros(num_bytes // 8 + _LINE // 8, dtype=np.int64)
    skipped = -raw.ctypes.data % _LINE // 8
    return raw[skipped : skipped + num_bytes // 8]


class Team:
    """`num_threads` threads that run programs, the caller of Program.run() included."""

    def __init__(self, num_threads: int) -> None:
        words = _aligned(_TEAM_BYTES)
        self._words = words
        self.in_use: object = None
        """The memory of the program run last: a thread that lost its core may still be in it."""
        self.address: int = words.ctypes.data
        self.num_threads = num_threads
        words[_NUM_MEMBERS // 8] = words[_LEFT // 8] = num_threads - 1
        serve = make_callable(_serve.address)
        _run.address  # noqa: B018, compiled before threads wait for it
        for core in _cores_of_others(num_threads):
            member = threading.Thread(
                target=_member, args=(serve, words, core), name="team", daemon=True
            )
            member.start()
        self._stop = weakref.finalize(self, _dismiss, words)

    def close(self) -> None:
        """Let the threads end; safe to call twice. No program of the team may run afterwards."""
        self._stop()


def _member(serve: object, words: np.ndarray, core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})
    assert callable(serve)
    serve(words.ctypes.data)


def _dismiss(words: np.ndarray) -> None:
    make_callable(_end.address)(words.ctypes.data)


def _cores_of_others(num_threads: int) -> list[int | None]:
    """Return the core of each thread but the leader's; None: any.

    OpenMP may have bound the leader to one core; threads that it starts would inherit that.
    """
    own = os.sched_getaffinity(0)
    if len(own) >= num_threads:
        return [None] * (num_threads - 1)
    known: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            known |= os.sched_getaffinity(int(thread))
    others = sorted(known - own)
    if not others:
        return [None] * (num_threads - 1)
    return [others[idx % len(others)] for idx in range(num_threads - 1)]


class Program:
    """Ops in memory, ready to run; each has the block that its kernel reads."""

    def __init__(self, ops: Sequence[Op], team: Team, kept: object = None) -> None:
        """`kept` lives as long as the program: what its ops read and write."""
        self._team = team
        self._kept = kept
        self._num_ops = len(ops)
        self.kernels = tuple(op.kernel for op in ops)
        sizes = [-(-(HEADER_BYTES + 8 * len(op.arguments)) // _LINE) * _LINE for op in ops]
        table = -(-(_PROGRAM_BYTES + _OP_BYTES * len(ops)) // _LINE) * _LINE
        self._words = _aligned(table + sum(sizes))
        self._base: int = self._words.ctypes.data
        self._words[_NUM_OPS // 8], self._words[_TEAM // 8] = len(ops), team.address
        self.blocks: list[np.ndarray] = []
        """By op its block, i64: the header's words, then the arguments."""
        offset = table
        for idx, (op, size) in enumerate(zip(ops, sizes, strict=True)):
            block = self._words[offset // 8 : (offset + size) // 8]
            begin = HEADER_BYTES // 8
            block[begin : begin + len(op.arguments)] = op.arguments
            at = (_PROGRAM_BYTES + _OP_BYTES * idx) // 8
            self._words[at : at + 2] = op.kernel.address, self._base + offset
            self.blocks.append(block)
            offset += size
        self._run = make_callable(_run.address)

    def take_times(self) -> np.ndarray:
        """Return memory in which every later run() leaves when its ops ended, i64 ns, by op.

        CLOCK_MONOTONIC of the leader; it costs a look at the clock per op.
        """
        self._times = np.zeros(self._num_ops, dtype=np.int64)
        self._words[_TIMES // 8] = self._times.ctypes.data
        return self._times

    def run(self) -> None:
        """Run all ops, and return when they are done."""
        self._run(self._base)
        # Only now have all threads left the one before.
        self._team.in_use = (self._words, self._kept)


@inlined
def _announce(team: int) -> None:
    add_shared(team + _NEWS, 1)
    if read_shared(team + _TEAM_SLEEPERS):
        wake_all(team + _NEWS)


@inlined
def _wait_until_left(team: int) -> None:
    """Wait until no member is in a program; none that is over holds one for long."""
    looks = 0
    while read_shared(team + _LEFT) < read_i64(team + _NUM_MEMBERS):
        pause()
        looks += 1
        if looks > SPINS:
            yield_core()


@Kernel
def _end(team: int) -> None:
    """Let the members end, and wait until none is in a program."""
    _wait_until_left(team)
    write_i64(team + _STOP, 1)
    _announce(team)


@inlined
def _begin(program: int, team: int) -> None:
    """Clear the headers and call the team, once it has left the last program."""
    _wait_until_left(team)
    for idx in range(read_i64(program + _NUM_OPS)):
        block = read_i64(program + _PROGRAM_BYTES + _OP_BYTES * idx + _OP_BLOCK)
        for word in range(0, HEADER_BYTES, 8):
            write_i64(block + word, 0)
    write_i64(team + _LEFT, 0)
    write_i64(team + _PROGRAM, program)
    if read_i64(team + _NUM_MEMBERS):
        _announce(team)


@Kernel
def _run(program: int) -> None:
    """Run a program as its leader."""
    team = read_i64(program + _TEAM)
    _begin(program, team)
    times = read_i64(program + _TIMES)
    for idx in range(read_i64(program + _NUM_OPS)):
        op = program + _PROGRAM_BYTES + _OP_BYTES * idx
        call_with(read_i64(op + _OP_KERNEL), read_i64(op + _OP_BLOCK))
        if times:
            write_i64(times + 8 * idx, now_ns())
    add_shared(team + _OVER, 1)


@Kernel
def _serve(team: int) -> None:
    """Run every program of a team as a member, until it is dismissed."""
    seen = 0
    while True:
        if read_shared(team + _NEWS) == seen:
            add_shared(team + _TEAM_SLEEPERS, 1)
            sleep_while(team + _NEWS, seen)
            add_shared(team + _TEAM_SLEEPERS, -1)
        else:
            if read_i64(team + _STOP):
                return
            seen += 1
            program = read_i64(team + _PROGRAM)
            for idx in range(read_i64(program + _NUM_OPS)):
                if read_shared(team + _OVER) == seen:
                    break
                op = program + _PROGRAM_BYTES + _OP_BYTES * idx
                call_with(read_i64(op + _OP_KERNEL), read_i64(op + _OP_BLOCK))
            add_shared(team + _LEFT, 1)

"""A step as a program: a list of (kernel, block), run by one compiled call on a team of threads.

Owns the team's life, the memory of a program and its running. All threads go through the list in
order; a kernel's tasks go to whoever claims them, and its end is when they are done
(`kernels.cpu.simd.tasks`), so there is no barrier and no number of threads in a program. Between
programs the team sleeps.

An op with `otherwise` is run by the leader alone, the thread that called run(); the others wait for
it, first by yielding their cores, then asleep. If its kernel leaves the work undone, run() calls
`otherwise` in Python and goes on. So a step that waits for another process needs Python only when
the wait is long, or fails.

Knows no tensor and no kernel: `kernels.cpu.recorder` makes programs from launches. A team and its
programs belong to one thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from kernels.cpu.compiled.runtime import Kernel, inlined, launch, make_callable
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
from kernels.cpu.simd.tasks import HEADER_BYTES, IS_DONE, IS_UNDONE, NUM_SLEEPERS, SPINS

_LINE: Final = 64

# A team's words, on cache lines of their own: how many programs were begun and are over, ...
_NEWS, _OVER, _LEFT, _TEAM_SLEEPERS, _PROGRAM = range(0, 5 * _LINE, _LINE)
_STOP, _NUM_MEMBERS = _PROGRAM + 8, _PROGRAM + 16
_TEAM_BYTES: Final = 5 * _LINE

# A program's words, then its ops.
_NUM_OPS, _TEAM, _TIMES, _AT = range(0, 32, 8)
_PROGRAM_BYTES: Final = 32
_OP_KERNEL, _OP_BLOCK, _OP_IS_ALONE = range(0, 24, 8)
_OP_BYTES: Final = 24

# How long a thread that waits for its leader yields before it sleeps: longer than a usual wait for
# another process, since waking up takes tens of microseconds.
_YIELD_NS: Final = 2_000_000


class Op(NamedTuple):
    """A kernel and its arguments.

    `otherwise` does its work in Python if it leaves that undone; only the leader runs it then.
    """

    kernel: Kernel
    arguments: Sequence[int]
    otherwise: Callable[[], None] | None = None


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
        for kernel in (_run, _leave):
            kernel.address  # noqa: B018, compiled before threads wait for it
        for core in _cores_of_others(num_threads):
            member = threading.Thread(
                target=_member, args=(serve, words, core), name="team", daemon=True
            )
            member.start()
        self._stop = weakref.finalize(self, _dismiss, words)

    def wait_until_left(self) -> None:
        """Wait until no thread is in the program run last; one that lost its core may be."""
        make_callable(_leave.address)(self.address)

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
    # OpenMP's own threads show where the others may be; it starts them when it first needs them.
    launch(_do_nothing, (), num_threads=num_threads)
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
        self._otherwise = tuple(op.otherwise for op in ops)
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
            is_alone = op.otherwise is not None
            self._words[at : at + 3] = op.kernel.address, self._base + offset, is_alone
            self.blocks.append(block)
            offset += size
        self._run = make_callable(_run.address)
        self._abandon = make_callable(_abandon.address)

    def take_times(self) -> np.ndarray:
        """Return memory in which every later run() leaves when its ops ended, i64 ns, by op.

        CLOCK_MONOTONIC of the leader; it costs a look at the clock per op.
        """
        self._times = np.zeros(self._num_ops, dtype=np.int64)
        self._words[_TIMES // 8] = self._times.ctypes.data
        return self._times

    def run(self) -> None:
        """Run all ops, and return when they are done.

        Raises the error of an op's `otherwise`; the ops behind it are not run then.
        """
        self._run(self._base)
        # Only now have all threads left the one before.
        self._team.in_use = (self._words, self._kept)
        while at := int(self._words[_AT // 8]):
            otherwise = self._otherwise[at - 1]
            assert otherwise is not None
            try:
                otherwise()
            except BaseException:
                self._abandon(self._base)
                raise
            self._run(self._base)


@Kernel
def _do_nothing(block: int) -> None:
    pass


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
def _leave(team: int) -> None:
    _wait_until_left(team)


@Kernel
def _end(team: int) -> None:
    """Let the members end, and wait until none is in a program."""
    _wait_until_left(team)
    write_i64(team + _STOP, 1)
    _announce(team)


@inlined
def _op(program: int, idx: int) -> int:
    return program + _PROGRAM_BYTES + _OP_BYTES * idx


@inlined
def _begin(program: int, team: int) -> None:
    """Clear the headers and call the team, once it has left the last program."""
    _wait_until_left(team)
    for idx in range(read_i64(program + _NUM_OPS)):
        block = read_i64(_op(program, idx) + _OP_BLOCK)
        for word in range(0, HEADER_BYTES, 8):
            write_i64(block + word, 0)
    write_i64(team + _LEFT, 0)
    write_i64(team + _PROGRAM, program)
    if read_i64(team + _NUM_MEMBERS):
        _announce(team)


@inlined
def _finish_alone(block: int) -> None:
    """Let the others go on behind an op that the leader runs alone."""
    add_shared(block + IS_DONE, 1)
    if read_shared(block + NUM_SLEEPERS):
        wake_all(block + IS_DONE)


@inlined
def _wait_for_leader(team: int, block: int, seen: int) -> None:
    """Wait, as a member, until the leader has done an op or program `seen` is over."""
    began_ns = now_ns()
    while not read_shared(block + IS_DONE) and read_shared(team + _OVER) < seen:
        yield_core()
        if now_ns() - began_ns > _YIELD_NS:
            add_shared(block + NUM_SLEEPERS, 1)
            sleep_while(block + IS_DONE, 0)
            add_shared(block + NUM_SLEEPERS, -1)


@inlined
def _end_op(program: int, idx: int) -> None:
    times = read_i64(program + _TIMES)
    if times:
        write_i64(times + 8 * idx, now_ns())


@Kernel
def _run(program: int) -> None:
    """Run a program as its leader, to its end or to an op that Python must do.

    AT is then 0, or the number of the op behind that one: the next call goes on there.
    """
    team, num_ops = read_i64(program + _TEAM), read_i64(program + _NUM_OPS)
    at = read_i64(program + _AT)
    if at:
        _finish_alone(read_i64(_op(program, at - 1) + _OP_BLOCK))
        _end_op(program, at - 1)
    else:
        _begin(program, team)
    for idx in range(at, num_ops):
        op = _op(program, idx)
        block = read_i64(op + _OP_BLOCK)
        call_with(read_i64(op + _OP_KERNEL), block)
        if read_i64(op + _OP_IS_ALONE):
            if read_i64(block + IS_UNDONE):
                write_i64(program + _AT, idx + 1)
                return
            _finish_alone(block)
        _end_op(program, idx)
    write_i64(program + _AT, 0)
    add_shared(team + _OVER, 1)


@Kernel
def _abandon(program: int) -> None:
    """End a program at the op that Python could not do."""
    team, at = read_i64(program + _TEAM), read_i64(program + _AT)
    write_i64(program + _AT, 0)
    add_shared(team + _OVER, 1)
    _finish_alone(read_i64(_op(program, at - 1) + _OP_BLOCK))


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
                op = _op(program, idx)
                block = read_i64(op + _OP_BLOCK)
                if read_i64(op + _OP_IS_ALONE):
                    _wait_for_leader(team, block, seen)
                else:
                    call_with(read_i64(op + _OP_KERNEL), block)
            add_shared(team + _LEFT, 1)

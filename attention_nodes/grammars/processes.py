"""A node's grammars: the processes that compile and follow them, and which of those are kept.

Owns the fork server, one process per grammar, and the reasons why a grammar is given up. A process
in use is never ended for another; idle ones are kept within a number and their memory. No wait for
masks is longer than STEP_WAIT_S, unless the machine is so busy that they have not been worked on.
Knows no sequences (constraints.py), only matchers, and no messages of the engine: worker.py reports
what is compiled, and what is lost. Called in the node's busy thread.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from attention_nodes.grammars.forking import UNSTARTED, ForkServerHandle, is_readable
from attention_nodes.grammars.frames import (
    OUT_OF_MEMORY_STATUS,
    Compiled,
    Ended,
    Follow,
    FollowedSlice,
    Fork,
    Masks,
    Slice,
    framed,
    receive,
    receive_bytes,
)
from spec_decode.draft import Draft
from topspin.errors import EngineUnavailable, InvalidRequest
from topspin.grammars import COMPILE_CPU_S, MAX_COMPILED_BYTES, grammar_key

MAX_IDLE: Final = 32
MAX_IDLE_BYTES: Final = 256 * 1024 * 1024
STEP_WAIT_S: Final = 0.3
"""How long a step waits for its masks."""
COMPILE_WAIT_S: Final = 0.15
"""How long a step waits for grammars that it finds not compiled."""
_MOST_WAIT_S: Final = 10.0
# Of the CPU: who has had less of it while a step waited has been kept from work by others.
_WORKED_S: Final = 0.02
_END_WAIT_S: Final = 0.5

_LATE: Final = "the grammar's next tokens take too long to be found; try a simpler one"

_Words = npt.NDArray[np.int32]
_log = logging.getLogger("attention")


class CompiledGrammar(NamedTuple):
    """The end of a compilation by `start`; `error`: why it failed, or nothing.

    `may_retry`: it failed by what else the node does, and may be compiled another time.
    """

    key: str
    error: str
    may_retry: bool = False


class LostGrammar(NamedTuple):
    """A compiled grammar that the node no longer has; `error`: why it must not come again."""

    key: str
    error: str


class MatcherStep(NamedTuple):
    """What a sequence asks of its matcher: see frames.Slice."""

    matcher: Matcher
    tokens: list[int]
    draft: Draft | None


class MaskAnswer(NamedTuple):
    """The masks [rows, words] of a step's rows (frames.FollowedSlice), or why it cannot go on.

    `may_retry`: by what else the node does.
    """

    refusal: str = ""
    may_retry: bool = False
    rows: Sequence[int] = ()
    masks: _Words | None = None


@dataclass(slots=True, eq=False)
class _GrammarProcess:
    """A grammar's process. `end` says why it is gone, once it is; `pid` 0: it compiles."""

    number: int
    key: str
    connection: socket.socket
    pid: int = 0
    held_bytes: int = 0
    num_matchers: int = 0
    matchers: set[int] = field(default_factory=set)
    end: _End | None = None


class _End(NamedTuple):
    reason: str
    may_retry: bool


class Matcher:
    """A sequence's place in its grammar."""

    def __init__(self, process: _GrammarProcess) -> None:
        self.process = process
        process.num_matchers += 1
        self.number = process.num_matchers
        process.matchers.add(self.number)


class Grammars:
    """The grammars that sequences of one node follow."""

    def __init__(self, directory: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Serve the checkpoint in `directory`, whose logits have `vocab_size` tokens."""
        self._processes: OrderedDict[str, _GrammarProcess] = OrderedDict()
        self._compiling: dict[str, _GrammarProcess] = {}
        self._kept: set[str] = set()
        self._answers: list[CompiledGrammar] = []
        self._lost: list[LostGrammar] = []
        self._num_started = 0
        self._by_number: dict[int, _GrammarProcess] = {}
        self._server = ForkServerHandle(directory, vocab_size, eos_token_ids)
        self._close = weakref.finalize(self, _close_all, self._server, self._by_number)

    def prepare(self) -> None:
        """Begin to read the checkpoint's tokenizer, which else waits for the first grammar."""
        self._server.start()

    @property
    def num_words(self) -> int:
        """Return how many i32 a matcher's mask has; 0 without a tokenizer, and so without any."""
        return self._server.num_words()

    # Compiling.

    def start(self, key: str, grammar: str) -> None:
        """Compile a grammar in the background, unless that is done; `take_compiled` tells.

        It is kept until release().
        """
        self._kept.add(key)
        if key in self._compiling:
            return
        if key in self._processes:
            self._answers.append(CompiledGrammar(key, ""))
            return
        try:
            self._compiling[key] = self._start(key, grammar)
        except InvalidRequest as error:
            self._answers.append(CompiledGrammar(key, str(error)))
        except EngineUnavailable as error:
            self._answers.append(CompiledGrammar(key, str(error), may_retry=True))

    def release(self, key: str) -> None:
        """Let a grammar go: its compilation is given up, once compiled it is kept for a while."""
        self._kept.discard(key)
        process = self._compiling.pop(key, None)
        if process is not None:
            self._forget(process)
        self._evict()

    def release_all(self) -> None:
        """Let all grammars go."""
        self._kept.clear()
        for key in list(self._compiling):
            self.release(key)
        self._evict()

    @property
    def is_compiling(self) -> bool:
        """Return whether take_compiled() has more to say."""
        return bool(self._compiling or self._answers)

    def take_compiled(self) -> list[CompiledGrammar]:
        """Return the compilations that have ended since the last call; never waits."""
        ended, self._answers = self._answers, []
        if self._compiling:
            self._read_ends()
            for process in self._compiling.values():
                if process.end is None and is_readable(process.connection, 0.0):
                    self._read_compiled(process)
            for key, process in list(self._compiling.items()):
                if (end := process.end) is not None:
                    del self._compiling[key]
                    ended.append(CompiledGrammar(key, *end))
                elif process.pid:
                    del self._compiling[key]
                    self._processes[key] = process
                    ended.append(CompiledGrammar(key, ""))
            self._evict()
        return ended

    def take_lost(self) -> list[LostGrammar]:
        """Return the compiled grammars that have been given up since the last call."""
        if self._processes:
            self._read_ends()
        lost, self._lost = self._lost, []
        return lost

    # Following.

    def matcher(self, grammar: str, deadline_s: float) -> Matcher:
        """Return a matcher that has consumed nothing.

        A grammar that is not compiled (it has just been evicted) is compiled now, until
        `deadline_s` of the monotonic clock. Raises InvalidRequest or EngineUnavailable.
        """
        key = grammar_key(grammar)
        process = self._processes.get(key)
        if process is None:
            process = self._compiled_now(key, grammar, deadline_s)
        self._processes.move_to_end(key)
        return Matcher(process)

    def _compiled_now(self, key: str, grammar: str, deadline_s: float) -> _GrammarProcess:
        process = self._compiling.get(key) or self._start(key, grammar)
        self._compiling[key] = process
        poll = select.poll()
        poll.register(process.connection, select.POLLIN)
        while not process.pid and process.end is None:
            if not poll.poll(1000 * max(0.0, deadline_s - time.monotonic())):
                raise EngineUnavailable("the request's grammar is not compiled yet; try again")
            self._read_compiled(process)
            if process.end is None and not process.pid:
                self._read_ends(wait_for=process)
        del self._compiling[key]
        if process.end is not None:
            kind = EngineUnavailable if process.end.may_retry else InvalidRequest
            raise kind(process.end.reason)
        self._processes[key] = process
        return process

    def follow(self, steps: Sequence[MatcherStep]) -> list[MaskAnswer]:
        """Return the masks of sequences, or why they cannot go on."""
        by_process: dict[int, list[int]] = {}
        for idx, step in enumerate(steps):
            by_process.setdefault(step.matcher.process.number, []).append(idx)
        waiting: dict[int, _GrammarProcess] = {}
        poll = select.poll()
        used_s: dict[int, float] = {}
        for number, places in by_process.items():
            process = steps[places[0]].matcher.process
            if process.end is None and self._ask(process, [steps[each] for each in places]):
                waiting[process.connection.fileno()] = process
                poll.register(process.connection, select.POLLIN)
                used_s[number] = _cpu_s(process.pid)
        answers: list[MaskAnswer] = [MaskAnswer()] * len(steps)
        begun_s = time.monotonic()
        while waiting:
            left_s = STEP_WAIT_S - (time.monotonic() - begun_s)
            for descriptor, _ in poll.poll(max(50.0, 1000 * left_s)):
                process = waiting.pop(descriptor)
                poll.unregister(descriptor)
                places = by_process[process.number]
                for place, answer in zip(places, self._read_masks(process), strict=False):
                    answers[place] = answer
            waited_s = time.monotonic() - begun_s
            for descriptor, process in list(waiting.items()):
                has_worked = _cpu_s(process.pid) - used_s[process.number] > _WORKED_S
                if waited_s > (STEP_WAIT_S if has_worked else _MOST_WAIT_S):
                    del waiting[descriptor]
                    poll.unregister(descriptor)
                    self._give_up(process, _End(_LATE, may_retry=True))
        for idx, step in enumerate(steps):
            if (end := step.matcher.process.end) is not None:
                answers[idx] = MaskAnswer(*end)
        return answers

    def _ask(self, process: _GrammarProcess, steps: Sequence[MatcherStep]) -> bool:
        """Send a process its slices; returns whether it is there."""
        slices = [
            Slice(
                step.matcher.number,
                step.tokens,
                list(step.draft.tokens) if step.draft else [],
                list(step.draft.parents) if step.draft else [],
            )
            for step in steps
        ]
        try:
            process.connection.sendall(framed(Follow(slices=slices)))
        except OSError:
            self._read_ends(wait_for=process)
            return False
        return True

    def _read_masks(self, process: _GrammarProcess) -> Iterator[MaskAnswer]:
        try:
            masks = receive(process.connection, Masks)
            num_words = self._server.num_words()
            num_rows = sum(len(each.rows) for each in masks.answers)
            data = receive_bytes(process.connection, 4 * num_rows * num_words)
        except (EOFError, OSError):
            self._read_ends(wait_for=process)
            return
        process.held_bytes = masks.held_bytes
        words = np.frombuffer(data, dtype="<i4").reshape(num_rows, num_words)
        first = 0
        for each in masks.answers:
            yield _answer(each, words[first : first + len(each.rows)])
            first += len(each.rows)

    def end(self, matcher: Matcher) -> None:
        """Forget a matcher, here and in its process."""
        process = matcher.process
        process.matchers.discard(matcher.number)
        if process.end is None:
            with contextlib.suppress(OSError):  # its end is on its way
                process.connection.sendall(framed(Follow(closed=[matcher.number])))
            if not process.matchers:
                self._evict()

    # Ends of processes.

    def close(self) -> None:
        """End all processes."""
        self._close()

    def _start(self, key: str, grammar: str) -> _GrammarProcess:
        self._num_started += 1
        connection = self._server.fork(
            Fork(self._num_started, COMPILE_CPU_S, MAX_COMPILED_BYTES), grammar
        )
        process = _GrammarProcess(self._num_started, key, connection)
        self._by_number[process.number] = process
        return process

    def _read_compiled(self, process: _GrammarProcess) -> None:
        """Read what a process that compiles has sent; its end is told by the fork server."""
        try:
            compiled = receive(process.connection, Compiled)
        except (EOFError, OSError):
            return
        if compiled.error:
            self._give_up(process, _End(compiled.error, may_retry=False))
        else:
            process.pid, process.held_bytes = compiled.pid, compiled.held_bytes

    def _read_ends(self, wait_for: _GrammarProcess | None = None) -> None:
        """Read which processes have ended; waits until `wait_for` has, whose stream is closed."""
        while True:
            wait = wait_for is not None and wait_for.end is None
            ended = self._server.ended(wait_s=_END_WAIT_S if wait else 0.0)
            if ended is None:
                break
            process = self._by_number.get(ended.number)
            if process is not None:
                if not process.pid:
                    self._read_compiled(process)  # it may have said why before it ended
                self._give_up(process, _end_of(ended, is_compiled=bool(process.pid)))
        if self._server.is_gone:
            error = self._server.error
            gone = _End(error or UNSTARTED, may_retry=not error)
            for process in [each for each in self._compiling.values() if each.end is None]:
                self._give_up(process, gone)
        if wait_for is not None and wait_for.end is None:
            self._give_up(wait_for, _End("the process of the request's grammar has ended", True))

    def _give_up(self, process: _GrammarProcess, end: _End) -> None:
        if process.end is None:
            process.end = end
        self._forget(process)
        if self._processes.pop(process.key, None) is not None:
            self._lost.append(LostGrammar(process.key, "" if end.may_retry else end.reason))

    def _forget(self, process: _GrammarProcess) -> None:
        process.connection.close()  # the process ends
        self._by_number.pop(process.number, None)

    def _evict(self) -> None:
        """End idle processes beyond those that are kept, the one used least lately first."""
        idle = [
            each
            for each in self._processes.values()
            if not each.matchers and each.key not in self._kept
        ]
        num_bytes = sum(each.held_bytes for each in idle)
        for nth, process in enumerate(idle, start=1):
            if len(idle) - nth < MAX_IDLE and num_bytes <= MAX_IDLE_BYTES:
                return
            num_bytes -= process.held_bytes
            self._give_up(process, _End("", may_retry=True))


def _end_of(ended: Ended, *, is_compiled: bool) -> _End:
    """Return why a process is gone, in words for the client."""
    if ended.error:
        _log.warning("%s", ended.error)
        return _End(UNSTARTED, may_retry=True)
    if ended.is_largest:
        return _End("the grammars in use take too much memory, this one most of it", True)
    if ended.status == OUT_OF_MEMORY_STATUS or ended.signal == signal.SIGABRT:
        most = MAX_COMPILED_BYTES // 1024**2
        return _End(f"the grammar is too large: it needs more than {most} MiB of memory", False)
    if ended.signal in (signal.SIGSEGV, signal.SIGBUS):
        return _End("the grammar is too deep: its rules or schemas are nested too deeply", False)
    if ended.signal == signal.SIGPROF and not is_compiled:
        taken = f"more than {COMPILE_CPU_S:g} s of CPU time to be compiled"
        return _End(f"the grammar is too complex: it takes {taken}", False)
    if ended.signal == signal.SIGPROF:
        return _End("the grammar is too complex: its next tokens take too much CPU time", False)
    return _End("the process of the request's grammar has ended", may_retry=True)


def _answer(followed: FollowedSlice, masks: _Words) -> MaskAnswer:
    return MaskAnswer(followed.error, False, followed.rows, masks)


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process, by the kernel's clock of its number; 0: it is gone."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def _close_all(server: ForkServerHandle, processes: dict[int, _GrammarProcess]) -> None:
    for process in processes.values():
        process.connection.close()
    server.close()

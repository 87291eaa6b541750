"""The process of one grammar: compiles it once, then follows it for every sequence that has it.

Owns the grammar, a matcher per sequence, and the limits within which both are worked on: CPU time
of each answer and on average, memory, stack. Over a limit the kernel ends the process, whatever
native code does then; the fork server tells the node how. Knows no sequences, only numbers of
matchers. Runs in the one thread that a fork leaves, but for the compilation.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from typing import Final

from llguidance import LLMatcher, LLTokenizer

from attention_nodes.grammars.frames import (
    OUT_OF_MEMORY_STATUS,
    Compiled,
    Follow,
    FollowedSlice,
    Fork,
    Masks,
    Slice,
    framed,
    receive,
)
from topspin.grammars import limits, reason_of

# Python's objects that a fork copies as soon as it counts their references, the heap, the stacks.
_OWN_BYTES: Final = 4 * 1024 * 1024
STACK_BYTES: Final = 8 * 1024 * 1024
# Of an answer: a mask takes 0.1 ms, and the parser's own limits end those of over 10.
ANSWER_CPU_S: Final = 0.25
_ROW_CPU_S: Final = 0.002
# Of all answers: others' steps wait for them.
_SAVED_CPU_S: Final = 2.0
_EARNED_CPU_S: Final = 0.01
_NICENESS: Final = 10
# Of a compilation that takes long, beside steps and other compilations.
_LATE_NICENESS: Final = 19
_LATE_S: Final = 0.2
_WARM: Final = {
    LLMatcher.grammar_from_json_schema(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "text": {"type": "string", "minLength": 2},
                "age": {"type": "integer"},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
            },
            "additionalProperties": False,
        },
        overrides={"whitespace_pattern": r" |\n[ \t]{0,24}"},
    ): '{"name": "Ann B", "text": "some text", "age": 12, "tags": ["a", "b"]}',
    r"start: /(.|\n)*/": "some text",
}
# The parent of a draft's first tokens.
_ROOT: Final = -1
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


def warm_up(tokenizer: LLTokenizer) -> None:
    """Do what is done for grammars, for some that nobody has sent, and a text of each.

    What the library makes at its first mask of a kind, it keeps with the vocabulary.
    """
    for grammar, text in _WARM.items():
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
        for token in tokenizer.tokenize_str(text):
            matcher.compute_bitmask()
            matcher.consume_token(token)
        matcher.compute_bitmask()


def run(fork: Fork, connection: socket.socket, text_file: int, tokenizer: LLTokenizer) -> None:
    """Serve the node at the other end of `connection` until it closes that."""
    memory = _Memory()
    _limit(memory.virtual_bytes + fork.max_bytes)
    grammar = os.pread(text_file, os.fstat(text_file).st_size, 0).decode(errors="replace")
    os.close(text_file)
    with _CpuTime(fork.compile_cpu_s):
        compilation = _Compilation(tokenizer, grammar)
        compilation.wait(connection)
    connection.sendall(
        framed(Compiled(pid=os.getpid(), held_bytes=memory.held_bytes(), error=compilation.error))
    )
    if compilation.matcher is not None and not compilation.error:
        _serve(connection, compilation.matcher, tokenizer, memory)


def _serve(
    connection: socket.socket, pristine: LLMatcher, tokenizer: LLTokenizer, memory: _Memory
) -> None:
    matchers = Matchers(pristine, tokenizer)
    saved_s = _SAVED_CPU_S
    while True:
        try:
            asked = receive(connection, Follow)
        except EOFError:
            return
        for number in asked.closed:
            matchers.close(number)
        if not asked.slices:
            continue
        num_rows = sum(1 + len(each.draft) for each in asked.slices)
        begun_s = time.process_time()
        with _CpuTime(min(saved_s, ANSWER_CPU_S + num_rows * _ROW_CPU_S)):
            masks = bytearray()
            answers = [matchers.follow(each, masks) for each in asked.slices]
        used_s = time.process_time() - begun_s
        saved_s = min(_SAVED_CPU_S, saved_s - used_s + num_rows * _EARNED_CPU_S)
        answer = Masks(answers=answers, held_bytes=memory.held_bytes())
        connection.sendall(framed(answer) + masks)


class Matchers:
    """The matchers of one grammar's sequences, by number.

    Invariant: `pristine` has consumed nothing and has no error; it is only copied.
    """

    def __init__(self, pristine: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._pristine = pristine
        self._ends = frozenset(tokenizer.eos_tokens)
        self._matchers: dict[int, LLMatcher] = {}
        self._ended: set[int] = set()
        self._row_bytes = 4 * num_words(tokenizer)

    def close(self, number: int) -> None:
        """Forget a matcher, if there is one of this number."""
        self._matchers.pop(number, None)
        self._ended.discard(number)

    def follow(self, asked: Slice, masks: bytearray) -> FollowedSlice:
        """Consume what a sequence has emitted and append the masks of its rows to `masks`.

        A token of a draft that is not allowed cannot be sampled before it, so that nothing behind
        it is accepted: these rows need no mask. Nor do those behind the end of a text, where the
        step ahead of it asks once more.
        """
        matcher = self._matchers.get(asked.matcher)
        if matcher is None:
            matcher = self._matchers[asked.matcher] = self._pristine.deep_copy()
        for token in asked.tokens:
            if self._ends_here(matcher, token):
                self._ended.add(asked.matcher)
                break
            if not matcher.consume_token(token):
                return _refused(matcher)
        if asked.matcher in self._ended:
            return FollowedSlice()
        rows = [0]
        masks += self._mask(matcher)
        path, allowed = [_ROOT], {_ROOT}
        for idx in _depth_first(asked.parents):
            parent = asked.parents[idx]
            if parent not in allowed:
                continue
            while path[-1] != parent:
                path.pop()
                matcher.rollback(1)
            token = asked.draft[idx]
            if not self._ends_here(matcher, token) and matcher.try_consume_tokens([token]):
                allowed.add(idx)
                path.append(idx)
                rows.append(1 + idx)
                masks += self._mask(matcher)
        matcher.rollback(len(path) - 1)
        return _refused(matcher) if matcher.is_error() else FollowedSlice("", rows)

    def _mask(self, matcher: LLMatcher) -> bytes:
        # The library's may have a word more.
        return matcher.compute_bitmask()[: self._row_bytes]

    def _ends_here(self, matcher: LLMatcher, token: int) -> bool:
        return token in self._ends and matcher.is_accepting()


def num_words(tokenizer: LLTokenizer) -> int:
    """Return how many i32 a mask has."""
    return -(-tokenizer.vocab_size // 32)


class _Compilation(threading.Thread):
    """The compilation of a grammar and of its first mask, which takes longest.

    In a thread, whose priority can be lowered and stays so: that of masks is not.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        super().__init__(daemon=True)
        self._tokenizer = tokenizer
        self._grammar = grammar
        self.matcher: LLMatcher | None = None
        self.error = ""
        self._ended, self._end = socket.socketpair()

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            matcher = LLMatcher(self._tokenizer, self._grammar, log_level=0, limits=limits())
            if not matcher.is_error():
                matcher.compute_bitmask()
            self.error = _reason(matcher.get_error()) if matcher.is_error() else ""
            self.matcher = matcher
        except MemoryError:
            os._exit(OUT_OF_MEMORY_STATUS)
        except BaseException as error:  # the library's panics are no Exception
            self.error = f"the grammar cannot be compiled: {reason_of(str(error))}"
        self._end.close()

    def wait(self, connection: socket.socket) -> None:
        """Wait for the end; ends the process if the node has closed `connection` before."""
        self.start()
        poll = select.poll()
        poll.register(self._ended, select.POLLIN)
        poll.register(connection, select.POLLRDHUP)
        events = poll.poll(1000 * _LATE_S)
        if not events:
            assert self.native_id is not None, "started"
            os.setpriority(os.PRIO_PROCESS, self.native_id, _LATE_NICENESS)
            events = poll.poll()
        if any(descriptor == connection.fileno() for descriptor, _ in events):
            os._exit(0)
        self.join()


class _CpuTime:
    """A limit of this process's CPU time while something is done, in seconds."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, max(self._limit_s, 0.001))

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _Memory:
    """What this process has taken since it was forked."""

    def __init__(self) -> None:
        self._file = os.open("/proc/self/statm", os.O_RDONLY)
        self.virtual_bytes, self._resident_bytes = self._read()

    def held_bytes(self) -> int:
        return _OWN_BYTES + max(0, self._read()[1] - self._resident_bytes)

    def _read(self) -> tuple[int, int]:
        virtual, resident, of_files = map(int, os.pread(self._file, 64, 0).split()[:3])
        return virtual * _PAGE_BYTES, (resident - of_files) * _PAGE_BYTES


def _limit(most: int) -> None:
    """Have the kernel end this process where it takes too much, of memory over `most` bytes."""
    # The default, whatever the fork server's: it ends the process.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
    threading.stack_size(stack)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    # Native code writes there before it ends the process; the node says why.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno() if sys.__stderr__ else 2)


def _depth_first(parents: list[int]) -> list[int]:
    """Return the indices of a draft's tokens so that what follows a token comes behind it."""
    children: dict[int, list[int]] = {}
    for idx, parent in enumerate(parents):
        children.setdefault(parent, []).append(idx)
    order: list[int] = []
    waiting = children.get(_ROOT, [])[::-1]
    while waiting:
        order.append(waiting.pop())
        waiting += children.get(order[-1], [])[::-1]
    return order


def _refused(matcher: LLMatcher) -> FollowedSlice:
    return FollowedSlice(f"the grammar cannot be followed: {reason_of(matcher.get_error())}")


def _reason(error: str) -> str:
    if "coerce_one_of" in error:
        return "`oneOf` is served only where its schemas exclude each other; use `anyOf`"
    return f"the grammar is refused: {reason_of(error)}"

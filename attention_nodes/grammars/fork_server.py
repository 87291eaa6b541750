"""The process that has read a checkpoint's vocabulary and forks a process per grammar.

Owns these processes' lives: it gives one to each Fork of the node, says how each has ended, and
ends the largest one when all together hold too much memory. One is always forked ahead. It has one
thread, so that a fork copies nothing that another thread holds, and parses nothing that a stranger
wrote. Ends with the node at once; the processes when they see that the node's socket is closed,
for they outlive this one.
"""

from __future__ import annotations

import array
import contextlib
import gc
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import msgspec
from llguidance import LLTokenizer

from attention_nodes.grammars import grammar_process
from attention_nodes.grammars.frames import OUT_OF_MEMORY_STATUS, Ended, Fork, VocabularyRead
from models.text.tokenizer_files import effective_tokenizer
from topspin.grammars import MAX_ALL_COMPILED_BYTES
from topspin.process import follow_parent

_MAX_MESSAGE_BYTES: Final = 4096
_NUM_FILES: Final = 2
SPARE: Final = 0
_POLL_MS: Final = 100
"""How soon memory is looked at, and another process forked ahead."""
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class _ForkedProcess:
    """A forked process: `handle` becomes readable when it ends; it began with `resident_bytes`.

    A spare one waits at `stream` for its grammar.
    """

    number: int
    pid: int
    handle: int
    resident_bytes: int
    stream: socket.socket | None = None
    is_largest: bool = False

    def held_bytes(self) -> int:
        """Return what it has taken since it began."""
        return max(0, _resident_bytes(self.pid) - self.resident_bytes)


class ForkServer:
    """The processes of grammars.

    Invariant: each Fork is answered by one Ended, when its process is gone.
    """

    def __init__(self, node: socket.socket, tokenizer: LLTokenizer) -> None:
        self._node = node
        self._tokenizer = tokenizer
        self._processes: dict[int, _ForkedProcess] = {}
        self._poll = select.poll()
        self._poll.register(node, select.POLLIN)
        self._spare: _ForkedProcess | None = self._forked()

    def run(self) -> None:
        """Serve the node until it closes its socket."""
        while True:
            is_idle = self._spare is not None and len(self._processes) == 1
            events = self._poll.poll(None if is_idle else _POLL_MS)
            if not events and self._spare is None:
                # Not at once: the last one has the cores.
                with contextlib.suppress(OSError):
                    self._spare = self._forked()
            for descriptor, _ in events:
                if descriptor != self._node.fileno():
                    self._reap(self._processes.pop(descriptor))
                elif not self._receive():
                    return
            self._check_memory()

    def _receive(self) -> bool:
        """Start a process; returns whether the node is there."""
        data, files = _receive_with_files(self._node)
        if not data:
            return False
        number = msgspec.msgpack.decode(data, type=Fork).number
        try:
            self._start(number, data, files)
        except OSError as error:
            self._tell(Ended(number, error=f"no process for a grammar: {error.strerror}"))
        finally:
            for each in files:
                os.close(each)
        return True

    def _start(self, number: int, fork: bytes, files: list[int]) -> None:
        """Give the spare process a grammar."""
        spare, self._spare = self._spare or self._forked(), None
        assert spare.stream is not None, "it is spare"
        spare.number, spare.resident_bytes = number, _resident_bytes(spare.pid)
        with spare.stream as stream:
            socket.send_fds(stream, [fork], files)
        spare.stream = None

    def _forked(self) -> _ForkedProcess:
        """Return a new spare process."""
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            mine.close()
            self._become_spare(its)
        its.close()
        process = _ForkedProcess(SPARE, pid, os.pidfd_open(pid), 0, mine)
        self._processes[process.handle] = process
        self._poll.register(process.handle, select.POLLIN)
        return process

    def _become_spare(self, server: socket.socket) -> NoReturn:
        """Make all that can be made before a grammar comes, then be that grammar's process."""
        status = 1
        try:
            self._node.close()
            for each in self._processes.values():
                os.close(each.handle)
            grammar_process.warm_up(self._tokenizer)
            with server:
                data, files = _receive_with_files(server)
            if data:
                fork = msgspec.msgpack.decode(data, type=Fork)
                connection, text = files
                with socket.socket(fileno=connection) as stream:
                    grammar_process.run(fork, stream, text, self._tokenizer)
            status = 0
        except MemoryError:
            status = OUT_OF_MEMORY_STATUS
        except OSError:
            status = 0  # the node has closed the connection
        finally:
            os._exit(status)

    def _reap(self, process: _ForkedProcess) -> None:
        self._poll.unregister(process.handle)
        os.close(process.handle)
        _, status = os.waitpid(process.pid, 0)
        if process.number == SPARE:
            self._spare = None  # the system may have had too little memory
            return
        code = os.waitstatus_to_exitcode(status)
        self._tell(
            Ended(
                process.number,
                signal=max(0, -code),
                status=max(0, code),
                is_largest=process.is_largest,
            )
        )

    def _check_memory(self) -> None:
        held = {
            each.handle: each.held_bytes()
            for each in self._processes.values()
            if each.number != SPARE
        }
        if sum(held.values()) > MAX_ALL_COMPILED_BYTES:
            largest = self._processes[max(held, key=lambda handle: held[handle])]
            largest.is_largest = True
            os.kill(largest.pid, signal.SIGKILL)

    def _tell(self, ended: Ended) -> None:
        self._node.send(msgspec.msgpack.encode(ended))


def _receive_with_files(node: socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = node.recvmsg(
        _MAX_MESSAGE_BYTES, socket.CMSG_LEN(_NUM_FILES * array.array("i").itemsize)
    )
    files = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(content)
    return data, list(files)


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        _, resident, of_files = map(int, Path(f"/proc/{pid}/statm").read_text().split()[:3])
        return (resident - of_files) * _PAGE_BYTES
    return 0  # it has ended


def _read_tokenizer(directory: Path, vocab_size: int, ends: list[str]) -> LLTokenizer:
    """Return the vocabulary of a checkpoint, whose logits have `vocab_size` tokens."""
    backend = effective_tokenizer(directory)
    own_size = backend.get_vocab_size(with_added_tokens=True)
    tokenizer = LLTokenizer(
        backend.to_str(),
        n_vocab=max(vocab_size, own_size),
        eos_token=[int(each) for each in ends],
    )
    # The library makes some of it at its first use; every process would make that anew.
    grammar_process.warm_up(tokenizer)
    return tokenizer


def main() -> int:
    """Serve the node at the other end of a socket, until it is gone."""
    follow_parent()
    descriptor, directory, vocab_size, ends, cores = sys.argv[1:]
    # The node decides when it ends, also where the terminal's Control-C reaches both.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    os.sched_setaffinity(0, map(int, cores.split(",")))
    with socket.socket(fileno=int(descriptor)) as node:
        try:
            tokenizer = _read_tokenizer(Path(directory), int(vocab_size), ends.split(","))
        except Exception as error:  # the library raises bare Exception
            node.send(
                msgspec.msgpack.encode(VocabularyRead(error=str(error)[: _MAX_MESSAGE_BYTES // 2]))
            )
            while _receive_with_files(node)[0]:
                pass  # the node closes its socket when it has read why
            return 1
        loaded = VocabularyRead(num_words=grammar_process.num_words(tokenizer))
        node.send(msgspec.msgpack.encode(loaded))
        gc.collect()
        gc.freeze()
        with contextlib.suppress(BrokenPipeError):
            ForkServer(node, tokenizer).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

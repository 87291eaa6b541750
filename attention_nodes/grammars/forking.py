"""The node's end of its fork server: starts it, has it fork, and reads how processes end.

Owns the server's life; one that ends is started again when it is needed. Knows no grammar, only
numbers of processes. Called by processes.py in the node's busy thread.
"""

from __future__ import annotations

import array
import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from attention_nodes.grammars.frames import Ended, Fork, VocabularyRead
from models.text.tokenizer_names import has_tokenizer
from topspin.errors import EngineUnavailable, InvalidRequest
from topspin.process import PARENT_PID_VARIABLE

UNSTARTED: Final = "there is no process for the request's grammar; try again"
# Of a fork server; it may have to read a large vocabulary on a busy machine.
_LOAD_WAIT_S: Final = 60.0

_log = logging.getLogger("attention")


class ForkServerHandle:
    """The fork server of a node, by which its processes are started.

    Invariant: without a socket there is no server, and the next fork starts one.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._arguments = (directory, vocab_size, eos_token_ids)
        self._error = ""
        self._num_words = 0
        self._is_loaded = False
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        if not has_tokenizer(directory):
            self._error = "the checkpoint has no tokenizer.json"
        elif not eos_token_ids:
            self._error = "the checkpoint names no token that ends a text"

    @property
    def is_gone(self) -> bool:
        """Return whether no more ends are told."""
        return self._socket is None

    @property
    def error(self) -> str:
        """Return why this checkpoint serves no grammars, in words for clients; or nothing."""
        return f"grammars are not served: {self._error}" if self._error else ""

    def num_words(self) -> int:
        """Wait until the vocabulary is read; return the words of a mask, 0 if there are none."""
        if not self._num_words:
            self.start()
            self._load(_LOAD_WAIT_S)
        return self._num_words

    def fork(self, fork: Fork, grammar: str) -> socket.socket:
        """Start a process for a grammar and return the connection to it.

        Raises InvalidRequest if this checkpoint cannot serve any, EngineUnavailable if it cannot
        now.
        """
        self.start()
        if self._error:
            raise InvalidRequest(self.error)
        assert self._socket is not None, "started"
        try:
            mine, its = socket.socketpair()
        except OSError as error:
            raise EngineUnavailable(UNSTARTED) from error
        try:
            with its, os.fdopen(os.memfd_create("grammar"), "wb", buffering=0) as text:
                text.write(grammar.encode(errors="replace"))
                files = array.array("i", (its.fileno(), text.fileno()))
                self._socket.sendmsg(
                    [msgspec.msgpack.encode(fork)],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)],
                )
        except OSError as error:
            mine.close()
            self._lose()
            raise EngineUnavailable(UNSTARTED) from error
        return mine

    def ended(self, *, wait_s: float) -> Ended | None:
        """Return the next process that has ended; None: none has within `wait_s`."""
        if self._socket is None:
            return None
        if not self._is_loaded and not self._load(wait_s):
            return None
        message = self._message(wait_s)
        return message if isinstance(message, Ended) else None

    def close(self) -> None:
        if self._socket is not None:
            self._lose()

    def start(self) -> None:
        """Start the process, unless it runs or could serve nothing."""
        if self._socket is not None or self._error:
            return
        directory, vocab_size, eos_token_ids = self._arguments
        self._is_loaded = False
        self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self._child = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "attention_nodes.grammars.fork_server"),
                    *(str(its.fileno()), str(directory), str(vocab_size)),
                    ",".join(map(str, eos_token_ids)),
                    ",".join(map(str, _cores_of_host())),
                ],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                # One heap for each process: it is copied by a fork, and counted.
                env={
                    **os.environ,
                    "MALLOC_ARENA_MAX": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                    PARENT_PID_VARIABLE: str(os.getpid()),
                },
            )

    def _load(self, wait_s: float) -> bool:
        """Wait for the vocabulary; returns whether it is there."""
        message = self._message(wait_s)
        if not isinstance(message, VocabularyRead):
            return False
        if message.error:
            _log.error("%s: %s", self._arguments[0] / "tokenizer.json", message.error)
            self._error = "the checkpoint's tokenizer.json cannot be used for them"
            self._lose()
            return False
        self._num_words, self._is_loaded = message.num_words, True
        return True

    def _message(self, wait_s: float) -> VocabularyRead | Ended | None:
        if self._socket is None or not is_readable(self._socket, wait_s):
            return None
        data = b""
        with contextlib.suppress(ConnectionResetError):
            data = self._socket.recv(65536)
        if not data:
            self._lose()
            return None
        message: VocabularyRead | Ended = msgspec.msgpack.decode(data, type=VocabularyRead | Ended)
        return message

    def _lose(self) -> None:
        """End the server; another one is started when it is needed."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


def is_readable(stream: socket.socket, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(1000 * wait_s))


def _cores_of_host() -> set[int]:
    """Return the cores of who has started this node, which may spin on a core of its own."""
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:
        return os.sched_getaffinity(0)

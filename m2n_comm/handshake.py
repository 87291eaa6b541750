"""The handshake of a pair: both ends identify themselves and agree on every size.

Owns the transfer of hello.py's messages (schema-checked MessagePack behind a bounded length),
the accepting loop of an expert node and the asking end of an attention node. Knows sockets but
not their later use; open.py calls it for all transports.

A peer of another incarnation, a stranger, and one that stays silent are refused without disturbing
the others; an expected peer with another version or shape can never work, so both ends raise.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from m2n_comm.hello import PairHello, PairRefusal, check_hello
from m2n_comm.waits import CHECK_INTERVAL_S, Check
from topspin.errors import (
    DeadlineExceeded,
    FrameError,
    PeerLost,
    StaleFrame,
    TopspinError,
    VersionMismatch,
)

_PREFIX = struct.Struct("<4sI")
_MAGIC = b"TSHS"
_MAX_BODY = 2**16
_MAX_FDS = 3
_SILENCE_S = 5.0
_MAX_PENDING = 256


class Meeting(NamedTuple):
    """A pair that was agreed on: the open socket, the peer's hello, and descriptors received."""

    sock: socket.socket
    hello: PairHello
    fds: tuple[int, ...]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[PairHello | PairRefusal] = msgspec.msgpack.Decoder(
    PairHello | PairRefusal
)
_ERRORS: dict[str, type[TopspinError]] = {
    error.code: error for error in (FrameError, StaleFrame, VersionMismatch)
}


def send_message(
    sock: socket.socket, message: PairHello | PairRefusal, fds: tuple[int, ...] = ()
) -> None:
    """Send one message, with descriptors on a Unix socket. Raises OSError."""
    body = _ENCODER.encode(message)
    data = _PREFIX.pack(_MAGIC, len(body)) + body
    sent = socket.send_fds(sock, [data], list(fds)) if fds else 0
    if sent < len(data):
        sock.sendall(data[sent:])


class Reader:
    """Reads one message from a socket and no byte beyond it. Owns the descriptors it receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fds: list[int] = []
        self._data = b""

    def advance(self) -> PairHello | PairRefusal | None:
        """Read available bytes; return the message when it is complete.

        Raises FrameError for bytes that are not of a handshake, PeerLost at the end of the stream,
        BlockingIOError or TimeoutError as the socket does.
        """
        needed = _PREFIX.size
        if len(self._data) >= _PREFIX.size:
            needed += self._body_bytes()
        data, fds, flags, _ = (
            socket.recv_fds(self.sock, needed - len(self._data), _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            if self.sock.family == socket.AF_UNIX
            else (self.sock.recv(needed - len(self._data)), [], 0, None)
        )
        self.fds += fds
        if flags & socket.MSG_CTRUNC or len(self.fds) > _MAX_FDS:
            raise FrameError("handshake: too many descriptors")
        if not data:
            raise PeerLost("the peer closed the connection during the handshake")
        self._data += data
        if len(self._data) < _PREFIX.size:
            return None
        if len(self._data) < _PREFIX.size + self._body_bytes():
            return None
        try:
            return _DECODER.decode(self._data[_PREFIX.size :])
        except (msgspec.DecodeError, RecursionError) as error:
            raise FrameError(f"handshake: {error}") from error

    def close_fds(self) -> None:
        """Close the descriptors that were received."""
        while self.fds:
            os.close(self.fds.pop())

    def _body_bytes(self) -> int:
        magic, body_bytes = _PREFIX.unpack_from(self._data)
        if magic != _MAGIC:
            raise FrameError("handshake: magic is wrong, this is not an M2N peer")
        if not 1 <= body_bytes <= _MAX_BODY:
            raise FrameError(f"handshake: {body_bytes} bytes, at most {_MAX_BODY} are allowed")
        return int(body_bytes)


def ask(sock: socket.socket, want: PairHello, *, deadline_s: float, check: Check) -> Meeting:
    """Read the expert node's answer to `want`, which has been sent.

    Returns the socket and its descriptors. Raises the error of a refusal or of a field that
    differs, DeadlineExceeded, PeerLost, the errors of `check`. On an error no descriptor
    stays open.
    """
    reader = Reader(sock)
    try:
        message = None
        while message is None:
            left_s = deadline_s - time.monotonic()
            sock.settimeout(max(min(left_s, CHECK_INTERVAL_S), 0.001))
            try:
                message = reader.advance()
            except TimeoutError:
                check()
                if left_s <= 0:
                    raise
        if isinstance(message, PairRefusal):
            raise _ERRORS.get(message.code, PeerLost)(message.reason)
        check_hello(message, want)
    except TimeoutError as error:
        reader.close_fds()
        raise DeadlineExceeded(f"expert {want.expert} did not answer the handshake") from error
    except OSError as error:
        reader.close_fds()
        raise PeerLost(f"expert {want.expert}: {error.strerror} in the handshake") from error
    except BaseException:
        reader.close_fds()
        raise
    return Meeting(sock, message, tuple(reader.fds))


class Reception:
    """Accepts the attention nodes of one expert node, in any order, each once.

    `expected[i]` is the hello that attention node i must send; `trusted` decides whether a
    connection is accepted at all (peer credentials). Every pending connection has its own deadline.
    `check` is called from time to time and may end the wait.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        expected: dict[int, PairHello],
        trusted: Callable[[socket.socket], bool],
        deadline_s: float,
        check: Check,
    ) -> None:
        self._listener = listener
        self._expected = expected
        self._check = check
        self._trusted = trusted
        self._deadline_s = deadline_s
        self._pending: dict[int, tuple[Reader, float]] = {}
        self._met: dict[int, Meeting] = {}
        self._refused: list[str] = []

    def run(self, welcome: Callable[[socket.socket, PairHello], None]) -> dict[int, Meeting]:
        """Return the meeting of each attention node, after `welcome` has answered each.

        Raises DeadlineExceeded naming the missing and the refused peers, and the error of an
        expected peer that can never fit. On an error every connection is closed.
        """
        try:
            while len(self._met) < len(self._expected):
                self._turn(welcome)
        except BaseException:
            for meeting in self._met.values():
                meeting.sock.close()
            raise
        finally:
            for reader, _ in self._pending.values():
                self._drop(reader)
        return {index: self._met[index] for index in sorted(self._met)}

    def _turn(self, welcome: Callable[[socket.socket, PairHello], None]) -> None:
        """Wait for one event: a connection, a message, or a deadline."""
        now = time.monotonic()
        for fd, (reader, end_s) in list(self._pending.items()):
            if now >= end_s:
                self._refuse(fd, reader, "it said nothing")
        if now >= self._deadline_s:
            missing = [i for i in self._expected if i not in self._met]
            raise DeadlineExceeded(
                f"attention nodes {missing} did not connect"
                + (f"; refused: {'; '.join(self._refused)}" if self._refused else "")
            )
        poller = select.poll()
        if len(self._pending) < _MAX_PENDING:
            poller.register(self._listener, select.POLLIN)
        for fd in self._pending:
            poller.register(fd, select.POLLIN)
        end_s = min([end for _, end in self._pending.values()] + [self._deadline_s])
        events = poller.poll(min(max(0, end_s - now), CHECK_INTERVAL_S) * 1000 + 1)
        if not events:
            self._check()
        for fd, _ in events:
            if fd == self._listener.fileno():
                self._accept()
            else:
                self._read(fd, welcome)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it closed before it was accepted
        if not self._trusted(sock):
            self._note("a connection of another user")
            sock.close()
            return
        sock.setblocking(False)
        self._pending[sock.fileno()] = (Reader(sock), time.monotonic() + _SILENCE_S)

    def _read(self, fd: int, welcome: Callable[[socket.socket, PairHello], None]) -> None:
        reader, _ = self._pending[fd]
        try:
            message = reader.advance()
        except BlockingIOError:
            return
        except (OSError, FrameError, PeerLost) as error:
            self._refuse(fd, reader, str(error))
            return
        if message is None:
            return
        if not isinstance(message, PairHello) or reader.fds:
            self._refuse(fd, reader, "its first message is no hello")
            return
        self._judge(fd, reader, message, welcome)

    def _judge(
        self,
        fd: int,
        reader: Reader,
        hello: PairHello,
        welcome: Callable[[socket.socket, PairHello], None],
    ) -> None:
        """Take the pair, or answer with a refusal; raise if an expected peer can never fit."""
        try:
            if hello.attention not in self._expected or hello.attention in self._met:
                raise StaleFrame(f"attention {hello.attention} is unknown or connected already")
            check_hello(hello, self._expected[hello.attention])
        except (StaleFrame, VersionMismatch, FrameError) as error:
            reader.sock.settimeout(1.0)
            with contextlib.suppress(OSError):  # it may be gone; the reason is recorded here too
                send_message(reader.sock, PairRefusal(code=error.code, reason=str(error)))
            self._refuse(fd, reader, str(error))
            if not isinstance(error, StaleFrame):
                raise
            return
        del self._pending[fd]
        try:
            reader.sock.settimeout(max(self._deadline_s - time.monotonic(), 0.001))
            welcome(reader.sock, hello)
        except OSError as error:
            reader.sock.close()
            self._note(f"attention {hello.attention}: {error.strerror}")
            return
        self._met[hello.attention] = Meeting(reader.sock, hello, ())

    def _refuse(self, fd: int, reader: Reader, reason: str) -> None:
        del self._pending[fd]
        self._drop(reader)
        self._note(reason)

    def _drop(self, reader: Reader) -> None:
        reader.close_fds()
        reader.sock.close()

    def _note(self, reason: str) -> None:
        if len(self._refused) < 8:
            self._refused.append(reason)

"""The handshake of a pair: both ends identify themselves and agree on every size.

Owns the transfer of hello.py's messages (schema-checked MessagePack behind a bounded length) and
the asking end, of an attention node; the accepting one is reception.py. Knows sockets but not their
later use; open.py calls it for all transports.

An expected peer with another version or shape can never work, so both ends raise.

Between nodes with keys, both ends first offer their public keys and prove that they hold the secret
ones (session.py); the messages after that carry authentication codes.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from m2n_comm.pairing.hello import KeyOffer, KeyProof, PairHello, PairRefusal, check_hello
from m2n_comm.waits import CHECK_INTERVAL_S, Check
from topspin.errors import (
    DeadlineExceeded,
    FrameError,
    PeerLost,
    StaleFrame,
    TopspinError,
    TransportError,
    UntrustedPeer,
    VersionMismatch,
)
from topspin.processes.listening import in_url

if TYPE_CHECKING:
    from m2n_comm.pairing.session import Agreement, Session, Trust

_PREFIX = struct.Struct("<4sI")
_MAGIC = b"TSHS"
MAX_BODY = 2**16
_CODE_BYTES = 16
_MAX_REASON = 300
MAX_FDS = 3


class Meeting(NamedTuple):
    """A pair that was agreed on: the open socket, the peer's hello, and descriptors received.

    `session` has the codes of what is sent from now on; None: without keys.
    """

    sock: socket.socket
    hello: PairHello
    fds: tuple[int, ...]
    session: Session | None = None


Message = KeyOffer | KeyProof | PairHello | PairRefusal

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_ERRORS: dict[str, type[TopspinError]] = {
    error.code: error for error in (FrameError, StaleFrame, VersionMismatch, UntrustedPeer)
}


def send_message(
    sock: socket.socket,
    message: Message,
    fds: tuple[int, ...] = (),
    *,
    session: Session | None = None,
) -> None:
    """Send one message, with descriptors on a Unix socket, a code in a session. Raises OSError."""
    body = _ENCODER.encode(message)
    code_bytes = _CODE_BYTES if session else 0
    data = _PREFIX.pack(_MAGIC, len(body) + code_bytes) + body
    if session is not None:
        data += session.ours.next([data])
    sent = socket.send_fds(sock, [data], list(fds)) if fds else 0
    if sent < len(data):
        sock.sendall(data[sent:])


class Reader:
    """Reads a message at a time from a socket and no byte beyond it.

    Owns the descriptors that it receives. Messages in a `session` must have its next code.
    """

    def __init__(self, sock: socket.socket, session: Session | None = None) -> None:
        self.sock = sock
        self.session = session
        self.fds: list[int] = []
        self._data = b""

    def advance(self) -> Message | None:
        """Read available bytes; return the message when it is complete.

        Raises FrameError for bytes that are not of a handshake, UntrustedPeer for those that are
        not of the session, PeerLost at the end of the stream, BlockingIOError or TimeoutError as
        the socket does.
        """
        needed = _PREFIX.size
        if len(self._data) >= _PREFIX.size:
            needed += self._body_bytes()
        data, fds, flags, _ = (
            socket.recv_fds(self.sock, needed - len(self._data), MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            if self.sock.family == socket.AF_UNIX
            else (self.sock.recv(needed - len(self._data)), [], 0, None)
        )
        self.fds += fds
        if flags & socket.MSG_CTRUNC or len(self.fds) > MAX_FDS:
            raise FrameError("handshake: too many descriptors")
        if not data:
            raise PeerLost("the peer closed the connection during the handshake")
        self._data += data
        if len(self._data) < _PREFIX.size:
            return None
        if len(self._data) < _PREFIX.size + self._body_bytes():
            return None
        message, self._data = self._data, b""
        if self.session is not None:
            message, code = message[:-_CODE_BYTES], message[-_CODE_BYTES:]
            if not self.session.theirs.is_next([message], code):
                raise UntrustedPeer("handshake: a message is not of the peer that has the key")
        try:
            return _DECODER.decode(message[_PREFIX.size :])
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
        if not 1 <= body_bytes <= MAX_BODY:
            raise FrameError(f"handshake: {body_bytes} bytes, at most {MAX_BODY} are allowed")
        return int(body_bytes)


def _advance_proof(reader: Reader, agreement: Agreement) -> Session | None:
    """Read what is there; return the session once both ends have proved their keys.

    Raises UntrustedPeer, FrameError, PeerLost, OSError.
    """
    try:
        message = reader.advance()
    except BlockingIOError:
        return None
    if isinstance(message, PairRefusal):
        raise _refusal(message)
    if reader.session is None and isinstance(message, KeyOffer):
        reader.session = agreement.agree(message)
    elif reader.session is not None and isinstance(message, KeyProof):
        send_message(reader.sock, KeyProof(), session=reader.session)
        return reader.session
    elif message is not None:
        raise UntrustedPeer("it offers no key, and this node has keys")
    return None


def introduce(
    socks: Mapping[int, socket.socket], trust: Trust, *, deadline_s: float, check: Check
) -> dict[int, Session]:
    """Prove this attention node's key to all expert nodes, and they theirs, in any order.

    Returns a session for each. Raises UntrustedPeer naming the address of one that does not,
    DeadlineExceeded, PeerLost, the errors of `check`.
    """
    waiting: dict[int, tuple[int, Reader, Agreement]] = {}
    found: dict[int, Session] = {}
    poller = select.poll()

    def advance(expert: int, reader: Reader, agreement: Agreement, *, begins: bool = False) -> None:
        """Take the next step of an expert node's proof, whose errors name it."""
        name = f"expert {expert} at {address_of(reader.sock)}"
        try:
            if begins:
                send_message(reader.sock, agreement.offer)
            elif (session := _advance_proof(reader, agreement)) is not None:
                found[expert] = session
        except TransportError as error:
            raise type(error)(f"{name}: {error}") from error
        except OSError as error:
            raise PeerLost(f"{name}: {error.strerror} in the handshake") from error

    for expert, sock in socks.items():
        waiting[sock.fileno()] = one = (expert, Reader(sock), trust.begin("attention"))
        advance(*one, begins=True)
        sock.setblocking(False)
        poller.register(sock, select.POLLIN)
    while waiting:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            missing = sorted(expert for expert, *_ in waiting.values())
            raise DeadlineExceeded(f"experts {missing} did not answer the handshake")
        events = poller.poll(min(left_s, CHECK_INTERVAL_S) * 1000 + 1)
        if not events:
            check()
        for fd, _ in events:
            advance(*waiting[fd])
            if waiting[fd][0] in found:
                poller.unregister(fd)
                del waiting[fd]
    for sock in socks.values():
        sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
    return found


def _refusal(message: PairRefusal) -> TopspinError:
    return _ERRORS.get(message.code, PeerLost)(shown(message.reason))


def shown(reason: str) -> str:
    """Return a reason for errors and logs, of which a part may be anybody's text."""
    return "".join(each if each.isprintable() else "?" for each in reason[:_MAX_REASON])


def address_of(sock: socket.socket) -> str:
    """Return the peer's address, for errors; on a Unix socket it has none."""
    if sock.family == socket.AF_UNIX:
        return "this host"
    with contextlib.suppress(OSError):  # it has gone already
        host, port = sock.getpeername()[:2]
        return f"{in_url(host)}:{port}"
    return "an address unknown"


def ask(
    sock: socket.socket,
    want: PairHello,
    *,
    deadline_s: float,
    check: Check,
    session: Session | None = None,
) -> Meeting:
    """Read the expert node's answer to `want`, which has been sent.

    Returns the socket and its descriptors. Raises the error of a refusal or of a field that
    differs, DeadlineExceeded, PeerLost, the errors of `check`. On an error no descriptor
    stays open.
    """
    reader = Reader(sock, session)
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
            error = _refusal(message)
            raise type(error)(f"expert {want.expert} at {address_of(sock)}: {error}")
        if not isinstance(message, PairHello):
            raise FrameError(f"expert {want.expert}: its first message is no hello")
        check_hello(message, want)
    except BaseException as error:
        reader.close_fds()
        if isinstance(error, TimeoutError):
            text = f"expert {want.expert} did not answer the handshake"
            raise DeadlineExceeded(text) from error
        if isinstance(error, OSError):
            text = f"expert {want.expert}: {error.strerror} in the handshake"
            raise PeerLost(text) from error
        raise
    return Meeting(sock, message, tuple(reader.fds), session)

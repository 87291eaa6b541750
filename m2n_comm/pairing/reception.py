"""The accepting end of the handshake: one expert node's attention nodes come, in any order.

Owns the connections on which no pair has been agreed on yet, and who of them must leave. Knows the
messages by handshake.py and not what the pairs are for; open.py calls it for all transports.

A peer of another incarnation, a stranger, and one that stays silent are refused without disturbing
the others. Anybody can connect over tcp, and say nothing: when there are too many, the one that has
been silent for longest goes, so that a peer that says its hello at once is always heard.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m2n_comm.pairing.handshake import Meeting, Message, Reader, address_of, send_message, shown
from m2n_comm.pairing.hello import KeyOffer, KeyProof, PairHello, PairRefusal, check_hello
from m2n_comm.waits import CHECK_INTERVAL_S, Check
from topspin.errors import (
    DeadlineExceeded,
    FrameError,
    PeerLost,
    StaleFrame,
    TopspinError,
    UntrustedPeer,
    VersionMismatch,
)

if TYPE_CHECKING:
    from m2n_comm.pairing.session import Trust

SILENCE_S = 5.0
MAX_PENDING = 256
_MAX_NOTES = 8

_log = logging.getLogger("m2n")


_SILENT, _OFFERED, _PROVED = range(3)


@dataclass(slots=True)
class _Guest:
    """A connection on which no pair has been agreed on until `end_s`.

    `is_known`: its hello is the next message, since no key is asked for or it is proved.
    """

    reader: Reader
    name: str
    end_s: float
    is_known: bool

    @property
    def rank(self) -> int:
        """Return how much it has said: a new connection takes the place of one that said less."""
        if self.reader.session is None:
            return _SILENT
        return _PROVED if self.is_known else _OFFERED


class Reception:
    """Accepts the attention nodes of one expert node, in any order, each once.

    `expected[i]` is the hello that attention node i must send; `trusted` decides whether a
    connection is accepted at all (peer credentials), `trust` which keys it must prove (None: none).
    Every pending connection has its own deadline. `check` is called from time to time and may end
    the wait.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        expected: dict[int, PairHello],
        trusted: Callable[[socket.socket], bool],
        deadline_s: float,
        check: Check,
        trust: Trust | None = None,
    ) -> None:
        self._listener = listener
        self._trust = trust
        self._expected = expected
        self._check = check
        self._trusted = trusted
        self._deadline_s = deadline_s
        self._pending: dict[int, _Guest] = {}
        self._met: dict[int, Meeting] = {}
        self._refused: list[str] = []

    def run(self, welcome: Callable[[Meeting], None]) -> dict[int, Meeting]:
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
            for guest in self._pending.values():
                self._drop(guest)
        return {index: self._met[index] for index in sorted(self._met)}

    def _turn(self, welcome: Callable[[Meeting], None]) -> None:
        """Wait for one event: a connection, a message, or a deadline."""
        now = time.monotonic()
        for fd, guest in list(self._pending.items()):
            if now >= guest.end_s:
                self._refuse(fd, "it said nothing")
        if now >= self._deadline_s:
            missing = [i for i in self._expected if i not in self._met]
            raise DeadlineExceeded(
                f"attention nodes {missing} did not connect"
                + (f"; refused: {'; '.join(self._refused)}" if self._refused else "")
            )
        poller = select.poll()
        if not self._is_full or self._dispensable() is not None:
            poller.register(self._listener, select.POLLIN)
        for fd in self._pending:
            poller.register(fd, select.POLLIN)
        end_s = min([each.end_s for each in self._pending.values()] + [self._deadline_s])
        events = poller.poll(min(max(0, end_s - now), CHECK_INTERVAL_S) * 1000 + 1)
        if not events:
            self._check()
        for fd, _ in events:
            if fd == self._listener.fileno():
                self._accept()
            elif fd in self._pending:  # it may have gone for the connection that came
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
        if self._is_full and (oldest := self._dispensable()) is not None:
            self._refuse(oldest, "it was silent, and others came")
        sock.setblocking(False)
        end_s = time.monotonic() + SILENCE_S
        guest = _Guest(Reader(sock), address_of(sock), end_s, is_known=self._trust is None)
        self._pending[sock.fileno()] = guest

    @property
    def _is_full(self) -> bool:
        # All expected peers have room beside the strangers.
        return len(self._pending) >= MAX_PENDING + len(self._expected)

    def _dispensable(self) -> int | None:
        """Return the connection that goes for a new one; None: all have proved their keys.

        It is the oldest of those that have said nothing; if there is none, of those that have said
        whose key they have, which anybody may know.
        """
        ranks = {fd: each.rank for fd, each in self._pending.items() if each.rank < _PROVED}
        return min(ranks, key=ranks.__getitem__, default=None)

    def _read(self, fd: int, welcome: Callable[[Meeting], None]) -> None:
        guest = self._pending[fd]
        try:
            message = guest.reader.advance()
            if message is None:
                return
            if not guest.is_known:
                self._introduce(guest, message)
                return
            if isinstance(message, KeyOffer):
                raise UntrustedPeer("this node has no keys")
        except BlockingIOError:
            return
        except UntrustedPeer as error:
            self._tell(guest, error)
            self._refuse(fd, str(error))
            return
        except (OSError, FrameError, PeerLost) as error:
            self._refuse(fd, str(error))
            return
        if not isinstance(message, PairHello) or guest.reader.fds:
            self._refuse(fd, "its first message is no hello")
        else:
            self._judge(fd, guest, message, welcome)

    def _introduce(self, guest: _Guest, message: Message) -> None:
        """Answer a peer's offer of keys, or take its proof. Raises UntrustedPeer, OSError."""
        assert self._trust is not None
        reader = guest.reader
        if reader.session is None and isinstance(message, KeyOffer):
            agreement = self._trust.begin("expert")
            session = agreement.agree(message)
            send_message(reader.sock, agreement.offer)
            reader.session = session
            send_message(reader.sock, KeyProof(), session=session)
        elif reader.session is not None and isinstance(message, KeyProof):
            guest.is_known = True
            # It says hello once all expert nodes have proved their keys to it.
            guest.end_s = self._deadline_s
        else:
            raise UntrustedPeer("a peer must prove its key first, since this node has keys")

    def _tell(self, guest: _Guest, error: TopspinError) -> None:
        """Send the reason of a refusal."""
        guest.reader.sock.settimeout(1.0)
        refusal = PairRefusal(code=error.code, reason=str(error))
        with contextlib.suppress(OSError):  # it may be gone; the reason is recorded here too
            send_message(guest.reader.sock, refusal, session=guest.reader.session)

    def _judge(
        self, fd: int, guest: _Guest, hello: PairHello, welcome: Callable[[Meeting], None]
    ) -> None:
        """Take the pair, or answer with a refusal; raise if an expected peer can never fit."""
        reader = guest.reader
        try:
            if hello.attention not in self._expected or hello.attention in self._met:
                raise StaleFrame(f"attention {hello.attention} is unknown or connected already")
            check_hello(hello, self._expected[hello.attention])
        except (StaleFrame, VersionMismatch, FrameError) as error:
            self._tell(guest, error)
            self._refuse(fd, str(error))
            if not isinstance(error, StaleFrame):
                raise
            return
        del self._pending[fd]
        meeting = Meeting(reader.sock, hello, (), reader.session)
        try:
            reader.sock.settimeout(max(self._deadline_s - time.monotonic(), 0.001))
            welcome(meeting)
        except OSError as error:
            reader.sock.close()
            self._note(f"attention {hello.attention}: {error.strerror}")
            return
        self._met[hello.attention] = meeting

    def _refuse(self, fd: int, reason: str) -> None:
        guest = self._pending.pop(fd)
        self._drop(guest)
        self._note(f"{guest.name}: {reason}")

    def _drop(self, guest: _Guest) -> None:
        guest.reader.close_fds()
        guest.reader.sock.close()

    def _note(self, reason: str) -> None:
        """Record and log a refusal; only the first ones, as strangers may come without end."""
        if len(self._refused) < _MAX_NOTES:
            reason = shown(reason)
            self._refused.append(reason)
            _log.warning("refused a connection: %s", reason)

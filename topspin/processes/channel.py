"""The control plane's sockets: one ROUTER in the scheduler, a DEALER in every peer.

Owns connection settings (size caps, heartbeats, high-water marks) and turns what ZeroMQ reports
into three events: a message came, a peer is gone, a peer sent something malformed. Knows the
messages' encoding (topspin.messages) but none of their meaning. A closed connection is noticed at
once and a silent one by libzmq's heartbeat, whose thread keeps answering while a node computes; a
hung node is found by the scheduler's deadlines, not here.

Over ipc the scheduler takes connections of its own user only, and peers do not check whose socket
they connect to: a stranger would have to bind the address before the scheduler, whose start then
fails and ends the engine. Over tcp beyond loopback both ends prove themselves by CURVE, which also
encrypts (topspin.processes.secure_channel).
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Collection
from socket import AF_INET6
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from topspin.errors import ConfigError, PeerLost, ProtocolError, SchedulerLost
from topspin.messages import AnyMessage, Message, Refused, decode, encode
from topspin.plan.network import place_of
from topspin.processes.connection import Line
from topspin.processes.listening import family_of
from topspin.processes.secure_channel import NAME, Gatekeeper, check_protected, secure_client

if TYPE_CHECKING:  # engines of one host have no keys, and may lack the package that reads them
    from topspin.processes.keys import KeyDirectory

MAX_MESSAGE_BYTES = 64 * 2**20
HIGH_WATER_MARK = 100_000
LINGER_MS = 1000
HANDSHAKE_MS = 5000
# How soon a listening end uses a key that has been replaced.
KEY_CHECK_S = 1.0
# Python computes with flags of an enumeration for microseconds.
_NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.SNDMORE)
_INPUT = int(zmq.POLLIN)
_CLOSED = zmq.EVENT_DISCONNECTED
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Heartbeat(NamedTuple):
    """How often a silent peer is pinged, and after how long without an answer it is gone.

    The peer's own pings count as signs of life. If a link is dead one way, the end that hears
    nothing closes the connection, and the other end sees that: both must ping.
    """

    interval_ms: int
    timeout_ms: int

    @property
    def limit_s(self) -> float:
        """Return the longest silence before a peer is gone: it begins just after a ping."""
        return (self.interval_ms + self.timeout_ms) / 1000


RELAXED_HEARTBEAT = Heartbeat(1000, 5000)
# A frozen peer is to be noticed within 2 s, a partition within 3 s.
FAILOVER_HEARTBEAT = Heartbeat(400, 1200)


class Received(NamedTuple):
    """A well-formed message from `peer` (an opaque connection id)."""

    peer: bytes
    message: AnyMessage


class Malformed(NamedTuple):
    """`peer` sent something that is no control message."""

    peer: bytes
    reason: str


class PeerGone(NamedTuple):
    """The connection of `peer`, which had sent something before, has ended; `how` says why.

    `was_silent`: the peer did not close it.
    """

    peer: bytes
    how: str = "closed its connection"
    was_silent: bool = False


Event = Received | Malformed | PeerGone


def _configure(
    socket: zmq.Socket[Any], address: str, heartbeat: Heartbeat = RELAXED_HEARTBEAT
) -> None:
    """Set the limits and heartbeats that libzmq leaves unbounded or off by default.

    So is IPv6, which libzmq takes instead of IPv4, not beside it; but for `::`.
    """
    if address.startswith("tcp:"):
        host, _ = place_of(address, name=NAME)
        socket.setsockopt(zmq.IPV6, family_of(host) == AF_INET6)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, heartbeat.interval_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, heartbeat.timeout_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, LINGER_MS)


def _has_input(socket: zmq.Socket[Any]) -> bool:
    """Say whether a message waits; costs half of a recv() that finds none."""
    return bool(int(socket.get(zmq.EVENTS)) & _INPUT)


def _loss(report: list[bytes], line: Line | None) -> str:
    """Return the text of a loss that a monitor reports; `line` is None until something has come."""
    silence = None if line is None else line.end()
    event = parse_monitor_message(report)
    if event["event"] & _REFUSED:
        if event["value"] == errno.EAGAIN:
            return f"the scheduler did not answer for {HANDSHAKE_MS / 1000:g} s"
        return (
            "the scheduler closed the control connection in the handshake: keys or users differ, "
            "or it has ended"
        )
    return f"the scheduler {silence or 'closed the control connection'}"


def _is_unknown(message: AnyMessage) -> bool:
    """Say whether a scheduler does not know the peer: it was lost, if it had said Hello."""
    return isinstance(message, Refused) and message.is_before_hello


class ControlServer:
    """The scheduler's end: one address, many peers.

    Invariant: a peer that has sent something is reported PeerGone exactly once, after all its
    messages.
    """

    def __init__(
        self,
        address: str,
        *,
        heartbeat: Heartbeat = RELAXED_HEARTBEAT,
        keys: KeyDirectory | None = None,
        groups: Collection[str] | None = None,
    ) -> None:
        """Listen on `address`; with `keys`, only peers of these `groups` are heard (None: of all).

        Raises ConfigError for an address that others can reach without keys, or that cannot be
        listened on.
        """
        check_protected(address, keys)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        _configure(self._socket, address, heartbeat)
        self._heartbeat = heartbeat
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if address.startswith("ipc:"):
            # An abstract socket has no file permissions; the kernel vouches for the user.
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._monitor = self._socket.get_monitor_socket(_CLOSED)
        self._gatekeeper: Gatekeeper | None = None
        self._group_of: dict[bytes, str] = {}
        self._lines: dict[bytes, Line] = {}
        self._keys_checked_s = 0.0
        try:
            self._listen(address, keys, groups)
        except ConfigError:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._peer_of_fd: dict[int, bytes] = {}
        self._unclaimed_closed_fds: set[int] = set()

    def _listen(
        self, address: str, keys: KeyDirectory | None, groups: Collection[str] | None
    ) -> None:
        if keys is not None:
            self._gatekeeper = Gatekeeper(self._context, self._socket, address, keys, groups)
            return
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"control address {address}: {error.strerror}") from error

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for events until `timeout_s` from now (None: for ever); [] if none came.

        With keys it may return [] earlier.
        """
        if self._gatekeeper is not None:
            timeout_s = KEY_CHECK_S if timeout_s is None else min(timeout_s, KEY_CHECK_S)
            if time.monotonic() >= self._keys_checked_s + KEY_CHECK_S:
                self._gatekeeper.renew()
                self._keys_checked_s = time.monotonic()
        ready = self._poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1000)))
        if not ready:
            return []
        events: list[Event] = []
        gone: list[PeerGone] = []
        while _has_input(self._socket):
            events.append(self._next_message(gone))
        # Else what ends meanwhile is of the next call, unless _register() has to know it.
        if any(socket is self._monitor for socket, _ in ready):
            self._collect_gone(gone)
        for peer in gone:
            self._lines.pop(peer.peer, None)
            self._group_of.pop(peer.peer, None)
        if gone:
            # Those that are back have a new connection, and take the place of the old one.
            lost = {peer.peer for peer in gone}
            ended = [event for event in events if event.peer in lost]
            return [*ended, *gone, *(event for event in events if event.peer not in lost)]
        return events

    def may_be(self, peer: bytes, group: str) -> bool:
        """Say whether `peer` has a key of `group`; without keys all peers may be anything."""
        return self._gatekeeper is None or self._group_of.get(peer) == group

    def _next_message(self, gone: list[PeerGone]) -> Event:
        """Return the message that waits."""
        peer = self._socket.recv(_NOBLOCK)
        if peer in self._lines:
            data = self._socket.recv(_NOBLOCK)
        else:
            frame = self._socket.recv(_NOBLOCK, copy=False)
            data = frame.bytes
            if self._gatekeeper is not None:
                self._group_of[peer] = self._gatekeeper.group_of(frame)
            self._register(peer, int(frame.get(zmq.SRCFD)), gone)
        num_frames = 1
        while self._socket.get(zmq.RCVMORE):
            self._socket.recv(_NOBLOCK)
            num_frames += 1
        if num_frames > 1:
            return Malformed(peer, f"{num_frames} frames instead of one")
        try:
            return Received(peer, decode(data))
        except ProtocolError as error:
            return Malformed(peer, str(error))

    def _register(self, peer: bytes, fd: int, gone: list[PeerGone]) -> None:
        """Map a new peer to its descriptor; an older connection may have had the same number."""
        self._collect_gone(gone)
        if fd in self._unclaimed_closed_fds and not self._is_reachable(peer):
            self._lines[peer] = Line(None, self._heartbeat.limit_s)
            gone.append(self._gone(peer))
        else:
            self._lines[peer] = Line(fd, self._heartbeat.limit_s)
            self._peer_of_fd[fd] = peer
        self._unclaimed_closed_fds.discard(fd)

    def _is_reachable(self, peer: bytes) -> bool:
        """Probe by an empty frame, which clients skip."""
        try:
            self._socket.send_multipart([peer, b""], zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError:
            return False
        return True

    def _collect_gone(self, gone: list[PeerGone]) -> None:
        """Turn the monitor's closed descriptors into peers; keep the numbers of unknown ones."""
        while _has_input(self._monitor):
            report = parse_monitor_message(self._monitor.recv_multipart())
            peer = self._peer_of_fd.pop(report["value"], None)
            if peer is None:
                self._unclaimed_closed_fds.add(report["value"])
            else:
                gone.append(self._gone(peer))

    def _gone(self, peer: bytes) -> PeerGone:
        silence = self._lines[peer].end()
        return PeerGone(peer) if silence is None else PeerGone(peer, silence, was_silent=True)

    def send(self, peer: bytes, message: Message) -> bool:
        """Queue `message` for `peer`; False if it is gone or has stopped reading."""
        data = encode(message)
        try:
            self._socket.send(peer, _MORE | _NOBLOCK)
            self._socket.send(data, _NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Send queued messages (for at most a second) and release the sockets."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        for line in self._lines.values():
            line.end()
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()


class ControlClient:
    """A node's end: one connection to the scheduler, until it is lost and reconnect() is called.

    Belongs to one thread, but for wake().
    """

    def __init__(
        self,
        address: str,
        *,
        heartbeat: Heartbeat = RELAXED_HEARTBEAT,
        keys: KeyDirectory | None = None,
        server: str = "scheduler",
    ) -> None:
        """Connect to `address`; with `keys`, only to a process of the group `server`.

        Raises ConfigError for an address that others can reach without keys.
        """
        check_protected(address, keys)
        self._address, self._heartbeat, self._keys, self._server = address, heartbeat, keys, server
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._connect()

    def _connect(self) -> None:
        self._loss = ""
        self._line: Line | None = None
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket, self._address, self._heartbeat)
        if self._keys is not None:
            secure_client(self._socket, self._keys.read(), self._server)
        self._monitor = self._socket.get_monitor_socket(_CLOSED | _REFUSED)
        self._socket.connect(self._address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def reconnect(self) -> None:
        """Connect anew, to whichever scheduler listens now; what was queued is dropped."""
        self._release(linger=0)
        self._connect()

    def wake(self) -> None:
        """Have a recv() that waits, or the next one that would, return None at once.

        May be called by any thread, and by a signal handler.
        """
        os.eventfd_write(self._wake_fd, 1)

    def recv(self, timeout_s: float | None = None) -> AnyMessage | None:
        """Return the next message, or None if none came within `timeout_s` (None: wait).

        Also None after wake(). Raises SchedulerLost once the connection has closed and all earlier
        messages are read, and from then on; ProtocolError for a malformed message.
        """
        while True:
            if self._loss:
                raise SchedulerLost(self._loss)
            if not _has_input(self._socket):
                timeout_ms = None if timeout_s is None else max(0, round(timeout_s * 1000))
                ready = dict(self._poller.poll(timeout_ms))
                if not ready:
                    return None
                if self._wake_fd in ready:
                    os.eventfd_read(self._wake_fd)
                    return None
                if self._socket not in ready:
                    self._loss = _loss(self._monitor.recv_multipart(), self._line)
                continue
            frame = self._socket.recv(_NOBLOCK, copy=self._line is not None)
            if isinstance(frame, zmq.Frame):
                is_first = not self._monitor.poll(0)  # else libzmq has connected again by itself
                fd = frame.get(zmq.SRCFD) if is_first else None
                self._line = Line(fd, self._heartbeat.limit_s)
                frame = frame.bytes
            if not (data := frame):  # an empty frame is the scheduler's probe
                continue
            message = decode(data)
            if _is_unknown(message) and self._monitor.poll(0):
                continue
            return message

    def send(self, message: Message) -> None:
        """Queue `message` for the scheduler.

        It is dropped if the scheduler has refused the connection; recv() then raises why.
        """
        data = encode(message)
        try:
            self._socket.send(data, _NOBLOCK)
        except zmq.Again:
            # Behind a handshake that failed libzmq has no queue, and would wait for one for ever.
            if not (self._loss or self._monitor.poll(0)):
                self._socket.send(data)

    def close(self) -> None:
        """Send queued messages, unless the connection was lost, and release the sockets."""
        self._release(0 if self._loss else None)
        self._context.term()
        os.close(self._wake_fd)

    def _release(self, linger: int | None = None) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger)
        if self._line is not None:
            self._line.end()


class AsyncControlClient:
    """The gateway's end, for asyncio; the same promises as ControlClient.

    Watches libzmq's descriptors in the loop itself: zmq.asyncio took two thirds of the processor's
    time that a gateway needs for a token.
    """

    def __init__(
        self,
        address: str,
        *,
        heartbeat: Heartbeat = RELAXED_HEARTBEAT,
        keys: KeyDirectory | None = None,
    ) -> None:
        """Connect as ControlClient does."""
        check_protected(address, keys)
        self._heartbeat = heartbeat
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        _configure(self._socket, address, heartbeat)
        if keys is not None:
            secure_client(self._socket, keys.read(), "scheduler")
        self._monitor = self._socket.get_monitor_socket(_CLOSED | _REFUSED)
        self._socket.connect(address)
        self._line: Line | None = None
        self._is_lost = False
        self._loss = ""
        self._arrived = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def recv(self) -> AnyMessage:
        """Return the next message; raises PeerLost and ProtocolError as ControlClient.recv."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket, self._look)
            self._loop.add_reader(self._monitor, self._look_for_loss)
            self._look()  # libzmq tells of nothing before somebody has asked
            self._look_for_loss()
        while True:
            await self._arrived.wait()
            if self._is_lost and not _has_input(self._socket):
                self._loss = self._loss or _loss(self._monitor.recv_multipart(), self._line)
                raise PeerLost(self._loss)
            frame = self._socket.recv(_NOBLOCK, copy=self._line is not None)
            if not self._is_lost and not _has_input(self._socket):
                self._arrived.clear()
            if isinstance(frame, zmq.Frame):
                self._line = Line(frame.get(zmq.SRCFD), self._heartbeat.limit_s)
                frame = frame.bytes
            if not (data := frame):  # an empty frame is the scheduler's probe
                continue
            message = decode(data)
            if self._is_lost and _is_unknown(message):
                raise PeerLost("the scheduler closed the control connection")
            return message

    def _look(self) -> None:
        """Note whether a message waits.

        A descriptor tells once of what changes, to whoever asks first: sending may be that.
        """
        if _has_input(self._socket):
            self._arrived.set()

    def _look_for_loss(self) -> None:
        if _has_input(self._monitor):
            self._is_lost = True
            self._arrived.set()

    def send(self, message: Message) -> None:
        """Queue `message` for the scheduler without waiting.

        It is dropped if the scheduler has refused the connection; recv() then raises why.
        """
        try:
            # The high-water mark is far above the messages ever in flight, so this never blocks.
            self._socket.send(encode(message), _NOBLOCK)
        except zmq.Again:
            # Behind a handshake that failed libzmq has no queue.
            if not (self._is_lost or _has_input(self._monitor)):
                raise
        self._look()

    def close(self) -> None:
        """Send queued messages, unless the connection was lost, and release the sockets."""
        if self._loop is not None:
            for socket in (self._socket, self._monitor):
                self._loop.remove_reader(socket)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0 if self._is_lost else None)
        if self._line is not None:
            self._line.end()
        self._context.term()

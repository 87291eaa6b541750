"""M2N over TCP: one connection per pair, frames read straight into registered windows.

Owns the sockets, the state of each one's partly read frame, and both windows of every pair in
private memory. Knows no plans; before it reads a payload it checks the header for damage, window,
size and sequence. Frames of other micro-batches that arrive first go to their own windows.

Between nodes with keys a frame carries an authentication code (session.py), which is checked when
the whole frame is there, and before that only a window that awaits a frame is written: rows in use
stay what they are whatever arrives.

Every wait of a node, to receive and to send, reads from all of its connections. So a blocked send
never blocks a peer's send to this node, and two ends can send large frames to each other.

A frame takes one call to send and usually one to receive: a reader that waits for a frame reads
past the header into the window for its rows, assuming that the frame is the awaited one and as long
as the last; rows that belong elsewhere are moved. That window is free until the frame comes. With
one connection the wait itself is that call.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kernels.frame_header import FrameHeader
from m2n_comm.handshake import Meeting
from m2n_comm.hello import Identity, NodeRole, PairHello
from m2n_comm.host.lines import NodeLines
from m2n_comm.host.windows import PairLayout, Window, private_memory
from m2n_comm.host.wire import (
    HEADER_BYTES,
    SEAL_AT,
    check_seal,
    check_size,
    read_header,
    seal,
)
from m2n_comm.waits import CHECK_INTERVAL_S, Hop, Waits, late, lost
from topspin.errors import FrameError, StaleFrame

if TYPE_CHECKING:
    from m2n_comm.session import Session

# The rest of a partly read frame comes soon: poll before sleeping, since a wake-up costs more.
_MID_FRAME_S = 50e-6
# A struct timeval.
_CHECK_INTERVAL = struct.pack("@ll", 0, round(CHECK_INTERVAL_S * 1e6))


class TcpPair(NamedTuple):
    """One connected pair, and the codes of its frames (None: they carry none)."""

    sock: socket.socket
    session: Session | None = None


class TcpForming:
    """The pairs of one node while they are formed: only a connection each."""

    def __init__(self, me: Identity, waits: Waits) -> None:
        self._me = me
        self._waits = waits
        self._pairs: dict[int, TcpPair] = {}

    def offer(self, peer: int, hello: PairHello) -> tuple[PairHello, tuple[int, ...]]:
        """Return `hello` unchanged."""
        return hello, ()

    def take(self, peer: int, met: Meeting) -> None:
        """Keep the connection."""
        self._pairs[peer] = TcpPair(met.sock, met.session)

    def prove(self, peer: int) -> None:
        """Do nothing: the handshake has proved the line."""

    def drop(self, peer: int) -> None:
        """Forget the connection."""
        self._pairs.pop(peer, None)

    def finish(self) -> TcpLines:
        """Return the lines, which own the connections from now on."""
        layout = PairLayout(self._me.shape)
        return TcpLines(layout, self._me.role, pairs=self._pairs, waits=self._waits)

    def close(self) -> None:
        """Do nothing: the caller closes the connections that it made."""


class _Line:
    """The receiving state of one connection.

    Invariant: `arrived[mb]` holds the header of a whole frame that lies in inbox mb and has
    not been received yet; `segments` is the rest of the frame in progress. `awaits[mb]`: inbox mb
    is not in use, so that a frame may be read into it.
    """

    def __init__(
        self,
        pair: TcpPair,
        inbox: tuple[Window, ...],
        *,
        row_bytes: int,
        rows: int,
        name: str,
        awaits: bool,
    ) -> None:
        self.sock = pair.sock
        self.session = pair.session
        self.ended = False
        self.awaits = [awaits] * len(inbox)
        self.arrived: list[bytes | None] = [None] * len(inbox)
        self._inbox = inbox
        self._row_bytes = row_bytes
        self._window_rows = rows
        self._name = name
        self._sequences = [0] * len(inbox)
        self._last_rows = [0] * len(inbox)
        self._header = bytearray(HEADER_BYTES)
        self._segments: list[memoryview] = [memoryview(self._header)]
        self._frame: FrameHeader | None = None
        # Rows read together with the header, before it is known where they belong.
        self._guessed: list[memoryview] = []
        self._spare = memoryview(b"")

    def pump(self, awaited: int | None = None, *, wait: bool = False) -> bool:
        """Read available bytes, up to the end of a frame; return whether there were any.

        `awaited` is a micro-batch whose inbox is free until its next frame. With `wait` sleeps
        up to CHECK_INTERVAL_S for the first bytes. In the middle of a frame it polls for up to
        _MID_FRAME_S after the last bytes. Raises FrameError or StaleFrame.
        """
        if awaited is not None and self._frame is None and not self._guessed:
            self._guess(awaited)
        has_read, patience_s = False, 0.0
        while True:
            try:
                count = self._read(0 if wait and not has_read else socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                if self._frame is None or time.monotonic() >= patience_s:
                    return has_read
                continue
            except ConnectionError:
                count = 0
            has_read = True
            patience_s = time.monotonic() + _MID_FRAME_S
            if count == 0:
                self.ended = True
                return True
            self._segments = _after(self._segments, count)
            if self._frame is None and self._has_header():
                self._begin()
            if self._frame is not None and not self._segments:
                self._complete(self._frame)
                if not self._spare:
                    return True

    def _guess(self, micro_batch: int) -> None:
        """Add that window's rows to the segments if only the (rest of the) header was left."""
        rows = self._last_rows[micro_batch]
        if rows and len(self._segments) == 1:
            self._guessed = self._inbox[micro_batch].payload(rows)
            self._segments = [*self._segments, *self._guessed]

    def _read(self, flags: int) -> int:
        """Fill the segments with bytes already read beyond a frame, or else from the socket."""
        if not self._spare:
            return self.sock.recvmsg_into(self._segments, 0, flags)[0]
        segment = self._segments[0]
        count = min(len(segment), len(self._spare))
        segment[:count] = self._spare[:count]
        self._spare = self._spare[count:]
        return count

    def _has_header(self) -> bool:
        """Return whether the header is complete, so that at most guessed rows are left to read."""
        return len(self._segments) <= len(self._guessed)

    def _begin(self) -> None:
        """Handle a complete header: read the rows into their window."""
        frame = self._judge()
        self._frame = frame
        guessed, self._guessed = self._guessed, []
        payload = self._inbox[frame.micro_batch].payload(frame.rows)
        if guessed is payload:
            return
        self._segments, left = list(payload), self._segments
        if not guessed:
            return
        # The guess was wrong: move the bytes of its rows, and those beyond it.
        count = sum(map(len, guessed)) - sum(map(len, left))
        self._spare = memoryview(b"".join(guessed)[:count])

    def _complete(self, frame: FrameHeader) -> None:
        """Handle a complete frame: mark it as arrived."""
        if self.session is not None:
            header = memoryview(self._header)
            payload = self._inbox[frame.micro_batch].payload(frame.rows)
            if not self.session.theirs.is_next([header[:SEAL_AT], *payload], header[SEAL_AT:]):
                raise FrameError(
                    f"frame of {self._name}, layer {frame.layer}, micro-batch "
                    f"{frame.micro_batch}: its authentication code is wrong"
                )
        self.awaits[frame.micro_batch] = False
        self._sequences[frame.micro_batch] = frame.sequence
        self._last_rows[frame.micro_batch] = frame.rows
        self._inbox[frame.micro_batch].header[:] = self._header
        self.arrived[frame.micro_batch] = bytes(self._header)
        self._frame = None
        self._segments = [memoryview(self._header)]

    def _judge(self) -> FrameHeader:
        """Check and return a header before any of its payload is used."""
        if self.session is None:
            check_seal(self._header)
        frame = read_header(self._header)
        if frame.micro_batch >= len(self._inbox):
            raise FrameError(
                f"frame of {self._name}: micro_batch is {frame.micro_batch}, there are windows "
                f"for {len(self._inbox)}"
            )
        check_size(
            frame, window_rows=self._window_rows, row_bytes=self._row_bytes, origin=self._name
        )
        expected = self._sequences[frame.micro_batch] + 1
        if not self.awaits[frame.micro_batch] or frame.sequence != expected:
            raise StaleFrame(
                f"frame of {self._name}, layer {frame.layer}, micro-batch {frame.micro_batch}: "
                f"sequence is {frame.sequence}, expected {expected}, and none before the "
                "last one is answered"
            )
        return frame


class TcpLines(NodeLines):
    """All pairs of one node; windows at each end are its own memory."""

    def __init__(
        self, layout: PairLayout, role: NodeRole, *, pairs: Mapping[int, TcpPair], waits: Waits
    ) -> None:
        memories = {peer: layout.map(private_memory(layout)) for peer in pairs}
        super().__init__(layout, role, memories)
        self._lines: dict[int, _Line] = {}
        self._check = waits.check
        self._spins = waits.policy == "spin"
        self._poller = select.poll()
        self._peer_of: dict[int, int] = {}
        attention = role == "attention"
        row_bytes = layout.answer_row_bytes if attention else layout.request_row_bytes
        for peer, pair in pairs.items():
            # Calls that must not sleep pass a flag; the one that may sleeps no longer than this.
            pair.sock.setblocking(True)
            pair.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _CHECK_INTERVAL)
            self._lines[peer] = _Line(
                pair,
                self._inbox[peer],
                row_bytes=row_bytes,
                rows=layout.shape.answer_rows if attention else layout.shape.window_rows,
                name=f"{self.peer_role} {peer}",
                awaits=not attention,
            )
            self._peer_of[pair.sock.fileno()] = peer
            self._poller.register(pair.sock, select.POLLIN)

    @property
    def authenticated(self) -> dict[int, bool]:
        """Return whether frames to and from each peer carry authentication codes."""
        return {peer: line.session is not None for peer, line in self._lines.items()}

    def send(self, hop: Hop, rows: int, sequence: int) -> None:
        """Send header and rows; waits only while the kernel's buffer is full.

        Raises PeerLost or DeadlineExceeded.
        """
        self._send(hop, self._outbox[hop.peer][hop.micro_batch].payload(rows))

    def send_from(self, hop: Hop, rows: int, sequence: int, hidden: Sequence[memoryview]) -> None:
        """Send as send() does, but the hidden rows in `hidden`; see InPlaceLines."""
        payload = self._outbox[hop.peer][hop.micro_batch].payload(rows)
        self._send(hop, [*payload[:-1], *hidden])

    def _send(self, hop: Hop, payload: list[memoryview]) -> None:
        line = self._lines[hop.peer]
        window = self._outbox[hop.peer][hop.micro_batch]
        line.awaits[hop.micro_batch] = True
        if line.session is None:
            seal(window.header)
        else:
            parts = [window.header[:SEAL_AT], *payload]
            window.header[SEAL_AT:] = line.session.ours.next(parts)
        segments = [window.header, *payload]
        while segments:
            try:
                segments = _after(segments, line.sock.sendmsg(segments, [], socket.MSG_DONTWAIT))
            except (BlockingIOError, InterruptedError):
                self._wait(hop, late_text="could not send to", writable=True)
            except ConnectionError as error:
                raise lost(self.peer_role, hop.peer, hop) from error

    def receive(self, hop: Hop, awaited: tuple[int, ...]) -> bytes:
        """Wait for the next frame of hop.peer; see Lines.receive."""
        arrived = self._lines[hop.peer].arrived
        while (header := arrived[hop.micro_batch]) is None:
            for peer in awaited:
                line = self._lines[peer]
                if line.ended and line.arrived[hop.micro_batch] is None:
                    raise lost(self.peer_role, peer, hop)
            self._wait(hop)
        arrived[hop.micro_batch] = None
        return header

    def arrived(self, peer: int, micro_batch: int) -> bool:
        """Return whether a whole frame lies in the inbox."""
        return self._lines[peer].arrived[micro_batch] is not None

    def close(self) -> None:
        """Close the connections and drop all views."""
        for line in self._lines.values():
            line.sock.close()
        self._lines = {}
        self.drop_windows()
        self._poller = select.poll()

    def _wait(self, hop: Hop, *, late_text: str = "no frame from", writable: bool = False) -> None:
        """Sleep until some connection can be read (or hop.peer's written); read them all."""
        left_s = hop.deadline_s - time.monotonic()
        if left_s <= 0:
            raise late(self.peer_role, hop, doing=late_text)
        target = self._lines[hop.peer]
        sleeps_in_read = len(self._lines) == 1 and not self._spins and not writable
        if sleeps_in_read and left_s > CHECK_INTERVAL_S:
            if not target.pump(hop.micro_batch, wait=True):
                self._check()
            return
        if writable:
            if target.ended:
                raise lost(self.peer_role, hop.peer, hop)
            self._poller.modify(target.sock, select.POLLIN | select.POLLOUT)
        events = self._poll(left_s)
        if not events:
            self._check()
        if writable:
            self._poller.modify(target.sock, select.POLLIN)
        for fd, mask in events:
            if mask & ~select.POLLOUT:
                line = self._lines[self._peer_of[fd]]
                line.pump(hop.micro_batch if line is target and not writable else None)
                if line.ended:
                    self._poller.unregister(fd)

    def _poll(self, left_s: float) -> list[tuple[int, int]]:
        """Return the sockets that can be read or written within CHECK_INTERVAL_S or `left_s`."""
        within_s = min(left_s, CHECK_INTERVAL_S)
        if not self._spins:
            return self._poller.poll(math.ceil(within_s * 1000))
        end_s = time.monotonic() + within_s
        while not (events := self._poller.poll(0)) and time.monotonic() < end_s:
            continue
        return events


def _after(segments: list[memoryview], count: int) -> list[memoryview]:
    """Return the rest of `segments` after `count` bytes of them."""
    for position, segment in enumerate(segments):
        if count < len(segment):
            return [segment[count:], *segments[position + 1 :]]
        count -= len(segment)
    return []

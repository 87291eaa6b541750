"""M2N over TCP: one connection per pair, frames read straight into registered windows.

Owns the sockets, both windows of every pair in private memory, and the waits; tcp_frames.py reads
and sends, in ops without this module. Knows no plans. What is wrong with a frame is named here:
before a payload is read its header is checked for damage, window, size and sequence. Frames of
other micro-batches that arrive first go to their own windows.

Between nodes with keys a frame carries an authentication code (session.py), which is checked when
the whole frame is there, and before that only memory that awaits a frame is written: rows in use
stay as they are whatever arrives.

Every long wait of a node, to receive and to send, reads from all of its connections. So a blocked
send never blocks a peer's send to this node, and two ends can send large frames to each other.
"""

from __future__ import annotations

import ctypes
import math
import select
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kernels.cpu.compiled.runtime import make_callable
from kernels.frame_header import FrameHeader
from m2n_comm.host.frames.records import FramePort
from m2n_comm.host.frames.tcp_frames import (
    CODED,
    ENDED,
    FORGED,
    FOUND,
    IS_PLACED,
    IS_SEALED,
    PLACE,
    SENT,
    SEQUENCE,
    WRONG,
    LineWords,
    accept_frame,
    read_line,
)
from m2n_comm.host.frames.windows import FrameWindow, PairLayout, private_memory
from m2n_comm.host.frames.wire import (
    SEAL_AT,
    check_seal,
    check_size,
    read_header,
    seal,
)
from m2n_comm.host.lines import NodeLines
from m2n_comm.pairing.handshake import Meeting
from m2n_comm.pairing.hello import Identity, NodeRole, PairHello
from m2n_comm.waits import CHECK_INTERVAL_S, Hop, Waits, late, lost
from topspin.errors import FrameError, StaleFrame

if TYPE_CHECKING:
    from m2n_comm.pairing.session import Session


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
    """One connection: reads frames into their windows, and names what is wrong with them."""

    def __init__(
        self,
        pair: TcpPair,
        inbox: tuple[FrameWindow, ...],
        *,
        row_bytes: int,
        rows: int,
        name: str,
        awaits: bool,
    ) -> None:
        self.sock = pair.sock
        self.session = pair.session
        self.words = LineWords(
            pair.sock,
            inbox,
            window_rows=rows,
            row_bytes=row_bytes,
            awaits=awaits,
            session=pair.session,
        )
        self._inbox = inbox
        self._row_bytes = row_bytes
        self._window_rows = rows
        self._name = name
        self._read_line, self._accept = map(
            make_callable, (read_line.address, accept_frame.address)
        )

    @property
    def ended(self) -> bool:
        """Return whether no more bytes will come."""
        return self.words[FOUND] == ENDED

    def read(self) -> None:
        """Read what has come, up to the end of a frame. Raises FrameError or StaleFrame."""
        self._read_line(self.words.address)
        found = self.words[FOUND]
        if found == CODED:
            self._check_code()
            self._accept(self.words.address)
        elif found == WRONG:
            raise self._fault()
        elif found == FORGED:
            raise self._forged(read_header(self.words.header.tobytes()))

    def _check_code(self) -> None:
        """Raise FrameError unless the code of the frame that is complete is right."""
        assert self.session is not None
        header = memoryview(self.words.header).cast("B")
        frame = read_header(header)
        payload = self._inbox[frame.micro_batch].payload(frame.rows)
        if frame.rows and self.words.of(frame.micro_batch, IS_PLACED):
            place = self.words.of(frame.micro_batch, PLACE)
            placed = (ctypes.c_char * len(payload[-1])).from_address(place)
            payload = [*payload[:-1], memoryview(placed).cast("B")]
        if not self.session.theirs.is_next([header[:SEAL_AT], *payload], header[SEAL_AT:]):
            raise self._forged(frame)

    def _forged(self, frame: FrameHeader) -> FrameError:
        return FrameError(
            f"frame of {self._name}, layer {frame.layer}, micro-batch {frame.micro_batch}: "
            "its authentication code is wrong"
        )

    def _fault(self) -> FrameError | StaleFrame:
        """Return the error of a header that read_frame() does not follow."""
        header = self.words.header.tobytes()
        frame = read_header(header)
        try:
            if self.session is None:
                check_seal(header)
            if frame.micro_batch >= len(self._inbox):
                return FrameError(
                    f"frame of {self._name}: micro_batch is {frame.micro_batch}, there are "
                    f"windows for {len(self._inbox)}"
                )
            check_size(
                frame, window_rows=self._window_rows, row_bytes=self._row_bytes, origin=self._name
            )
        except FrameError as error:
            return error
        return StaleFrame(
            f"frame of {self._name}, layer {frame.layer}, micro-batch {frame.micro_batch}: "
            f"sequence is {frame.sequence}, expected "
            f"{self.words.of(frame.micro_batch, SEQUENCE) + 1}, and none before the last one is "
            "answered"
        )


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
            pair.sock.setblocking(False)
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
        line.words.await_answer(hop.micro_batch)
        if line.words[IS_SEALED]:
            line.words[IS_SEALED] = 0
        elif line.session is None:
            seal(window.header)
        else:
            parts = [window.header[:SEAL_AT], *payload]
            window.header[SEAL_AT:] = line.session.ours.next(parts)
        # An op may have sent the beginning.
        segments = _after([window.header, *payload], line.words[SENT])
        line.words[SENT] = 0
        while segments:
            try:
                segments = _after(segments, line.sock.sendmsg(segments))
            except (BlockingIOError, InterruptedError):
                self._wait(hop, late_text="could not send to", writable=True)
            except ConnectionError as error:
                raise lost(self.peer_role, hop.peer, hop) from error

    def receive(self, hop: Hop, awaited: tuple[int, ...]) -> bytes:
        """Wait for the next frame of hop.peer; see PairLines.receive."""
        line = self._lines[hop.peer]
        while not self.arrived(hop.peer, hop.micro_batch):
            line.read()
            if self.arrived(hop.peer, hop.micro_batch):
                break
            for peer in awaited:
                if self._lines[peer].ended and not self.arrived(peer, hop.micro_batch):
                    raise lost(self.peer_role, peer, hop)
            self._wait(hop)
        window = self._inbox[hop.peer][hop.micro_batch]
        self.advance(hop, window.flag[0])
        return bytes(window.header)

    def arrived(self, peer: int, micro_batch: int) -> bool:
        """Return whether a whole frame lies in the inbox, or where its rows were to go."""
        return self._inbox[peer][micro_batch].flag[0] != self.consumed[peer][micro_batch]

    def port(self, peer: int, micro_batch: int) -> FramePort | None:
        """Return the words of the inbox and of the connection."""
        inbox, words = self._inbox[peer][micro_batch], self._lines[peer].words
        consumed = self.consumed[peer]
        return FramePort(
            in_flag=inbox.flag_at,
            in_is_awake=inbox.reader_is_awake_at,
            consumed=consumed.buffer_info()[0] + consumed.itemsize * micro_batch,
            line=words.address,
            block=words.block(micro_batch),
        )

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
                line.read()
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

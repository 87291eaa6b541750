"""M2N between processes of one host: windows in shared memory, wake-ups by eventfd.

Owns one memfd per pair (sealed against resizing, mapped by both ends), two eventfds per pair (one
rings the expert, one the attention node), and the Unix socket that carried them, which stays open
for liveness: nothing is sent on it, and it closes when the peer ends. Nothing has a name in a file
system. Knows no headers and no plans.

Waiting: look at the flag, say that this end sleeps, then poll the bell and the sockets, then look
again. The writer rings unless the reader is awake. "spin" reads the flag in a loop instead, and
sometimes the sockets: for a node with a separate core, which is always awake. Compiled code
(hops.py) yields before it sleeps, and is awake meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from m2n_comm.host.frames.memory_order import check_platform, consume, fall_asleep, publish_fenced
from m2n_comm.host.frames.records import FramePort
from m2n_comm.host.frames.windows import PairLayout, PairWindows
from m2n_comm.host.lines import NodeLines, Watches
from m2n_comm.pairing.handshake import Meeting
from m2n_comm.pairing.hello import Identity, NodeRole, PairHello
from m2n_comm.sealed_memory import make_sealed, map_sealed
from m2n_comm.waits import CHECK_INTERVAL_S, Hop, Waits, late, lost
from topspin.errors import PeerLost

_HANGUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_LOOKS_PER_POLL = 2000


class PairHandles(NamedTuple):
    """The descriptors of one pair: memory, the expert's bell, the attention node's bell."""

    memory: int
    expert_bell: int
    attention_bell: int


class ShmPair(NamedTuple):
    """One pair as one end holds it. `my_bell` wakes this end, `peer_bell` the other."""

    windows: PairWindows
    my_bell: int
    peer_bell: int
    sock: socket.socket


def create_handles(layout: PairLayout) -> PairHandles:
    """Return new, zeroed memory of the pair's size, sealed against resizing, and its bells."""
    with contextlib.ExitStack() as undo:
        memory = make_sealed(layout.total_bytes)
        undo.callback(os.close, memory)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        expert_bell = os.eventfd(0, flags)
        undo.callback(os.close, expert_bell)
        attention_bell = os.eventfd(0, flags)
        undo.pop_all()
    return PairHandles(memory, expert_bell, attention_bell)


def map_handles(layout: PairLayout, memory: int) -> PairWindows:
    """Map a pair's memory, every page present. Raises FrameError if a peer could resize it."""
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    return layout.map(map_sealed(memory, layout.total_bytes, flags=flags))


class ShmForming:
    """The pairs of one node while they are formed: the expert node makes the memory of each."""

    def __init__(self, me: Identity, waits: Waits) -> None:
        check_platform()
        self._me = me
        self._waits = waits
        self._layout = PairLayout(me.shape)
        self._fds: dict[int, tuple[int, ...]] = {}
        self._socks: dict[int, socket.socket] = {}

    def offer(self, peer: int, hello: PairHello) -> tuple[PairHello, tuple[int, ...]]:
        """Return `hello`, and from an expert node the descriptors of new memory."""
        if self._me.role == "expert":
            self._fds[peer] = tuple(create_handles(self._layout))
        return hello, self._fds.get(peer, ())

    def take(self, peer: int, met: Meeting) -> None:
        """Take the descriptors from an expert node. Raises PeerLost without them."""
        self._socks[peer] = met.sock
        if self._me.role == "expert":
            return
        self._fds[peer] = met.fds
        if len(met.fds) != len(PairHandles._fields):
            raise PeerLost(f"expert {peer}: the handshake brought no memory")

    def prove(self, peer: int) -> None:
        """Do nothing: mapping the memory has proved the line."""

    def drop(self, peer: int) -> None:
        """Close the descriptors of a pair that is not formed."""
        for fd in self._fds.pop(peer, ()):
            os.close(fd)

    def finish(self) -> ShmLines:
        """Return the lines, which own bells and sockets from now on."""
        pairs = {}
        for peer, fds in self._fds.items():
            handles = PairHandles(*fds)
            windows = map_handles(self._layout, handles.memory)
            bells = (handles.expert_bell, handles.attention_bell)
            mine, theirs = bells if self._me.role == "expert" else bells[::-1]
            self._socks[peer].setblocking(False)
            pairs[peer] = ShmPair(windows, mine, theirs, self._socks[peer])
        lines = ShmLines(self._layout, self._me.role, pairs=pairs, waits=self._waits)
        for fds in self._fds.values():
            os.close(PairHandles(*fds).memory)
        self._fds = {}
        return lines

    def close(self) -> None:
        """Close all descriptors."""
        for peer in list(self._fds):
            self.drop(peer)


class ShmLines(NodeLines):
    """All pairs of one node."""

    def __init__(
        self, layout: PairLayout, role: NodeRole, *, pairs: Mapping[int, ShmPair], waits: Waits
    ) -> None:
        super().__init__(layout, role, {peer: pair.windows for peer, pair in pairs.items()})
        self._my_bells = {peer: pair.my_bell for peer, pair in pairs.items()}
        self._peer_bells = {peer: pair.peer_bell for peer, pair in pairs.items()}
        self._socks = {peer: pair.sock for peer, pair in pairs.items()}
        self._watches = Watches(self._socks, _HANGUP)
        self._check, self._resume = waits.check, waits.resume
        self._spins = waits.policy == "spin"
        if self._spins:
            for peer in pairs:
                for window in self._inbox[peer]:
                    window.reader_is_awake[0] = 1

    def send(self, hop: Hop, rows: int, sequence: int) -> None:
        """Publish the outbox and ring a peer that may sleep; never waits.

        A lost peer is noticed when its answer is due.
        """
        window = self._outbox[hop.peer][hop.micro_batch]
        if not publish_fenced(window.flag_at, window.reader_is_awake_at, sequence):
            os.eventfd_write(self._peer_bells[hop.peer], 1)

    def receive(self, hop: Hop, awaited: tuple[int, ...]) -> bytes:
        """Wait for the next frame of hop.peer; see PairLines.receive."""
        if not self.arrived(hop.peer, hop.micro_batch):
            if self._spins:
                self._spin_for(hop, awaited)
            else:
                self._block_for(hop, awaited)
            self._resume()
        window = self._inbox[hop.peer][hop.micro_batch]
        self.advance(hop, consume(window.flag))
        return bytes(window.header)

    def arrived(self, peer: int, micro_batch: int) -> bool:
        """Return whether the peer has published since the last receive()."""
        flag = self._inbox[peer][micro_batch].flag
        return consume(flag) != self.consumed[peer][micro_batch]

    def port(self, peer: int, micro_batch: int) -> FramePort | None:
        """Return the words of both windows and the peer's bell."""
        outbox, inbox = self._outbox[peer][micro_batch], self._inbox[peer][micro_batch]
        consumed = self.consumed[peer]
        return FramePort(
            out_flag=outbox.flag_at,
            out_is_awake=outbox.reader_is_awake_at,
            bell=self._peer_bells[peer],
            in_flag=inbox.flag_at,
            in_is_awake=inbox.reader_is_awake_at,
            consumed=consumed.buffer_info()[0] + consumed.itemsize * micro_batch,
        )

    def close(self) -> None:
        """Drop all views (the last one unmaps) and close bells and sockets."""
        self.drop_windows()
        self._watches.clear()
        for bell in (*self._my_bells.values(), *self._peer_bells.values()):
            os.close(bell)
        self._my_bells, self._peer_bells = {}, {}
        for sock in self._socks.values():
            sock.close()
        self._socks = {}

    def _block_for(self, hop: Hop, awaited: tuple[int, ...]) -> None:
        # Addresses: a window in an error's traceback would keep the memory mapped.
        is_awake_at = self._inbox[hop.peer][hop.micro_batch].reader_is_awake_at
        flag_at = self._inbox[hop.peer][hop.micro_batch].flag_at
        consumed = self.consumed[hop.peer][hop.micro_batch]
        while fall_asleep(is_awake_at, flag_at) == consumed:
            left_s = hop.deadline_s - time.monotonic()
            if left_s <= 0:
                raise late(self.peer_role, hop)
            polled_s = min(left_s, CHECK_INTERVAL_S)
            awaited = self._poll(hop, awaited, timeout_ms=math.ceil(polled_s * 1000))

    def _spin_for(self, hop: Hop, awaited: tuple[int, ...]) -> None:
        flag = self._inbox[hop.peer][hop.micro_batch].flag
        consumed = self.consumed[hop.peer][hop.micro_batch]
        while True:
            for _ in range(_LOOKS_PER_POLL):
                if consume(flag) != consumed:
                    return
            if time.monotonic() >= hop.deadline_s:
                raise late(self.peer_role, hop)
            awaited = self._poll(hop, awaited, timeout_ms=0)

    def _poll(self, hop: Hop, awaited: tuple[int, ...], *, timeout_ms: int) -> tuple[int, ...]:
        """Sleep until the bell rings or a socket ends; return the peers still worth watching.

        If neither happens, call the check, which may end the wait.

        The bell is emptied before the caller looks at the flag again: a frame published
        after that look rings again, one published before it is seen.
        """
        bell = self._my_bells[hop.peer]
        gone = []
        events = self._watches.of(awaited, (bell,)).poll(timeout_ms)
        if not events:
            self._check()
        for fd, _ in events:
            if fd == bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(bell)
            else:
                gone.append(self._watches.peer_of(fd))
        for peer in gone:
            # A frame published before the peer ended is used: orderly shutdown is no loss.
            if not self.arrived(peer, hop.micro_batch):
                raise lost(self.peer_role, peer, hop)
        return tuple(peer for peer in awaited if peer not in gone) if gone else awaited

"""M2N between processes of one host: windows in shared memory, wake-ups by eventfd.

Owns one memfd per pair (sealed against resizing, mapped by both ends), two eventfds per
pair (one rings the expert, one the attention node), and the Unix socket that brought them,
which stays open as the liveness line: nothing is sent on it, its end is the peer's end.
Nothing has a name in a file system. Knows no headers and no plans.

Waiting: look at the flag, then poll the bell and the sockets, then look again. The writer
always rings, because a "waiter sleeps" flag would need a store-load fence. "spin" looks at
the flag in a loop instead, and now and then at the sockets: for a core of one's own. Such a
reader says so once, in its windows, and is not rung for.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import select
import socket
import time
from typing import Literal, NamedTuple

from m2n_comm.host.lines import CHECK_INTERVAL_S, Check, Hop, late, lost, wait_on
from m2n_comm.host.memory_order import consume, publish
from m2n_comm.host.windows import NodeWindows, PairLayout, PairWindows, Window
from m2n_comm.net import WaitPolicy
from topspin.errors import FrameError, StaleFrame
from topspin.messages import StepTicket

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_HANGUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_LOOKS_PER_POLL = 2000
_MAX_POLLERS = 64


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
    """Return fresh, zeroed memory of the pair's size that nobody can resize, and its bells."""
    with contextlib.ExitStack() as undo:
        memory = os.memfd_create("topspin-m2n", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        undo.callback(os.close, memory)
        os.ftruncate(memory, layout.total_bytes)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        expert_bell = os.eventfd(0, flags)
        undo.callback(os.close, expert_bell)
        attention_bell = os.eventfd(0, flags)
        undo.pop_all()
    return PairHandles(memory, expert_bell, attention_bell)


def map_handles(layout: PairLayout, memory: int) -> PairWindows:
    """Map a pair's memory, every page present. Raises FrameError if a peer could resize it."""
    size = os.fstat(memory).st_size
    if size != layout.total_bytes:
        raise FrameError(f"shared windows: {size} bytes, expected {layout.total_bytes}")
    if fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise FrameError("shared windows: the memory is not sealed against resizing")
    return layout.map(mmap.mmap(memory, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))


class ShmLines:
    """All pairs of one node; None in `pairs` is a peer that is absent and never named.

    Invariant: `_consumed[peer][mb]` is the last sequence received.
    """

    def __init__(
        self,
        *,
        layout: PairLayout,
        role: Literal["attention", "expert"],
        pairs: tuple[ShmPair | None, ...],
        wait: WaitPolicy = "block",
        check: Check = wait_on,
    ) -> None:
        present = {peer: pair for peer, pair in enumerate(pairs) if pair is not None}
        windows = NodeWindows.of(layout, role, {peer: p.windows for peer, p in present.items()})
        self._peer_role = windows.peer_role
        self._registered_bytes = windows.registered_bytes
        self._outbox, self._inbox = windows.outbox, windows.inbox
        self._my_bells = {peer: pair.my_bell for peer, pair in present.items()}
        self._peer_bells = {peer: pair.peer_bell for peer, pair in present.items()}
        self._socks = {peer: pair.sock for peer, pair in present.items()}
        self._peer_of = {pair.sock.fileno(): peer for peer, pair in present.items()}
        self._consumed = {peer: [0] * len(inbox) for peer, inbox in self._inbox.items()}
        self._pollers: dict[tuple[int, ...], select.poll] = {}
        self._spin = wait == "spin"
        if self._spin:
            for inbox in self._inbox.values():
                for window in inbox:
                    window.reader_spins[0] = 1
        self._check = check

    @property
    def peer_role(self) -> str:
        """Return the role of the nodes at the other end."""
        return self._peer_role

    @property
    def registered_bytes(self) -> int:
        """Return the bytes of all mapped windows."""
        return self._registered_bytes

    def outbox(self, peer: int, micro_batch: int) -> Window:
        """Return the window that the peer reads."""
        return self._outbox[peer][micro_batch]

    def inbox(self, peer: int, micro_batch: int) -> Window:
        """Return the window that the peer writes."""
        return self._inbox[peer][micro_batch]

    def begin(self, ticket: StepTicket) -> None:
        """Do nothing: shared memory knows no steps."""

    def send(self, hop: Hop, rows: int, sequence: int) -> None:
        """Publish the outbox and ring a peer that may sleep; never waits.

        That a peer is gone shows when its answer is due.
        """
        window = self._outbox[hop.peer][hop.micro_batch]
        publish(window.flag, sequence)
        if not window.reader_spins[0]:
            os.eventfd_write(self._peer_bells[hop.peer], 1)

    def receive(self, hop: Hop, awaited: tuple[int, ...]) -> bytes:
        """Wait for the next frame of hop.peer; see Lines.receive."""
        if not self.arrived(hop.peer, hop.micro_batch):
            if self._spin:
                self._spin_for(hop, awaited)
            else:
                self._block_for(hop, awaited)
        window = self._inbox[hop.peer][hop.micro_batch]
        sequence = self._consumed[hop.peer][hop.micro_batch] + 1
        if (found := consume(window.flag)) != sequence:
            raise StaleFrame(
                f"{self._peer_role} {hop.peer}, layer {hop.layer}, micro-batch "
                f"{hop.micro_batch}: sequence is {found}, expected {sequence}"
            )
        self._consumed[hop.peer][hop.micro_batch] = sequence
        return bytes(window.header)

    def arrived(self, peer: int, micro_batch: int) -> bool:
        """Return whether the peer has published since the last receive()."""
        flag = self._inbox[peer][micro_batch].flag
        return consume(flag) != self._consumed[peer][micro_batch]

    def close(self) -> None:
        """Drop all views (the last one unmaps) and close bells and sockets."""
        self._outbox, self._inbox = {}, {}
        self._pollers.clear()
        for bell in (*self._my_bells.values(), *self._peer_bells.values()):
            os.close(bell)
        self._my_bells, self._peer_bells = {}, {}
        for sock in self._socks.values():
            sock.close()
        self._socks = {}

    def _block_for(self, hop: Hop, awaited: tuple[int, ...]) -> None:
        while not self.arrived(hop.peer, hop.micro_batch):
            left_s = hop.deadline_s - time.monotonic()
            if left_s <= 0:
                raise late(self._peer_role, hop)
            polled_s = min(left_s, CHECK_INTERVAL_S)
            awaited = self._poll(hop, awaited, timeout_ms=math.ceil(polled_s * 1000))

    def _spin_for(self, hop: Hop, awaited: tuple[int, ...]) -> None:
        flag = self._inbox[hop.peer][hop.micro_batch].flag
        consumed = self._consumed[hop.peer][hop.micro_batch]
        while True:
            for _ in range(_LOOKS_PER_POLL):
                if consume(flag) != consumed:
                    return
            if time.monotonic() >= hop.deadline_s:
                raise late(self._peer_role, hop)
            awaited = self._poll(hop, awaited, timeout_ms=0)

    def _poll(self, hop: Hop, awaited: tuple[int, ...], *, timeout_ms: int) -> tuple[int, ...]:
        """Sleep until the bell rings or a socket ends; return who is still worth watching.

        When neither happens, ask whether to wait on.

        The bell is emptied before the caller looks at the flag again: a frame published
        after that look rings again, one published before it is seen.
        """
        bell = self._my_bells[hop.peer]
        gone = []
        events = self._poller(awaited).poll(timeout_ms)
        if not events:
            self._check()
        for fd, _ in events:
            if fd == bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(bell)
            else:
                gone.append(self._peer_of[fd])
        for peer in gone:
            # What a peer published before it ended counts: orderly shutdown is no loss.
            if not self.arrived(peer, hop.micro_batch):
                raise lost(self._peer_role, peer, hop)
        return tuple(peer for peer in awaited if peer not in gone) if gone else awaited

    def _poller(self, awaited: tuple[int, ...]) -> select.poll:
        """Return the poll object for the first peer's bell and all sockets of `awaited`."""
        poller = self._pollers.get(awaited)
        if poller is None:
            if len(self._pollers) >= _MAX_POLLERS:
                self._pollers.clear()
            poller = select.poll()
            for peer in awaited:
                poller.register(self._socks[peer], _HANGUP)
            if awaited:
                poller.register(self._my_bells[awaited[0]], select.POLLIN)
            self._pollers[awaited] = poller
        return poller

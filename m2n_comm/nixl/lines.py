"""M2N over NIXL: one-sided writes into registered windows, each with a notification.

Owns the posted writes and the arrived frames of all pairs of a node; forming.py forms the pairs.
Their handshake sockets stay open: one closes when its peer ends, and a byte on it (the bell) wakes
a peer that blocks, since NIXL has no blocking wait. Knows no headers and no plans. UCX chooses
shared memory, TCP or RDMA for the data.

Nothing runs in the background: the node's thread advances its own writes and its inbox whenever it
waits, and after it has posted a write that does not complete at once.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import time
from typing import NamedTuple

from m2n_comm.host.frames.windows import PairLayout
from m2n_comm.host.frames.wire import check_seal, seal
from m2n_comm.host.lines import NodeLines, Watches
from m2n_comm.nixl.agent import Handle, NixlPeer, NodeAgent
from m2n_comm.pairing.hello import NodeRole
from m2n_comm.waits import CHECK_INTERVAL_S, Hop, Waits, late, lost
from topspin.errors import FrameError, PeerLost

NOTE = struct.Struct("<HQ")
_BELL = b"b"
# How long send() polls a write that did not complete at once; RDMA needs a few us of it.
_STAY_S = 100e-6
# How often a sleeper polls without a bell: a peer's write may need this node's progress.
_NAP_S = 2e-3
# How long a frame may still be in transit after its sender's socket has closed.
_GRACE_S = 20e-3
_LOOKS_PER_BELL = 64
_LOOKS_PER_POLL = 256


class NixlPair(NamedTuple):
    """One pair at this end; `sock` does not block. `bell`: the peer must be woken."""

    peer: NixlPeer
    sock: socket.socket
    bell: bool


class WriteNote(NamedTuple):
    """One notification: a frame of `peer` is in its window."""

    peer: int
    micro_batch: int
    sequence: int


class NixlLines(NodeLines):
    """All pairs of one node; implements lines.PairLines. Invariants, by (peer, micro-batch):

    `_published` is the newest sequence notified, `_posted` holds the writes that were incomplete at
    the last poll.
    """

    def __init__(
        self,
        layout: PairLayout,
        role: NodeRole,
        *,
        node: NodeAgent,
        pairs: dict[int, NixlPair],
        waits: Waits,
    ) -> None:
        windows = {peer: pair.peer.windows for peer, pair in pairs.items()}
        super().__init__(layout, role, windows)
        self._node = node
        self._pairs = pairs
        self._spins = waits.policy == "spin"
        self._check = waits.check
        self._next_check_s = 0.0
        self._peer_named = {pair.peer.name: peer for peer, pair in pairs.items()}
        self._published = {peer: [0] * layout.shape.num_micro_batches for peer in pairs}
        self._posted: dict[tuple[int, int], Handle] = {}
        socks = {peer: pair.sock for peer, pair in pairs.items()}
        self._watches = Watches(socks, select.POLLIN)
        self._bucket_of = _bucket_of(pairs)

    def send(self, hop: Hop, rows: int, sequence: int) -> None:
        """Post the prepared write of `rows` rows, with its notification.

        Returns when it has completed or, on an attention node, a short time has passed: combine()
        will advance it, while an expert node may not poll again before the next step. Raises
        PeerLost, or DeadlineExceeded if a write did not complete in time.
        """
        pair = self._pairs[hop.peer]
        key = (hop.peer, hop.micro_batch)
        if key in self._posted:
            self._settle(hop, end_s=hop.deadline_s)
        write = pair.peer.writes[hop.micro_batch][self._bucket_of[rows]]
        seal(self.outbox(hop.peer, hop.micro_batch).header)
        try:
            state = self._node.agent.transfer(write, NOTE.pack(hop.micro_batch, sequence))
        except Exception as error:
            raise lost(self.peer_role, hop.peer, hop) from error
        if state == "ERR":
            raise lost(self.peer_role, hop.peer, hop)
        self._ring(pair)
        if state == "DONE":
            return
        self._posted[key] = write
        stays = self.peer_role == "attention"
        self._settle(hop, end_s=hop.deadline_s if stays else time.monotonic() + _STAY_S)

    def receive(self, hop: Hop, awaited: tuple[int, ...]) -> bytes:
        """Wait for the next frame of hop.peer; see PairLines.receive."""
        if not self._look(hop.peer, hop):
            self._wait(hop, awaited)
        self.advance(hop, self._published[hop.peer][hop.micro_batch])
        header = bytes(self.inbox(hop.peer, hop.micro_batch).header)
        check_seal(header)
        return header

    def arrived(self, peer: int, micro_batch: int) -> bool:
        """Return whether the peer has published since the last receive()."""
        with contextlib.suppress(PeerLost):  # receive() raises it, if it matters
            return self._look(peer, Hop(peer, micro_batch, 0, 0.0))
        return False

    def file(self, notes: list[WriteNote]) -> None:
        """Record the frames that have arrived. Raises FrameError for an unknown window."""
        for note in notes:
            published = self._published[note.peer]
            if note.micro_batch >= len(published):
                raise FrameError(
                    f"frame of {self.peer_role} {note.peer}: micro_batch is {note.micro_batch}, "
                    f"there are windows for {len(published)}"
                )
            published[note.micro_batch] = note.sequence

    def close(self) -> None:
        """Release all keys, memory and sockets; safe to call twice.

        Posted writes get a short time to complete, or a peer would miss the last answer.
        """
        end_s = time.monotonic() + _GRACE_S
        with contextlib.suppress(PeerLost, FrameError):
            while self._posted and time.monotonic() < end_s:
                self._advance(Hop(next(iter(self._posted))[0], 0, 0, end_s))
        self._posted.clear()
        self._watches.clear()
        self.drop_windows()
        socks = [pair.sock for pair in self._pairs.values()]
        self._pairs = {}
        self._node.close()
        for sock in socks:
            sock.close()

    def _settle(self, hop: Hop, *, end_s: float) -> None:
        """Advance that window's write to its end or `end_s`; raise after the hop's deadline."""
        key = (hop.peer, hop.micro_batch)
        started_s = now_s = time.monotonic()
        while key in self._posted and now_s < end_s:
            self._advance(hop)
            now_s = time.monotonic()
            if key in self._posted and now_s >= started_s + _STAY_S:
                self._ask(now_s)
                if self._watches.of((hop.peer,)).poll(1) and not _hears(self._pairs[hop.peer].sock):
                    raise lost(self.peer_role, hop.peer, hop)
        if key in self._posted and now_s >= hop.deadline_s:
            raise late(self.peer_role, hop, doing="could not write to")

    def _ask(self, now_s: float) -> None:
        """Call the check from time to time; it may end the wait."""
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_INTERVAL_S
            self._check()

    def _look(self, peer: int, hop: Hop) -> bool:
        """Return whether a frame of `peer` has arrived, advancing everything if not."""
        published, consumed = self._published[peer], self.consumed[peer]
        if published[hop.micro_batch] != consumed[hop.micro_batch]:
            return True
        self._advance(hop)
        return published[hop.micro_batch] != consumed[hop.micro_batch]

    def _advance(self, hop: Hop) -> None:
        """Advance posted writes and file new notifications. Raises PeerLost."""
        self.file(notes_of(self._node.agent.get_new_notifs(), self._peer_named))
        for key, write in tuple(self._posted.items()):
            try:
                state = self._node.agent.check_xfer_state(write)
            except Exception as error:
                raise lost(self.peer_role, key[0], hop) from error
            if state == "ERR":
                raise lost(self.peer_role, key[0], hop)
            if state == "DONE":
                del self._posted[key]
                self._ring(self._pairs[key[0]])

    def _ring(self, pair: NixlPair) -> None:
        """Wake a peer that blocks; if the socket is full, a wake-up is already pending."""
        if pair.bell:
            with contextlib.suppress(OSError):  # a lost peer is noticed when its answer is due
                pair.sock.send(_BELL)

    def _wait(self, hop: Hop, awaited: tuple[int, ...]) -> None:
        """Poll until the frame is there; sleep between polls, unless set to spin."""
        looks = _LOOKS_PER_POLL if self._spins else 1
        while True:
            for _ in range(looks):
                if self._look(hop.peer, hop):
                    return
            now_s = time.monotonic()
            if now_s >= hop.deadline_s:
                raise late(self.peer_role, hop)
            self._ask(now_s)
            nap_s = 0.0 if self._spins else min(hop.deadline_s - now_s, _NAP_S)
            fds = [fd for fd, _ in self._watches.of(awaited).poll(math.ceil(nap_s * 1000))]
            rung = False
            for fd in fds:
                peer = self._watches.peer_of(fd)
                if _hears(self._pairs[peer].sock):
                    rung = True
                else:
                    self._part(peer, hop)
                    awaited = tuple(each for each in awaited if each != peer)
            if not self._spins:
                looks = _LOOKS_PER_BELL if rung else 1

    def _part(self, peer: int, hop: Hop) -> None:
        """Handle a peer's closed socket: raise PeerLost unless its frame has arrived."""
        end_s = time.monotonic() + _GRACE_S
        while not self._look(peer, hop):
            if time.monotonic() >= end_s:
                raise lost(self.peer_role, peer, hop)


def notes_of(
    notified: dict[str, list[bytes]], peer_named: dict[str | None, int]
) -> list[WriteNote]:
    """Return the notes of known peers; those of others (earlier incarnations) are ignored."""
    notes = []
    for name, messages in notified.items():
        peer = peer_named.get(name)
        if peer is None:
            continue
        for message in messages:
            if len(message) != NOTE.size:
                raise FrameError(f"nixl: a notification of {name} has {len(message)} bytes")
            notes.append(WriteNote(peer, *NOTE.unpack(message)))
    return notes


def _hears(sock: socket.socket) -> bool:
    """Empty the bell; return False if the socket has closed."""
    try:
        return bool(sock.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _bucket_of(pairs: dict[int, NixlPair]) -> list[int]:
    """Return the index of the smallest bucket for each number of rows."""
    buckets = next(iter(pairs.values())).peer.buckets if pairs else ()
    return [
        next(index for index, rows in enumerate(buckets) if rows >= count)
        for count in range(buckets[-1] + 1 if buckets else 0)
    ]

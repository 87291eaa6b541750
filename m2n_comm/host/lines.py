"""The interface between the rules of M2N and a transport: all lines of one node.

attention_side.py and expert_side.py keep the rules (plans, parts, headers, versions) once,
for every transport; a transport only moves windows: it publishes one to a peer and waits
for one from a peer. local.py, shm.py, tcp.py and nixl/lines.py extend NodeLines; faults.py
wraps them.
"""

from __future__ import annotations

import select
import socket
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from m2n_comm.host.frames.records import FramePort
from m2n_comm.host.frames.windows import FrameWindow, PairLayout, PairWindows
from m2n_comm.pairing.hello import NodeRole, other_role
from m2n_comm.waits import Hop
from topspin.errors import StaleFrame
from topspin.messages import StepTicket

_MAX_POLLERS = 64


class PairLines(Protocol):
    """All pairs of one node. A (peer, micro-batch) has at most one frame in flight each way."""

    @property
    def registered_bytes(self) -> int:
        """Return the bytes of all windows of this node."""

    def outbox(self, peer: int, micro_batch: int) -> FrameWindow:
        """Return the window whose content send() publishes."""

    def inbox(self, peer: int, micro_batch: int) -> FrameWindow:
        """Return the window that receive() waits for."""

    def begin(self, ticket: StepTicket) -> None:
        """Begin the step of `ticket`."""

    def send(self, hop: Hop, rows: int, sequence: int) -> None:
        """Publish header and the first `rows` rows of the outbox.

        Raises PeerLost or DeadlineExceeded.
        """

    def receive(self, hop: Hop, awaited: tuple[int, ...]) -> bytes:
        """Wait for the next frame of hop.peer in its inbox, header and rows; return the header.

        `awaited` are the peers whose frame of this micro-batch has not been received yet, hop.peer
        first: if one of them has gone without sending it, PeerLost is raised at once. Raises
        DeadlineExceeded, StaleFrame (out of sequence), FrameError.
        """

    def arrived(self, peer: int, micro_batch: int) -> bool:
        """Return whether receive() would return without waiting."""

    def port(self, peer: int, micro_batch: int) -> FramePort | None:
        """Return how compiled code sends and receives; None: it should not be in a recording."""

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""


@runtime_checkable
class InPlaceLines(PairLines, Protocol):
    """Lines that can also send rows from where they are."""

    def send_from(self, hop: Hop, rows: int, sequence: int, hidden: Sequence[memoryview]) -> None:
        """send(), with the bytes of all hidden rows in `hidden` instead of in the outbox.

        They may be changed after return.
        """


def bytes_of(rows: Tensor) -> memoryview:
    """Return the bytes of contiguous rows in host memory."""
    found: memoryview = rows.view(torch.uint8).numpy().data.cast("B")
    return found


class NodeLines:
    """The windows of one node, by peer and micro-batch, as its role sees them.

    `consumed[peer][mb]` is the sequence of the last frame received. Peers that are absent
    have no windows and are never named.
    """

    def __init__(
        self, layout: PairLayout, role: NodeRole, pairs: Mapping[int, PairWindows]
    ) -> None:
        self.peer_role: str = other_role(role)
        self.registered_bytes = layout.total_bytes * len(pairs)
        requests = {peer: pair.requests for peer, pair in pairs.items()}
        answers = {peer: pair.answers for peer, pair in pairs.items()}
        attends = role == "attention"
        self._outbox, self._inbox = (requests, answers) if attends else (answers, requests)
        num_micro_batches = layout.shape.num_micro_batches
        self.consumed = {peer: array("Q", bytes(8 * num_micro_batches)) for peer in pairs}

    def outbox(self, peer: int, micro_batch: int) -> FrameWindow:
        """Return the window that the peer reads."""
        return self._outbox[peer][micro_batch]

    def inbox(self, peer: int, micro_batch: int) -> FrameWindow:
        """Return the window that the peer's frames arrive in."""
        return self._inbox[peer][micro_batch]

    def begin(self, ticket: StepTicket) -> None:
        """Do nothing: most transports know no steps."""

    def port(self, peer: int, micro_batch: int) -> FramePort | None:
        """Return an empty port: most transports need Python for every frame."""
        return FramePort()

    def drop_windows(self) -> None:
        """Drop all views; the last one may unmap the memory."""
        self._outbox, self._inbox = {}, {}

    def advance(self, hop: Hop, found: int) -> None:
        """Count a frame with sequence `found`. Raises StaleFrame if it is not the next one."""
        expected = self.consumed[hop.peer][hop.micro_batch] + 1
        if found != expected:
            raise StaleFrame(
                f"{self.peer_role} {hop.peer}, layer {hop.layer}, micro-batch "
                f"{hop.micro_batch}: sequence is {found}, expected {expected}"
            )
        self.consumed[hop.peer][hop.micro_batch] = expected


class Watches:
    """Poll objects for the sockets of some peers; those of recent choices are kept."""

    def __init__(self, socks: Mapping[int, socket.socket], events: int) -> None:
        self._socks = socks
        self._events = events
        self._peer_of = {sock.fileno(): peer for peer, sock in socks.items()}
        self._pollers: dict[tuple[int, ...], select.poll] = {}

    def of(self, peers: tuple[int, ...], bells: Iterable[int] = ()) -> select.poll:
        """Return the poll object for sockets of `peers` and `bells`, which depend on `peers`."""
        poller = self._pollers.get(peers)
        if poller is None:
            if len(self._pollers) >= _MAX_POLLERS:
                self._pollers.clear()
            poller = select.poll()
            for peer in peers:
                poller.register(self._socks[peer], self._events)
            for bell in bells:
                poller.register(bell, select.POLLIN)
            self._pollers[peers] = poller
        return poller

    def peer_of(self, fd: int) -> int:
        """Return the peer whose socket `fd` is."""
        return self._peer_of[fd]

    def clear(self) -> None:
        """Drop all poll objects; the sockets are closed."""
        self._pollers.clear()

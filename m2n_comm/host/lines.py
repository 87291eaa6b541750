"""The seam between the rules of M2N and a transport: all lines of one node.

attention_side.py and expert_side.py keep the rules (plans, parts, headers, versions) once,
for every transport; a transport only moves windows: it publishes one to a peer and waits
for one from a peer. local.py, shm.py and tcp.py implement Lines, faults.py wraps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from m2n_comm.host.windows import Window
from topspin.errors import DeadlineExceeded, PeerLost
from topspin.messages import StepTicket

# How often a long wait asks whether it still makes sense.
CHECK_INTERVAL_S = 0.2

# How long to wait for one's turn while the experts serve a step of other attention nodes. The
# scheduler watches that step, and ends this wait (its check) if it does not go on.
TURN_S = 3600.0

# Called now and then during a wait; raises a TransportError to end it.
Check = Callable[[], None]


def wait_on() -> None:
    """Let every wait last until its deadline: the Check of a net that nobody interrupts."""


class Hop(NamedTuple):
    """One frame's way: the peer's index, and what errors name.

    `deadline_s` (monotonic) is when the wait for it ends, counted from the wait's beginning.
    """

    peer: int
    micro_batch: int
    layer: int
    deadline_s: float


class Lines(Protocol):
    """All pairs of one node. A (peer, micro-batch) has at most one frame each way in the air."""

    @property
    def peer_role(self) -> str:
        """Return "attention" or "expert", for messages."""

    @property
    def registered_bytes(self) -> int:
        """Return the bytes of all windows of this node."""

    def outbox(self, peer: int, micro_batch: int) -> Window:
        """Return the window whose content send() publishes."""

    def inbox(self, peer: int, micro_batch: int) -> Window:
        """Return the window that receive() waits for."""

    def begin(self, ticket: StepTicket) -> None:
        """Learn that a step begins."""

    def send(self, hop: Hop, rows: int, sequence: int) -> None:
        """Publish header and the first `rows` rows of the outbox.

        Raises PeerLost or DeadlineExceeded.
        """

    def receive(self, hop: Hop, awaited: tuple[int, ...]) -> bytes:
        """Wait for the next frame of hop.peer in its inbox, header and rows; return the header.

        `awaited` are the peers whose frame of this micro-batch has not been received yet,
        hop.peer first: if one of them is gone without having sent it, PeerLost is raised
        at once. Raises DeadlineExceeded, StaleFrame (out of sequence), FrameError.
        """

    def arrived(self, peer: int, micro_batch: int) -> bool:
        """Return whether receive() would return without waiting."""

    def close(self) -> None:
        """Release all memory and descriptors; safe to call twice."""


def late(role: str, hop: Hop, *, doing: str = "no frame from") -> DeadlineExceeded:
    """Return the error that names the peer, the layer and the micro-batch."""
    return DeadlineExceeded(
        f"{doing} {role} {hop.peer} before the wait's deadline "
        f"(layer {hop.layer}, micro-batch {hop.micro_batch})"
    )


def lost(role: str, peer: int, hop: Hop) -> PeerLost:
    """Return the error that names the closed peer and what was waited for."""
    return PeerLost(
        f"{role} {peer} closed its connection (layer {hop.layer}, micro-batch {hop.micro_batch})"
    )


def describe(error: BaseException) -> str:
    """Return kind and text of `error`, without the frames (and windows) its traceback holds."""
    return f"{type(error).__name__}: {error}"

"""A node's waits for its peers, and the errors of failed waits.

Owns the deadlines and intervals that all transports share. Knows no transport and no frame;
the nets, the lines and the opener use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from topspin.errors import DeadlineExceeded, PeerLost

# On a separate core spinning saves the wake-up; on a shared one it takes the peer's time.
WaitPolicy = Literal["block", "spin"]

# How often a long wait calls its check.
CHECK_INTERVAL_S = 0.2

# How long to wait while the experts serve a step of other attention nodes. The scheduler watches
# that step, and ends this wait (by its check) if it makes no progress.
TURN_S = 3600.0

# Called from time to time during a wait; raises a TransportError to end it.
Check = Callable[[], None]


def wait_on() -> None:
    """Let every wait last until its deadline: the Check of a net without interruptions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """The waits of one node: `timeout_s` to form all its pairs, then by `policy` for frames.

    `check` is called during long waits, to form pairs and in steps, and may end them; `resume`
    after a wait for a frame.
    """

    timeout_s: float
    policy: WaitPolicy = "block"
    check: Check = wait_on
    resume: Callable[[], None] = wait_on


class Hop(NamedTuple):
    """One frame's transfer: the peer's index, and the fields named in errors.

    `deadline_s` (monotonic) is when the wait for it ends, counted from the wait's beginning.
    """

    peer: int
    micro_batch: int
    layer: int
    deadline_s: float


def late(role: str, hop: Hop, *, doing: str = "no frame from") -> DeadlineExceeded:
    """Return the error that names the peer, the layer and the micro-batch."""
    return DeadlineExceeded(
        f"{doing} {role} {hop.peer} before the wait's deadline "
        f"(layer {hop.layer}, micro-batch {hop.micro_batch})"
    )


def lost(role: str, peer: int, hop: Hop) -> PeerLost:
    """Return the error that names the closed peer and the awaited frame."""
    return PeerLost(
        f"{role} {peer} closed its connection (layer {hop.layer}, micro-batch {hop.micro_batch})"
    )

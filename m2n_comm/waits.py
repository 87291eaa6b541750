"""How a node waits for its peers, and the errors of a wait that ends in vain.

Owns the deadlines and intervals that all transports share. Knows no transport and no frame;
the nets, the lines and the opener use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from topspin.errors import DeadlineExceeded, PeerLost

# On a core of one's own spinning saves the wake-up; on a shared one it takes the peer's time.
WaitPolicy = Literal["block", "spin"]

# How often a long wait asks whether it still makes sense.
CHECK_INTERVAL_S = 0.2

# How long to wait for one's turn while the experts serve a step of other attention nodes. The
# scheduler watches that step, and ends this wait (its check) if it does not go on.
TURN_S = 3600.0

# Called now and then during a wait; raises a TransportError to end it.
Check = Callable[[], None]


def wait_on() -> None:
    """Let every wait last until its deadline: the Check of a net that nobody interrupts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waits:
    """The waits of one node: `timeout_s` to form all its pairs, then by `policy` for frames.

    `check` is called during long waits, to form pairs and in steps, and may end them.
    """

    timeout_s: float
    policy: WaitPolicy = "block"
    check: Check = wait_on


class Hop(NamedTuple):
    """One frame's way: the peer's index, and what errors name.

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

"""Tells the scheduler that a node gets on with a long step.

Owns how often: a step shorter than the interval sends nothing. Knows no layers and no net;
the workers begin a step, and what does the step calls `beat` from within it, so that a
process which hangs or is frozen says nothing. Belongs to the node's one busy thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from topspin.channel import ControlClient
from topspin.messages import Progress, Role, StepTicket

# Less than what the scheduler allows a step beyond the deadline of its waits.
INTERVAL_S = 2.0

# Called once in a while from within a step.
Beat = Callable[[], None]


class StepProgress:
    """One node's reports on one control connection."""

    def __init__(
        self, control: ControlClient, *, role: Role, index: int, interval_s: float = INTERVAL_S
    ) -> None:
        self._control = control
        self._role: Role = role
        self._index = index
        self._interval_s = interval_s
        self._next_s = 0.0
        self._ticket: StepTicket | None = None

    def begin(self, ticket: StepTicket) -> None:
        """Report on the step of `ticket` from now on."""
        self._ticket = ticket
        self._next_s = time.monotonic() + self._interval_s

    def beat(self) -> None:
        """Say that the step has got on, unless that was said a moment ago; never waits."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        assert self._ticket is not None, "begin() first"
        self._next_s = now_s + self._interval_s
        self._control.send(
            Progress(
                step=self._ticket.step,
                generation=self._ticket.generation,
                role=self._role,
                index=self._index,
            )
        )

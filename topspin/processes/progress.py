"""Reports a node's progress on a long step to the scheduler.

Owns the reports and their rate: a step shorter than the interval sends nothing. Knows no layers and
no net: workers begin a step, its code calls `beat` as it proceeds, and waits for a peer call
`waiting`, so a process that hangs or is frozen reports nothing. Belongs to the node's one busy
thread. server.scheduler.nodes.watermark judges the reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from topspin.messages import Progress, ProgressState, Role, StepTicket

if TYPE_CHECKING:  # a step runs without sockets too, where their library may be missing
    from topspin.processes.channel import ControlClient

# Far below the smallest failover.progress_deadline_s: several reports fit into it.
INTERVAL_S = 0.5

# Called from time to time within a step.
Beat = Callable[[], None]


def no_beat() -> None:
    """Report nothing."""


class StepProgress:
    """One node's reports on one control connection.

    Invariant: the last report is "waiting" only while the node waits; it is withdrawn at once when
    the node continues.
    """

    def __init__(
        self, control: ControlClient, *, role: Role, index: int, interval_s: float = INTERVAL_S
    ) -> None:
        self._control = control
        self._role: Role = role
        self._index = index
        self._interval_s = interval_s
        self._ticket: StepTicket | None = None
        self._is_done = False
        self._said: ProgressState | None = None
        self._said_s = 0.0
        self._moved_s = 0.0
        self.on_beat: Callable[[], None] = lambda: None
        """Called by beat() too."""

    def begin(self, ticket: StepTicket) -> None:
        """Report on the step of `ticket` from now on."""
        self._ticket = ticket
        self._is_done = False
        self._said = None
        self._said_s = self._moved_s = time.monotonic()

    def beat(self) -> None:
        """Report progress on the step, unless reported within the interval; never blocks."""
        self.on_beat()
        self._moved_s = time.monotonic()
        if self._said == "waiting" or self._moved_s >= self._said_s + self._interval_s:
            self._say("working", self._moved_s)

    def waiting(self) -> None:
        """Report that the step waits for a peer, if it has done so for an interval."""
        now_s = time.monotonic()
        is_long = now_s >= max(self._said_s, self._moved_s) + self._interval_s
        if self._ticket is not None and not self._is_done and is_long:
            self._say("waiting", now_s)

    def end(self) -> None:
        """The node has done its part of the step."""
        self._is_done = True
        self._moved_s = time.monotonic()

    def forget(self) -> None:
        """Forget the last step: another scheduler knows nothing of it."""
        self._ticket = None

    @property
    def owes_end(self) -> bool:
        """Say whether the last end is unreported, so that idle() should be called.

        Whoever joins a generation leaves the one before, if only in form: that ends no step.
        """
        return self._ticket is not None and self._is_done and self._said != "done"

    def idle(self) -> None:
        """Report, once, that the step is done, if nothing has come since for an interval.

        Not needed by a node whose result reports it anyway.
        """
        now_s = time.monotonic()
        if self.owes_end and now_s >= self._moved_s + self._interval_s:
            self._say("done", now_s)

    def _say(self, state: ProgressState, now_s: float) -> None:
        assert self._ticket is not None, "begin() first"
        self._said, self._said_s = state, now_s
        self._control.send(
            Progress(
                step=self._ticket.step,
                generation=self._ticket.generation,
                role=self._role,
                index=self._index,
                state=state,
            )
        )

"""One node's messages from the scheduler: in order, except that a Halt overtakes the rest.

Owns the messages that are read but not yet handled, so that a node waiting in a step can check
whether the step is still wanted. Knows no step and no net; topspin.processes.node_life takes
messages from it and hands `check` to nets. Questions about traces are answered here
(topspin.processes.trace_node), from `trace`, and not passed on.
"""

from __future__ import annotations

from collections import deque

from topspin.errors import Interrupted, ProtocolError, SchedulerLost
from topspin.messages import AnyMessage, ClockPing, Halt, Refused, Stop, TraceQuery
from topspin.processes.channel import ControlClient
from topspin.processes.trace_node import answer_trace
from topspin.trace import Ring


class Stopped(Exception):
    """The scheduler asked this node to stop; not an error."""


class Inbox:
    """One node's messages. Belongs to the node's one busy thread, like the connection."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self.trace: Ring | None = None
        self._queue: deque[AnyMessage] = deque()

    def next(self, timeout_s: float | None = None) -> AnyMessage | None:
        """Return the next message, or None if none came within `timeout_s` (None: wait).

        Raises Stopped, ProtocolError if the scheduler has refused this node (which it considers
        dead and may have replaced), PeerLost if the scheduler is gone.
        """
        self._read()
        while not self._queue:
            message = self._control.recv(timeout_s)
            if message is None:
                return None
            self._take(message)
        message = self._queue.popleft()
        if isinstance(message, Stop):
            raise Stopped(message.reason)
        if isinstance(message, Refused):
            raise ProtocolError(f"the scheduler has refused this node: {message.reason}")
        return message

    def clear(self) -> None:
        """Forget the messages of a scheduler that is gone."""
        self._queue.clear()

    def check(self) -> None:
        """Raise Interrupted if the step under way is not wanted any more; never waits.

        Raises PeerLost if the scheduler is gone.
        """
        self._read()
        if self._queue and isinstance(self._queue[0], Halt | Stop | Refused):
            raise Interrupted(f"the scheduler has sent {type(self._queue[0]).__name__}")

    def _read(self) -> None:
        try:
            while (message := self._control.recv(0)) is not None:
                self._take(message)
        except SchedulerLost:
            # It may have said how this ends before it went.
            if not (self._queue and isinstance(self._queue[0], Stop | Refused)):
                raise

    def _take(self, message: AnyMessage) -> None:
        if isinstance(message, ClockPing | TraceQuery):
            answer_trace(self._control, message, self.trace)
            return
        if isinstance(message, Halt | Stop | Refused):
            self._queue.clear()
        self._queue.append(message)

"""A node's side of a trace: sends its time and its stamps, between steps.

Owns the answers to ClockPing and TraceQuery, and whether a node records at all. Knows no
step. Called by the workers' control loops; the asking half is server.scheduler.traces.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from topspin.messages import AnyMessage, ClockPing, ClockPong, TraceDump, TraceQuery
from topspin.plan.spec import NodeConfig
from topspin.trace import Ring

if TYPE_CHECKING:  # a step runs without sockets too, where their library may be missing
    from topspin.processes.channel import ControlClient


def ring_of(config: NodeConfig) -> Ring | None:
    """Return a new ring, or None if nothing is to be recorded."""
    return Ring(config.trace.num_stamps) if config.trace.enabled else None


def answer_trace(control: ControlClient, message: AnyMessage | None, ring: Ring | None) -> bool:
    """Answer `message` if it is about traces; say whether it was."""
    if isinstance(message, ClockPing):
        control.send(
            ClockPong(
                query_id=message.query_id, sent_ns=message.sent_ns, node_ns=time.monotonic_ns()
            )
        )
        return True
    if isinstance(message, TraceQuery):
        since_ns = max(0, time.monotonic_ns() - round(message.seconds * 1e9))
        records = b"" if ring is None else ring.dump(since_ns)
        control.send(TraceDump(query_id=message.query_id, records=records))
        return True
    return False

"""A node's side of a trace: sends its time and its stamps, between steps.

Owns the answers to ClockPing and TraceQuery, and whether a node records at all. Knows no
step. Called by the workers' control loops; the asking half is server.scheduler.traces.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from topspin.messages import ClockPing, ClockPong, TraceDump, TraceQuery
from topspin.plan.spec import NodeConfig
from topspin.trace import Ring

if TYPE_CHECKING:  # a step runs without sockets too, where their library may be missing
    from topspin.processes.channel import ControlClient


def ring_of(config: NodeConfig) -> Ring | None:
    """Return a new ring, or None if nothing is to be recorded."""
    return Ring(config.trace.num_stamps) if config.trace.enabled else None


def answer_trace(
    control: ControlClient, question: ClockPing | TraceQuery, ring: Ring | None
) -> None:
    """Answer with the node's time, or with its stamps."""
    now_ns = time.monotonic_ns()
    if isinstance(question, ClockPing):
        query_id, sent_ns = question.query_id, question.sent_ns
        control.send(ClockPong(query_id=query_id, sent_ns=sent_ns, node_ns=now_ns))
        return
    records = asked_of(ring, question.seconds, step=question.step, now_ns=now_ns)
    control.send(TraceDump(query_id=question.query_id, records=records))


def asked_of(ring: Ring | None, seconds: float, *, step: int, now_ns: int) -> bytes:
    """Return the records of a step, or (0) of the last `seconds`; none of a node without any."""
    if ring is None:
        return b""
    return ring.of_step(step) if step else ring.dump(max(0, now_ns - round(seconds * 1e9)))

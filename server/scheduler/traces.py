"""Collects traces from all nodes, on the scheduler's clock, and records the scheduler's own.

Owns the sequence of a collection: a few pings to each node, which bound its clock's offset,
then the query, then the answer. Pure: messages and times come as arguments and messages to
send are returned (only the ring reads the clock). Called by service.py.

A node answers between steps, so a ping may wait there for a whole step, and half the round
trip would be a poor estimate. Each ping bounds the offset on both sides instead: the node
read its clock after we had sent and before we received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from topspin.messages import (
    ClockPing,
    ClockPong,
    Message,
    NodeTrace,
    Trace,
    TraceDump,
    TraceQuery,
    TraceRequest,
)
from topspin.plan.settings import TraceSection
from topspin.processes.trace_node import asked_of
from topspin.trace import RECORD_BYTES, Kind, Ring

NUM_PINGS = 4
DEADLINE_S = 5.0
MAX_SECONDS = 60.0
# Of all nodes together; a control message may have 64 MiB.
MAX_RECORD_BYTES = 48 * 2**20


class Ask(NamedTuple):
    """A message for the node `name`."""

    name: str
    message: Message


class Offset(NamedTuple):
    """A clock's offset from ours, and its largest error."""

    offset_ns: int
    error_ns: int


@dataclass(slots=True)
class _TracedNode:
    role: str
    index: int
    num_pings: int = 0
    low_ns: int = -(2**62)
    high_ns: int = 2**62
    records: bytes | None = None

    def offset(self) -> Offset:
        """Return an offset within the bounds: 0 if they allow it, as on one host."""
        error_ns = max(0, self.high_ns - self.low_ns)
        if self.low_ns <= 0 <= self.high_ns:
            return Offset(0, error_ns)
        return Offset((self.low_ns + self.high_ns) // 2, error_ns // 2)


class TraceCollection:
    """One trace being collected. Done when every node has answered, or at the deadline."""

    def __init__(
        self,
        request: TraceRequest,
        nodes: Mapping[str, tuple[str, int]],
        *,
        collection_id: int,
        now: float,
    ) -> None:
        """`nodes` maps names to (role, index); nodes are asked under `collection_id`."""
        self._request_id = request.query_id
        self._query_id = collection_id
        self._seconds = min(max(0.0, request.seconds), MAX_SECONDS)
        self._step = request.step
        self._nodes = {name: _TracedNode(role, index) for name, (role, index) in nodes.items()}
        self._deadline_s = now + DEADLINE_S

    def start(self, now_ns: int) -> list[Ask]:
        """Return the first ping of every node."""
        ping = ClockPing(query_id=self._query_id, sent_ns=now_ns)
        return [Ask(name, ping) for name in self._nodes]

    def on_pong(self, name: str, pong: ClockPong, now_ns: int) -> list[Ask]:
        """Narrow a node's bounds and return the next questions."""
        node = self._nodes.get(name)
        if node is None or pong.query_id != self._query_id:
            return []
        node.num_pings += 1
        node.low_ns = max(node.low_ns, pong.node_ns - now_ns)
        node.high_ns = min(node.high_ns, pong.node_ns - pong.sent_ns)
        if node.num_pings < NUM_PINGS:
            return [Ask(name, ClockPing(query_id=self._query_id, sent_ns=now_ns))]
        query = TraceQuery(query_id=self._query_id, seconds=self._seconds, step=self._step)
        return [Ask(name, query)]

    def on_dump(self, name: str, dump: TraceDump) -> None:
        """Keep a node's stamps."""
        node = self._nodes.get(name)
        if node is not None and dump.query_id == self._query_id:
            node.records = dump.records

    def is_done(self, now: float) -> bool:
        """Say whether every node has answered or the deadline has passed."""
        missing = any(node.records is None for node in self._nodes.values())
        return not missing or now >= self._deadline_s

    def result(self, own_records: bytes) -> Trace:
        """Return the answer, with the scheduler's own stamps."""
        traces = [
            NodeTrace(role="scheduler", index=0, offset_ns=0, error_ns=0, records=own_records)
        ]
        for node in self._nodes.values():
            if node.records is not None:
                offset = node.offset()
                traces.append(
                    NodeTrace(
                        role=node.role,
                        index=node.index,
                        offset_ns=offset.offset_ns,
                        error_ns=offset.error_ns,
                        records=node.records,
                    )
                )
        share = MAX_RECORD_BYTES // len(traces) // RECORD_BYTES * RECORD_BYTES
        return Trace(
            query_id=self._request_id,
            nodes=tuple(
                NodeTrace(
                    role=trace.role,
                    index=trace.index,
                    offset_ns=trace.offset_ns,
                    error_ns=trace.error_ns,
                    records=trace.records[-share:],
                )
                for trace in traces
            ),
            missing=tuple(name for name, node in self._nodes.items() if node.records is None),
        )

    def records_of(self, ring: Ring | None, now_ns: int) -> bytes:
        """Return what of a ring of our own belongs to the trace."""
        return asked_of(ring, self._seconds, step=self._step, now_ns=now_ns)


class TraceAnswer(NamedTuple):
    """A finished trace for the gateway `peer`."""

    peer: bytes
    trace: Trace


class Tracer:
    """The scheduler's own ring, and the collections under way, at most one per gateway."""

    def __init__(self, section: TraceSection) -> None:
        self._ring = Ring(section.num_stamps) if section.enabled else None
        self._collections: dict[bytes, TraceCollection] = {}
        self._num_collections = 0

    def stamp(self, kind: Kind, step: int, peer: int) -> None:
        """Record that a plan was sent to, or a result came from, attention node `peer`."""
        if self._ring is not None:
            self._ring.step = step
            self._ring.stamp(kind, 0, 0, peer)

    def start(
        self,
        gateway: bytes,
        request: TraceRequest,
        *,
        nodes: Mapping[str, tuple[str, int]],
        now: float,
        now_ns: int,
    ) -> list[Ask]:
        """Begin a collection, and drop the gateway's earlier one."""
        self._num_collections += 1
        collection = TraceCollection(request, nodes, collection_id=self._num_collections, now=now)
        self._collections[gateway] = collection
        return collection.start(now_ns)

    def on_node_message(self, name: str, message: ClockPong | TraceDump, now_ns: int) -> list[Ask]:
        """Record a node's answer and return the next questions."""
        asks: list[Ask] = []
        for collection in self._collections.values():
            if isinstance(message, ClockPong):
                asks += collection.on_pong(name, message, now_ns)
            else:
                collection.on_dump(name, message)
        return asks

    def finished(self, now: float, now_ns: int) -> list[TraceAnswer]:
        """Remove and return the traces that are complete or late."""
        answers = []
        for gateway, collection in list(self._collections.items()):
            if collection.is_done(now):
                del self._collections[gateway]
                own = collection.records_of(self._ring, now_ns)
                answers.append(TraceAnswer(gateway, collection.result(own)))
        return answers

"""Collecting the records of all nodes, and comparing their clocks.

Clocks are CLOCK_MONOTONIC of each process's host, in nanoseconds. See topspin.messages.
"""

from __future__ import annotations

import msgspec

from topspin.messages.base import Message


class TraceRequest(Message, frozen=True, kw_only=True):
    """A gateway wants the stamps of the last `seconds` of every node, or those of one `step`."""

    query_id: int
    seconds: float
    step: int = 0


class ClockPing(Message, frozen=True, kw_only=True):
    """To a node: send your clock's time. Answered between steps."""

    query_id: int
    sent_ns: int


class ClockPong(Message, frozen=True, kw_only=True):
    """The answer to a ClockPing, with the node's clock when it was read and answered."""

    query_id: int
    sent_ns: int
    node_ns: int


class TraceQuery(Message, frozen=True, kw_only=True):
    """To a node: send the stamps of your last `seconds`, or (not 0) of a `step`.

    Answered between steps.
    """

    query_id: int
    seconds: float
    step: int = 0


class TraceDump(Message, frozen=True, kw_only=True):
    """A node's stamps, as topspin.trace packs them; empty if it does not record."""

    query_id: int
    records: bytes


class NodeTrace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node's stamps. Its clock minus the scheduler's is `offset_ns`, to +-`error_ns`."""

    role: str
    index: int
    offset_ns: int
    error_ns: int
    records: bytes


class Trace(Message, frozen=True, kw_only=True):
    """The answer to a TraceRequest; `missing` names the nodes that did not answer in time."""

    query_id: int
    nodes: tuple[NodeTrace, ...]
    missing: tuple[str, ...] = ()

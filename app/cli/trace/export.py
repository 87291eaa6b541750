"""A trace as Chrome's trace-event JSON, which Perfetto (https://ui.perfetto.dev) opens.

Owns the form: one process per node, one thread per micro-batch, a slice per span named by its
activity, an arrow per frame, and waits as slices of a separate thread. Times are microseconds on
the scheduler's clock. Called by command.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from app.cli.trace.report import Lane, frames_of
from topspin.trace import WAITS, WHOLE_STEPS, Kind

_WAIT_THREAD = 100
_STEP_THREAD = 101

Event = dict[str, Any]


def chrome_trace(lanes: Sequence[Lane]) -> dict[str, Any]:
    """Return the whole document."""
    events: list[Event] = []
    for pid, lane in enumerate(lanes):
        events.append(_meta(pid, 0, "process_name", lane.name))
        threads = {_thread_of(span.kind, span.micro_batch) for span in lane.spans}
        for tid in sorted(threads):
            events.append(_meta(pid, tid, "thread_name", _thread_name(tid)))
        for span in lane.spans:
            is_point = span.start_ns == span.end_ns
            event: Event = {
                "name": span.kind.name.lower().replace("_", " "),
                "ph": "i" if is_point else "X",
                "ts": span.start_ns / 1e3,
                "pid": pid,
                "tid": _thread_of(span.kind, span.micro_batch),
                "args": {"step": span.step, "layer": span.layer, "peer": span.peer},
            }
            if is_point:
                event["s"] = "t"
            else:
                event["dur"] = (span.end_ns - span.start_ns) / 1e3
            events.append(event)
    events += _arrows(lanes)
    return {"displayTimeUnit": "ns", "traceEvents": events}


def _thread_of(kind: Kind, micro_batch: int) -> int:
    if kind in WAITS:
        return _WAIT_THREAD
    return _STEP_THREAD if kind in WHOLE_STEPS else micro_batch


def _thread_name(tid: int) -> str:
    return {_WAIT_THREAD: "waits", _STEP_THREAD: "steps"}.get(tid, f"micro-batch {tid}")


def _meta(pid: int, tid: int, name: str, value: str) -> Event:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": value}}


def _arrows(lanes: Sequence[Lane]) -> Iterator[Event]:
    """Yield a pair of flow events for every frame that was recorded at both ends."""
    for idx, (sender, sent, reader, read) in enumerate(frames_of(lanes)):
        flow = {"name": "frame", "cat": "frame", "id": idx}
        start = {"pid": sender, "tid": sent.micro_batch, "ts": sent.end_ns / 1e3}
        end = {"pid": reader, "tid": _WAIT_THREAD, "ts": read.end_ns / 1e3}
        yield {**flow, "ph": "s", **start}
        yield {**flow, "ph": "f", "bp": "e", **end}

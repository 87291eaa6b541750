"""The work of draft nodes in a trace, and how much of it was done while attention nodes computed.

Pure arithmetic over timelines (app.cli.trace.report). A pass overlaps with verification where
an attention node is between its inputs and its tokens at the same time: this time costs a request
nothing, but on shared cores it does. Knows no server and no trees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from app.cli.trace.report import Lane
from topspin.trace import Kind


class DraftPasses(NamedTuple):
    """A draft node's passes: their number, their median time, and the share that overlaps."""

    name: str
    num_passes: int
    pass_s: float
    overlap: float


def drafting_of(lanes: Sequence[Lane]) -> list[DraftPasses]:
    """Return a line per draft node that has made a pass."""
    steps = _steps(lanes)
    found = []
    for lane in lanes:
        passes = [(s.start_ns, s.end_ns) for s in lane.spans if s.kind == Kind.DRAFTED]
        if passes:
            times_ns = [end - begin for begin, end in passes]
            together_ns = sum(_shared_ns(begin, end, steps) for begin, end in passes)
            share = together_ns / sum(times_ns) if sum(times_ns) else 0.0
            found.append(DraftPasses(lane.name, len(passes), median(times_ns) * 1e-9, share))
    return found


def _steps(lanes: Sequence[Lane]) -> list[tuple[int, int]]:
    """Return the times in which some attention node is in a step, ascending and apart."""
    steps: list[tuple[int, int]] = []
    for lane in lanes:
        began_ns: int | None = None
        for span in lane.spans:
            if span.kind == Kind.STEP_BEGAN and lane.role == "attention":
                began_ns = span.end_ns
            elif span.kind == Kind.STEP_ENDED and began_ns is not None:
                steps.append((began_ns, span.end_ns))
                began_ns = None
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(steps):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _shared_ns(begin: int, end: int, steps: Sequence[tuple[int, int]]) -> int:
    """Return how much of the time from `begin` to `end` lies within `steps`."""
    shared_ns = 0
    idx = max(0, bisect_right(steps, (begin, begin)) - 1)
    while idx < len(steps) and steps[idx][0] < end:
        shared_ns += max(0, min(end, steps[idx][1]) - max(begin, steps[idx][0]))
        idx += 1
    return shared_ns

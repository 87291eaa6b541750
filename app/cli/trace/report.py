"""The report on a trace: spans, the times of the pipeline's model, bubbles and the straggler.

Owns the reading of stamps (topspin.trace) as a timeline on one clock and pure arithmetic
over it. Knows no server, no file and no picture (export.py and plot.py draw).
Called by command.py and by benchmarks.

T_a: an attention node's work per MoE layer and micro-batch, T_e: an expert node's, T_c: one way
over the link; each is a median. A bubble is the share of a role's time, within steps, spent
waiting. MegaScale-Infer (arXiv 2504.02263, section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from app.cli.trace.replay import StepGraph, WhatIf, replay, what_if
from topspin.messages import NodeTrace, Trace
from topspin.trace import WAITS, Kind, Stamp, read_stamps


class Span(NamedTuple):
    """One node's activity or wait between two stamps; times on the scheduler's clock.

    `kind` is the stamp that ended it.
    """

    start_ns: int
    end_ns: int
    step: int
    kind: Kind
    layer: int
    micro_batch: int
    peer: int

    @property
    def is_wait(self) -> bool:
        """Say whether the node did nothing."""
        return self.kind in WAITS


@dataclass(frozen=True, slots=True)
class Lane:
    """One node's timeline, in order and without holes."""

    role: str
    index: int
    error_ns: int
    spans: list[Span] = field(repr=False)

    @property
    def name(self) -> str:
        """Return the node's name for people."""
        return self.role if self.role == "scheduler" else f"{self.role} {self.index}"


def lanes_of(trace: Trace) -> list[Lane]:
    """Return every node's timeline; raises ProtocolError for records that are damaged."""
    return [_lane_of(node) for node in trace.nodes]


def _lane_of(node: NodeTrace) -> Lane:
    spans = [
        Span(
            before.t_ns - node.offset_ns,
            after.t_ns - node.offset_ns,
            after.step,
            Kind(after.kind),
            after.layer,
            after.micro_batch,
            after.peer,
        )
        for before, after in _neighbours(node, read_stamps(node.records))
    ]
    return Lane(node.role, node.index, node.error_ns, spans)


def _neighbours(node: NodeTrace, stamps: Sequence[Stamp]) -> Iterator[tuple[Stamp, Stamp]]:
    """Yield each stamp with the one that began its span; the scheduler's are points."""
    if node.role == "scheduler":
        yield from zip(stamps, stamps, strict=True)
        return
    for before, after in pairwise(stamps):
        # An expert node's step begins with its ticket: before that it had nothing to do.
        yield (
            (after, after)
            if after.kind == Kind.STEP_BEGAN and node.role == "expert"
            else (
                before,
                after,
            )
        )


class Busy(NamedTuple):
    """How a node spent its time within steps."""

    name: str
    role: str
    busy_ns: int
    wait_ns: int

    @property
    def bubble(self) -> float:
        """Return the share of waiting, 0 to 1."""
        total_ns = self.busy_ns + self.wait_ns
        return self.wait_ns / total_ns if total_ns else 0.0


class Task(NamedTuple):
    """The work of one node on one (MoE layer, micro-batch) of a step."""

    layer: int
    micro_batch: int
    duration_ns: int


Tasks = dict[int, list[Task]]


def tasks_of(lane: Lane) -> Tasks:
    """Return each step's tasks in the order in which the node did them.

    A task ends with DISPATCHED, or the LOCAL after it, on attention nodes and with REPLIED on
    expert nodes; all the node's work since the previous task belongs to it.
    """
    ending = Kind.DISPATCHED if lane.role == "attention" else Kind.REPLIED
    tasks: Tasks = {}
    busy_ns = 0
    for span in lane.spans:
        if span.kind in (Kind.STEP_BEGAN, Kind.RALLIED):
            busy_ns = 0
            continue
        if span.kind == Kind.CODED:
            continue  # done in the wait for experts
        own = tasks.setdefault(span.step, [])
        if span.kind == Kind.LOCAL and own and not busy_ns:
            own[-1] = own[-1]._replace(
                duration_ns=own[-1].duration_ns + span.end_ns - span.start_ns
            )
            continue
        if not span.is_wait:
            busy_ns += span.end_ns - span.start_ns
        if span.kind == ending:
            own.append(Task(span.layer, span.micro_batch, busy_ns))
            busy_ns = 0
    return tasks


def busy_of(lane: Lane, steps: Iterable[int]) -> Busy:
    """Return how a node spent its time in `steps`, from its first to its last hop there."""
    wanted = set(steps)
    outside = {
        Kind.PLAN_RECEIVED,
        Kind.FETCHED,
        Kind.STEP_BEGAN,
        Kind.CODED,
        Kind.STEP_ENDED,
    }
    busy_ns = wait_ns = 0
    for span in lane.spans:
        if span.step in wanted and span.kind not in outside:
            if span.is_wait:
                wait_ns += span.end_ns - span.start_ns
            else:
                busy_ns += span.end_ns - span.start_ns
    return Busy(lane.name, lane.role, busy_ns, wait_ns)


class Frame(NamedTuple):
    """A frame that was recorded at both ends: each end's lane, and its last span.

    The sender's is DISPATCHED or REPLIED, the reader's GATHERED or ARRIVED.
    """

    sender: int
    sent: Span
    reader: int
    read: Span


def frames_of(lanes: Sequence[Lane]) -> Iterator[Frame]:
    """Yield all frames, in the order in which each lane has read them."""
    sent = {
        (lane.role, lane.index, span.step, span.layer, span.micro_batch): (idx, span)
        for idx, lane in enumerate(lanes)
        for span in lane.spans
        if span.kind in (Kind.DISPATCHED, Kind.REPLIED)
    }
    for idx, lane in enumerate(lanes):
        other = "expert" if lane.role == "attention" else "attention"
        for span in lane.spans:
            if span.kind in (Kind.ARRIVED, Kind.GATHERED):
                key = (other, span.peer, span.step, span.layer, span.micro_batch)
                if key in sent:
                    yield Frame(*sent[key], idx, span)


def link_ns(lanes: Sequence[Lane]) -> float | None:
    """Return the median one-way time of frames that a reader waited for; None if there are none."""
    ways = [
        frame.read.end_ns - frame.sent.end_ns
        for frame in frames_of(lanes)
        if frame.read.start_ns <= frame.sent.end_ns < frame.read.end_ns
    ]
    return median(ways) if ways else None


@dataclass(frozen=True, slots=True)
class TraceReport:
    """A trace in numbers. Times are medians in seconds; None if the trace lacks the data.

    `replay_error`: the replayed graph's mean step time against the recorded one, as a share.
    """

    steps: list[int]
    num_micro_batches: int
    num_layers: int
    step_s: float
    t_a_s: float | None
    t_e_s: float | None
    t_c_s: float | None
    gap_s: float | None
    busy: list[Busy]
    what_if: list[WhatIf]
    replay_error: float | None

    @property
    def num_steps(self) -> int:
        """Return the number of steps."""
        return len(self.steps)

    def bubble(self, role: str) -> float | None:
        """Return the mean bubble of a role's nodes."""
        shares = [each.bubble for each in self.busy if each.role == role]
        return fmean(shares) if shares else None

    def formula_s(self) -> float | None:
        """Return T_total = (T_a + T_e + 2 T_c) + T_f (m L - 1) of one step."""
        if self.t_a_s is None or self.t_e_s is None:
            return None
        link_s = self.t_c_s or 0.0
        longest_s = max(self.t_a_s, self.t_e_s)
        hops = self.num_micro_batches * self.num_layers
        return self.t_a_s + self.t_e_s + 2 * link_s + longest_s * (hops - 1)


def rally_times_ns(lane: Lane) -> dict[int, int]:
    """Return how long each whole rally of an attention node took, by step."""
    began: dict[int, int] = {}
    took: dict[int, int] = {}
    for span in lane.spans:
        if span.kind == Kind.STEP_BEGAN:
            began[span.step] = span.end_ns
        elif span.kind == Kind.RALLIED and span.step in began:
            took[span.step] = span.end_ns - began[span.step]
    return took


class _Shape(NamedTuple):
    """`layers` are the MoE layers whose rows travelled; others were local."""

    layers: tuple[int, ...]
    num_micro_batches: int
    steps: list[int]


def make_report(lanes: Sequence[Lane]) -> TraceReport | None:
    """Return the numbers of the steps whose stamps are complete, or None if there are none.

    Only steps of the most common shape (layers, micro-batches) count.
    """
    attention = [lane for lane in lanes if lane.role == "attention"]
    experts = [lane for lane in lanes if lane.role == "expert"]
    tasks = {lane.name: tasks_of(lane) for lane in [*attention, *experts]}
    rallies = [rally_times_ns(lane) for lane in attention]
    known = sorted({step for times in rallies for step in times})
    if not known:
        return None
    shape = _most_common_shape([tasks[lane.name] for lane in attention], known)
    graphs = [
        graph
        for step in shape.steps
        if (graph := _graph(attention, experts, tasks, step=step, shape=shape)) is not None
    ]
    chosen = [graph.step for graph in graphs] or shape.steps
    step_ns = [max(times[step] for times in rallies if step in times) for step in chosen]
    delay_ns = link_ns(lanes)
    error = None
    if graphs:
        replayed = fmean(replay(g.attention, g.experts, delay_ns or 0.0) for g in graphs)
        error = replayed / fmean(step_ns) - 1.0
    return TraceReport(
        steps=chosen,
        num_micro_batches=shape.num_micro_batches,
        num_layers=len(shape.layers),
        step_s=median(step_ns) * 1e-9,
        t_a_s=_median_task_s([tasks[lane.name] for lane in attention], chosen),
        t_e_s=_median_task_s([tasks[lane.name] for lane in experts], chosen),
        t_c_s=None if delay_ns is None else delay_ns * 1e-9,
        gap_s=_median_gap_s(attention, chosen),
        busy=[busy_of(lane, chosen) for lane in [*attention, *experts]],
        what_if=what_if(graphs, delay_ns or 0.0),
        replay_error=error,
    )


def _median_gap_s(attention: Sequence[Lane], steps: Iterable[int]) -> float | None:
    wanted = set(steps)
    gaps = [
        span.end_ns - span.start_ns
        for lane in attention
        for span in lane.spans
        if span.kind == Kind.PLAN_RECEIVED and span.step in wanted
    ]
    return median(gaps) * 1e-9 if gaps else None


def _median_task_s(tasks: Sequence[Tasks], steps: Iterable[int]) -> float | None:
    durations = [task.duration_ns for own in tasks for step in steps for task in own.get(step, ())]
    return median(durations) * 1e-9 if durations else None


def _most_common_shape(attention: Sequence[Tasks], steps: Sequence[int]) -> _Shape:
    """Return the (layers, micro-batches) that most steps have, with those steps."""
    by_shape: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for step in steps:
        own = [task for tasks in attention for task in tasks.get(step, ())]
        layers = tuple(sorted({task.layer for task in own}))
        micro_batches = 1 + max((task.micro_batch for task in own), default=0)
        by_shape.setdefault((layers, micro_batches), []).append(step)
    shape, chosen = max(by_shape.items(), key=lambda item: len(item[1]))
    return _Shape(*shape, chosen)


def _graph(
    attention: Sequence[Lane],
    experts: Sequence[Lane],
    tasks: Mapping[str, Tasks],
    *,
    step: int,
    shape: _Shape,
) -> StepGraph | None:
    """Return one step's durations, None if the stamps do not hold all of it."""
    sides: list[dict[str, list[list[float]]]] = []
    for lanes in (attention, experts):
        # An attention node without tasks took no part.
        found = {lane.name: tasks[lane.name].get(step) for lane in lanes}
        if any(own is None and lanes is experts for own in found.values()):
            return None
        grids = {name: _grid(own, shape) for name, own in found.items() if own is not None}
        complete = {name: grid for name, grid in grids.items() if grid is not None}
        if not complete or len(complete) < len(grids):
            return None
        sides.append(complete)
    return StepGraph(step, sides[0], sides[1])


def _grid(tasks: Sequence[Task], shape: _Shape) -> list[list[float]] | None:
    place = {layer: idx for idx, layer in enumerate(shape.layers)}
    grid = [[0.0] * shape.num_micro_batches for _ in place]
    seen = set()
    for task in tasks:
        if task.layer not in place or task.micro_batch >= shape.num_micro_batches:
            return None
        grid[place[task.layer]][task.micro_batch] += task.duration_ns
        seen.add((task.layer, task.micro_batch))
    return grid if len(seen) == len(place) * shape.num_micro_batches else None

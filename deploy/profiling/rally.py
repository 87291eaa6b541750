"""Times both sides of an engine in steps through the real M2N, in two processes.

Owns the visits of a rally and their samples. Attention and experts take turns on all cores, or have
cores of their own. Knows no tables: worker.py compares with what each side takes alone. Also called
by benchmarks.engine.cost_model, for steps to compare predictions with.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from typing import Literal, NamedTuple

import msgspec
import torch

from deploy.profiling.hops import (
    ATTENTION_WORK,
    CAPACITY,
    EXPERT_WORK,
    Durations,
    add_durations,
    lower_quartile,
    work_s,
)
from deploy.profiling.slices import GROWTH, config_of
from deploy.profiling.solo import Sides
from deploy.rig.forks import fork
from deploy.rig.nets import ProcessPair
from deploy.rig.steps import Batch
from expert_nodes.worker import graphs_of, run_ticket
from topspin.cores import Layout, split_cores
from topspin.messages import StepPlan, StepTimings
from topspin.trace import Ring

# Steps of a visit that are not counted: inputs are new, and the caches another visit's.
NUM_SETTLING = 2


class Load(NamedTuple):
    """The work of a visit's steps.

    `rows` sequences whose new token attends to `context` keys, in `micro_batches`.
    """

    rows: int
    context: int
    micro_batches: int = 1

    @property
    def num_keys(self) -> int:
        """Return the keys that the cache must have room for."""
        return self.rows * (self.context + GROWTH + 1)


class Sample(msgspec.Struct, frozen=True):
    """The times of a load, in seconds.

    `attention_s` and `experts_s` are a layer's and micro-batch's, from the flight recorder;
    `link_s` is the least one-way time, None where it was hidden; `fixed_s` is the step's time
    outside the layers. `steps_s` are the whole steps. `touched`: the different experts of a batch.
    """

    load: Load
    attention_s: float
    experts_s: float
    link_s: float | None
    fixed_s: float
    steps_s: list[float]
    num_layers: int
    touched: float = 0.0


class RallyStep(NamedTuple):
    """A step of a visit to a load; the first ones of a visit are not counted."""

    load: Load
    plan: StepPlan
    is_counted: bool


class RallyJob(msgspec.Struct, frozen=True):
    """A rally to measure: every load is visited once a round, for `steps` that count."""

    transport: Literal["shm", "tcp"]
    shares_cores: bool
    loads: list[Load]
    rounds: int
    steps: int

    def plan(self, batch: Batch) -> list[RallyStep]:
        """Return all steps; one more round is for compiling and recording."""
        found = []
        for turn in range(1 + self.rounds):
            for load in self.loads:
                batch.begin(load.rows, max(0, load.context - 1), growth=GROWTH)
                for idx in range(NUM_SETTLING + self.steps):
                    is_counted = turn > 0 and idx >= NUM_SETTLING
                    found.append(RallyStep(load, batch.decode(load.micro_batches), is_counted))
        return found


class RallyReport(msgspec.Struct, frozen=True):
    """The samples of a RallyJob, one for each of its loads."""

    transport: str
    shares_cores: bool
    samples: list[Sample]


def cores_of(shares_cores: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the cores of attention and experts: all for both, or half each."""
    cores = sorted(os.sched_getaffinity(0))
    if shares_cores:
        return tuple(cores), tuple(cores)
    first, second = split_cores(cores, 2)
    return first, second


def run_rally(sides: Sides, job: RallyJob) -> RallyReport:
    """Measure the loads of a rally; call in a process that has started no threads."""
    attention, experts = cores_of(job.shares_cores)
    rally = _Rally(sides, job)

    def settle(cores: Sequence[int]) -> None:
        if not job.shares_cores:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))

    def serve() -> list[tuple[float, float]]:
        settle(experts)
        return rally.serve()

    def play() -> list[Sample]:
        settle(attention)
        return rally.play()

    served = fork(serve, list[tuple[float, float]])
    played = fork(play, list[Sample])
    rally.pair.close()
    samples = [
        msgspec.structs.replace(sample, experts_s=experts_s, touched=touched)
        for sample, (experts_s, touched) in zip(played(), served(), strict=True)
    ]
    return RallyReport(job.transport, job.shares_cores, samples)


class _Rally:
    """What both processes do."""

    def __init__(self, sides: Sides, job: RallyJob) -> None:
        self._sides, self._loads = sides, job.loads
        layout: Layout = "shared" if job.shares_cores else "split"
        self._config = config_of(sides.measured._replace(transport=job.transport, layout=layout))
        self.pair = ProcessPair(sides.rig, self._config)
        self._steps = job.plan(sides.rig.batch(range(sides.runner.num_blocks)))

    @torch.inference_mode()
    def serve(self) -> list[tuple[float, float]]:
        """Serve all steps; return, by load, a batch's seconds and how many experts it touched."""
        experts = self._sides.experts
        assert experts is not None
        experts.runtime.prepare_capture()
        ring = experts.trace = Ring(CAPACITY)
        graphs = graphs_of(self._config, experts)
        counted: dict[Load, list[int]] = {load: [0, 0] for load in self._loads}
        found: dict[Load, Durations] = {load: {} for load in self._loads}
        with closing(self.pair.accept(experts)) as net:
            for load, plan, is_counted in self._steps:
                run_ticket(net, experts, plan.ticket, graphs=graphs)
                add_durations(found[load] if is_counted else {}, ring, EXPERT_WORK)
                for counts in experts.take_counts():
                    counted[load][0] += counts.activations
                    counted[load][1] += counts.batches
        return [
            (work_s(found[load]), counted[load][0] / max(1, counted[load][1]))
            for load in self._loads
        ]

    @torch.inference_mode()
    def play(self) -> list[Sample]:
        """Play all steps; return a sample by load, without what the experts have measured."""
        runner = self._sides.runner
        runner.runtime.prepare_capture()
        ring = runner.trace = Ring(CAPACITY)
        timings: dict[Load, list[StepTimings]] = {load: [] for load in self._loads}
        found: dict[Load, Durations] = {load: {} for load in self._loads}
        with closing(self.pair.connect(runner)) as net:
            for load, plan, is_counted in self._steps:
                result = runner.execute(plan, net, index=0)
                add_durations(found[load] if is_counted else {}, ring, ATTENTION_WORK)
                if is_counted:
                    timings[load].append(result.timings)
        num_layers = self._sides.measured.model.num_layers
        return [_sample(load, timings[load], found[load], num_layers) for load in self._loads]


def _sample(
    load: Load, timings: Sequence[StepTimings], found: Durations, num_layers: int
) -> Sample:
    links = [each.link_s for each in timings if each.link_s is not None]
    return Sample(
        load=load,
        attention_s=work_s(found),
        experts_s=0.0,
        # A trip is only ever lengthened.
        link_s=min(links) if links else None,
        fixed_s=lower_quartile([each.total_s - each.attention_s - each.wait_s for each in timings]),
        steps_s=[each.total_s for each in timings],
        num_layers=num_layers,
    )

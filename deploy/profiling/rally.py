"""Times both sides of an engine in steps through the real M2N, in two processes.

Owns the visits of a rally and their samples. Attention and experts take turns on all cores, or have
cores of their own. Knows no tables: worker.py compares with what each side takes alone. Also called
by benchmarks.engine.cost_model, for steps to compare predictions with.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch

from deploy.profiling.forks import fork
from deploy.profiling.hops import (
    ATTENTION_WORK,
    CAPACITY,
    EXPERT_WORK,
    Durations,
    durations,
    join,
    lower_quartile,
    work_s,
)
from deploy.profiling.parts import Measured, config_of, table_of
from deploy.profiling.solo import Sides
from deploy.profiling.steps import Load, plans, tickets
from expert_nodes.worker import graphs_of, run_ticket
from m2n_comm.net import wait_policy
from m2n_comm.open import ExpertListener, connect_attention, listen_expert
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from topspin.cores import split_cores
from topspin.messages import ExpertPeer, StepTicket, StepTimings
from topspin.trace import Ring

TIMEOUT_S = 60.0
# Steps of a visit that are not counted: inputs are new, and the caches another visit's.
NUM_SETTLING = 2


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


@dataclass(frozen=True)
class Schedule:
    """Visits in order; every load is visited once a round, after a round of warm-up."""

    loads: Sequence[Load]
    rounds: int
    steps: int

    def visits(self) -> list[tuple[Load, list[StepTicket]]]:
        """Return each visit's load and tickets; the first round is for compiling and recording."""
        found, first = [], 1
        for _ in range(1 + self.rounds):
            for load in self.loads:
                count = NUM_SETTLING + self.steps
                found.append((load, tickets(load, first, count)))
                first += count
        return found


def cores_of(shares_cores: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the cores of attention and experts: all for both, or half each."""
    cores = sorted(os.sched_getaffinity(0))
    if shares_cores:
        return tuple(cores), tuple(cores)
    first, second = split_cores(cores, 2)
    return first, second


def run_rally(
    sides: Sides,
    schedule: Schedule,
    *,
    shares_cores: bool,
    transport: Literal["shm", "tcp"] = "shm",
    threads: int | None = None,
) -> list[Sample]:
    """Measure the loads of a schedule; call in a process that has started no threads."""
    measured = sides.measured._replace(
        transport=transport,
        layout="shared" if shares_cores else "split",
    )
    attention, experts = cores_of(shares_cores)
    listener = listen_expert(transport)

    def settle(cores: Sequence[int]) -> None:
        if not shares_cores:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads or len(cores))

    def serve() -> list[tuple[float, float]]:
        settle(experts)
        return _serve(sides, measured, schedule, listener)

    def play() -> list[Sample]:
        settle(attention)
        return _play(sides, measured, schedule, listener.address)

    served = fork(serve, list[tuple[float, float]])
    played = fork(play, list[Sample])
    listener.close()
    found = played()
    return [
        msgspec.structs.replace(sample, experts_s=experts_s, touched=touched)
        for sample, (experts_s, touched) in zip(found, served(), strict=True)
    ]


@torch.inference_mode()
def _serve(
    sides: Sides, measured: Measured, schedule: Schedule, listener: ExpertListener
) -> list[tuple[float, float]]:
    """Serve all tickets; return, by load, a batch's seconds and how many experts it touched."""
    config, experts = config_of(measured), sides.experts
    assert experts is not None
    experts.runtime.prepare_capture()
    ring = experts.trace = Ring(CAPACITY)
    graphs = graphs_of(config, experts)
    counted: dict[Load, list[int]] = {load: [0, 0] for load in schedule.loads}
    found: dict[Load, list[Durations]] = {load: [] for load in schedule.loads}
    net = listener.accept(
        Identity(role="expert", index=0, incarnation=2, shape=experts.net_shape(config)),
        [1],
        table_of(measured.model),
        Waits(timeout_s=TIMEOUT_S, policy=wait_policy(config)),
    )
    with closing(net):
        for idx, (load, stamped) in enumerate(schedule.visits()):
            for step, ticket in enumerate(stamped):
                run_ticket(net, experts, ticket, graphs=graphs)
                taken = durations(ring, EXPERT_WORK)
                if idx >= len(schedule.loads) and step >= NUM_SETTLING:
                    found[load].append(taken)
            for counts in experts.take_counts():
                counted[load][0] += counts.activations
                counted[load][1] += counts.batches
    return [
        (work_s(join(found[load])), counted[load][0] / max(1, counted[load][1]))
        for load in schedule.loads
    ]


@torch.inference_mode()
def _play(sides: Sides, measured: Measured, schedule: Schedule, address: str) -> list[Sample]:
    config, runner = config_of(measured), sides.runner
    runner.runtime.prepare_capture()
    ring = runner.trace = Ring(CAPACITY)
    net = connect_attention(
        Identity(role="attention", index=0, incarnation=1, shape=runner.net_shape(config)),
        [ExpertPeer(address=address, incarnation=2)],
        table_of(measured.model),
        Waits(timeout_s=TIMEOUT_S, policy=wait_policy(config)),
    )
    timings: dict[Load, list[StepTimings]] = {load: [] for load in schedule.loads}
    found: dict[Load, list[Durations]] = {load: [] for load in schedule.loads}
    with closing(net):
        for idx, (load, stamped) in enumerate(schedule.visits()):
            for step, plan in enumerate(plans(load, stamped, num_blocks=runner.num_blocks)):
                result = runner.execute(plan, net, index=0)
                taken = durations(ring, ATTENTION_WORK)
                if idx >= len(schedule.loads) and step >= NUM_SETTLING:
                    timings[load].append(result.timings)
                    found[load].append(taken)
    num_layers = measured.model.num_layers
    return [_sample(load, timings[load], join(found[load]), num_layers) for load in schedule.loads]


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

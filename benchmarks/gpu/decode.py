"""Decode and prefill of a whole model on one GPU, and their time by kernel.

The last part of `make gpu`. Builds Qwen3-30B-A3B's shape with random weights, times greedy decode
at several batches and the prefill of one prompt, and profiles each. A decode figure has
milliseconds per step, tokens per second, and the share of the byte floor: the time to read the
bytes that every step needs at the read bandwidth measured in the same process. Engines are made by
benchmarks.gpu.engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engine import fitting, open_engine
from benchmarks.gpu.part import Part, open_part, parse, parser
from benchmarks.gpu.timing import measure_bandwidths
from benchmarks.gpu.workload import FULL, QUICK, Workload

SECONDS: Final = 150.0
GOALS: Final = {1: 0.60, 32: 0.75, 128: 0.75}
"""The project's goal on one H200 as a share of the byte floor, by batch."""
TABLE_ROWS: Final = 20
PROFILED_STEPS: Final = 8
NAME_WIDTH: Final = 70


class TimedEngine(Protocol):
    """A model on a device; the part of benchmarks.gpu.engine that is measured."""

    def start_decode(self, batch: int, context: int) -> None:
        """Drop all sequences and begin `batch` new ones with `context` positions cached."""

    def decode_step(self) -> None:
        """Launch one step of all sequences; the step before it may still be running."""

    def prefill(self, num_tokens: int) -> None:
        """Drop all sequences and launch the prefill of one prompt of `num_tokens` tokens."""

    def finish(self) -> None:
        """Wait until all launched steps have completed and their tokens are on the host."""

    def decode_floor(self) -> Mapping[str, float]:
        """Return the bytes, by kind, that a decode step like the last one must move."""


@dataclass(frozen=True)
class Decode:
    """Times of decode steps, and their floor."""

    step_s: float
    rounds_s: tuple[float, ...]
    """Mean time of a step, by round."""
    floor: Mapping[str, float]
    floor_s: float

    @property
    def fraction(self) -> float:
        """The measured share of the byte floor; 1 is the limit."""
        return self.floor_s / self.step_s


def time_decode(
    engine: TimedEngine,
    workload: Workload,
    batch: int,
    bytes_per_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Decode:
    """Time rounds of decode steps at one batch, after one round that warms up.

    The floor is that of the last step before the timed ones: contexts grow by a token per step, so
    it is at most slightly below the floor of the timed steps.
    """
    engine.start_decode(batch, workload.context)
    times, floor = [], {}
    for idx in range(workload.rounds + 1):
        begin = clock()
        for _ in range(workload.steps):
            engine.decode_step()
        engine.finish()
        times.append((clock() - begin) / workload.steps)
        if idx == 0:
            floor = dict(engine.decode_floor())
    timed = tuple(times[1:])
    return Decode(statistics.median(timed), timed, floor, sum(floor.values()) / bytes_per_s)


def time_prefill(
    engine: TimedEngine, workload: Workload, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the median seconds of a prompt's prefill, after a warm-up."""
    times = []
    for _ in range(workload.rounds + 1):
        begin = clock()
        engine.prefill(workload.prefill_tokens)
        engine.finish()
        times.append(clock() - begin)
    return statistics.median(times[1:])


def profile_steps(
    engine: TimedEngine, step: Callable[[], None], num_steps: int, *, on_gpu: bool
) -> list[dict[str, Any]]:
    """Profile consecutive steps; return each kernel's runs and time in one step.

    On the host the "kernels" are torch's operations, including nested ones.
    """
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(num_steps):
            step()
        engine.finish()
    rows = []
    for event in profiler.key_averages():
        total_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if total_us > 0:
            rows.append(
                {"kernel": event.key, "runs": event.count / num_steps, "us": total_us / num_steps}
            )
    return sorted(rows, key=lambda row: (-row["us"], row["kernel"]))


def show(part: Part, what: str, rows: Sequence[Mapping[str, Any]], step_s: float) -> None:
    """Print and keep the table of one kind of step; `step_s` is its time without the profiler."""
    lines = [f"{what}: {'kernel':{NAME_WIDTH - len(what)}} {'runs':>7} {'us/step':>9} {'share':>6}"]
    for row in rows[:TABLE_ROWS]:
        share = row["us"] * 1e-6 / step_s
        name = row["kernel"].removeprefix("void ")[:NAME_WIDTH]
        lines.append(f"  {name:{NAME_WIDTH}} {row['runs']:7.1f} {row['us']:9.1f} {share:6.1%}")
    busy_us = sum(row["us"] for row in rows)
    lines.append(f"  kernels run for {busy_us:.1f} us; a step takes {step_s * 1e6:.1f} us")
    part.figure("\n".join(lines), of="profile", what=what, busy_us=busy_us, rows=list(rows))


def measure_decode(
    part: Part,
    engine: TimedEngine,
    workload: Workload,
    batch: int,
    bytes_per_s: float,
    *,
    on_gpu: bool,
) -> None:
    """Time and profile decode steps of one batch."""
    found = time_decode(engine, workload, batch, bytes_per_s)
    goal = GOALS.get(batch) if on_gpu else None
    part.figure(
        f"decode, batch {batch}: {found.step_s * 1e3:.2f} ms/step, "
        f"{batch / found.step_s:.0f} tokens/s, {found.fraction:.1%} of the byte floor "
        f"({found.floor_s * 1e3:.2f} ms)" + (f", goal {goal:.0%}" if goal is not None else ""),
        of="decode",
        batch=batch,
        context=workload.context,
        step_ms=found.step_s * 1e3,
        rounds_ms=[seconds * 1e3 for seconds in found.rounds_s],
        tokens_per_s=batch / found.step_s,
        floor_bytes=found.floor,
        floor_ms=found.floor_s * 1e3,
        fraction=found.fraction,
        goal=goal,
    )
    num_steps = min(PROFILED_STEPS, workload.steps)
    rows = profile_steps(engine, engine.decode_step, num_steps, on_gpu=on_gpu)
    show(part, f"decode, batch {batch}", rows, found.step_s)


def measure_prefill(part: Part, engine: TimedEngine, workload: Workload, *, on_gpu: bool) -> None:
    """Time and profile the prefill of one prompt."""
    num_tokens = workload.prefill_tokens
    seconds = time_prefill(engine, workload)
    part.figure(
        f"prefill, {num_tokens} tokens: {seconds * 1e3:.1f} ms, "
        f"{num_tokens / seconds:.0f} tokens/s",
        of="prefill",
        tokens=num_tokens,
        ms=seconds * 1e3,
        tokens_per_s=num_tokens / seconds,
    )
    rows = profile_steps(engine, lambda: engine.prefill(num_tokens), 1, on_gpu=on_gpu)
    show(part, f"prefill, {num_tokens} tokens", rows, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    flags = parser("decode", SECONDS)
    flags.add_argument("--batch", type=int, action="append", help="instead of 1, 32 and 128")
    flags.add_argument("--context", type=int, help="cached positions of each sequence")
    flags.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself")
    args = parse(flags, argv)
    part, runtime = open_part("decode", args)
    base = QUICK if args.quick else FULL
    workload = replace(
        base,
        context=base.context if args.context is None else args.context,
        batches=tuple(args.batch or base.batches),
    )
    variant = "no graphs" if args.no_graphs else "graphs"
    on_gpu = runtime.is_asynchronous
    with part.attempt("the engine"):
        bytes_per_s = measure_bandwidths(part, runtime, is_quick=args.quick)
        # The buffers are 8 GiB; the model needs the memory.
        runtime.release_cached()
        if on_gpu:
            asked, workload = workload, fitting(workload, runtime.memory())
            if workload.context < asked.context:
                part.figure(
                    f"context {workload.context} instead of {asked.context}: the memory has no more"
                )
        begin = time.perf_counter()
        engine = open_engine(workload, args.device, cuda_graphs=not args.no_graphs)
        built_s = time.perf_counter() - begin
        part.figure(
            f"{workload.name}, {variant}: built in {built_s:.1f} s",
            of="engine",
            model=workload.name,
            variant=variant,
            seconds=built_s,
        )
        for batch in workload.batches:
            with part.attempt(f"decode, batch {batch}") as is_time:
                if is_time:
                    measure_decode(part, engine, workload, batch, bytes_per_s, on_gpu=on_gpu)
        with part.attempt("prefill") as is_time:
            if is_time:
                measure_prefill(part, engine, workload, on_gpu=on_gpu)
        engine.close()
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())

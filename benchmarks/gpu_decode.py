"""Decode and prefill end to end on one GPU: a part of `make gpu`.

Owns which engines are timed (CUDA graphs on and off, one and two streams) at which batches,
and what a figure says: milliseconds per step, tokens per second, and the share of the byte
floor, which is the time in which the copy bandwidth measured in the same process moves the
bytes that no step can do without. Engines are made by benchmarks.gpu_engine; here they are
the protocol `Engine`, so that the measuring is tested without one. Run by benchmarks.gpu.
"""

from __future__ import annotations

import gc
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Protocol

from benchmarks.gpu_models import FULL, QUICK, Workload
from benchmarks.gpu_records import Deadline, PartFlags, Recorder, parse_flags

GATES: Final = {1: 0.40, 32: 0.65, 128: 0.65}
"""The least share of the byte floor, by batch."""
GOALS: Final = {1: 0.60, 32: 0.75, 128: 0.75}


@dataclass(frozen=True)
class Variant:
    """How an engine runs its steps."""

    cuda_graphs: bool
    gpu_streams: int

    @property
    def name(self) -> str:
        """Name it as the table does."""
        graphs = "graphs" if self.cuda_graphs else "no graphs"
        return f"{graphs}, {self.gpu_streams} stream{'s' if self.gpu_streams > 1 else ''}"


VARIANTS: Final = (Variant(True, 1), Variant(True, 2), Variant(False, 1))
"""The one that is expected to be best goes first: time may be short for the others."""


class Engine(Protocol):
    """One model with random weights on one device, greedy, as a node runs it."""

    def start_decode(self, batch: int, context: int) -> None:
        """Forget all sequences and begin `batch` ones that have `context` positions cached.

        What is cached may be random numbers: nobody reads the tokens. Raises ConfigError if
        the cache has no room for them.
        """

    def decode_step(self) -> None:
        """Launch one step of all sequences; the step before it may still be running."""

    def prefill(self, num_tokens: int) -> None:
        """Forget all sequences and launch the prefill of one prompt of so many tokens."""

    def finish(self) -> None:
        """Wait until everything that was launched has happened and its tokens are here."""

    def decode_floor(self) -> Mapping[str, float]:
        """Give the bytes, by what they are, that a decode step as the last one must move.

        Weights of experts count where the last step's routing touched them.
        """

    def close(self) -> None:
        """Free the device's memory."""


OpenEngine = Callable[[Workload, str, Variant], Engine]
"""(shape and lengths, device, variant) -> engine; benchmarks.gpu_engine.open_engine."""


@dataclass(frozen=True)
class Decode:
    """Times of decode steps, and the floor beside them."""

    batch: int
    context: int
    step_s: float
    steps_s: tuple[float, ...]
    """Mean step of each round."""
    floor: Mapping[str, float]
    floor_s: float

    @property
    def fraction(self) -> float:
        """The share of the byte floor that was reached; 1 is the limit."""
        return self.floor_s / self.step_s


def time_decode(
    engine: Engine,
    workload: Workload,
    batch: int,
    bytes_per_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Decode:
    """Time rounds of decode steps at one batch, after one round that warms up.

    The floor is that of the last step before the timed ones: contexts grow by a token a step,
    so that it is, if anything, a little less than that of the steps it is compared with.
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
    return Decode(
        batch,
        workload.context,
        statistics.median(timed),
        timed,
        floor,
        sum(floor.values()) / bytes_per_s,
    )


def time_prefill(
    engine: Engine, workload: Workload, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Give the median seconds of a prompt's prefill, after one that warms up."""
    times = []
    for _ in range(workload.rounds + 1):
        begin = clock()
        engine.prefill(workload.prefill_tokens)
        engine.finish()
        times.append(clock() - begin)
    return statistics.median(times[1:])


def measure(
    variant: Variant,
    engine: Engine,
    workload: Workload,
    bytes_per_s: float,
    recorder: Recorder,
    deadline: Deadline,
    *,
    is_judged: bool,
) -> None:
    """Record the decode steps of a variant at every batch, and the prefill of the first one."""
    for batch in workload.batches:
        what = f"decode, batch {batch}, {variant.name}"
        if not deadline.has(0):
            recorder.skipped(what, "the time was up")
            continue
        found = time_decode(engine, workload, batch, bytes_per_s)
        recorder.write(
            "figure",
            of="decode",
            engine="topspin",
            variant=variant.name,
            **asdict(variant),
            batch=batch,
            context=found.context,
            step_ms=found.step_s * 1e3,
            rounds_ms=[seconds * 1e3 for seconds in found.steps_s],
            tokens_per_s=batch / found.step_s,
            floor_bytes=found.floor,
            floor_ms=found.floor_s * 1e3,
            fraction=found.fraction,
            gate=GATES.get(batch) if is_judged else None,
            goal=GOALS.get(batch) if is_judged else None,
        )
    if variant != VARIANTS[0]:
        return
    if not deadline.has(0):
        recorder.skipped(f"prefill, {variant.name}", "the time was up")
        return
    seconds = time_prefill(engine, workload)
    recorder.write(
        "figure",
        of="prefill",
        engine="topspin",
        variant=variant.name,
        tokens=workload.prefill_tokens,
        ms=seconds * 1e3,
        tokens_per_s=workload.prefill_tokens / seconds,
    )


def run(
    flags: PartFlags,
    recorder: Recorder,
    open_engine: OpenEngine,
    bytes_per_s: float,
    deadline: Deadline,
) -> None:
    """Build the engine of each variant in turn and measure it, until the time is up.

    A variant that cannot be built or run is a problem, and the next one is tried.
    """
    workload = QUICK if flags.quick else FULL
    for variant in VARIANTS:
        if not deadline.has_another:
            recorder.skipped(f"engine, {variant.name}", "the time would not have sufficed")
            continue
        recorder.progress(f"building {workload.name}, {variant.name}")
        # A kernel or a driver may raise anything; what the other variants reach counts still.
        try:
            with deadline.measured():
                engine = open_engine(workload, flags.device, variant)
                try:
                    measure(
                        variant, engine, workload, bytes_per_s, recorder, deadline,
                        is_judged=not flags.quick,
                    )  # fmt: skip
                finally:
                    engine.close()
        except Exception as error:
            traceback.print_exc()
            recorder.problem(f"engine, {variant.name}", f"{type(error).__name__}: {error}")
        # What a failure has kept alive is an engine, and two do not fit the memory.
        gc.collect()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    flags = parse_flags("benchmarks.gpu_decode", __doc__, argv)
    recorder, deadline = Recorder(), Deadline(flags.seconds)
    import torch

    from benchmarks.gpu_engine import open_engine
    from benchmarks.gpu_timing import copy_bandwidth
    from kernels.runtime import open_runtime

    bytes_per_s = copy_bandwidth(open_runtime(flags.device), is_quick=flags.quick)
    recorder.write("figure", of="ceiling", name="copy", per_s=bytes_per_s, unit="B/s")
    # The copy's buffers; without a GPU there are none.
    torch.cuda.empty_cache()
    run(flags, recorder, open_engine, bytes_per_s, deadline)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

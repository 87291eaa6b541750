"""Where the time of a step goes on a GPU: its kernels, the gaps between them, and the floor.

For whoever makes a step faster; `make gpu` does not run it, since profiling takes time of its
own. Owns reading torch's profiler and the arithmetic of the table; the engine is that of
benchmarks.gpu_engine.

    python -m benchmarks.gpu_profile --batch 1 --streams 2
    python -m benchmarks.gpu_profile --prefill 8192
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_decode import Engine, Variant
from benchmarks.gpu_engine import open_engine
from benchmarks.gpu_models import FULL, QUICK, Workload
from benchmarks.gpu_timing import copy_bandwidth
from kernels.runtime import open_runtime

WARM_UP_STEPS: Final = 4
NAME_WIDTH: Final = 56


class Kernel(NamedTuple):
    """One kernel (or copy) that ran: when it began and ended, in microseconds."""

    name: str
    begin_us: float
    end_us: float


class Row(NamedTuple):
    """All runs of one kernel, per step."""

    name: str
    runs: float
    us: float


@dataclass(frozen=True)
class Summary:
    """Microseconds per step: `span` = `busy` + `idle`; kernels overlap for `overlap`."""

    rows: list[Row]
    span: float
    busy: float
    overlap: float

    @property
    def idle(self) -> float:
        """Return the time in which no kernel ran."""
        return self.span - self.busy


def summarise(kernels: Sequence[Kernel], num_steps: int) -> Summary:
    """Add up what ran in `num_steps` steps, which followed each other without a break."""
    assert kernels, "no kernel"
    ordered = sorted(kernels, key=lambda kernel: kernel.begin_us)
    busy_us, covered_us = 0.0, ordered[0].begin_us
    by_name: dict[str, list[float]] = {}
    for kernel in ordered:
        by_name.setdefault(kernel.name, []).append(kernel.end_us - kernel.begin_us)
        busy_us += max(0.0, kernel.end_us - max(kernel.begin_us, covered_us))
        covered_us = max(covered_us, kernel.end_us)
    rows = [
        Row(name, len(times) / num_steps, sum(times) / num_steps) for name, times in by_name.items()
    ]
    return Summary(
        rows=sorted(rows, key=lambda row: (-row.us, row.name)),
        span=(covered_us - ordered[0].begin_us) / num_steps,
        busy=busy_us / num_steps,
        overlap=sum(row.us for row in rows) - busy_us / num_steps,
    )


def table(found: Summary, floor: Mapping[str, float], bytes_per_s: float) -> list[str]:
    """Return the lines to print; `floor` is a step's bytes by what they are, {} for none."""
    lines = [f"{'kernel':{NAME_WIDTH}} {'runs':>7} {'us/run':>8} {'us/step':>9} {'share':>6}"]
    for row in found.rows:
        lines.append(
            f"{short_name(row.name):{NAME_WIDTH}} {row.runs:7.1f} {row.us / row.runs:8.2f} "
            f"{row.us:9.1f} {row.us / found.span:6.1%}"
        )
    num_runs = sum(row.runs for row in found.rows)
    lines.append(
        f"a step: {found.span:.1f} us; kernels run {found.busy:.1f} us of it, nothing does "
        f"{found.idle:.1f} us ({found.idle / num_runs:.2f} us per kernel); overlap "
        f"{found.overlap:.1f} us"
    )
    if floor:
        parts = {what: count / bytes_per_s * 1e6 for what, count in floor.items()}
        listed = ", ".join(f"{what} {us:.1f}" for what, us in parts.items())
        total = sum(parts.values())
        lines.append(
            f"floor: {total:.1f} us at {bytes_per_s / 1e12:.2f} TB/s ({listed}); reached "
            f"{total / found.span:.1%}"
        )
    return lines


def short_name(name: str) -> str:
    """Return a kernel's name without return type and template arguments, cut to the column."""
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    bare = bare.split("<")[0].split("(")[0]
    return bare[:NAME_WIDTH]


def read_kernels(events: Iterable[Any], device: DeviceType) -> list[Kernel]:
    """Return what the profiler saw on devices of one type."""
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == device
    ]


def profile_steps(
    engine: Engine, num_steps: int, *, prefill: int | None, on_gpu: bool
) -> list[Kernel]:
    """Run `num_steps` steps under the profiler, launched as fast as they can be.

    On the host the "kernels" are torch's operations, those inside others too.
    """
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        for _ in range(num_steps):
            engine.decode_step() if prefill is None else engine.prefill(prefill)
        engine.finish()
    device = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return read_kernels(profiler.events() or [], device)


def workload_of(args: argparse.Namespace) -> Workload:
    """Return a workload with room for these steps, and no more than they need."""
    base = QUICK if args.quick else FULL
    return replace(
        base,
        context=args.context if args.context is not None else base.context,
        batches=(args.batch,),
        prefill_tokens=args.prefill or args.batch,
        rounds=1,
        steps=WARM_UP_STEPS + args.steps,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Profile and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_profile", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu (interpreted)")
    parser.add_argument("--batch", type=int, default=1, help="sequences that are decoded")
    parser.add_argument("--context", type=int, help="positions that each of them has cached")
    parser.add_argument("--prefill", type=int, help="profile prompts of so many tokens instead")
    parser.add_argument("--streams", type=int, choices=(1, 2), default=1)
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself")
    parser.add_argument("--steps", type=int, default=8, help="steps that are profiled")
    parser.add_argument("--quick", action="store_true", help="a tiny shape")
    args = parser.parse_args(argv)
    workload = workload_of(args)
    runtime = open_runtime(args.device)
    on_gpu = runtime.is_asynchronous
    engine = open_engine(workload, args.device, Variant(not args.no_graphs, args.streams))
    if args.prefill is None:
        engine.start_decode(args.batch, workload.context)
    for _ in range(WARM_UP_STEPS):
        engine.decode_step() if args.prefill is None else engine.prefill(args.prefill)
    # What still runs would be counted among the steps that are profiled.
    engine.finish()
    kernels = profile_steps(engine, args.steps, prefill=args.prefill, on_gpu=on_gpu)
    floor = engine.decode_floor() if args.prefill is None else {}
    engine.close()
    bytes_per_s = copy_bandwidth(runtime, is_quick=args.quick)
    print(f"{workload.name} on {torch.cuda.get_device_name() if on_gpu else 'the host'}")
    print("\n".join(table(summarise(kernels, args.steps), floor, bytes_per_s)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

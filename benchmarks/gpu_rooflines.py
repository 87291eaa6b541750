"""Every kernel against the roofline that was measured beside it: a part of `make gpu`.

Owns what a figure says of a kernel: its bytes and operations (benchmarks.roofline), its time
(benchmarks.gpu_timing), what it achieved, and the share of the least time that this device
could need, by the copy bandwidth and the product's rate measured in the same process. Run by
benchmarks.gpu.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import torch

from benchmarks import gpu_compile
from benchmarks.gpu_compile import num_compilers, read_share
from benchmarks.gpu_kernels import Entry
from benchmarks.gpu_kernels.catalogue import CATALOGUE, Job, JobsOf, in_order
from benchmarks.gpu_records import Deadline, Recorder, flag_parser
from benchmarks.gpu_timing import Timed, copy_bandwidth, matmul_rate, time_call
from benchmarks.roofline import Roofline
from kernels.runtime import Runtime, open_runtime

MAX_COMPILERS: Final = 8
COMPILING_SHARE: Final = 0.5
PRODUCTS: Final = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def figure(entry: Entry, timed: Timed, rooflines: Mapping[str, Roofline]) -> dict[str, Any]:
    """Say what was reached; times in microseconds, rates per second.

    An fp8 product is compared with bf16's rate where the device's fp8 rate is not known.
    """
    roofline = rooflines.get(entry.product, rooflines["bf16"])
    least_s = roofline.least_s(entry.work)
    beyond_s = timed.median_s - entry.work.num_bytes / roofline.bytes_per_s
    return {
        "of": "kernel",
        "op": entry.op,
        "shape": entry.shape,
        "bytes": entry.work.num_bytes,
        "flops": entry.work.flops,
        "us": timed.median_s * 1e6,
        "least_us_seen": timed.least_s * 1e6,
        "calls": timed.calls,
        "timed_by": timed.by,
        "bytes_per_s": entry.work.num_bytes / timed.median_s,
        "flops_per_s": entry.work.flops / timed.median_s,
        "bound": roofline.bound(entry.work),
        "floor_us": least_s * 1e6,
        "fraction": roofline.fraction(entry.work, timed.median_s),
        "goal": entry.goal,
        "beyond_us": beyond_s * 1e6,
        "goal_beyond_us": None if entry.goal_beyond_s is None else entry.goal_beyond_s * 1e6,
    }


def measure_ceilings(
    runtime: Runtime, recorder: Recorder, *, is_quick: bool
) -> dict[str, Roofline]:
    """Measure and record the copy bandwidth and the rate of each product that the device has."""
    bytes_per_s = copy_bandwidth(runtime, is_quick=is_quick)
    recorder.write("figure", of="ceiling", name="copy", per_s=bytes_per_s, unit="B/s")
    found = {}
    for name, dtype in PRODUCTS.items():
        try:
            flops_per_s = matmul_rate(runtime, dtype, is_quick=is_quick)
        except (RuntimeError, NotImplementedError) as error:
            recorder.skipped(f"{name} product", str(error).splitlines()[0])
            continue
        recorder.write("figure", of="ceiling", name=name, per_s=flops_per_s, unit="FLOP/s")
        found[name] = Roofline(bytes_per_s, flops_per_s)
    return found


def find_jobs(
    catalogue: Mapping[str, JobsOf], device: torch.device, recorder: Recorder, *, is_tiny: bool
) -> list[Job]:
    """Give all jobs in order; a module that cannot give its own is a problem."""
    found: list[Job] = []
    for name, jobs_of in catalogue.items():
        try:
            found += jobs_of(device, is_tiny)
        except Exception as error:
            traceback.print_exc()
            recorder.problem(name, f"{type(error).__name__}: {error}")
    return in_order(found)


def measure(
    wanted: Iterable[Job],
    runtime: Runtime,
    rooflines: Mapping[str, Roofline],
    recorder: Recorder,
    deadline: Deadline,
) -> None:
    """Time the entries of every job until the time is up; one that fails is a problem."""
    skipped: dict[str, int] = {}
    for job in wanted:
        if not deadline.has(0):
            skipped[job.name] = skipped.get(job.name, 0) + 1
            continue
        # A kernel or its compiler may raise anything, and the others count still.
        try:
            for entry in job.make():
                timed = time_call(runtime, entry.call, entry.copies)
                entry.check()
                recorder.write("figure", **figure(entry, timed, rooflines))
        except Exception as error:
            traceback.print_exc()
            recorder.problem(job.name, f"{type(error).__name__}: {error}")
    for name, count in skipped.items():
        recorder.skipped(f"{name} ({count} sizes)", "the time was up")


def compile_jobs(jobs: Iterable[Job], runtime: Runtime) -> None:
    """Call every entry once, which compiles its kernels for whoever times them later."""
    for job in jobs:
        # Who times it will meet the same error, and report it.
        try:
            for entry in job.make():
                entry.call(0)
                runtime.synchronize()
        except Exception:
            traceback.print_exc()


def compile_beside(device: str, recorder: Recorder, deadline: Deadline) -> None:
    """Have all kernels compiled into Triton's cache, for a share of the time at most."""
    count = num_compilers(MAX_COMPILERS)
    recorder.progress(f"compiling in {count} processes")
    command = ["-m", "benchmarks.gpu_rooflines", "--device", device]
    gpu_compile.compile_beside(command, count, deadline.left * COMPILING_SHARE)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or compile a share; returns the exit status."""
    parser = flag_parser("benchmarks.gpu_rooflines", __doc__)
    parser.add_argument("--share", help="I/N: only compile the I-th of N shares")
    args = parser.parse_args(argv)
    recorder, deadline = Recorder(), Deadline(args.seconds)
    runtime = open_runtime(args.device)
    torch.manual_seed(0)
    wanted = find_jobs(CATALOGUE, runtime.device, recorder, is_tiny=args.quick)
    if args.share is not None:
        compile_jobs(wanted[read_share(args.share)], runtime)
        return 0
    if runtime.is_asynchronous:
        compile_beside(args.device, recorder, deadline)
    rooflines = measure_ceilings(runtime, recorder, is_quick=args.quick)
    measure(wanted, runtime, rooflines, recorder, deadline)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

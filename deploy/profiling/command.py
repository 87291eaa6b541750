"""`topspin profile`: measures the device at hand and writes its file for the planner.

Owns the flags, the workers (one process per model and format), and the device's file that their
reports become. Knows no tensors. Loaded by app.cli.main.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Literal, get_args

import msgspec
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.placement.devices import (
    DeviceProfile,
    ProcessMemory,
    Table,
    load_profile,
    save_profile,
)
from deploy.placement.shapes import ModelShape
from deploy.profiling.rally import Load, RallyJob
from deploy.profiling.reports import fastest, links_of, rallies_of, rates_from
from deploy.profiling.resident import MeasuredRole, Resident
from deploy.profiling.solo import Grid
from deploy.profiling.worker import ProfileJob, ProfileReport
from models.description.config import load_model_config
from models.sources.hub import resolve_model
from topspin.cores import node_environment
from topspin.devices import CPU, TRITON
from topspin.errors import ConfigError, TopspinError
from topspin.plan.precision import KERNEL_FORMATS, UNQUANTISED, Format
from topspin.plan.settings import Dtype
from topspin.process import PARENT_PID_VARIABLE

RALLY_ROWS = (1, 4, 16, 32)
DEFAULT_MODEL = "smollm2-moe"


class ProfileError(TopspinError):
    """A measurement failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `topspin profile`."""
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="DEVICE.json")
    add(
        "--model",
        action="append",
        default=[],
        metavar="MODEL",
        help=f"measure the shapes of this model; several add up ({DEFAULT_MODEL})",
    )
    add("--device", default=CPU, help="cpu, or cuda:N (%(default)s)")
    add("--kernels", choices=("cpu", "triton"), help="(those of the device)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--formats", nargs="+", metavar="FORMAT", help="of weights (all that the kernels have)")
    add("--threads", nargs="+", type=int, metavar="N", help="(1, 2, 4, ... cores)")
    add("--name", help="the device's name (the processor's)")
    add("--price", type=float, default=0.0, help="per hour, in the cluster's unit")
    add("--quick", action="store_true", help="few points, for a first look")


def run(args: argparse.Namespace) -> int:
    """Measure and write the file; returns the exit status."""
    kernels = args.kernels or ("cpu" if args.device == CPU else TRITON)
    formats = _formats(args.formats, kernels)
    threads = _threads(args.threads, args.device)
    profile = load_profile(args.output) if args.output.exists() else None
    models = [resolve_model(name) for name in args.model or [DEFAULT_MODEL]]
    grid = quick_grid() if args.quick else Grid()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), transient=True
    ) as progress:
        for path in models:
            profile = _measure_model(profile, path, args, kernels, formats, threads, grid, progress)
    assert profile is not None
    profile.check()
    save_profile(profile, args.output)
    print(f"{args.output}: {profile.name}, {len(profile.tables)} tables", flush=True)
    return 0


def quick_grid() -> Grid:
    """Return few points and rounds."""
    return Grid(
        rows=(1, 8, 32),
        keys=(256, 4096),
        chunks=(16, 128),
        starts=(0, 512),
        touched=(1, 4, 16),
        pairs=(1, 8),
        rounds=2,
        steps=2,
        budget_s=3.0,
    )


def _formats(asked: Sequence[str] | None, kernels: str) -> list[Format]:
    known: list[Format] = [UNQUANTISED, *KERNEL_FORMATS[kernels]]
    for each in asked or ():
        if each not in known:
            raise ConfigError(f"--formats {each}: the kernels {kernels} have {', '.join(known)}")
    return [each for each in known if asked is None or each in asked]


def _threads(asked: Sequence[int] | None, device: str) -> list[int]:
    cores = len(os.sched_getaffinity(0))
    if device != CPU:
        return [1]
    for each in asked or ():
        if not 1 <= each <= cores:
            raise ConfigError(f"--threads {each}: 1 to {cores}, the cores of this process")
    powers = {1 << power for power in range(cores.bit_length()) if 1 << power < cores}
    return sorted(set(asked)) if asked else sorted(powers | {cores})


def _measure_model(
    known: DeviceProfile | None,
    path: Path,
    args: argparse.Namespace,
    kernels: str,
    formats: Sequence[Format],
    threads: Sequence[int],
    grid: Grid,
    progress: Progress,
) -> DeviceProfile:
    dtype: Dtype = args.dtype
    config = load_model_config(path)
    shape = ModelShape.from_config(config, dtype=dtype)
    base = ProfileJob(str(path), dtype, UNQUANTISED, args.device, kernels, list(threads), grid)
    tables: list[Table] = []
    first: ProfileReport | None = None
    for idx, weight_format in enumerate(formats):
        task = progress.add_task(f"{path.name} in {weight_format}", total=None)
        # How a rally differs from its sides is much the same in all formats.
        has_rally = idx == 0 and args.device == CPU and config.moe is not None
        job = msgspec.structs.replace(
            base,
            weight_format=weight_format,
            rallies=rally_jobs(grid) if has_rally else [],
        )
        report = run_worker(job, on_visit=_advance(progress, task))
        tables += report.tables
        first = first or report
    assert first is not None
    process = known.process if known else ProcessMemory(attention=0.0, expert=0.0)
    if args.device == CPU:
        process = process_memory(base, has_experts=config.moe is not None)
    fresh = {(each.operation, each.shape, each.format, each.threads) for each in tables}
    kept = known.tables if known else ()
    tables += [t for t in kept if (t.operation, t.shape, t.format, t.threads) not in fresh]
    is_cpu = args.device == CPU
    profile = DeviceProfile(
        name=args.name or (known.name if known else _name(args.device)),
        kind="cpu" if is_cpu else "cuda",
        source="measured",
        notes=f"measured by topspin profile with the kernels {kernels}",
        memory_bytes=_memory_bytes(args.device),
        price_per_hour=args.price or (known.price_per_hour if known else 0.0),
        cores=len(os.sched_getaffinity(0)) if is_cpu else 1,
        formats=tuple(
            each
            for each in (UNQUANTISED, *KERNEL_FORMATS[kernels])
            if each in formats or (known and each in known.formats)
        ),
        rates=rates_from(tables, shape, kernels, threads, known),
        tables=tuple(tables),
        rallies=known.rallies if known else (),
        links=known.links if known else (),
        process=process,
    )
    if first.rallies:
        profile = msgspec.structs.replace(
            profile,
            rallies=(
                *rallies_of(first.rallies, profile, shape),
                *(each for each in profile.rallies if each.shape != shape.experts_key()),
            ),
            links=fastest([*profile.links, *links_of(first.rallies, shape)]),
        )
    return profile


def process_memory(job: ProfileJob, *, has_experts: bool) -> ProcessMemory:
    """Return what nodes of each role take beside their data, by a process of each.

    Without routed experts there are no expert nodes, and the attention node's stands for both.
    """
    found: dict[str, Resident] = {}
    for role in get_args(MeasuredRole):
        if role == "expert" and not has_experts:
            found[role] = found["attention"]
            continue
        report = run_worker(msgspec.structs.replace(job, resident=role))
        assert report.resident is not None
        found[role] = report.resident
    return ProcessMemory(
        attention=found["attention"].own,
        expert=found["expert"].own,
        shared=max(each.files for each in found.values()),
    )


def rally_jobs(grid: Grid) -> list[RallyJob]:
    """Return the rallies: m = 1..4 on shared cores and on own ones, and the links."""
    rows = [each for each in RALLY_ROWS if each <= max(grid.rows)]
    loads = [
        Load(rows=m * each, context=128, micro_batches=m) for each in rows for m in (1, 2, 3, 4)
    ]
    rounds = max(1, grid.rounds // 2)
    singles = [each for each in loads if each.micro_batches == 1]
    conditions = (True, False) if len(os.sched_getaffinity(0)) > 1 else (True,)
    transports: tuple[tuple[Literal["shm", "tcp"], list[Load]], ...] = (
        ("shm", loads),
        ("tcp", singles),
    )
    return [
        RallyJob(transport, shares, each, rounds, grid.steps)
        for transport, each in transports
        for shares in conditions
    ]


def run_worker(
    job: ProfileJob, on_visit: Callable[[int], None] = lambda count: None
) -> ProfileReport:
    """Do a job in a process of its own; raises ProfileError with its last words."""
    on_device, cores = job.device != CPU, len(os.sched_getaffinity(0))
    environment = {
        **os.environ,
        **node_environment(os.environ, num_threads=cores, on_device=on_device),
        PARENT_PID_VARIABLE: str(os.getpid()),
    }
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            (sys.executable, "-P", "-m", "deploy.profiling.worker"),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        process.stdin.close()
        try:
            report = _read(process.stdout, on_visit)
        finally:
            process.stdout.close()
            if process.poll() is None and sys.exc_info()[0] is not None:
                process.kill()
            status = process.wait()
        if report is None or status:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise ProfileError(f"measuring failed: {lines[-1] if lines else f'status {status}'}")
        return report


def _read(lines: IO[bytes], on_visit: Callable[[int], None]) -> ProfileReport | None:
    for line in lines:
        if line.strip().isdigit():
            on_visit(int(line))
        else:
            return msgspec.json.decode(line, type=ProfileReport)
    return None


def _advance(progress: Progress, task: object) -> Callable[[int], None]:
    def advance(count: int) -> None:
        if count:
            progress.update(task, total=count)  # type: ignore[arg-type]
        else:
            progress.advance(task)  # type: ignore[arg-type]

    return advance


def _name(device: str) -> str:
    if device != CPU:
        import torch

        return str(torch.cuda.get_device_name(device))
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes(device: str) -> float:
    if device != CPU:
        import torch

        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

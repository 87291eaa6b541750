"""The process that measures one model in one format: `python -m deploy.profiling.worker`.

Owns the order of its measurements and the wire to command.py: a job on stdin; on stdout the number
of visits, a line for each, and the report as JSON. Each measurement is a fork of this process,
which made the weights and starts no threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from deploy.placement.devices import Table
from deploy.placement.shapes import ModelShape
from deploy.profiling.rally import RallyJob, RallyReport, run_rally
from deploy.profiling.resident import MeasuredRole, Resident, resident
from deploy.profiling.slices import CPU_DEVICE, Measured, slice_of
from deploy.profiling.solo import Grid, Sides
from deploy.rig.forks import fork
from models.description.config import load_model_config
from topspin.logs import start_logging
from topspin.plan.precision import Format
from topspin.plan.settings import Dtype
from topspin.process import follow_parent

Tick = Callable[[int], None]
Done = Callable[[], None]


class ProfileJob(msgspec.Struct, frozen=True):
    """What to measure. `resident`: only what a node of this role takes beside its data."""

    path: str
    dtype: Dtype
    weight_format: Format
    device: str
    kernels: str
    threads: list[int]
    grid: Grid
    rallies: list[RallyJob] = []
    resident: MeasuredRole | None = None


class ProfileReport(msgspec.Struct, frozen=True):
    """What was measured."""

    tables: list[Table] = []
    rallies: list[RallyReport] = []
    resident: Resident | None = None


def measure(job: ProfileJob, tick: Tick) -> ProfileReport:
    """Do a job; `tick` is called with the number of visits, and then at each."""
    model = load_model_config(Path(job.path))
    shape = ModelShape.from_config(model, dtype=job.dtype)
    measured = Measured(
        model=slice_of(model, shape),
        dtype=job.dtype,
        weight_format=job.weight_format,
        device=job.device,
        kernels=job.kernels,
        max_rows=max([*job.grid.rows, *(each.rows for r in job.rallies for each in r.loads)]),
        max_tokens=max(job.grid.chunks),
        num_keys=max(
            [job.grid.most_keys, *(each.num_keys for r in job.rallies for each in r.loads)]
        ),
    )
    if job.resident is not None:
        return ProfileReport(resident=resident(measured, job.resident, Path(job.path)))
    widths = sorted({shape.mlp_width(layer) for layer in range(shape.num_layers)} - {0})
    sides = Sides(measured, shape, widths)
    tick(len(job.threads) * sides.num_visits(job.grid))
    tables: list[Table] = []
    for threads in job.threads:
        work = partial(_tables, sides, job.grid, threads, lambda: tick(0))
        # A GPU's runtime does not survive a fork.
        tables += work() if job.device != CPU_DEVICE else fork(work, list[Table])()
    return ProfileReport(tables, [run_rally(sides, each) for each in job.rallies])


@torch.inference_mode()
def _tables(sides: Sides, grid: Grid, threads: int, done: Done) -> list[Table]:
    torch.set_num_threads(threads)
    return sides.measure(grid, threads=threads, done=done)


def _tick(count: int) -> None:
    print(count, flush=True)


def main() -> int:
    """Measure what stdin says; print the report."""
    follow_parent()
    start_logging("profile")
    torch.set_num_threads(1)
    job = msgspec.json.decode(sys.stdin.readline(), type=ProfileJob)
    with torch.inference_mode():
        report = measure(job, _tick)
    print(msgspec.json.encode(report).decode(), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

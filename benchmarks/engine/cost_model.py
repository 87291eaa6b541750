"""Does the planner's cost model say what the engine then takes?

Three questions, each with the nodes' own code on a model's shapes. T_a and T_e: tables are
measured, and in the same run, visit by visit in turn, points that are not on their grids; what the
tables say of these is compared with what they took. Steps: a rally of two processes over the real
M2N gives the factors of a few loads, and in the same run measures others, which are predicted from
tables, factors and link. Memory: nodes of `topspin serve` after they have loaded, in three formats,
predicted from the model's shapes and a process without weights. Writes
results/cost-model.json and .png. Run as `topspin bench cost-model`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
import torch

from benchmarks.experiment import Experiment, Result, TextTable, table
from benchmarks.servers.topspin import TopspinServer, children_of
from deploy.placement.cost import (
    AttentionLayer,
    BatchRows,
    ExpertLayer,
    StepEnds,
    link_s,
    step_s,
)
from deploy.placement.devices import DeviceProfile, Rates
from deploy.placement.memory import attention_weight_bytes, expert_weight_bytes, process_bytes
from deploy.placement.routing import choice_probabilities, touched
from deploy.placement.shapes import ModelShape, precision_by
from deploy.placement.tables import rally_factors
from deploy.profiling.command import DEFAULT_MODEL, RALLY_ROWS, process_memory
from deploy.profiling.hops import lower_quartile
from deploy.profiling.rally import Load, RallyJob, RallyReport, Sample, run_rally
from deploy.profiling.reports import links_of, message_bytes, rallies_of, threads_of
from deploy.profiling.resident import resident_bytes
from deploy.profiling.slices import Measured, slice_of
from deploy.profiling.solo import Grid, Sides
from deploy.profiling.worker import ProfileJob
from deploy.rig.forks import fork
from models.description.config import load_model_config
from models.sources.hub import resolve_model
from topspin.cores import node_environment
from topspin.pipeline import HopTimes
from topspin.plan.precision import UNQUANTISED, Format, rules_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HELD_OUT = Grid(
    rows=(3, 6, 12, 24, 48),
    keys=(1000, 6000),
    chunks=(),
    starts=(),
    touched=(3, 6, 12),
    pairs=(5, 7, 10, 14, 24, 48),
)
SETTLED_VARIABLE = "TOPSPIN_BENCH_SETTLED"
KV_CACHE_BYTES = 256 * 2**20

Compared = dict[str, Any]
"""A point: what it is, and its predicted and measured seconds or bytes."""


def anchors() -> Grid:
    """Return the grid of the tables: the profile's, without prompts."""
    return Grid()._replace(chunks=(), starts=(), rounds=8, budget_s=60.0)


def device_of(cores: int) -> DeviceProfile:
    """Return this machine's device without tables; its roofline must never answer."""
    return DeviceProfile(
        name="this machine",
        kind="cpu",
        source="measured",
        memory_bytes=1e9,
        cores=cores,
        formats=(UNQUANTISED,),
        rates=(Rates(read_bytes_per_s=1e9, flops={UNQUANTISED: 1e9}, launch_s=1e-6),),
    )


def error_of(row: Compared) -> float:
    """Return the relative error of a point."""
    return abs(float(row["predicted"]) / float(row["measured"]) - 1.0)


def summary(rows: Sequence[Compared]) -> dict[str, float]:
    """Return the errors of points in per cent."""
    errors = [100 * error_of(row) for row in rows]
    return {
        "points": len(rows),
        "median_percent": round(median(errors), 2),
        "p90_percent": round(float(np.quantile(errors, 0.9)), 2),
        "worst_percent": round(max(errors), 2),
    }


def compare_sides(
    sides: Sides, device: DeviceProfile, threads: int
) -> tuple[DeviceProfile, list[Compared]]:
    """Measure tables and held-out points; return the device with tables, and the comparison."""
    grid = anchors()

    def work() -> list[tuple[tuple[str, float, float], float]]:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            return list(sides.points([grid, HELD_OUT], done=lambda: None).items())

    found = {tuple(name): seconds for name, seconds in fork(work, list[Any])()}
    held = {
        *product(["attention"], HELD_OUT.rows, HELD_OUT.keys),
        *product(["experts"], HELD_OUT.touched, HELD_OUT.pairs),
        *product(["head"], HELD_OUT.rows, [0]),
    }
    on_grid = {name: each for name, each in found.items() if name not in held}
    tables = sides.tables(on_grid, threads)
    device = msgspec.structs.replace(device, tables=(*device.tables, *tables))
    shape, plain, rows = sides.shape, precision_by(()), []
    layer = shape.moe_layers[0]
    for (kind, first, second), measured in found.items():
        if (kind, first, second) not in held:
            continue
        if kind == "attention":
            asked = BatchRows(decode=first, context=max(1, second // first))
            half = AttentionLayer(device, shape, layer, plain, threads=threads)
            predicted = half.seconds(asked)
        elif kind == "experts":
            counts = {"rows": first, "pairs": first * second, "touched": first}
            experts = ExpertLayer(device, shape, layer, UNQUANTISED, threads=threads)
            predicted = experts.seconds(**counts)
        else:
            predicted = StepEnds(device, shape, UNQUANTISED, threads=threads).seconds(first)
        point = {"threads": threads, "point": [first, second]}
        kind = {"attention": "T_a", "experts": "T_e"}.get(kind, kind)
        rows.append({"kind": kind, **point, "predicted": predicted, "measured": measured})
    return device, rows


def compare_steps(sides: Sides, device: DeviceProfile, *, shares_cores: bool) -> list[Compared]:
    """Measure steps of a rally; predict those whose loads gave no factors."""
    known = [Load(rows=m * r, context=128, micro_batches=m) for r in RALLY_ROWS for m in (1, 2)]
    asked = [
        Load(rows=m * r, context=context, micro_batches=m)
        for m in (1, 2)
        for r, context in ((2, 500), (8, 128), (8, 600), (24, 250))
    ]
    job = RallyJob("shm", shares_cores, [*known, *asked], rounds=8, steps=3)
    samples = run_rally(sides, job).samples
    reports = [RallyReport("shm", shares_cores, samples[: len(known)])]
    link = links_of(reports, sides.shape)[0]
    device = msgspec.structs.replace(
        device, rallies=rallies_of(reports, device, sides.shape), links=(link,)
    )
    found = []
    for sample in samples[len(known) :]:
        predicted = predicted_step_s(device, sides.shape, sample, shares_cores=shares_cores)
        point = {"shares_cores": shares_cores, "point": list(sample.load)}
        measured = lower_quartile(sample.steps_s)
        found.append({"kind": "step", **point, "predicted": predicted, "measured": measured})
    return found


def predicted_step_s(
    device: DeviceProfile, shape: ModelShape, sample: Sample, *, shares_cores: bool
) -> float:
    """Return a step's time from tables, factors and link: of the sample, its load only."""
    m, threads = sample.load.micro_batches, threads_of(device, shares_cores)
    rows, layer = sample.load.rows / m, shape.moe_layers[0]
    factors = rally_factors(
        device, shape.experts_key(), shares_cores=shares_cores, micro_batches=m, rows=rows
    )
    asked = BatchRows(decode=rows, context=sample.load.context)
    t_a = AttentionLayer(device, shape, layer, precision_by(()), threads=threads).seconds(asked)
    t_e = ExpertLayer(device, shape, layer, UNQUANTISED, threads=threads).seconds(
        rows=rows,
        pairs=rows * shape.top_k,
        touched=touched(choice_probabilities(shape.num_experts, shape.top_k), rows),
    )
    t_c = link_s(device.links[0], message_bytes(sample, shape))
    hop = HopTimes(factors.attention * t_a, factors.experts * t_e, t_c)
    return step_s(
        [hop] * sample.num_layers,
        fixed_s=StepEnds(device, shape, UNQUANTISED, threads=threads).seconds(sample.load.rows),
        micro_batches=m,
        shares_cores=shares_cores,
        factor=factors.step,
    )


def compare_memory(
    path: Path, shape: ModelShape, device: DeviceProfile, weight_format: Format
) -> list[Compared]:
    """Return the bytes of real nodes, loaded and idle, predicted and measured.

    Predicted: weights, keys, and the process as `topspin profile` finds it. Both nodes map the same
    libraries: each counts half of them.
    """
    precision_of = precision_by(rules_of(weight_format))
    expert_bytes = expert_weight_bytes(shape, precision_of, held=shape.num_experts, kernels="cpu")
    attention_bytes = attention_weight_bytes(shape, precision_of, kernels="cpu") + KV_CACHE_BYTES
    data = {"attention_nodes": attention_bytes, "expert_nodes": expert_bytes}
    found = []
    flags = ("--quantization", weight_format, "--layout", "shared", "--transport", "shm")
    cache = ("--kv-cache-memory", str(KV_CACHE_BYTES))
    with TopspinServer([str(path), *flags, *cache]) as server:
        for module, pid in sorted(node_processes(server.pid)):
            role, memory = module.removesuffix("_nodes"), resident_bytes(pid)
            point = {"format": weight_format, "point": [role]}
            predicted = data[module] + process_bytes(device, role, nodes_on_host=2)
            measured = memory.own + memory.files / 2
            found.append({"kind": "memory", **point, "predicted": predicted, "measured": measured})
    return found


def node_processes(parent: int) -> Iterator[tuple[str, int]]:
    """Yield the role's module and the process id of a server's nodes."""
    for pid in children_of(parent):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        for role in {"attention_nodes", "expert_nodes"} & set(words):
            yield role, pid


def layout(result: Result) -> Iterator[TextTable]:
    """Yield the errors of the planner's cost model."""
    names = {
        "T_a": "attention half of a layer",
        "T_e": "experts of a layer",
        "head": "outside the layers",
        "step": "whole step",
        "memory": "memory of a node",
    }
    columns = {
        "": "{name}",
        "held-out points": "{points}",
        "median error": "{median_percent:.1f} %",
        "p90": "{p90_percent:.1f} %",
        "worst": "{worst_percent:.1f} %",
    }
    errors = result["errors"]
    yield table(
        columns,
        ({"name": name, **errors[kind]} for kind, name in names.items() if kind in errors),
    )


def draw(result: Result, figure: Figure) -> None:
    """Draw predicted against measured."""
    figure.set_size_inches(5, 5)
    axes = figure.subplots()
    timed = [row for row in result["points"] if row["kind"] != "memory"]
    for kind in sorted({str(row["kind"]) for row in timed}):
        own = [row for row in timed if row["kind"] == kind]
        xs, ys = ([1e3 * row[name] for row in own] for name in ("measured", "predicted"))
        axes.plot(xs, ys, ".", label=kind)
    ends = [1e3 * f((row["measured"] for row in timed), default=1) for f in (min, max)]
    axes.plot(ends, ends, "k-", linewidth=0.5)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
    axes.legend()


EXPERIMENT = Experiment("cost-model", __doc__, layout, draw)


def settle() -> None:
    """Restart with a node's OpenMP and heap: libraries read them when a process starts."""
    if SETTLED_VARIABLE in os.environ:
        return
    cores = len(os.sched_getaffinity(0))
    environment = node_environment(os.environ, num_threads=cores)
    environment.pop("TOPSPIN_CORES", None)
    os.environ.update(environment | {SETTLED_VARIABLE: "1"})
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare, write the result and the picture."""
    parser = EXPERIMENT.parser(model=DEFAULT_MODEL)
    parts: tuple[Literal["sides", "steps", "memory"], ...] = ("sides", "steps", "memory")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    args = parser.parse_args(argv)
    settle()
    torch.set_num_threads(1)
    path = resolve_model(args.model)
    config = load_model_config(path)
    shape = ModelShape.from_config(config)
    cores = len(os.sched_getaffinity(0))
    device, rows = device_of(cores), list[Compared]()
    if "sides" in args.parts or "steps" in args.parts:
        with torch.inference_mode():
            measured = Measured(slice_of(config, shape), "bfloat16", UNQUANTISED)
            sides = Sides(measured, shape, ())
        for threads in sorted({max(1, cores // 2), cores}):
            device, found = compare_sides(sides, device, threads)
            rows += found
        if "steps" in args.parts:
            for shares_cores in (True, False) if cores > 1 else (True,):
                rows += compare_steps(sides, device, shares_cores=shares_cores)
    if "memory" in args.parts:
        job = ProfileJob(str(path), "bfloat16", UNQUANTISED, "cpu", "cpu", [cores], Grid())
        process = process_memory(job, has_experts=True)
        device = msgspec.structs.replace(device, process=process)
        formats: tuple[Format, ...] = (UNQUANTISED, "int8", "int4")
        rows += [row for each in formats for row in compare_memory(path, shape, device, each)]
    kinds = sorted({str(row["kind"]) for row in rows})
    errors = {kind: summary([row for row in rows if row["kind"] == kind]) for kind in kinds}
    return EXPERIMENT.finish(args, {"model": args.model, "errors": errors, "points": rows})


if __name__ == "__main__":
    raise SystemExit(main())

"""Try many loads on one server: `topspin bench sweep`; finds its knee and its Pareto front.

Owns the command: flags, the order of the points, the table, the JSON and the picture. Each
point is a run like `topspin bench serve`, with its own prompts (a synthetic dataset is drawn
again for each point, so that prefix caches do not help; a file repeats its prompts). A point
that fails is reported, and the sweep continues. The rules are in benchmarks.load.sweep.

    topspin bench sweep --base-url http://127.0.0.1:8000 --concurrencies 1,2,4,8,16
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import report as envelope
from benchmarks import serve
from benchmarks.load import arguments, datasets, pictures, report
from benchmarks.load.contracts import Load, Run, Target
from benchmarks.load.metrics import measure_run, parse_goodput
from benchmarks.load.result import result_json
from benchmarks.load.runner import prepare, run_load
from benchmarks.load.sweep import Knee, Point, find_knee, numbers, pareto
from benchmarks.load.targets import wait_until_ready
from benchmarks.load.view import Progress
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError, TopspinError

_PERCENTILES = (50.0, 90.0, 99.0)
_REQUESTS_PER_PLACE = 8
_SECONDS_OF_RATE = 30.0
_LEAST_REQUESTS = 16
_COLUMNS = {
    "req/s": "request_throughput",
    "tok/s": "output_throughput",
    "TTFT\np50": "median_ttft_ms",
    "TTFT\np99": "p99_ttft_ms",
    "TPOT\np50": "median_tpot_ms",
    "TPOT\np99": "p99_tpot_ms",
    "E2EL\np50": "median_e2el_ms",
}
_LATENCIES = ("median_tpot_ms", "median_ttft_ms")


@dataclass(frozen=True)
class Asked:
    """The request of the command line.

    `loads` are rates or concurrencies, by `load_name`; `load` is the Load of the first.
    """

    parsed: argparse.Namespace
    loads: tuple[float, ...]
    load_name: str
    load: Load
    dataset: datasets.DatasetSettings
    goodput_s: Mapping[str, float]

    def load_at(self, value: float) -> Load:
        """Return the load of one point."""
        if self.load_name == "concurrency":
            return replace(self.load, max_concurrency=int(value))
        return replace(self.load, request_rate=value)

    def dataset_at(self, value: float) -> datasets.DatasetSettings:
        """Return the dataset of one point, with enough requests for its load."""
        if self.dataset.num_prompts is not None:
            return self.dataset
        factor = _REQUESTS_PER_PLACE if self.load_name == "concurrency" else _SECONDS_OF_RATE
        count = max(_LEAST_REQUESTS, math.ceil(value * factor))
        return replace(self.dataset, num_prompts=count)


def main(flags: Sequence[str] | None = None) -> int:
    """Run the command with `flags` (default: the process's); returns the exit status.

    0 if a point was measured, 1 if none was, 130 after Ctrl-C (with the points so far).
    """
    asked = read_flags(flags)
    parsed = asked.parsed
    base_url = arguments.base_url_of(parsed)
    if parsed.report is not None:
        report.check_path(parsed.report)
        pictures.check_can_draw()
    if parsed.ready_check_timeout_sec:
        headers = arguments.request_headers(parsed)
        wait_until_ready(base_url, parsed.ready_check_timeout_sec, headers)
    target = arguments.target_of(parsed, base_url, dataset_name=asked.dataset.name)
    _, tokenizer, dataset = arguments.texts_of(parsed, target, asked.dataset)
    asked = replace(asked, dataset=dataset)
    points, runs = _measure(asked, target, tokenizer)
    knee = find_knee(points, {name: goal * 1000 for name, goal in asked.goodput_s.items()})
    _print_table(points, knee, asked)
    if points:
        _write(asked, target, points, knee, runs)
    if any(run.interrupted for run in runs.values()) or len(points) < len(asked.loads):
        return 130
    return 0 if any(point.is_measured for point in points) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="topspin bench sweep",
        description="Measures a server at many loads and finds its knee.",
        allow_abbrev=False,
    )
    arguments.add_target_arguments(parser)
    arguments.add_load_arguments(parser)
    points = parser.add_mutually_exclusive_group(required=True)
    points.add_argument("--request-rates", metavar="R,R,...", help="requests/s of each point")
    points.add_argument("--concurrencies", metavar="N,N,...", help="requests at once, each point")
    parser.add_argument(
        "--num-prompts",
        type=int,
        metavar="N",
        help=f"requests a point (concurrency: {_REQUESTS_PER_PLACE} a place, rate: "
        f"{_SECONDS_OF_RATE:g} s, {_LEAST_REQUESTS} at least)",
    )
    parser.add_argument(
        "--num-warmups", type=int, default=2, metavar="N", help="before each point (%(default)s)"
    )
    datasets.add_arguments(parser)
    group = parser.add_argument_group("report")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="the knee is the highest load whose p99 keeps them: ttft:200 tpot:50 e2el:5000",
    )
    group.add_argument(
        "--result-dir", type=Path, default=Path(), metavar="DIR", help="of sweep.json, sweep.png"
    )
    group.add_argument(
        "--report", type=Path, metavar="FILE", help="all points side by side, .html or .png"
    )
    group.add_argument("--quiet", action="store_true", help="show no progress within a point")
    return parser


def read_flags(flags: Sequence[str] | None) -> Asked:
    """Return the request in `flags`; raises ConfigError naming an invalid flag."""
    parsed = _parser().parse_args(flags)
    by_rate = parsed.request_rates is not None
    other = {
        "--request-rate": not math.isinf(parsed.request_rate),
        "--max-concurrency": parsed.max_concurrency is not None and not by_rate,
        "--users": parsed.users is not None,
        "--ramp-up-strategy": parsed.ramp_up_strategy is not None,
        "--replay": parsed.replay,
    }
    for flag, given in other.items():
        if given:
            raise ConfigError(f"{flag} does not go with a sweep, whose points say the load")
    if parsed.num_warmups < 0:
        raise ConfigError(f"--num-warmups is {parsed.num_warmups}; it must be 0 or more")
    if by_rate:
        loads = numbers("--request-rates", parsed.request_rates, whole=False)
        parsed.request_rate = loads[0]
    else:
        loads = numbers("--concurrencies", parsed.concurrencies, whole=True)
        parsed.max_concurrency = int(loads[0])
    chat = parsed.backend == "openai-chat"
    return Asked(
        parsed=parsed,
        loads=loads,
        load_name="request rate" if by_rate else "concurrency",
        load=arguments.load_of(parsed),
        dataset=datasets.DatasetSettings.of(parsed, chat=chat),
        goodput_s=parse_goodput(parsed.goodput),
    )


def _measure(
    asked: Asked, target: Target, tokenizer: Tokenizer | None
) -> tuple[list[Point], dict[str, Run]]:
    """Measure the points from the lowest load up; Ctrl-C ends with the points so far."""
    points: list[Point] = []
    runs: dict[str, Run] = {}
    for idx, value in enumerate(asked.loads):
        name = f"{asked.load_name} {value:g}"
        _say(f"[{idx + 1}/{len(asked.loads)}] {name}")
        rng = np.random.default_rng([asked.load.seed, idx])
        requests = datasets.load(asked.dataset_at(value), tokenizer, rng)
        load = asked.load_at(value)
        prepare(target, requests, load)
        try:
            serve.warm_up(target, requests, load, asked.parsed.num_warmups)
            with Progress(quiet=asked.parsed.quiet) as progress:
                run = run_load(
                    target,
                    requests,
                    load,
                    settings={"dataset": asked.dataset.name},
                    watch=progress.show,
                )
        except KeyboardInterrupt:
            break
        except TopspinError as error:
            points.append(Point(value, error=str(error)))
            _say(f"  failed: {error}")
            continue
        metrics = measure_run(run, percentiles=_PERCENTILES, goodput_s=asked.goodput_s)
        points.append(Point(value, result_json(run, metrics)))
        runs[name] = run
        _say(f"  {metrics.output_throughput:.1f} output tokens/s, {metrics.failed} failed")
        if run.interrupted:
            break
    return points, runs


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_table(points: Sequence[Point], knee: Knee, asked: Asked) -> None:
    table = Table(
        title=f"Sweep of the {asked.load_name}; ms", title_justify="left", box=SIMPLE_HEAD
    )
    for name in ("load", *_COLUMNS, "failed", ""):
        table.add_column(name, justify="right")
    for point in points:
        mark = "knee" if point.load == knee.load else ""
        if point.error is not None:
            table.add_row(f"{point.load:g}", *["-"] * len(_COLUMNS), "-", "not measured")
            continue
        figures = point.figures
        if figures["topspin"]["client"]["saturated"]:
            mark = f"{mark} client saturated".strip()
        values = [figures[key] for key in _COLUMNS.values()]
        shown = ["-" if value is None else f"{value:.1f}" for value in values]
        table.add_row(f"{point.load:g}", *shown, str(figures["failed"]), mark)
    console = Console()
    console.print(table)
    chosen = "none" if knee.load is None else f"{asked.load_name} {knee.load:g}"
    console.print(f"Knee: {chosen} ({knee.rule}).", soft_wrap=True)
    for point in points:
        if point.error is not None:
            line = f"{asked.load_name} {point.load:g} was not measured: {point.error}"
            console.print(Text(line, style="red"), soft_wrap=True)
        elif point.figures["failed"]:
            kinds = point.figures["topspin"]["errors_by_kind"]
            line = f"{asked.load_name} {point.load:g}: failed requests by kind: {kinds}"
            console.print(Text(line, style="red"), soft_wrap=True)


def _write(
    asked: Asked,
    target: Target,
    points: Sequence[Point],
    knee: Knee,
    runs: Mapping[str, Run],
) -> None:
    """Write sweep.json, and the pictures if matplotlib is installed."""
    parsed = asked.parsed
    folder: Path = parsed.result_dir
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.json"
    path.write_text(json.dumps(_result(asked, target, points, knee), allow_nan=False) + "\n")
    print(f"Written to {path}")
    title = f"{target.model} at {target.url}, dataset {asked.dataset.name}"
    if not pictures.can_draw():
        print("No picture: that needs matplotlib, pip install -e '.[plots]'", file=sys.stderr)
        return
    picture = pictures.draw_sweep(points, knee, title=title, load_name=asked.load_name)
    path.with_suffix(".png").write_bytes(picture)
    print(f"Written to {path.with_suffix('.png')}")
    if parsed.report is not None and runs:
        report.write_report(parsed.report, runs, title=title)
        print(f"Written to {parsed.report}")


def _result(asked: Asked, target: Target, points: Sequence[Point], knee: Knee) -> dict[str, Any]:
    return {
        "benchmark": "sweep",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": envelope.commit(),
        "machine": envelope.machine(),
        "versions": envelope.versions(),
        "model_id": target.model,
        "url": target.url,
        "dataset": asked.dataset.name,
        "load_name": asked.load_name,
        "goodput_ms": {name: goal * 1000 for name, goal in asked.goodput_s.items()},
        "knee": knee._asdict(),
        "pareto": {key: [point.load for point in pareto(points, key)] for key in _LATENCIES},
        "points": [
            {"load": point.load, "error": point.error, "result": dict(point.figures) or None}
            for point in points
        ],
    }

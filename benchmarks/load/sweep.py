"""Try many loads on one server: `topspin bench sweep`; finds its knee and its Pareto front.

Owns the command: flags, the order of the points, the table and the JSON. Each point is a run like
`topspin bench serve`, with its own prompts (a synthetic dataset is drawn again for each point, so
that prefix caches do not help; a file repeats its prompts). A point that fails is reported, and the
sweep continues. The rules are in benchmarks.load.knee.

    topspin bench sweep --url http://127.0.0.1:8000 --concurrencies 1,2,4,8,16

How a server behaves with more load than it can serve: --capacity-factors 1,2,5 measures how many
requests a second it answers for many clients in a closed loop, and sends as many times that.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.experiment import Experiment, Result, TextTable, say, table
from benchmarks.load import arguments, datasets, serve
from benchmarks.load.contracts import LoadPattern, LoadRun
from benchmarks.load.figures.metrics import measure_run, parse_goodput
from benchmarks.load.figures.page import check_report, write_report
from benchmarks.load.knee import find_knee, is_measured, pareto
from topspin.errors import ConfigError, TopspinError

_PERCENTILES = (50.0, 90.0, 99.0)
_REQUESTS_PER_PLACE = 8
_SECONDS_OF_RATE = 30.0
_LEAST_REQUESTS = 16
CAPACITY_CLIENTS = 32
_LATENCIES = ("median_tpot_ms", "median_ttft_ms")
_COLUMNS = {
    "load": "{load:g}",
    "req/s": "{request_throughput:.1f}",
    "tok/s": "{output_throughput:.1f}",
    "TTFT p50 ms": "{median_ttft_ms}",
    "p99": "{p99_ttft_ms}",
    "TPOT p50 ms": "{median_tpot_ms}",
    "p99 ": "{p99_tpot_ms}",
    "E2EL p50 ms": "{median_e2el_ms}",
    "good req/s": "{request_goodput}",
    "refused": "{refused}",
    "in p50 ms": "{median_refusal_ms}",
    "p99  ": "{p99_refusal_ms}",
    "failed": "{failed}",
    "": "{mark}",
}


@dataclass(frozen=True)
class SweepFlags:
    """The request of the command line.

    `loads` are rates or concurrencies, by `load_name`, or `factors` of the capacity that is to be
    measured; `load` is the LoadPattern of the first.
    """

    parsed: argparse.Namespace
    loads: tuple[float, ...]
    load_name: str
    load: LoadPattern
    dataset: datasets.DatasetSettings
    goodput_s: Mapping[str, float]
    factors: tuple[float, ...] = ()

    def at_capacity(self) -> SweepFlags:
        """Return the closed loop that tells the capacity."""
        load = replace(self.load, request_rate=math.inf)
        many = replace(self, loads=(CAPACITY_CLIENTS,), load_name="concurrency", load=load)
        return replace(many, factors=(), goodput_s={})

    def of_capacity(self, rate: float) -> SweepFlags:
        """Return the sweep of the factors of a capacity in requests/s."""
        return replace(self, loads=tuple(factor * rate for factor in self.factors))

    def load_at(self, value: float) -> LoadPattern:
        """Return the load of one point."""
        if self.load_name == "concurrency":
            return replace(self.load, max_concurrency=int(value))
        return replace(self.load, request_rate=value)

    def num_prompts_at(self, value: float) -> int:
        """Return the number of requests of one point: enough for its load, unless it is given."""
        factor = _REQUESTS_PER_PLACE if self.load_name == "concurrency" else _SECONDS_OF_RATE
        return self.dataset.num_prompts or max(_LEAST_REQUESTS, math.ceil(value * factor))


def read_flags(flags: Sequence[str] | None) -> SweepFlags:
    """Return the request in `flags`; raises ConfigError naming an invalid flag."""
    parsed = _parser().parse_args(flags)
    by_rate = parsed.concurrencies is None
    other = {
        "--request-rate": parsed.request_rate is not None,
        "--max-concurrency": parsed.max_concurrency is not None and not by_rate,
        "--ramp-up-strategy": parsed.ramp_up_strategy is not None,
        "--replay": parsed.replay is not None,
    }
    for name, given in other.items():
        if given:
            raise ConfigError(f"{name} does not go with a sweep, whose points say the load")
    factors: tuple[float, ...] = ()
    if by_rate:
        flag = "--request-rates" if parsed.capacity_factors is None else "--capacity-factors"
        text = parsed.request_rates or parsed.capacity_factors
        loads = arguments.numbers(flag, text, whole=False)
        factors = () if parsed.capacity_factors is None else loads
        parsed.request_rate = loads[0]
    else:
        loads = arguments.numbers("--concurrencies", parsed.concurrencies, whole=True)
        parsed.max_concurrency = int(loads[0])
    check_report(parsed.report)
    return SweepFlags(
        parsed=parsed,
        loads=loads,
        load_name="request rate" if by_rate else "concurrency",
        load=arguments.load_of(parsed),
        dataset=datasets.DatasetSettings.of(parsed, chat=parsed.backend == "openai-chat"),
        goodput_s=parse_goodput(parsed.goodput),
        factors=factors,
    )


def _parser() -> argparse.ArgumentParser:
    parser = EXPERIMENT.parser(
        folder=Path(),
        epilog=f"Without --num-prompts a point has {_REQUESTS_PER_PLACE} requests a place, or "
        f"{_SECONDS_OF_RATE:g} s of a rate, {_LEAST_REQUESTS} at least.",
    )
    arguments.add_target_arguments(parser)
    arguments.add_load_arguments(parser, num_warmups=2)
    points = parser.add_mutually_exclusive_group(required=True)
    points.add_argument("--request-rates", metavar="R,R,...", help="requests/s of each point")
    points.add_argument("--concurrencies", metavar="N,N,...", help="requests at once, each point")
    points.add_argument(
        "--capacity-factors",
        metavar="F,F,...",
        help=f"times as many requests/s as {CAPACITY_CLIENTS} clients are answered",
    )
    group = parser.add_argument_group("report")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="the knee is the highest load whose p99 keeps them: ttft:200 tpot:50 e2el:5000",
    )
    arguments.add_page_arguments(group)
    return parser


def main(flags: Sequence[str] | None = None) -> int:
    """Run the command with `flags` (default: the process's); returns the exit status.

    0 if a point was measured, 1 if none was, 130 after Ctrl-C (with the points so far).
    """
    asked = read_flags(flags)
    base_url = arguments.base_url_of(asked.parsed)
    opened = arguments.open_target(asked.parsed, base_url, asked.dataset)
    capacity = None
    if asked.factors:
        found, _ = _measure(asked.at_capacity(), opened)
        if not any(map(is_measured, found)):
            return 1
        capacity = found[0]["result"]["request_throughput"]
        asked = asked.of_capacity(capacity)
    points, runs = _measure(asked, opened)
    if points:
        EXPERIMENT.finish(asked.parsed, _result(asked, opened, points, capacity))
    if asked.parsed.report is not None and runs:
        write_report(asked.parsed.report, runs, title=f"Sweep of {opened.target.url}")
        print(f"Written to {asked.parsed.report}")
    if any(run.interrupted for run in runs.values()) or len(points) < len(asked.loads):
        return 130
    return 0 if any(map(is_measured, points)) else 1


def _measure(
    asked: SweepFlags, opened: arguments.Opened
) -> tuple[list[Result], dict[str, LoadRun]]:
    """Measure the points from the lowest load up; Ctrl-C ends with the points so far."""
    points: list[Result] = []
    runs: dict[str, LoadRun] = {}
    for idx, value in enumerate(asked.loads):
        name = f"{asked.load_name} {value:g}"
        say(f"[{idx + 1}/{len(asked.loads)}] {name}")
        rng = np.random.default_rng([asked.load.seed, idx])
        settings = replace(opened.dataset, num_prompts=asked.num_prompts_at(value))
        requests = datasets.load(settings, opened.tokenizer, rng)
        load = asked.load_at(value)
        try:
            run = serve.measure(
                opened.target, requests, load, parsed=asked.parsed, settings=settings
            )
        except KeyboardInterrupt:
            break
        except ConfigError:
            raise
        except TopspinError as error:
            points.append({"load": value, "error": str(error), "result": None})
            say(f"  failed: {error}")
            continue
        figures = measure_run(run, percentiles=_PERCENTILES, goodput_s=asked.goodput_s)
        points.append({"load": value, "error": None, "result": figures})
        runs[name] = run
        say(f"  {figures['output_throughput']:.1f} output tokens/s, {figures['failed']} failed")
        if run.interrupted:
            break
    return points, runs


def _result(
    asked: SweepFlags, opened: arguments.Opened, points: Sequence[Result], capacity: float | None
) -> Result:
    goodput_ms = {name: goal * 1000 for name, goal in asked.goodput_s.items()}
    return {
        "model_id": opened.target.model,
        "url": opened.target.url,
        "dataset": asked.dataset.name,
        "load_name": asked.load_name,
        "capacity": capacity,
        "goodput_ms": goodput_ms,
        "knee": find_knee(points, goodput_ms)._asdict(),
        "pareto": {key: pareto(points, key) for key in _LATENCIES},
        "points": points,
    }


def layout(result: Result) -> Iterator[TextTable | str]:
    """Yield the points, the knee, and the points or requests that failed."""
    name, knee = result["load_name"], result["knee"]["load"]
    measured = [each for each in result["points"] if each["error"] is None]
    capacity = result["capacity"]
    of = "" if capacity is None else f"; the capacity is {capacity:.1f} requests/s"
    yield f"Sweep of the {name}{of}"
    yield table(_COLUMNS, (_row(each, knee) for each in measured))
    chosen = "none" if knee is None else f"{name} {knee:g}"
    yield f"Knee: {chosen} ({result['knee']['rule']})."
    for each in result["points"]:
        if each["error"] is not None:
            yield f"{name} {each['load']:g} was not measured: {each['error']}"
        elif each["result"]["failed"]:
            kinds = each["result"]["topspin"]["errors_by_kind"]
            yield f"{name} {each['load']:g}: failed requests by kind: {kinds}"


def _row(point: Result, knee: float | None) -> Result:
    figures = point["result"]
    marks = ["knee"] if point["load"] == knee else []
    if figures["topspin"]["client"]["saturated"]:
        marks.append("client saturated")
    return {**figures["topspin"], **figures, "load": point["load"], "mark": " ".join(marks)}


EXPERIMENT = Experiment("sweep", __doc__, layout)

"""Compare servers on the same prompts: `topspin bench compare`, with ratios and equal answers.

Owns the command: flags, the turns and the result; the arithmetic is in benchmarks.load.comparison.
First every target answers the same few prompts greedily, one at a time, and the answers are
compared. Then each round gives every target one turn: at each concurrency a run for one output
token (prefill) and a run of the dataset's requests. Prompts differ from round to round and are the
same for all targets in one.

    topspin bench compare --target ours=http://127.0.0.1:8000 --target peer=http://127.0.0.1:9000

A target with --start is started before its turn and stopped after it: on few cores even an
idle server changes what the others reach.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.experiment import Experiment, Result, Table, check_positive, number, say
from benchmarks.kernels import read_rate
from benchmarks.kernels.byte_floor import BITS, step_weight_bytes
from benchmarks.kernels.roofline import ceiling
from benchmarks.load import arguments, comparison, datasets, serve
from benchmarks.load.client.runner import check_complete, run_load
from benchmarks.load.client.targets import first_model, wait_until_ready
from benchmarks.load.comparison import NAMES, Agreement, ByteFloor, Figures
from benchmarks.load.contracts import BenchRequest, Load, Run, Target
from benchmarks.load.datasets.settings import DatasetSettings
from benchmarks.load.figures.page import check_report, write_report
from benchmarks.load.flags import add_flags
from benchmarks.load.started_server import StartedServer, ended_by_signals
from models.description.config import load_model_config
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError, TopspinError
from topspin.plan.precision import UNQUANTISED

# The questions to every target, one at a time, before it is measured.
QUESTIONS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "In table tennis, a game is won by the player who first",
    "def fibonacci(n):",
    "The three primary colours are",
    "Once upon a time there was a small village by the sea, where",
    "A list of the planets, from the sun outwards:",
    "To make a good cup of tea, first",
)
_LEAST_REQUESTS = 8
_REQUESTS_PER_PLACE = 4


class NotEqual(TopspinError):
    """The targets' greedy answers differ, and --require-equal was given."""

    code = "answers_differ"


@dataclass(frozen=True)
class Named:
    """A target of the command line; `model` None: the first one that it lists."""

    name: str
    url: str
    model: str | None
    command: str | None


@dataclass
class Comparison:
    """The checked request of the command line, and the results so far.

    Each round is concurrency -> target's name -> figures.
    """

    parsed: argparse.Namespace
    targets: tuple[Named, ...]
    concurrencies: tuple[int, ...]
    dataset: DatasetSettings
    models: dict[str, str] = field(default_factory=dict)
    answers: dict[str, list[str]] = field(default_factory=dict)
    agreements: dict[str, Agreement] = field(default_factory=dict)
    rounds: list[dict[int, dict[str, Figures]]] = field(default_factory=list)
    # For the byte floor, if it is asked for: bytes of a step, and bytes/s in each round.
    floor_bytes: int | None = None
    read_rates: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    # The last round's runs with the dataset's lengths, for the report.
    runs: dict[str, Run] = field(default_factory=dict)

    @classmethod
    def of(cls, flags: Sequence[str] | None) -> Comparison:
        """Read `flags` (None: the process's); make all checks that need no server."""
        parsed = _parser().parse_args(flags)
        check_positive(parsed, ("rounds", "request_timeout", "start_timeout"))
        if parsed.check_tokens < 0 or (parsed.num_warmups or 0) < 0:
            raise ConfigError("--check-tokens and --num-warmups must be 0 or more")
        if parsed.require_equal and (parsed.check_tokens == 0 or parsed.temperature != 0):
            raise ConfigError("--require-equal needs --check-tokens above 0 and --temperature 0")
        if math.isinf(parsed.request_timeout):
            raise ConfigError("--request-timeout is infinite")
        check_report(parsed.report)
        floor_bytes = None
        if parsed.floor_model is not None:
            model = load_model_config(parsed.floor_model)
            floor_bytes = step_weight_bytes(model, parsed.floor_quantization)
        asked = arguments.numbers("--concurrencies", parsed.concurrencies, whole=True)
        return cls(
            parsed=parsed,
            targets=named_targets(parsed),
            concurrencies=tuple(map(int, asked)),
            dataset=DatasetSettings.of(parsed, chat=parsed.backend == "openai-chat"),
            floor_bytes=floor_bytes,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer named, or that of a target's model if it is on this machine."""
        for model in self.models.values():
            _, tokenizer = arguments.tokenizer_of(self.parsed.tokenizer, model)
            if tokenizer is not None:
                return tokenizer
        return None

    def load(self, at: int) -> Load:
        """Return the load of one run: a closed loop of `at` requests."""
        return Load(max_concurrency=at, request_timeout_s=self.parsed.request_timeout)

    def requests(self, which: Sequence[int]) -> list[BenchRequest]:
        """Return the prompts of run `which` (round, concurrency, kind), equal for all targets."""
        rng = np.random.default_rng([self.parsed.seed, *which])
        count = self.dataset.num_prompts or max(_LEAST_REQUESTS, _REQUESTS_PER_PLACE * which[1])
        settings = dataclasses.replace(self.dataset, num_prompts=count)
        return datasets.load(settings, self.tokenizer, rng)


def _parser() -> argparse.ArgumentParser:
    parser = EXPERIMENT.parser(rounds=3, folder=Path())
    parser.add_argument(
        "--target",
        action="append",
        required=True,
        metavar="NAME=URL[=MODEL]",
        help="a server, at least two; ratios are to the first",
    )
    parser.add_argument(
        "--start",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="start this target before its turn and stop it after",
    )
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="S")
    parser.add_argument(
        "--concurrencies", default="1,16", metavar="N,N,...", help="requests at once (%(default)s)"
    )
    parser.add_argument(
        "--num-warmups", type=int, metavar="N", help="before each run (as many as at once)"
    )
    parser.add_argument(
        "--check-tokens",
        type=int,
        default=32,
        metavar="N",
        help="length of the answers that are compared; 0 compares none (%(default)s)",
    )
    parser.add_argument(
        "--require-equal", action="store_true", help="fail if the greedy answers differ"
    )
    parser.add_argument("--request-timeout", type=float, default=600.0, metavar="S")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (%(default)s)")
    parser.add_argument(
        "--floor-model",
        type=Path,
        metavar="DIR",
        help="compare the time per token of one request with the least for this checkpoint",
    )
    parser.add_argument(
        "--floor-quantization",
        choices=(UNQUANTISED, *BITS),
        default=UNQUANTISED,
        help="the format of its weights (%(default)s)",
    )
    arguments.add_request_arguments(parser.add_argument_group("requests"))
    add_flags(parser.add_argument_group("dataset"), DatasetSettings)
    arguments.add_page_arguments(parser)
    return parser


def named_targets(parsed: argparse.Namespace) -> tuple[Named, ...]:
    """Return the targets; raises ConfigError for a duplicate name or a --start without a target."""
    commands = arguments.key_values("--start", parsed.start)
    if len(commands) < len(parsed.start):
        raise ConfigError("--start names a target twice")
    found: dict[str, Named] = {}
    for word in parsed.target:
        name, _, rest = word.partition("=")
        url, _, model = rest.partition("=")
        if not name or not url:
            raise ConfigError(f"--target {word}: expected NAME=URL or NAME=URL=MODEL")
        if not re.fullmatch(r"[\w.+-]+", name):
            raise ConfigError(f"--target {word}: a name has letters, digits, '.', '_', '+', '-'")
        if name in found:
            raise ConfigError(f"--target names {name} twice")
        where = argparse.Namespace(base_url=url, host=None, port=None)
        base_url = arguments.base_url_of(where)
        found[name] = Named(name, base_url, model or parsed.model, commands.get(name))
    if len(found) < 2:
        raise ConfigError("a comparison needs two targets: give --target at least twice")
    for name in commands:
        if name not in found:
            raise ConfigError(f"--start {name}: no --target has this name")
    return tuple(found.values())


def main(flags: Sequence[str] | None = None) -> int:
    """Run the command with `flags` (default: the process's); returns the exit status.

    0 if all rounds were measured, 130 after Ctrl-C, with the results so far written. Raises
    TopspinError, after writing the complete rounds, if a target fails.
    """
    found = Comparison.of(flags)
    status, failure = 0, None
    try:
        with ended_by_signals():
            _ask_all(found)
            _judge_answers(found)
            for idx in range(found.parsed.rounds):
                found.rounds.append(_round(found, idx))
    except KeyboardInterrupt:
        status = 130
    except TopspinError as error:
        failure = error
    if found.rounds:
        EXPERIMENT.finish(found.parsed, _result(found, failure))
        if found.parsed.report is not None:
            write_report(found.parsed.report, found.runs, title="The last round")
            say(f"Written to {found.parsed.report}")
    if failure is not None:
        raise failure
    return status


@contextlib.contextmanager
def _turn(found: Comparison, named: Named) -> Iterator[Target]:
    """Start the target if necessary, and yield it as the load tester's Target.

    If something fails while a started server is dead, the server's death is raised.
    """
    parsed = found.parsed
    if named.command is None:
        if parsed.ready_check_timeout_sec:
            headers = arguments.request_headers(parsed)
            wait_until_ready(named.url, parsed.ready_check_timeout_sec, headers)
        yield _target(found, named)
        return
    say(f"starting {named.name}")
    log = parsed.result_dir / f"{named.name}.log"
    started = StartedServer(
        named.command, url=named.url, log=log, ready_timeout_s=parsed.start_timeout
    )
    with started as server:
        try:
            yield _target(found, named)
        except TopspinError:
            server.check(patience_s=1.0)
            raise
        server.check()


def _target(found: Comparison, named: Named) -> Target:
    """Return the Target; raises ConfigError if its model differs from the first target's."""
    headers = arguments.request_headers(found.parsed)
    model = named.model or found.models.get(named.name) or first_model(named.url, headers)
    reference = next(iter(found.models.values()), model)
    if named.model is None and model != reference:
        raise ConfigError(
            f"{named.name} serves {model!r} and {next(iter(found.models))} {reference!r}; if they "
            f"are the same model, say so: --target {named.name}={named.url}={model}"
        )
    found.models[named.name] = model
    asked = argparse.Namespace(**{**vars(found.parsed), "model": model})
    return arguments.target_of(asked, named.url, dataset_name=found.dataset.name)


def _ask_all(found: Comparison) -> None:
    """Let every target answer the questions, one at a time; this also finds its model."""
    length = found.parsed.check_tokens
    for named in found.targets:
        with _turn(found, named) as target:
            if not length:
                continue
            requests = [
                BenchRequest(messages=[{"role": "user", "content": text}], max_tokens=length)
                if found.dataset.chat
                else BenchRequest(prompt=text, max_tokens=length)
                for text in QUESTIONS
            ]
            fields = {k: v for k, v in target.extra_body.items() if k != "ignore_eos"}
            greedy = dataclasses.replace(target, extra_body={**fields, "temperature": 0.0})
            run = run_load(greedy, requests, found.load(1))
            _check(named, run, found)
            found.answers[named.name] = [record.text for record in run.records]
            say(f"{named.name} ({target.model}) answered {len(requests)} questions")


def _judge_answers(found: Comparison) -> None:
    """Compare every target's answers with the first one's; raises NotEqual if --require-equal."""
    if not found.answers:
        return
    first, *others = (named.name for named in found.targets)
    tokenizer = found.tokenizer
    for name in others:
        agreed = comparison.agreement(
            found.answers[first],
            found.answers[name],
            None if tokenizer is None else _encoder(tokenizer),
        )
        found.agreements[name] = agreed
        if found.parsed.require_equal and agreed.identical < 1:
            raise NotEqual(f"{name} answers otherwise than {first}: {agreed.first_difference}")


def _encoder(tokenizer: Tokenizer) -> Any:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def _round(found: Comparison, idx: int) -> dict[int, dict[str, Figures]]:
    """Measure every target once at every concurrency, the targets in turn."""
    figures: dict[int, dict[str, Figures]] = {at: {} for at in found.concurrencies}
    if found.floor_bytes is not None:
        found.read_rates += read_rate.read_rates()
    for named in found.targets:
        with _turn(found, named) as target:
            for at in found.concurrencies:
                measured = _measure(found, named, target, (idx, at))
                figures[at][named.name] = measured
                where = f"round {idx + 1}/{found.parsed.rounds}, {named.name}, {at} at once"
                say(f"{where}: {number(measured.output_throughput)} tokens/s")
    return figures


def _measure(found: Comparison, named: Named, target: Target, which: tuple[int, int]) -> Figures:
    """Warm the target up; measure its prefill, then complete requests."""
    at = which[1]
    warm_ups = at if found.parsed.num_warmups is None else found.parsed.num_warmups
    parsed = argparse.Namespace(num_warmups=warm_ups, quiet=found.parsed.quiet)
    whole, other = (found.requests([*which, kind]) for kind in (0, 1))
    one_token = [dataclasses.replace(request, max_tokens=1) for request in other]
    runs = []
    for requests in (one_token, whole):
        run = serve.measure(target, requests, found.load(at), parsed=parsed, settings=found.dataset)
        _check(named, run, found)
        runs.append(run)
    found.runs[f"{named.name}, {at} at once"] = runs[1]
    return comparison.figures_of(runs[1], prefill=runs[0], streams=at)


def _check(named: Named, run: Run, found: Comparison) -> None:
    """Raise if requests failed; keep a warning if the client was saturated."""
    check_complete(run, named.name)
    for reason in run.health.reasons:
        found.warnings.append(f"{named.name}: the client was saturated. {reason}")


def _result(found: Comparison, failure: TopspinError | None) -> Result:
    described = dataclasses.asdict(found.dataset)
    floor = None
    if found.floor_bytes is not None:
        floor = ByteFloor(found.floor_bytes, ceiling(found.read_rates)).as_json()
    return {
        "targets": [
            {**dataclasses.asdict(named), "model": found.models[named.name]}
            for named in found.targets
        ],
        "dataset": {key: str(v) if isinstance(v, Path) else v for key, v in described.items()},
        "seed": found.parsed.seed,
        "rounds_asked": found.parsed.rounds,
        "rounds_measured": len(found.rounds),
        "error": None if failure is None else str(failure),
        "agreement": {name: dataclasses.asdict(each) for name, each in found.agreements.items()},
        "warnings": found.warnings,
        "byte_floor": floor,
        "concurrencies": {
            str(at): comparison.summarise([each[at] for each in found.rounds])
            for at in found.concurrencies
        },
    }


def layout(result: Result) -> Iterator[Table | str]:
    """Yield a table for each concurrency, and how far the greedy answers agree."""
    # Results from before there was a floor have no such key.
    floor = result.get("byte_floor")
    for at, targets in result["concurrencies"].items():
        rows = [
            [title, *(_compared(figures.get(name)) for figures in targets.values())]
            for name, title in NAMES.items()
        ]
        if at == "1" and floor is not None:
            floor_ms = floor["ms_per_token"]
            medians = (each.get("median_tpot_ms", {}).get("median") for each in targets.values())
            cells = ("-" if each is None else f"{each / floor_ms:.2f}x" for each in medians)
            rows.append([f"median TPOT / byte floor, {floor_ms:.2f} ms", *cells])
        yield Table([f"{at} at once", *targets], rows)
    yield (
        f"Medians of {result['rounds_measured']} rounds in turn; x: ratio to "
        f"{next(iter(targets))}, in brackets its least and greatest round."
    )
    if floor is not None:
        yield (
            f"Byte floor: {floor['weight_bytes'] / 1e6:.0f} MB of weights a step, read at "
            f"{floor['read_bytes_per_s'] / 1e9:.1f} GB/s."
        )
    for name, agreed in result["agreement"].items():
        tokens = agreed["common_prefix_tokens"]
        measured = "" if tokens is None else f"; the first {tokens:.1f} tokens agree on average"
        yield (
            f"Greedy answers of {name} that are the same: {agreed['identical']:.0%} of "
            f"{agreed['num_prompts']}{measured}."
        )
    yield from (f"Warning: {warning}" for warning in result["warnings"])


def _compared(row: Result | None) -> str:
    if row is None:
        return "-"
    text, ratio = number(row["median"]), row.get("ratio")
    if ratio is None:
        return text
    return f"{text} ({ratio['median']:.2f}x [{ratio['least']:.2f}..{ratio['greatest']:.2f}])"


EXPERIMENT = Experiment("compare", __doc__, layout)

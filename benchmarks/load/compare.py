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
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.experiment import Experiment, Result, TextTable, check_positive, number, say
from benchmarks.kernels import read_rate
from benchmarks.kernels.byte_floor import BITS, step_weight_bytes
from benchmarks.kernels.roofline import ceiling
from benchmarks.load import arguments, comparison, datasets, serve
from benchmarks.load.client.runner import check_complete, run_load
from benchmarks.load.client.targets import wait_until_ready
from benchmarks.load.comparison import NAMES, AnswerAgreement, RoundFigures
from benchmarks.load.contracts import BenchRequest, LoadPattern, LoadRun, Target
from benchmarks.load.datasets.settings import DatasetSettings
from benchmarks.load.figures.page import check_report, write_report
from benchmarks.load.flags import add_flags
from benchmarks.load.started_server import StartedServer
from models.description.config import load_model_config
from models.description.facts import facts_of
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError, EngineUnavailable, TopspinError
from topspin.plan.precision import UNQUANTISED, rules_of
from topspin.plan.setting import AUTO

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


Round = dict[int, dict[str, RoundFigures]]
"""Concurrency -> target's name -> figures."""


class NotEqual(TopspinError):
    """The targets' greedy answers differ, and --require-equal was given."""

    code = "answers_differ"


@dataclass(frozen=True)
class NamedTarget:
    """A target of the command line; `model` None: the first one that it lists."""

    name: str
    url: str
    model: str | None
    command: str | None


class Comparison:
    """The checked request of the command line, and what was found so far."""

    def __init__(self, flags: Sequence[str] | None) -> None:
        """Read `flags` (None: the process's); make all checks that need no server."""
        self.parsed = parsed = _parser().parse_args(flags)
        check_positive(parsed, ("rounds", "request_timeout", "start_timeout"))
        if parsed.check_tokens < 0 or (parsed.num_warmups or 0) < 0:
            raise ConfigError("--check-tokens and --num-warmups must be 0 or more")
        if parsed.require_equal and (parsed.check_tokens == 0 or parsed.temperature != 0):
            raise ConfigError("--require-equal needs --check-tokens above 0 and --temperature 0")
        if math.isinf(parsed.request_timeout):
            raise ConfigError("--request-timeout is infinite")
        check_report(parsed.report)
        self.floor_bytes: int | None = None
        if parsed.floor_model is not None:
            model = load_model_config(parsed.floor_model)
            rules = facts_of(model, parsed.floor_model).precision.get("cpu", ())
            if parsed.floor_quantization != AUTO:
                rules = rules_of(parsed.floor_quantization)
            self.floor_bytes = step_weight_bytes(model, rules)
        self.targets = named_targets(parsed)
        asked = arguments.numbers("--concurrencies", parsed.concurrencies, whole=True)
        self.concurrencies = tuple(map(int, asked))
        self.dataset = DatasetSettings.of(parsed, chat=parsed.backend == "openai-chat")
        self.models: dict[str, str] = {}
        self.agreements: dict[str, AnswerAgreement] = {}
        self.warnings: list[str] = []
        # Bytes/s of the memory, measured in each round if there is a floor.
        self.read_rates: list[float] = []
        # The last round's runs with the dataset's lengths, for the report.
        self.runs: dict[str, LoadRun] = {}

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer named, or that of a target's model if it is on this machine."""
        for model in self.models.values():
            _, tokenizer = arguments.tokenizer_of(self.parsed.tokenizer, model)
            if tokenizer is not None:
                return tokenizer
        return None

    def load(self, at: int) -> LoadPattern:
        """Return the load of one run: a closed loop of `at` requests."""
        return LoadPattern(max_concurrency=at, request_timeout_s=self.parsed.request_timeout)

    def requests(self, which: Sequence[int]) -> list[BenchRequest]:
        """Return the prompts of run `which` (round, concurrency, kind), equal for all targets."""
        rng = np.random.default_rng([self.parsed.seed, *which])
        count = self.dataset.num_prompts or max(_LEAST_REQUESTS, _REQUESTS_PER_PLACE * which[1])
        settings = replace(self.dataset, num_prompts=count)
        return datasets.load(settings, self.tokenizer, rng)

    @contextmanager
    def turn(self, named: NamedTarget) -> Iterator[Target]:
        """Start the target if necessary, and yield it as the load tester's Target.

        If something fails while a started server is dead, the server's death is raised.
        """
        parsed = self.parsed
        if named.command is None:
            if parsed.ready_check_timeout_sec:
                headers = arguments.request_headers(parsed)
                wait_until_ready(named.url, parsed.ready_check_timeout_sec, headers)
            yield self._target(named)
            return
        say(f"starting {named.name}")
        log = parsed.result_dir / f"{named.name}.log"
        started = StartedServer(
            named.command, url=named.url, log=log, ready_timeout_s=parsed.start_timeout
        )
        with started as server:
            try:
                yield self._target(named)
            except TopspinError:
                server.check(patience_s=1.0)
                raise
            server.check()

    def _target(self, named: NamedTarget) -> Target:
        """Return the Target; raises ConfigError if its model differs from the first target's."""
        model = named.model or self.models.get(named.name)
        target = arguments.target_of(
            self.parsed, named.url, model=model, dataset_name=self.dataset.name
        )
        first, reference = next(iter(self.models.items()), (named.name, target.model))
        if named.model is None and target.model != reference:
            raise ConfigError(
                f"{named.name} serves {target.model!r} and {first} {reference!r}; if they are the "
                f"same model, say so: --target {named.name}={named.url}={target.model}"
            )
        self.models[named.name] = target.model
        return target

    def compare_answers(self) -> None:
        """Let every target answer the questions, one at a time; this also finds its model.

        Raises NotEqual if other answers than the first one's differ and --require-equal is given.
        """
        length = self.parsed.check_tokens
        requests = [BenchRequest(prompt=text, max_tokens=length or 1) for text in QUESTIONS]
        answers: dict[str, list[str]] = {}
        for named in self.targets.values():
            with self.turn(named) as target:
                if length:
                    fields = {k: v for k, v in target.extra_body.items() if k != "ignore_eos"}
                    greedy = replace(target, extra_body={**fields, "temperature": 0.0})
                    records = self._checked(named, run_load(greedy, requests, self.load(1))).records
                    answers[named.name] = [record.text for record in records]
                    say(f"{named.name} ({target.model}) answered {len(requests)} questions")
        tokenizer = self.tokenizer
        encode = None
        if tokenizer is not None:
            encode = partial(tokenizer.encode, add_special_tokens=False)
        first = next(iter(self.targets))
        for name in [name for name in answers if name != first]:
            agreed = comparison.agreement(answers[first], answers[name], encode)
            self.agreements[name] = agreed
            if self.parsed.require_equal and agreed.identical < 1:
                raise NotEqual(f"{name} answers otherwise than {first}: {agreed.first_difference}")

    def measure_round(self, idx: int) -> Round:
        """Measure every target once at every concurrency, the targets in turn.

        Requests that fail leave out the figures of their target, if that has been measured before
        and is not the first one; else EngineUnavailable or WarmUpFailed is raised.
        """
        if not idx:
            self.compare_answers()
        found: Round = {at: {} for at in self.concurrencies}
        if self.floor_bytes is not None:
            self.read_rates += read_rate.read_rates()
        for named in self.targets.values():
            with self.turn(named) as target:
                for at in self.concurrencies:
                    where = f"round {idx + 1}/{self.parsed.rounds}, {named.name}, {at} at once"
                    try:
                        measured = self._measure(named, target, (idx, at))
                    except (EngineUnavailable, serve.WarmUpFailed) as error:
                        is_new = not idx and at == self.concurrencies[0]
                        if is_new or named.name == next(iter(self.targets)):
                            raise
                        self.warnings.append(f"{where}: {error}")
                        found[at][named.name] = RoundFigures()
                        continue
                    found[at][named.name] = measured
                    say(f"{where}: {number(measured.output_throughput)} tokens/s")
        return found

    def _measure(self, named: NamedTarget, target: Target, which: tuple[int, int]) -> RoundFigures:
        """Warm the target up; measure its prefill, then complete requests."""
        at = which[1]
        warm_ups = at if self.parsed.num_warmups is None else self.parsed.num_warmups
        parsed = argparse.Namespace(num_warmups=warm_ups, quiet=self.parsed.quiet)
        whole, other = (self.requests([*which, kind]) for kind in (0, 1))
        prefill, run = (
            self._checked(
                named,
                serve.measure(
                    target, requests, self.load(at), parsed=parsed, settings=self.dataset
                ),
            )
            for requests in ([replace(each, max_tokens=1) for each in other], whole)
        )
        self.runs[f"{named.name}, {at} at once"] = run
        return comparison.figures_of(run, prefill=prefill, streams=at)

    def _checked(self, named: NamedTarget, run: LoadRun) -> LoadRun:
        """Raise if requests failed; keep a warning if the client was saturated."""
        check_complete(run, named.name)
        for reason in run.health.reasons:
            self.warnings.append(f"{named.name}: the client was saturated. {reason}")
        return run

    def result(self, rounds: Sequence[Round]) -> Result:
        """Return the result's JSON."""
        described = asdict(self.dataset)
        floor = None
        if self.floor_bytes is not None:
            floor = comparison.byte_floor(self.floor_bytes, ceiling(self.read_rates))
        return {
            "targets": [
                {
                    **asdict(named),
                    "command": named.command and _anywhere(named.command),
                    "model": self.models[named.name],
                }
                for named in self.targets.values()
            ],
            "dataset": {key: str(v) if isinstance(v, Path) else v for key, v in described.items()},
            "seed": self.parsed.seed,
            "agreement": {name: each._asdict() for name, each in self.agreements.items()},
            "warnings": self.warnings,
            "byte_floor": floor,
            "concurrencies": {
                str(at): comparison.summarise([each[at] for each in rounds])
                for at in self.concurrencies
            },
        }


def _anywhere(command: str) -> str:
    """Return a command with the names of its absolute paths only: they are of this machine."""
    words = shlex.split(command)
    return shlex.join(Path(word).name if word.startswith("/") else word for word in words)


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
        choices=(AUTO, UNQUANTISED, *BITS),
        default=AUTO,
        help="the format of its weights (auto: as the checkpoint has them)",
    )
    arguments.add_request_arguments(parser.add_argument_group("requests"))
    add_flags(parser.add_argument_group("dataset"), DatasetSettings)
    arguments.add_page_arguments(parser)
    return parser


def named_targets(parsed: argparse.Namespace) -> dict[str, NamedTarget]:
    """Return the targets; raises ConfigError for a duplicate name or a --start without a target."""
    commands = arguments.key_values("--start", parsed.start)
    if len(commands) < len(parsed.start):
        raise ConfigError("--start names a target twice")
    found: dict[str, NamedTarget] = {}
    for word in parsed.target:
        name, _, rest = word.partition("=")
        url, _, model = rest.partition("=")
        if not name or not url:
            raise ConfigError(f"--target {word}: expected NAME=URL or NAME=URL=MODEL")
        if not re.fullmatch(r"[\w.+-]+", name):
            raise ConfigError(f"--target {word}: a name has letters, digits, '.', '_', '+', '-'")
        if name in found:
            raise ConfigError(f"--target names {name} twice")
        base_url = arguments.checked_url(f"--target {word}", url)
        found[name] = NamedTarget(name, base_url, model or parsed.model, commands.get(name))
    if len(found) < 2:
        raise ConfigError("a comparison needs two targets: give --target at least twice")
    for name in commands:
        if name not in found:
            raise ConfigError(f"--start {name}: no --target has this name")
    return found


def main(flags: Sequence[str] | None = None) -> int:
    """Run the command with `flags` (default: the process's); returns the exit status.

    That is Experiment.run_rounds'. Raises TopspinError if a target fails.
    """
    found = Comparison(flags)
    try:
        return EXPERIMENT.run_rounds(found.parsed, found.measure_round, found.result)
    finally:
        if found.parsed.report is not None and found.runs:
            write_report(found.parsed.report, found.runs, title="The last round")
            say(f"Written to {found.parsed.report}")


def layout(result: Result) -> Iterator[TextTable | str]:
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
        yield TextTable([f"{at} at once", *targets], rows)
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

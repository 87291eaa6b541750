"""Compare servers on the same prompts: `topspin bench compare`, in turn A B A B, with ratios.

Owns the command: flags, the turns, the table, the JSON and the picture; the arithmetic is in
benchmarks.load.compare. First every target answers the same few prompts greedily, one at a
time, to check that they serve the same model; then come the rounds. In a round each target has
one turn: at each concurrency a run for one output token (prefill) and a run of the dataset's
lengths, each after a warm-up. All targets get the same prompts; a synthetic dataset is drawn
again for every round and run, so that prefix caches do not help (a file repeats its prompts).

A target with --start is started before its turn and stopped after it: on few cores even an
idle server that spins takes CPU time from the measured one.

    topspin bench compare --target ours=http://127.0.0.1:8000 --target peer=http://127.0.0.1:8080
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import read_rate, serve
from benchmarks import report as envelope
from benchmarks.load import arguments, compare, pictures, report
from benchmarks.load.compare import Agreement, ByteFloor, Figures
from benchmarks.load.compare_plan import Named, Plan
from benchmarks.load.contracts import BenchRequest, Run, Target
from benchmarks.load.metrics import measure_run
from benchmarks.load.result import result_json
from benchmarks.load.runner import check_complete, prepare, run_load
from benchmarks.load.started_server import StartedServer, ended_by_signals
from benchmarks.load.targets import first_model, wait_until_ready
from benchmarks.load.view import Progress
from benchmarks.roofline import ceiling
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError, TopspinError

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


@dataclass
class Comparison:
    """The results so far; each round is concurrency -> target's name -> figures."""

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

    def tables(self, concurrencies: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return concurrency -> the summary over all rounds; empty before the first round."""
        if not self.rounds:
            return {}
        return {at: compare.summarise([found[at] for found in self.rounds]) for at in concurrencies}

    @property
    def floor(self) -> ByteFloor | None:
        """The least time of a step of one request, if it is asked for; needs a round."""
        if self.floor_bytes is None:
            return None
        return ByteFloor(self.floor_bytes, ceiling(self.read_rates))


class NotEqual(TopspinError):
    """The targets' greedy answers differ, and --require-equal was given."""

    code = "answers_differ"


def main(flags: Sequence[str] | None = None) -> int:
    """Run the command with `flags` (default: the process's); returns the exit status.

    0 if all rounds were measured, 130 after Ctrl-C, with the results so far written. Raises
    TopspinError, after writing the complete rounds, if a target fails.
    """
    plan = Plan.of(flags)
    found = Comparison(floor_bytes=plan.floor_bytes)
    status, failure = 0, None
    try:
        with ended_by_signals():
            _ask_all(plan, found)
            _judge_answers(plan, found)
            for number in range(plan.rounds):
                found.rounds.append(_round(plan, found, number))
    except KeyboardInterrupt:
        status = 130
    except TopspinError as error:
        failure = error
    if found.rounds:
        tables = found.tables(plan.concurrencies)
        _print_tables(tables, found)
        _write(plan, found, tables, failure)
    if failure is not None:
        raise failure
    return status


@contextlib.contextmanager
def _turn(plan: Plan, named: Named, found: Comparison) -> Iterator[Target]:
    """Start the target if necessary, and yield it as the load tester's Target.

    If something fails while a started server is dead, the server's death is raised.
    """
    parsed = plan.parsed
    server: StartedServer | None = None
    with contextlib.ExitStack() as stack:
        if named.command is not None:
            _say(f"starting {named.name}")
            server = StartedServer(
                named.command,
                url=named.url,
                log=parsed.result_dir / f"{named.name}.log",
                ready_timeout_s=parsed.start_timeout,
            )
            stack.enter_context(server)
        elif parsed.ready_check_timeout_sec:
            headers = arguments.request_headers(parsed)
            wait_until_ready(named.url, parsed.ready_check_timeout_sec, headers)
        try:
            yield _target(plan, named, found)
        except TopspinError:
            if server is not None:
                server.check(patience_s=1.0)
            raise
        if server is not None:
            server.check()


def _target(plan: Plan, named: Named, found: Comparison) -> Target:
    """Return the Target; raises ConfigError if its model differs from the first target's."""
    headers = arguments.request_headers(plan.parsed)
    model = named.model or found.models.get(named.name) or first_model(named.url, headers)
    reference = next(iter(found.models.values()), model)
    if named.model is None and model != reference:
        raise ConfigError(
            f"{named.name} serves {model!r} and {next(iter(found.models))} {reference!r}; if they "
            f"are the same model, say so: --target {named.name}={named.url}={model}"
        )
    found.models[named.name] = model
    return plan.target(named, model)


def _ask_all(plan: Plan, found: Comparison) -> None:
    """Let every target answer the questions, one at a time; this also finds its model."""
    length = plan.parsed.check_tokens
    chat = plan.parsed.backend == "openai-chat"
    for named in plan.targets:
        with _turn(plan, named, found) as target:
            if not length:
                continue
            requests = [_question(text, length, chat=chat) for text in QUESTIONS]
            fields = {k: v for k, v in target.extra_body.items() if k != "ignore_eos"}
            greedy = dataclasses.replace(target, extra_body={**fields, "temperature": 0.0})
            run = run_load(greedy, requests, plan.load(1))
            _check(named, run, found)
            found.answers[named.name] = [record.text for record in run.records]
            _say(f"{named.name} ({target.model}) answered {len(requests)} questions")


def _question(text: str, length: int, *, chat: bool) -> BenchRequest:
    if chat:
        return BenchRequest(messages=[{"role": "user", "content": text}], max_tokens=length)
    return BenchRequest(prompt=text, max_tokens=length)


def _judge_answers(plan: Plan, found: Comparison) -> None:
    """Compare every target's answers with the first one's; raises NotEqual if --require-equal."""
    if not found.answers:
        return
    first, *others = plan.targets
    tokenizer = _tokenizer(plan, found)
    for named in others:
        agreed = compare.agreement(
            found.answers[first.name],
            found.answers[named.name],
            None if tokenizer is None else _encoder(tokenizer),
        )
        found.agreements[named.name] = agreed
        _say(_agreement_line(first.name, named.name, agreed))
        if plan.parsed.require_equal and agreed.identical < 1:
            raise NotEqual(
                f"{named.name} answers otherwise than {first.name}: {agreed.first_difference}"
            )


def _round(plan: Plan, found: Comparison, number: int) -> dict[int, dict[str, Figures]]:
    """Measure every target once at every concurrency, the targets in turn."""
    figures: dict[int, dict[str, Figures]] = {at: {} for at in plan.concurrencies}
    if found.floor_bytes is not None:
        found.read_rates += read_rate.read_rates()
    for named in plan.targets:
        with _turn(plan, named, found) as target:
            for at in plan.concurrencies:
                figures[at][named.name] = _measure(plan, found, named, target, (number, at))
                shown = ", ".join(
                    f"{name} {value:.1f}"
                    for name, value in dataclasses.asdict(figures[at][named.name]).items()
                    if value is not None
                )
                _say(f"round {number + 1}/{plan.rounds}, {named.name}, {at} at once: {shown}")
    return figures


def _measure(
    plan: Plan, found: Comparison, named: Named, target: Target, which: tuple[int, int]
) -> Figures:
    """Warm the target up; measure its prefill, then complete requests."""
    number, at = which
    load = plan.load(at)
    warmups = at if plan.parsed.num_warmups is None else plan.parsed.num_warmups
    tokenizer = _tokenizer(plan, found)
    whole = plan.requests([number, at, 0], tokenizer)
    one_token = [
        dataclasses.replace(request, max_tokens=1)
        for request in plan.requests([number, at, 1], tokenizer)
    ]
    prepare(target, whole, load)
    runs = []
    for requests in (one_token, whole):
        serve.warm_up(target, requests, load, warmups)
        with Progress(quiet=plan.parsed.quiet) as progress:
            run = run_load(target, requests, load, watch=progress.show)
        _check(named, run, found)
        runs.append(run)
    prefill, run = runs
    found.runs[f"{named.name}, {at} at once"] = run
    summary = result_json(run, measure_run(run))
    return compare.figures_of(summary, run, prefill, streams=at)


def _tokenizer(plan: Plan, found: Comparison) -> Tokenizer | None:
    """Return the tokenizer named, or that of a target's model if it is on this machine."""
    for model in found.models.values():
        _, tokenizer = arguments.tokenizer_of(plan.parsed.tokenizer, model)
        if tokenizer is not None:
            return tokenizer
    return None


def _encoder(tokenizer: Tokenizer) -> Any:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def _check(named: Named, run: Run, found: Comparison) -> None:
    """Raise if requests failed; keep a warning if the client was saturated."""
    check_complete(run, named.name)
    for reason in run.health.reasons:
        found.warnings.append(f"{named.name}: the client was saturated. {reason}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _agreement_line(first: str, name: str, found: Agreement) -> str:
    tokens = ""
    if found.common_prefix_tokens is not None:
        tokens = f", {found.common_prefix_tokens:.1f} tokens"
    line = (
        f"{name} and {first}: {found.identical:.0%} of {found.num_prompts} greedy answers are "
        f"identical; on average the first {found.common_prefix_characters:.1f} characters{tokens} "
        "agree"
    )
    if found.first_difference is None:
        return line
    return (
        f"{line}; first difference: {found.first_difference}. In bf16 a near-tie goes either "
        "way, so differences are normal there."
    )


def _print_tables(tables: Mapping[int, Mapping[str, Any]], found: Comparison) -> None:
    console = Console()
    for at, table in tables.items():
        shown = Table(title=f"{at} at once, median of the rounds", title_justify="left", box=SIMPLE)
        shown.add_column("")
        for name in table:
            shown.add_column(name, justify="right")
        for figure, title in compare.NAMES.items():
            shown.add_row(title, *(_cell(row.get(figure)) for row in table.values()))
        if at == 1 and found.floor is not None:
            shown.add_row(*compare.floor_row(table, found.floor.ms_per_token))
        console.print(shown)
    console.print("In brackets: least to greatest round. x: ratio to the first target, by round.")
    first = next(iter(found.models))
    for name, agreed in found.agreements.items():
        console.print(Text(_agreement_line(first, name, agreed)), soft_wrap=True)
    for warning in found.warnings:
        console.print(Text(warning, style="red"), soft_wrap=True)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    text = f"{_short(row['median'])} [{_short(row['least'])}..{_short(row['greatest'])}]"
    ratio = row.get("ratio")
    if ratio is None:
        return text
    return f"{text}\n{ratio['median']:.3f}x [{ratio['least']:.3f}..{ratio['greatest']:.3f}]"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _write(
    plan: Plan,
    found: Comparison,
    tables: Mapping[int, Mapping[str, Any]],
    failure: TopspinError | None,
) -> None:
    """Write compare.json, and compare.png if matplotlib is installed."""
    folder: Path = plan.parsed.result_dir
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "compare.json"
    path.write_text(json.dumps(_result(plan, found, tables, failure), allow_nan=False) + "\n")
    print(f"Written to {path}")
    if not pictures.can_draw():
        print("No picture: that needs matplotlib, pip install -e '.[plots]'", file=sys.stderr)
        return
    rounds = len(found.rounds)
    title = f"{', '.join(found.models)}: {plan.dataset.name}, {rounds} rounds in turn"
    floor_ms = None if found.floor is None else found.floor.ms_per_token
    picture = pictures.draw_compare(tables, title=title, floor_ms=floor_ms)
    path.with_suffix(".png").write_bytes(picture)
    print(f"Written to {path.with_suffix('.png')}")
    if plan.parsed.report is not None:
        report.write_report(plan.parsed.report, found.runs, title=f"{title}, the last")
        print(f"Written to {plan.parsed.report}")


def _result(
    plan: Plan,
    found: Comparison,
    tables: Mapping[int, Mapping[str, Any]],
    failure: TopspinError | None,
) -> dict[str, Any]:
    described = dataclasses.asdict(plan.dataset)
    return {
        "benchmark": "compare",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": envelope.commit(),
        "machine": envelope.machine(),
        "versions": envelope.versions(),
        "targets": [
            {**dataclasses.asdict(named), "model": found.models[named.name]}
            for named in plan.targets
        ],
        "dataset": {key: str(v) if isinstance(v, Path) else v for key, v in described.items()},
        "seed": plan.parsed.seed,
        "rounds_asked": plan.rounds,
        "rounds_measured": len(found.rounds),
        "error": None if failure is None else str(failure),
        "agreement": {name: agreed.as_json() for name, agreed in found.agreements.items()},
        "warnings": found.warnings,
        "byte_floor": None if found.floor is None else found.floor.as_json(),
        "concurrencies": {str(at): table for at, table in tables.items()},
    }

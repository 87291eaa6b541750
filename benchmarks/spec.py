"""What does speculative decoding bring? Servers without it, forced and adaptive, in turn.

Starts `topspin serve` three times a round: with speculation off, with --config and `"adaptive":
false` (forced), and with `"adaptive": true`. Each server is stopped before the next is started, so
that they never share the cores, and answers six kinds of prompts greedily at each concurrency.
Ratios are those of a round's pairs. All servers get the same prompts, and their answers are
compared. Flags that it does not know go to `topspin serve`; with --draft-nodes a fourth server
drafts as the forced one does, but between its own steps (serial). Run as

    topspin bench spec [MODEL] [--config JSON]

Fails if the forced server accepted no drafted token in any kind: then nothing was measured.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import report
from benchmarks.load.contracts import Load, Run, Target
from benchmarks.load.metrics import measure_run
from benchmarks.load.pictures import COLOURS, can_draw
from benchmarks.load.runner import check_complete, run_load
from benchmarks.load.started_server import StartedServer, ended_by_signals
from benchmarks.load.sweep import numbers
from benchmarks.load.view import Progress
from benchmarks.peers import free_port
from benchmarks.server_arguments import check_positive, server_parser
from benchmarks.spec_figures import Drafts, Phase, check_accepted, read_drafts, summarise
from benchmarks.spec_prompts import KINDS, PROMPTS_PER_KIND, backend_of, requests_of
from benchmarks.table_layouts import SPEC_HEADINGS, spec_rows
from models.sources.hub import resolve_model
from models.text.chat_template import ChatTemplate
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError, EngineUnavailable, TopspinError
from topspin.plan.speculation import parse_speculation

OFF, FORCED, ADAPTIVE, SERIAL = "off", "forced", "adaptive", "serial"
NAME = "model"
# Flags of `topspin serve` that the benchmark sets.
_OWNED = ("--speculative-config", "--port", "--host", "--served-model-name")
_REQUESTS_PER_PLACE = 2
_METRICS_TIMEOUT_S = 30.0

# concurrency -> kind -> server -> phase
Round = dict[int, dict[str, dict[str, Phase]]]


@dataclass(frozen=True)
class Plan:
    """The checked request of the command line; `servers` is name -> --speculative-config."""

    model: str
    path: Path
    flags: tuple[str, ...]
    servers: Mapping[str, str]
    concurrencies: tuple[int, ...]
    rounds: int
    output_len: int
    seed: int
    start_timeout_s: float
    result_dir: Path
    quiet: bool
    tokenizer: Tokenizer
    has_chat_template: bool

    @classmethod
    def of(cls, argv: Sequence[str] | None) -> Plan:
        """Read the flags; make all checks that need no server."""
        args, flags = _parser().parse_known_args(argv)
        for flag in flags:
            if flag.partition("=")[0] in _OWNED:
                raise ConfigError(f"{flag}: the benchmark sets it itself; see --config")
        check_positive(args, ("rounds", "output_len", "start_timeout"))
        config = parse_speculation(args.config)
        forced = str(msgspec.structs.replace(config, adaptive=False))
        path = resolve_model(args.model)
        return cls(
            model=args.model,
            path=path,
            flags=tuple(flags),
            servers={
                OFF: "off",
                FORCED: forced,
                ADAPTIVE: str(msgspec.structs.replace(config, adaptive=True)),
                **({SERIAL: forced} if _without_draft_nodes(flags) != flags else {}),
            },
            concurrencies=tuple(
                int(at) for at in numbers("--concurrencies", args.concurrencies, whole=True)
            ),
            rounds=args.rounds,
            output_len=args.output_len,
            seed=args.seed,
            start_timeout_s=args.start_timeout,
            result_dir=args.result_dir,
            quiet=args.quiet,
            tokenizer=Tokenizer.from_directory(path),
            has_chat_template=ChatTemplate.find(path) is not None,
        )

    def command(self, server: str, port: int) -> str:
        """Return the command that starts a server of `servers` at `port`."""
        flags = _without_draft_nodes(self.flags) if server == SERIAL else self.flags
        return shlex.join(
            [
                *(sys.executable, "-m", "topspin", "serve", str(self.path), "--port", str(port)),
                *("--served-model-name", NAME, "--speculative-config", self.servers[server]),
                *flags,
            ]
        )


def _without_draft_nodes(flags: Sequence[str]) -> list[str]:
    kept: list[str] = []
    words = iter(flags)
    for word in words:
        if word == "--draft-nodes":
            next(words, None)
        elif not word.startswith("--draft-nodes="):
            kept.append(word)
    return kept


def _parser() -> argparse.ArgumentParser:
    parser = server_parser(
        "spec", "Measures speculative decoding: off, forced and adaptive servers in turn."
    )
    parser.add_argument(
        "--config",
        default='{"method": "suffix"}',
        metavar="JSON",
        help="as for --speculative-config; adaptive is set by turn (%(default)s)",
    )
    parser.add_argument(
        "--concurrencies", default="1,4,16", metavar="N,N", help="requests at once (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--output-len", type=int, default=128, metavar="N", help="most tokens (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of random ids (%(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit status.

    0 if all rounds were measured, 128 + n after Ctrl-C or signal n, with the complete rounds
    written. Raises TopspinError, after writing them, if a server fails or the forced one accepts
    nothing.
    """
    plan = Plan.of(argv)
    rounds: list[Round] = []
    warnings: list[str] = []
    status, failure = 0, None
    try:
        with ended_by_signals():
            for number in range(plan.rounds):
                rounds.append(_round(plan, number, warnings))
                for at, turns in rounds[-1].items():
                    check_accepted(turns, FORCED, at)
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:
        status = int(end.code or 0)
    except TopspinError as error:
        failure = error
    if rounds:
        _report(plan, rounds, warnings, failure)
    if failure is not None:
        raise failure
    return status


def _round(plan: Plan, number: int, warnings: list[str]) -> Round:
    """Give every server its turn: all concurrencies, and at each all kinds."""
    found: Round = {at: {kind: {} for kind in KINDS} for at in plan.concurrencies}
    for name in plan.servers:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        server = StartedServer(
            plan.command(name, port),
            url=url,
            log=plan.result_dir / f"{name}.log",
            ready_timeout_s=plan.start_timeout_s,
        )
        with server:
            try:
                for at in plan.concurrencies:
                    for kind in KINDS:
                        phase, run = _phase(plan, url, kind, at, number)
                        found[at][kind][name] = phase
                        warnings += [
                            f"{name}, {kind}, {at} at once: the client was saturated. {reason}"
                            for reason in run.health.reasons
                        ]
                        _say(
                            plan,
                            f"round {number + 1}/{plan.rounds}, {name}, {at} at once, {kind}: "
                            f"{phase.output_throughput:.1f} tokens/s, "
                            f"{phase.drafts.accepted_tokens} of {phase.drafts.draft_tokens} "
                            "drafted tokens accepted",
                        )
            except TopspinError:
                # If the server has died, that is the reason to tell.
                server.check(patience_s=1.0)
                raise
    return found


def _phase(plan: Plan, url: str, kind: str, at: int, number: int) -> tuple[Phase, Run]:
    """Warm the server up with this kind, then measure it.

    The warm-up has the same prompts under another `cache_salt`: neither the prefix cache nor the
    drafter may use it, but an adaptive server has learnt how this kind is accepted.
    """
    backend = backend_of(kind, has_chat_template=plan.has_chat_template)
    target = Target(base_url=url, model=NAME, backend=backend)
    warm_up, requests = (
        requests_of(
            kind,
            count,
            backend=backend,
            output_len=plan.output_len,
            tokenizer=plan.tokenizer,
            salt=f"{at}/{kind}/{use}",
            seed=[plan.seed, number, at],
        )
        for use, count in (
            ("warm-up", at),
            ("measured", max(PROMPTS_PER_KIND, _REQUESTS_PER_PLACE * at)),
        )
    )
    load = Load(max_concurrency=at)
    check_complete(run_load(target, warm_up, load), f"{kind}: the server")
    before = _drafts(url)
    with Progress(quiet=plan.quiet) as progress:
        run = run_load(target, requests, load, watch=progress.show)
    check_complete(run, f"{kind}: the server")
    metrics = measure_run(run)
    tpot_s = metrics.tpot.median
    phase = Phase(
        output_throughput=metrics.output_throughput,
        median_tpot_ms=1000 * tpot_s if tpot_s else None,
        drafts=_drafts(url).since(before),
        answers=tuple(r.text for r in sorted(run.records, key=lambda record: record.index)),
    )
    return phase, run


def _drafts(url: str) -> Drafts:
    try:
        response = httpx.get(f"{url}/metrics", timeout=_METRICS_TIMEOUT_S).raise_for_status()
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"{url}/metrics: {error}") from error
    return read_drafts(response.text)


def _say(plan: Plan, line: str) -> None:
    if not plan.quiet:
        print(line, file=sys.stderr, flush=True)


def _report(
    plan: Plan, rounds: Sequence[Round], warnings: Sequence[str], failure: TopspinError | None
) -> None:
    """Print a table for each concurrency; write spec.json, and spec.png if it can be drawn."""
    tables = {
        str(at): {kind: summarise([found[at][kind] for found in rounds]) for kind in KINDS}
        for at in plan.concurrencies
    }
    console = Console()
    for at, kinds in tables.items():
        title = f"{at} at once, median of the rounds ({len(rounds)})"
        shown = Table(title=title, title_justify="left", box=SIMPLE)
        for heading in SPEC_HEADINGS:
            shown.add_column(heading, justify="left" if heading in SPEC_HEADINGS[:2] else "right")
        for row in spec_rows(kinds):
            shown.add_row(*row, end_section=row[1] == ADAPTIVE)
        console.print(shown)
    console.print("x: ratio to off, round by round; in brackets its 95 % interval (Student's t).")
    for warning in warnings:
        console.print(Text(warning, style="red"), soft_wrap=True)
    result = {
        "model": plan.model,
        "flags": plan.flags,
        "servers": plan.servers,
        "output_len": plan.output_len,
        "seed": plan.seed,
        "rounds_asked": plan.rounds,
        "rounds_measured": len(rounds),
        "error": None if failure is None else str(failure),
        "warnings": warnings,
        "concurrencies": tables,
    }
    path = report.write("spec", result, plan.result_dir)
    print(f"Written to {path}")
    if not can_draw():
        print("No picture: that needs matplotlib, pip install -e '.[plots]'", file=sys.stderr)
        return
    draw(result, path.with_suffix(".png"))
    print(f"Written to {path.with_suffix('.png')}")


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios of throughput with their intervals, a panel per concurrency."""
    from matplotlib.figure import Figure

    tables = result["concurrencies"]
    figure = Figure(figsize=(10, 0.6 + 2.6 * len(tables)), layout="constrained")
    panels = figure.subplots(len(tables), squeeze=False)[:, 0]
    others = [name for name in result["servers"] if name != OFF]
    width = 0.8 / len(others)
    for axes, (at, kinds) in zip(panels, tables.items(), strict=True):
        for number, name in enumerate(others):
            ratios = [servers[name]["output_throughput"]["ratio"] for servers in kinds.values()]
            places = [idx + (number - (len(others) - 1) / 2) * width for idx in range(len(ratios))]
            means = [ratio["mean"] for ratio in ratios]
            axes.bar(places, means, width * 0.92, color=COLOURS[number], label=name)
            known = [
                (place, ratio)
                for place, ratio in zip(places, ratios, strict=True)
                if ratio["low"] is not None
            ]
            axes.errorbar(
                [place for place, _ in known],
                [ratio["mean"] for _, ratio in known],
                [
                    [ratio["mean"] - ratio["low"] for _, ratio in known],
                    [ratio["high"] - ratio["mean"] for _, ratio in known],
                ],
                fmt="none",
                ecolor="#333333",
                capsize=3,
            )
        axes.axhline(1.0, color="black", linewidth=1)
        axes.set_xticks(range(len(kinds)), list(kinds))
        axes.set_ylabel(f"{at} at once")
        axes.grid(axis="y", color="#EEEEEE")
        axes.set_axisbelow(True)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper", fontsize=9, frameon=False)
    figure.suptitle(
        f"{Path(result['model']).name}: output tokens/s over those without speculation,\n"
        f"rounds in turn: {result['rounds_measured']}, with 95 % intervals",
        fontsize=11,
    )
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())

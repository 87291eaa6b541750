"""The gain of speculative decoding: servers without it, forced and adaptive, in turn.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.experiment import (
    COLOURS,
    Experiment,
    Result,
    TextTable,
    check_positive,
    number,
    say,
)
from benchmarks.load.arguments import numbers
from benchmarks.load.client.runner import check_complete, run_load
from benchmarks.load.contracts import LoadPattern, LoadRun, Target
from benchmarks.load.figures.metrics import measure_run
from benchmarks.load.figures.view import progress
from benchmarks.servers.topspin import TopspinServer, add_server_arguments
from benchmarks.speculation.figures import ServerPhase, VerifiedDrafts, check_accepted, summarise
from benchmarks.speculation.prompts import KINDS, PROMPTS_PER_KIND, backend_of, requests_of
from models.sources.hub import resolve_model
from models.text.chat_template import ChatTemplate
from models.text.tokenizer import Tokenizer
from topspin.errors import ConfigError, TopspinError
from topspin.plan.speculation import DEFAULT, OFF, parse_speculation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORCED, ADAPTIVE, SERIAL = "forced", "adaptive", "serial"
# Flags of `topspin serve` that the benchmark sets.
_OWNED = ("--speculative-config", "--port", "--host")
_REQUESTS_PER_PLACE = 2

# concurrency -> kind -> server -> phase
Round = dict[int, dict[str, dict[str, ServerPhase]]]


@dataclass(frozen=True)
class SpeculationFlags:
    """The checked request of the command line; `servers` is name -> --speculative-config."""

    args: argparse.Namespace
    path: Path
    flags: tuple[str, ...]
    servers: Mapping[str, str]
    concurrencies: tuple[int, ...]
    tokenizer: Tokenizer
    has_chat_template: bool

    @classmethod
    def of(cls, argv: Sequence[str] | None) -> SpeculationFlags:
        """Read the flags; make all checks that need no server."""
        args, flags = _parser().parse_known_args(argv)
        for flag in flags:
            if flag.partition("=")[0] in _OWNED:
                raise ConfigError(f"{flag}: the benchmark sets it itself; see --config")
        check_positive(args, ("rounds", "output_len", "start_timeout"))
        config = parse_speculation(args.config)
        if config == OFF:
            raise ConfigError("--config off: servers without drafts are measured anyway")
        forced = str(msgspec.structs.replace(config, adaptive=False, disable_by_batch_size=None))
        path = resolve_model(args.model)
        return cls(
            args=args,
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
            tokenizer=Tokenizer.from_directory(path),
            has_chat_template=ChatTemplate.find(path) is not None,
        )

    def server(self, name: str) -> TopspinServer:
        """Return the server NAME of `servers`, to be started."""
        flags = _without_draft_nodes(self.flags) if name == SERIAL else self.flags
        own = ("--speculative-config", self.servers[name])
        return TopspinServer(
            [str(self.path), *own, *flags],
            log=self.args.result_dir / f"{name}.log",
            ready_timeout_s=self.args.start_timeout,
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
    parser = EXPERIMENT.parser(
        rounds=5, folder=Path(), epilog="All other flags go to topspin serve."
    )
    add_server_arguments(parser)
    parser.add_argument(
        "--config",
        default=str(DEFAULT),
        metavar="JSON",
        help="as for --speculative-config; adaptive is set by turn (%(default)s)",
    )
    parser.add_argument(
        "--concurrencies", default="1,4,16", metavar="N,N", help="requests at once (%(default)s)"
    )
    parser.add_argument(
        "--output-len", type=int, default=128, metavar="N", help="most tokens (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of random ids (%(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns the exit status (Experiment.run_rounds).

    Raises TopspinError if a server fails or the forced one accepts nothing.
    """
    plan = SpeculationFlags.of(argv)
    warnings: list[str] = []

    def check(turns: Round) -> None:
        for at, kinds in turns.items():
            check_accepted(kinds, FORCED, at)

    return EXPERIMENT.run_rounds(
        plan.args,
        lambda number: _round(plan, number, warnings),
        lambda rounds: _result(plan, rounds, warnings),
        check=check,
    )


def _round(plan: SpeculationFlags, number: int, warnings: list[str]) -> Round:
    """Give every server its turn: all concurrencies, and at each all kinds."""
    found: Round = {at: {kind: {} for kind in KINDS} for at in plan.concurrencies}
    for name in plan.servers:
        with plan.server(name) as server:
            try:
                for at in plan.concurrencies:
                    for kind in KINDS:
                        phase, run = _phase(plan, server, kind, at, number)
                        found[at][kind][name] = phase
                        where = f"{name}, {kind}, {at} at once"
                        warnings += [
                            f"{where}: the client was saturated. {reason}"
                            for reason in run.health.reasons
                        ]
                        if not plan.args.quiet:
                            rate = f"{phase.output_throughput:.1f} tokens/s"
                            say(f"round {number + 1}, {where}: {rate}")
            except TopspinError:
                # If the server has died, that is the reason to tell.
                server.check(patience_s=1.0)
                raise
    return found


def _phase(
    plan: SpeculationFlags, server: TopspinServer, kind: str, at: int, number: int
) -> tuple[ServerPhase, LoadRun]:
    """Warm the server up with this kind, then measure it.

    The warm-up has the same prompts under another `cache_salt`: neither the prefix cache nor the
    drafter may use it, but an adaptive server has learnt how this kind is accepted.
    """
    backend = backend_of(kind, has_chat_template=plan.has_chat_template)
    target = Target(server.url, server.model, backend=backend)
    warm_up, requests = (
        requests_of(
            kind,
            count,
            output_len=plan.args.output_len,
            tokenizer=plan.tokenizer,
            salt=f"{at}/{kind}/{use}",
            seed=[plan.args.seed, number, at],
        )
        for use, count in (
            ("warm-up", at),
            ("measured", max(PROMPTS_PER_KIND, _REQUESTS_PER_PLACE * at)),
        )
    )
    load = LoadPattern(max_concurrency=at)
    check_complete(run_load(target, warm_up, load), f"{kind}: the server")
    before = VerifiedDrafts.of(server.metrics())
    with progress(quiet=plan.args.quiet) as watch:
        run = run_load(target, requests, load, watch=watch)
    check_complete(run, f"{kind}: the server")
    figures = measure_run(run)
    phase = ServerPhase(
        output_throughput=figures["output_throughput"],
        median_tpot_ms=figures["median_tpot_ms"] or None,
        drafts=VerifiedDrafts.of(server.metrics()).since(before),
        answers=tuple(r.text for r in sorted(run.records, key=lambda record: record.index)),
    )
    return phase, run


def _result(
    plan: SpeculationFlags, rounds: Sequence[Round], warnings: Sequence[str]
) -> dict[str, Any]:
    return {
        "model": plan.args.model,
        "flags": plan.flags,
        "servers": plan.servers,
        "output_len": plan.args.output_len,
        "seed": plan.args.seed,
        "warnings": warnings,
        "concurrencies": {
            str(at): {kind: summarise([found[at][kind] for found in rounds]) for kind in KINDS}
            for at in plan.concurrencies
        },
    }


def layout(result: Result) -> Iterator[TextTable | str]:
    """Yield a table for each concurrency."""
    yield (
        f"{Path(result['model']).name}, `{result['servers']['adaptive']}`, at most "
        f"{result['output_len']} tokens an answer:"
    )
    others = ("server", "tokens/s", "median TPOT (ms)", "accepted a draft", "drafted")
    for at, kinds in result["concurrencies"].items():
        rows = [
            [
                *(kind, server),
                *(_with_interval(row[name]) for name in ("output_throughput", "median_tpot_ms")),
                *(number(row["accepted_per_draft"]), str(row["draft_tokens"])),
                f"{row['equal_answers']:.0%}" if "equal_answers" in row else "-",
            ]
            for kind, servers in kinds.items()
            for server, row in servers.items()
        ]
        yield TextTable([f"prompts, {at} at once", *others, "answers as off"], rows)
    yield (
        f"Medians of {result['rounds_measured']} rounds in turn; x: ratio to off, in brackets its "
        "95 % interval (Student's t on the logarithms of the rounds' ratios)."
    )
    yield from (f"Warning: {warning}" for warning in result["warnings"])


def _with_interval(row: Result | None) -> str:
    if row is None:
        return "-"
    text, ratio = number(row["median"]), row.get("ratio")
    if ratio is None:
        return text
    if ratio["low"] is None:
        return f"{text} ({ratio['mean']:.2f}x)"
    return f"{text} ({ratio['mean']:.2f}x [{ratio['low']:.2f}..{ratio['high']:.2f}])"


def draw(result: Result, figure: Figure) -> None:
    """Draw the ratios of throughput with their intervals, a panel per concurrency."""
    tables = result["concurrencies"]
    figure.set_size_inches(10, 0.6 + 2.6 * len(tables))
    panels = figure.subplots(len(tables), squeeze=False)[:, 0]
    others = [name for name in result["servers"] if name != OFF]
    width = 0.8 / len(others)
    for axes, (at, kinds) in zip(panels, tables.items(), strict=True):
        for idx, name in enumerate(others):
            ratios = [servers[name]["output_throughput"]["ratio"] for servers in kinds.values()]
            places = [each + (idx - (len(others) - 1) / 2) * width for each in range(len(ratios))]
            means = [ratio["mean"] for ratio in ratios]
            # One round has no interval.
            ends = [
                [abs((ratio[end] or ratio["mean"]) - ratio["mean"]) for ratio in ratios]
                for end in ("low", "high")
            ]
            axes.bar(places, means, width * 0.92, yerr=ends, color=COLOURS[idx], label=name)
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


EXPERIMENT = Experiment("spec", __doc__, layout, draw)


if __name__ == "__main__":
    raise SystemExit(main())

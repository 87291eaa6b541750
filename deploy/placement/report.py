"""The form of a planner's report: its fields, as JSON, as tables and as a picture.

Owns no figure and no word: deploy.placement.reasons.explain fills it. Called by
deploy.placement.command.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from topspin.errors import ConfigError


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of an engine at a load."""

    engine: str
    copies: int
    precision: str
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    kl: float


class FrontPoint(EngineFigures, frozen=True, kw_only=True):
    """An offer that no other beats in price, TTFT, TPOT, tokens per second and divergence."""

    price_per_hour: float


class EngineReport(EngineFigures, frozen=True, kw_only=True):
    """An engine of the fleet. `binding`: what keeps it from carrying more than `most_load`.

    `layer_ends`: the layer before which each range ends, by its device; empty: layers are not cut.
    `price_per_million` tokens at its load.
    """

    hosts: str
    num_attention: int
    num_experts: int
    devices: str
    price_per_million: float
    micro_batches: int
    max_num_seqs: int
    max_num_batched_tokens: int
    experts_per_node: tuple[int, ...]
    local_layers: int = 0
    local_when: str = ""
    local_reason: str = ""
    layer_ends: tuple[int, ...]
    load: float
    most_load: float
    binding: str
    file: str = ""


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of engine that was not taken, by its best, and why."""

    kind: str
    engine: str
    reason: str


class PlanChange(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest change tried of one thing that changes the outcome."""

    change: str
    outcome: str


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that a search says. `load` is asked for, `most_load` the fleet's.

    `load_unit`: requests/s or users. `estimates`: per device of the plan the times that its profile
    has no table of, so that they are the roofline's. `refusal`: "" with a plan. `runner_up`: the
    best that was not taken.
    `drafts`: what was decided about them, by engine; empty: the workload asks for none.
    """

    objective: str
    load_unit: str
    price_per_hour: float
    load: float
    most_load: float
    is_exact: bool
    engines: tuple[EngineReport, ...]
    front: tuple[FrontPoint, ...]
    runner_up: Rejected | None
    losers: tuple[Rejected, ...]
    answers: tuple[str, ...]
    flips: tuple[PlanChange, ...]
    estimates: tuple[str, ...]
    refusal: str
    drafts: tuple[str, ...]

    def with_files(self, files: Sequence[str]) -> PlanReport:
        """Return the report with the plans' files, one per engine."""
        engines = tuple(
            msgspec.structs.replace(engine, file=file)
            for engine, file in zip(self.engines, files, strict=True)
        )
        return msgspec.structs.replace(self, engines=engines)

    def to_json(self) -> bytes:
        """Return it as readable JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def print_report(
    report: PlanReport, console: Console | None = None, *, in_full: bool = False
) -> None:
    """Print an engine a line, what binds, the runner-up and the answers; or, `in_full`, all."""
    out = Console(highlight=False) if console is None else console
    if report.engines:
        out.print(_engines(report.engines))
        whole = "exact over its grids" if report.is_exact else "a heuristic: see docs/planner.md"
        out.print(
            f"{report.load:.4g} {report.load_unit}, {report.most_load:.4g} at most, at "
            f"{report.price_per_hour:.4g} per hour ({report.objective}; the search was {whole})"
        )
        for engine in report.engines:
            out.print(f"What binds: {engine.binding}.")
    if report.refusal:
        out.print(f"No plan: {report.refusal}.")
    if report.runner_up is not None:
        out.print(f"Runner-up, {report.runner_up.engine}: {report.runner_up.reason}.")
    for line in (*report.drafts, *report.answers):
        out.print(line)
    for flip in report.flips:
        out.print(f"With {flip.change}: {flip.outcome}.")
    if in_full:
        _print_rest(report, out)
    elif report.engines:
        out.print("--explain shows all settings, the front, and what was not taken.")


def _engines(engines: Sequence[EngineReport]) -> Table:
    """Return an engine a line; names break between their words only."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("hosts", "M x N", "devices", "weights", "m", "tokens/s", "TTFT", "TPOT", "per 1M"):
        is_name = name in ("hosts", "devices", "weights")
        table.add_column(name, no_wrap=not is_name, justify="left" if is_name else "right")
    for each in engines:
        hosts = f"{each.copies} times {each.hosts}" if each.copies > 1 else each.hosts
        table.add_row(
            hosts,
            f"{each.num_attention} x {each.num_experts}",
            each.devices,
            each.precision,
            str(each.micro_batches),
            f"{each.copies * each.tokens_per_s:.4g}",
            f"{each.ttft_s:.3g} s",
            f"{each.tpot_s * 1e3:.3g} ms",
            f"{each.price_per_million:.3g}",
        )
    for column in table.columns:
        words = " ".join(map(str, column.cells)).split()
        column.min_width = max(map(len, words))
    return table


def _print_rest(report: PlanReport, out: Console) -> None:
    """Print the settings, the front and what lost: a line each, indented where it goes on."""
    for engine in report.engines:
        out.print(f"\n{engine.engine}, {engine.copies} of it")
        for field, value in msgspec.structs.asdict(engine).items():
            if field not in ("engine", "copies"):
                out.print(Padding(f"{field}: {_shown(value)}", (0, 0, 0, 2)))
    for title, found in (
        ("The front: none is better in all of these.", [(_offered(e)) for e in report.front]),
        ("Not taken", [f"{e.kind}. Its best, {e.engine}: {e.reason}." for e in report.losers]),
    ):
        if found:
            out.print(f"\n{title}")
            for line in found:
                out.print(Padding(line, (0, 0, 0, 2)))
    for line in report.estimates:
        out.print(f"Estimated, not measured, on {line}.")


def _offered(each: FrontPoint) -> str:
    return (
        f"{each.copies} times {each.engine} ({each.precision}): {each.price_per_hour:.4g} per "
        f"hour, TTFT {each.ttft_s:.3g} s, TPOT {each.tpot_s * 1e3:.3g} ms, "
        f"{each.tokens_per_s:.4g} tokens/s, divergence {each.kl:.3g}"
    )


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(report: PlanReport, path: Path) -> None:
    """Write a picture of the front: price and TPOT, with tokens per second as size.

    Engines have numbers, by price, and are named below.

    Raises ConfigError without matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--picture: needs matplotlib: pip install -e '.[plots]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    front = sorted(report.front, key=lambda each: (each.price_per_hour, each.tpot_s))
    figure = Figure(figsize=(7, 4 + 0.17 * len(front)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    most = max(point.tokens_per_s for point in front)
    chosen = {(engine.engine, engine.copies) for engine in report.engines}
    taken = [(point.engine, point.copies) in chosen for point in front]
    prices, times_ms = [p.price_per_hour for p in front], [p.tpot_s * 1e3 for p in front]
    dots = axes.scatter(
        prices,
        times_ms,
        s=[30 + 170 * point.tokens_per_s / most for point in front],
        c=[point.ttft_s for point in front],
        edgecolors=["red" if is_taken else "none" for is_taken in taken],
        linewidths=2,
        cmap="viridis",
    )
    figure.colorbar(dots, label="TTFT, s")
    axes.set(xlabel="price per hour", ylabel="TPOT, ms", ylim=(0, 1.1 * max(times_ms)))
    axes.margins(x=0.1)
    axes.set_title("Engines that none beats; size: tokens/s; red ring: the plan", fontsize=10)
    axes.grid(alpha=0.3)
    lines = []
    for number, (point, is_taken) in enumerate(zip(front, taken, strict=True), 1):
        at = (prices[number - 1], times_ms[number - 1])
        axes.annotate(
            f"{number}", at, (9, 5 if number % 2 else -11), textcoords="offset points", fontsize=9
        )
        name = f"{point.copies} times {point.engine}" if point.copies > 1 else point.engine
        told = f"{number}  {name}: {point.tokens_per_s:.4g} tokens/s"
        lines.append(f"{told} (the plan)" if is_taken else told)
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8)
    figure.savefig(path, dpi=120)

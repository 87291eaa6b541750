"""The load tester's pictures: a run's latencies and timeline, a sweep's front, a comparison.

Owns only their look: numbers come from series, sweep and compare. Each function returns a PNG.
Needs matplotlib (the extra `plots`), which is imported only when a picture is drawn, and draws
without its global state.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from benchmarks.load import series
from benchmarks.load.compare import NAMES
from benchmarks.load.contracts import Run
from benchmarks.load.sweep import Knee, Point, pareto
from topspin.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart without red and green.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
# Different colours from those of the first runs, because both are in one picture.
_PHASES = {"queued in the client": "#B0B0B0", "prefill": "#E69F00", "decode": "#8C8CC6"}
_FAILED = "#B00020"
_DASHES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "wait between arrivals",
    "e2el": "end-to-end latency",
}
_DPI = 110
_TIMELINES_IN_A_ROW = 3
_MOST_CURVE_POINTS = 2000
# Latencies get a logarithmic axis if max / min is larger than this.
_WIDE_RANGE = 30
# A concurrency curve with more steps than this is drawn as its mean in each bin.
_MOST_STEPS = 400


class RunPicture(NamedTuple):
    """The data drawn for one run; `latencies_ms` has the keys ttft, tpot, itl and e2el."""

    name: str
    run: Run
    latencies_ms: Mapping[str, Sequence[float]]


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_can_draw() -> None:
    """Raise ConfigError if matplotlib is not installed; call it before a long run."""
    if not can_draw():
        raise ConfigError("pictures need matplotlib: pip install -e '.[plots]'")


def _figure(width: float, height: float) -> Figure:
    check_can_draw()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=_DPI)
    return data.getvalue()


def draw_runs(runs: Sequence[RunPicture], *, title: str) -> bytes:
    """Draw latency CDFs, throughput and concurrency over time, and a timeline for each run.

    Raises ConfigError if matplotlib is not installed.
    """
    columns = min(len(runs), _TIMELINES_IN_A_ROW)
    timeline_rows = math.ceil(len(runs) / columns)
    heights = [3.2, 2.8, *[3.6] * timeline_rows]
    figure = _figure(14, sum(heights) + 0.6)
    figure.suptitle(title, fontsize=13)
    grid = figure.add_gridspec(2 + timeline_rows, 12, height_ratios=heights)
    for idx, (key, name) in enumerate(_LATENCIES.items()):
        axes = figure.add_subplot(grid[0, 3 * idx : 3 * idx + 3])
        _draw_distribution(axes, runs, key)
        axes.set_title(f"{key.upper()}: {name}", fontsize=10)
        if idx == 0:
            axes.set_ylabel("share of requests (ITL: of waits)")
    _draw_throughput(figure.add_subplot(grid[1, :6]), runs)
    _draw_concurrency(figure.add_subplot(grid[1, 6:]), runs)
    longest_s = max(picture.run.duration_s for picture in runs)
    width = 12 // columns
    for idx, picture in enumerate(runs):
        row, column = divmod(idx, columns)
        axes = figure.add_subplot(grid[2 + row, column * width : (column + 1) * width])
        _draw_timeline(axes, picture, longest_s, height_in=heights[2 + row])
        if column == 0:
            axes.set_ylabel("request")
    _legend(figure, runs)
    return _png(figure)


def _legend(figure: Figure, runs: Sequence[RunPicture]) -> None:
    """Name the runs and the phases once, below all pictures."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=_colour(idx), linestyle=_style(idx), linewidth=2, label=picture.name)
        for idx, picture in enumerate(runs)
    ]
    handles += [
        Line2D([], [], color=colour, linewidth=6, label=name) for name, colour in _PHASES.items()
    ]
    handles.append(Line2D([], [], color=_FAILED, marker="x", linestyle="", label="failed"))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=9, frameon=False)


def _draw_distribution(axes: Axes, runs: Sequence[RunPicture], key: str) -> None:
    shown: list[float] = []
    for idx, picture in enumerate(runs):
        curve = series.cdf(picture.latencies_ms[key])
        if not len(curve.values):
            continue
        few = np.unique(np.linspace(0, len(curve.values) - 1, _MOST_CURVE_POINTS).astype(int))
        x, y = curve.times_s[few], curve.values[few]
        axes.step(
            *(np.append(x[0], x), np.append(0.0, y)),
            where="post",
            color=_colour(idx),
            linestyle=_style(idx),
            linewidth=1.6,
        )
        shown += [float(x[0]), float(x[-1])]
    positive = [value for value in shown if value > 0]
    if positive and max(positive) > _WIDE_RANGE * min(positive):
        _log_axis(axes)
    elif positive:
        axes.set_xlim(0, max(positive) * 1.05)
    if not shown:
        axes.text(0.5, 0.5, "no samples", ha="center", va="center", transform=axes.transAxes)
    axes.set_ylim(0, 1.02)
    for share in (0.5, 0.9, 0.99):
        axes.axhline(share, color="#DDDDDD", linewidth=0.8, zorder=0)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.9, 0.99], ["0", "25 %", "50 %", "75 %", "90 %", "99 %"])
    axes.tick_params(labelsize=8)
    axes.set_xlabel("ms")


def _log_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_throughput(axes: Axes, runs: Sequence[RunPicture]) -> None:
    longest_s = max(picture.run.duration_s for picture in runs)
    width_s = series.bin_width_s(longest_s)
    for idx, (_, run, _) in enumerate(runs):
        _steps(axes, series.throughput(run, width_s), run.duration_s, idx)
    axes.set_title(f"output tokens per second, in bins of {width_s:g} s", fontsize=10)
    _time_axis(axes, longest_s)
    axes.set_ylabel("tokens/s")


def _draw_concurrency(axes: Axes, runs: Sequence[RunPicture]) -> None:
    from matplotlib.ticker import MaxNLocator

    longest_s = max(picture.run.duration_s for picture in runs)
    width_s = series.bin_width_s(longest_s)
    curves = [series.concurrency(picture.run.records) for picture in runs]
    crowded = max(len(curve.values) for curve in curves) > _MOST_STEPS
    for idx, (picture, curve) in enumerate(zip(runs, curves, strict=True)):
        duration_s = picture.run.duration_s
        shown = series.averages(curve, width_s, duration_s) if crowded else curve
        _steps(axes, shown, duration_s, idx)
    how = f", mean in bins of {width_s:g} s" if crowded else ""
    axes.set_title(f"requests with the server{how}", fontsize=10)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _time_axis(axes, longest_s)
    axes.set_ylabel("requests")


def _steps(axes: Axes, curve: series.Curve, end_s: float, idx: int) -> None:
    """Draw a step curve whose last value holds until `end_s`."""
    axes.step(
        *(np.append(curve.times_s, end_s), np.append(curve.values, curve.values[-1])),
        where="post",
        color=_colour(idx),
        linestyle=_style(idx),
        linewidth=1.4,
    )


def _time_axis(axes: Axes, longest_s: float) -> None:
    axes.set_xlim(0, longest_s * 1.01)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds from the start")
    axes.grid(color="#EEEEEE", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _draw_timeline(axes: Axes, picture: RunPicture, longest_s: float, *, height_in: float) -> None:
    """Draw one line per request, in the order of intended times, from the top."""
    from matplotlib.ticker import MaxNLocator

    found = series.bars(picture.run)
    thickness = min(9.0, max(1.0, 0.75 * 0.8 * height_in * 72 / max(1, len(found))))
    rows = np.arange(len(found))
    edges = np.array([bar[:4] for bar in found]).reshape(-1, 4)
    for idx, colour in enumerate(_PHASES.values()):
        axes.hlines(rows, edges[:, idx], edges[:, idx + 1], colors=colour, linewidth=thickness)
    failed = [row for row, bar in enumerate(found) if not bar.ok]
    axes.plot(edges[failed, 3], failed, "x", color=_FAILED, markersize=5)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0, longest_s * 1.01)
    axes.set_xlabel("seconds from the start")
    axes.set_title(f"timeline: {picture.name}", fontsize=10)
    axes.tick_params(labelsize=8)


def draw_sweep(points: Sequence[Point], knee: Knee, *, title: str, load_name: str) -> bytes:
    """Draw output throughput against median TPOT and median TTFT, each with its Pareto front."""
    figure = _figure(12, 4.8)
    figure.suptitle(title, fontsize=12)
    measured = sorted((p for p in points if p.is_measured), key=lambda point: point.load)
    latencies = {"median_tpot_ms": "median TPOT (ms)", "median_ttft_ms": "median TTFT (ms)"}
    for idx, (key, name) in enumerate(latencies.items()):
        axes = figure.add_subplot(1, 2, idx + 1)
        shown = [point for point in measured if point.figures[key] is not None]
        front = pareto(points, key)
        axes.plot(*_xy(front, key), "-", color=COLOURS[0], label="Pareto front", linewidth=1.4)
        axes.plot(*_xy(shown, key), "o", color=COLOURS[0], label=f"one {load_name}")
        chosen = [point for point in shown if point.load == knee.load]
        if chosen:
            label = f"knee: {load_name} {knee.load:g}"
            axes.plot(*_xy(chosen, key), "*", color=_FAILED, markersize=15, label=label)
        xs, ys = _xy(shown, key)
        axes.margins(0.12)
        if xs and max(xs) > _WIDE_RANGE * min(xs) > 0:
            _log_axis(axes)
        else:
            axes.set_xlim(0, (max(xs, default=0.0) or 1.0) * 1.12)
        axes.set_ylim(0, (max(ys, default=0.0) or 1.0) * 1.12)
        _label_points(axes, shown, key)
        axes.set_xlabel(name)
        axes.set_ylabel("output tokens/s")
        axes.grid(color="#EEEEEE")
        axes.set_axisbelow(True)
        axes.legend(loc="lower right", fontsize=9)
    return _png(figure)


def _label_points(axes: Axes, points: Sequence[Point], key: str) -> None:
    """Write each point's load beside it, unless an earlier label is there."""
    taken: list[tuple[float, float]] = []
    for point, x, y in zip(points, *_xy(points, key), strict=True):
        at_x, at_y = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
        if any(abs(at_x - a) < 0.04 and abs(at_y - b) < 0.04 for a, b in taken):
            continue
        taken.append((at_x, at_y))
        axes.annotate(f"{point.load:g}", (x, y), xytext=(9, -11), textcoords="offset points")


def _xy(points: Sequence[Point], key: str) -> tuple[list[float], list[float]]:
    return (
        [float(point.figures[key]) for point in points],
        [float(point.figures["output_throughput"]) for point in points],
    )


def draw_compare(
    tables: Mapping[int, Mapping[str, Any]], *, title: str, floor_ms: float | None = None
) -> bytes:
    """Draw each figure as bars per concurrency and target, with the rounds' least and greatest.

    `tables` is concurrency -> compare.summarise's table. Above a bar is its median ratio to the
    first target. `floor_ms`, the least TPOT of one request, is a line across its bars.
    """
    figure = _figure(14, 8)
    figure.suptitle(title, fontsize=12)
    targets = list(next(iter(tables.values())))
    width = 0.8 / len(targets)
    for idx, (key, name) in enumerate(NAMES.items()):
        axes = figure.add_subplot(2, 3, idx + 1)
        for number, target in enumerate(targets):
            rows = [
                (at, t[target][key]) for at, t in enumerate(tables.values()) if key in t[target]
            ]
            places = [at + (number - (len(targets) - 1) / 2) * width for at, _ in rows]
            medians = [row["median"] for _, row in rows]
            spans = [
                [row["median"] - row["least"] for _, row in rows],
                [row["greatest"] - row["median"] for _, row in rows],
            ]
            axes.bar(places, medians, width * 0.92, color=COLOURS[number % len(COLOURS)])
            axes.errorbar(places, medians, spans, fmt="none", ecolor="#333333", capsize=3)
            for place, (_, row) in zip(places, rows, strict=True):
                if "ratio" in row:
                    text = f"{row['ratio']['median']:.2f}x"
                    axes.annotate(
                        *(text, (place, row["greatest"])),
                        xytext=(0, 4),
                        textcoords="offset points",
                        ha="center",
                        fontsize=8,
                    )
        if key == "median_tpot_ms" and floor_ms is not None and 1 in tables:
            at = list(tables).index(1)
            axes.hlines(floor_ms, at - 0.48, at + 0.48, colors="black", linestyles="--")
        axes.set_xticks(range(len(tables)), [f"{at} at once" for at in tables])
        axes.set_title(
            f"{name}, {'less' if key.endswith('_ms') else 'more'} is better", fontsize=10
        )
        axes.margins(y=0.12)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#EEEEEE")
        axes.set_axisbelow(True)
    _name_targets(figure.add_subplot(2, 3, 6), targets, floor_ms)
    return _png(figure)


def _name_targets(axes: Axes, targets: Sequence[str], floor_ms: float | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    axes.axis("off")
    handles: list[Artist] = [
        Patch(color=COLOURS[idx % len(COLOURS)], label=name) for idx, name in enumerate(targets)
    ]
    if floor_ms is not None:
        label = f"byte floor, {floor_ms:.2f} ms"
        handles.append(Line2D([], [], color="black", linestyle="--", label=label))
    note = f"bars: median of the rounds\nwhiskers: least and greatest\n1.00x: {targets[0]}"
    axes.legend(handles=handles, loc="upper left", title=note, alignment="left", frameon=False)


def _colour(idx: int) -> str:
    return COLOURS[idx % len(COLOURS)]


def _style(idx: int) -> Literal["-", "--", ":", "-."]:
    """Return a run's line style: runs beyond the palette repeat its colours with another dash."""
    return _DASHES[idx // len(COLOURS) % len(_DASHES)]

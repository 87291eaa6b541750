"""The report of one or several runs: a self-contained HTML page with their tables and a picture.

Owns the page and the picture, which needs matplotlib (the extra `plots`). The tables are those of
the terminal (benchmarks.load.figures.view).
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from benchmarks.experiment import COLOURS, TextTable, can_draw, show
from benchmarks.load.contracts import LoadRun
from benchmarks.load.figures import series
from benchmarks.load.figures.metrics import LATENCIES, latencies_ms, measure_run
from benchmarks.load.figures.view import tables_of
from topspin.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PERCENTILES = (90.0, 99.0)
_WIDTH = 160


def check_report(path: Path | None) -> None:
    """Raise ConfigError if a report cannot be written to `path`; call it before a long run."""
    if path is None:
        return
    if path.suffix != ".html":
        raise ConfigError(f"{path}: a report is a file named .html")
    if not can_draw():
        raise ConfigError("a report has a picture, which needs matplotlib: pip install '.[plots]'")


def write_report(path: Path, runs: Mapping[str, LoadRun], *, title: str) -> None:
    """Write the report of `runs` (name -> run, at least one) to `path`."""
    console = Console(record=True, file=io.StringIO(), width=_WIDTH)
    measured = {
        name: (run, measure_run(run, percentiles=_PERCENTILES)) for name, run in runs.items()
    }
    show([Text(title, style="bold"), *tables_of(measured), _settings(runs)], console)
    page = console.export_html(inline_styles=True)
    alt = "distributions of the latencies, throughput and concurrency over time"
    image = base64.b64encode(_png(runs)).decode("ascii")
    picture = f'<img alt="{alt}" src="data:image/png;base64,{image}">'
    head = f"<title>{html.escape(title)}</title>"
    page = page.replace("</head>", f"{head}</head>", 1).replace("</body>", f"{picture}</body>", 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _settings(runs: Mapping[str, LoadRun]) -> TextTable:
    """Return each run's target, load and dataset; never keys or headers."""
    columns: list[dict[str, Any]] = [
        {
            "started": run.started_at,
            "url": run.target.url,
            "model": run.target.model,
            "extra body": run.target.extra_body,
            **dataclasses.asdict(run.load),
            **run.settings,
        }
        for run in runs.values()
    ]
    keys = dict.fromkeys(key for each in columns for key in each)
    rows = [[key, *(str(each.get(key, "-")) for each in columns)] for key in keys]
    return TextTable(["settings", *runs], rows)


def _png(runs: Mapping[str, LoadRun]) -> bytes:
    from matplotlib.figure import Figure

    figure, data = Figure(figsize=(15, 8), layout="constrained"), io.BytesIO()
    _draw(runs, figure)
    figure.savefig(data, format="png", dpi=110)
    return data.getvalue()


def _draw(runs: Mapping[str, LoadRun], figure: Figure) -> None:
    """Draw the latencies' distributions, and throughput and concurrency over time."""
    panels = figure.subplots(2, 3).flat
    for axes, name in zip(panels, LATENCIES, strict=False):
        axes.set(title=name.upper(), xlabel="ms", ylabel="share", xscale="symlog", ylim=(0, 1.02))
        for idx, run in enumerate(runs.values()):
            values = np.sort(latencies_ms(run)[name])
            shares = np.arange(1, len(values) + 1) / max(1, len(values))
            axes.step(values, shares, where="post", color=COLOURS[idx % len(COLOURS)])
    tokens, requests = panels[4], panels[5]
    tokens.set(title="output tokens per second", xlabel="seconds from the start")
    requests.set(title="requests with the server", xlabel="seconds from the start")
    for idx, (name, run) in enumerate(runs.items()):
        curves = ((tokens, series.throughput(run)), (requests, series.concurrency(run.records)))
        for axes, curve in curves:
            colour = COLOURS[idx % len(COLOURS)]
            axes.step(curve.times_s, curve.values, where="post", color=colour, label=name)
            axes.set_ylim(bottom=0)
    figure.legend(*requests.get_legend_handles_labels(), loc="outside lower center", ncols=6)

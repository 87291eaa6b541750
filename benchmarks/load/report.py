"""The report of one or several runs: a PNG, or one self-contained HTML page.

Owns the page and its choice of figures. The pictures come from benchmarks.load.pictures, the
figures from benchmarks.load.metrics; several runs are side by side, one column each.
"""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.load import metrics, pictures
from benchmarks.load.contracts import Run
from benchmarks.load.result import LATENCIES, result_json
from topspin.errors import ConfigError

SUFFIXES = (".html", ".png")
_PERCENTILES = (90.0, 99.0)
_FIGURES = {
    "Requests answered": "completed",
    "Requests failed": "failed",
    "Duration (s)": "duration",
    "Prompt tokens": "total_input_tokens",
    "Output tokens": "total_output_tokens",
    "Requests per second": "request_throughput",
    "Output tokens per second": "output_throughput",
    "Output tokens in the best second": "max_output_tokens_per_s",
    "Most requests at once": "max_concurrent_requests",
}
_CLIENT = {
    "Share of one core": ("cpu_share", 100.0, "%"),
    "Event loop late, p99": ("loop_lag_p99_s", 1000.0, "ms"),
    "Requests sent late, p99": ("send_lateness_p99_s", 1000.0, "ms"),
}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 76em; color: #222; }
table { border-collapse: collapse; margin: 0.5em 0 1.5em; }
th, td { padding: 0.25em 0.9em; border-bottom: 1px solid #ddd; text-align: left; }
td { text-align: right; font-variant-numeric: tabular-nums; }
td.text { text-align: left; overflow-wrap: anywhere; }
img { max-width: 100%; }
.warning { background: #fbe9e7; border-left: 4px solid #b00020; padding: 0.6em 1em; }
"""


def check_path(path: Path) -> None:
    """Raise ConfigError if `path` has an unknown suffix; call it before a long run."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: a report is a file named {' or '.join(SUFFIXES)}")


def write_report(path: Path, runs: Mapping[str, Run], *, title: str) -> None:
    """Write the report of `runs` (name -> run, at least one) to `path`, .html or .png.

    Raises ConfigError for another suffix, and if matplotlib is not installed.
    """
    check_path(path)
    drawn = [pictures.RunPicture(name, run, latencies_ms(run)) for name, run in runs.items()]
    png = pictures.draw_runs(drawn, title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        path.write_bytes(png)
    else:
        path.write_text(report_html(runs, title=title, png=png), encoding="utf-8")


def latencies_ms(run: Run) -> dict[str, list[float]]:
    """Return the latencies of the successful requests, and the waits between arrivals."""
    good = [record for record in run.records if record.ok]
    per_request = {"ttft": metrics.ttft_s, "tpot": metrics.tpot_s, "e2el": metrics.e2el_s}
    found = {
        name: [value * 1000 for record in good if (value := latency(record)) is not None]
        for name, latency in per_request.items()
    }
    found["itl"] = [wait * 1000 for record in good for wait in metrics.itls_s(record)]
    return found


def report_html(runs: Mapping[str, Run], *, title: str, png: bytes) -> str:
    """Return the page: figures, pictures, the client's health and the settings."""
    results = [
        result_json(run, metrics.measure_run(run, percentiles=_PERCENTILES))
        for run in runs.values()
    ]
    picture = base64.b64encode(png).decode("ascii")
    alt = "distributions of the latencies, throughput and concurrency over time, timelines"
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        *(_warning(name, run) for name, run in runs.items() if run.health.saturated),
        *(_interrupted(name, run) for name, run in runs.items() if run.interrupted),
        _table("Figures", runs, _figure_rows(results)),
        _table("Latency (ms), from the intended send time", runs, _latency_rows(results)),
        _table("Errors", runs, _error_rows(results)),
        f'<img alt="{alt}" src="data:image/png;base64,{picture}">',
        _table("Client", runs, _client_rows(list(runs.values()))),
        _table("Settings", runs, _setting_rows(list(runs.values()), results), is_text=True),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _warning(name: str, run: Run) -> str:
    reasons = html.escape(" ".join(run.health.reasons))
    return (
        f'<p class="warning"><b>{html.escape(name)}: the client is saturated; its figures are the '
        f"client's limits, not the server's.</b> {reasons}</p>"
    )


def _interrupted(name: str, run: Run) -> str:
    ended = sum(record.error_kind != "interrupted" for record in run.records)
    return (
        f'<p class="warning">{html.escape(name)}: the run was interrupted after {ended} of '
        f"{run.num_requested} requests.</p>"
    )


_Row = tuple[str, Sequence[Any]]


def _table(title: str, names: Iterable[str], rows: Sequence[_Row], *, is_text: bool = False) -> str:
    """Return a table with a column per run, or nothing if there are no rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    open_cell = '<td class="text">' if is_text else "<td>"
    body = "\n".join(
        f"<tr><th>{html.escape(name)}</th>"
        + "".join(f"{open_cell}{html.escape(_shown(value))}</td>" for value in values)
        + "</tr>"
        for name, values in rows
    )
    return f"<h2>{html.escape(title)}</h2>\n<table>\n<tr><th></th>{head}</tr>\n{body}\n</table>"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _figure_rows(results: Sequence[Mapping[str, Any]]) -> list[_Row]:
    return [(name, [result[key] for result in results]) for name, key in _FIGURES.items()]


def _latency_rows(results: Sequence[Mapping[str, Any]]) -> list[_Row]:
    statistics = ["mean", "median", "std", *(f"p{p:g}" for p in _PERCENTILES)]
    names = [*LATENCIES, "client_queue_time"]
    return [
        (
            f"{name.upper() if name in LATENCIES else 'queued in the client'}, {statistic}",
            [result[f"{statistic}_{name}_ms"] for result in results],
        )
        for name in names
        for statistic in statistics
    ]


def _error_rows(results: Sequence[Mapping[str, Any]]) -> list[_Row]:
    counts = [result["topspin"]["errors_by_kind"] for result in results]
    kinds = dict.fromkeys(kind for count in counts for kind in count)
    return [(kind, [count.get(kind, 0) for count in counts]) for kind in kinds]


def _client_rows(runs: Sequence[Run]) -> list[_Row]:
    rows: list[_Row] = [
        (f"{name} ({unit})", [getattr(run.health, field) * scale for run in runs])
        for name, (field, scale, unit) in _CLIENT.items()
    ]
    return [*rows, ("Saturated", ["yes" if run.health.saturated else "no" for run in runs])]


def _setting_rows(runs: Sequence[Run], results: Sequence[Mapping[str, Any]]) -> list[_Row]:
    """Return the rows of each run's target, dataset and load; never keys or headers."""
    rows: list[_Row] = [
        ("started", [run.started_at for run in runs]),
        ("url", [run.target.url for run in runs]),
        ("model", [run.target.model for run in runs]),
        ("extra body", [run.target.extra_body for run in runs]),
        ("commit", [result["topspin"]["commit"] for result in results]),
        ("machine", [result["topspin"]["machine"] for result in results]),
    ]
    for field in dataclasses.fields(runs[0].load):
        rows.append((field.name, [str(getattr(run.load, field.name)) for run in runs]))
    given = dict.fromkeys(key for run in runs for key in run.settings)
    return [*rows, *((key, [str(run.settings.get(key, "-")) for run in runs]) for key in given)]

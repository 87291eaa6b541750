"""The display of a load test: progress while it runs, and the tables at its end.

Owns both. On a terminal the progress is one live line (rich), elsewhere an occasional plain
line on stderr; the tables, a column or a line per run, go to a console, which may be a page's.
Knows no request: it is given snapshots and figures.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from benchmarks.load.client.runner import Snapshot
from benchmarks.load.contracts import Run
from benchmarks.load.figures.metrics import LATENCIES, QUEUE

PLAIN_PERIOD_S = 10.0
PLAIN_WIDTH = 100
# Names of figures -> their keys and formats.
_FIGURES = {
    "Successful requests": ("completed", ""),
    "Failed requests": ("failed", ""),
    "Duration (s)": ("duration", ".2f"),
    "Input tokens": ("total_input_tokens", ""),
    "Output tokens": ("total_output_tokens", ""),
    "Request throughput (req/s)": ("request_throughput", ".2f"),
    "Request goodput (req/s)": ("request_goodput", ".2f"),
    "Output token throughput (tok/s)": ("output_throughput", ".2f"),
    "Best second (tok/s)": ("max_output_tokens_per_s", ".0f"),
    "Total token throughput (tok/s)": ("total_token_throughput", ".2f"),
    "Peak concurrent requests": ("max_concurrent_requests", ""),
}
_LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Wait between arrivals (ITL)",
    "e2el": "End-to-end latency",
    QUEUE: "Of which queued in the client",
}


class Progress:
    """Shows snapshots while its `with` block runs; `show` is a Watch of the runner."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._quiet = quiet
        self._live: Live | None = None
        self._next_line_s = 0.0
        self._before: Snapshot | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._quiet:
            # No drawing thread: it would take the interpreter lock from the event loop.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, snapshot: Snapshot) -> None:
        """Show the state of the run."""
        if self._quiet:
            return
        line = progress_line(snapshot, self._before)
        if self._live is not None:
            self._before = snapshot
            self._live.update(_with_bar(line, snapshot), refresh=True)
        elif snapshot.elapsed_s >= self._next_line_s:
            self._before = snapshot
            self._next_line_s = snapshot.elapsed_s + PLAIN_PERIOD_S
            print(line, file=sys.stderr, flush=True)


def progress_line(snapshot: Snapshot, before: Snapshot | None) -> str:
    """Return one line on `snapshot`, with the rate of events since `before`."""
    since = before or Snapshot(0.0, snapshot.num_requests, 0, 0, 0, 0)
    elapsed_s = max(snapshot.elapsed_s - since.elapsed_s, 1e-9)
    rate = (snapshot.num_events - since.num_events) / elapsed_s
    failed = f", {snapshot.num_failed} failed" if snapshot.num_failed else ""
    return (
        f"{snapshot.elapsed_s:6.1f} s  {snapshot.num_completed}/{snapshot.num_requests} done, "
        f"{snapshot.num_running} running{failed}, {rate:.0f} events/s"
    )


def _with_bar(line: str, snapshot: Snapshot) -> Table:
    grid = Table.grid(padding=(0, 1))
    done = snapshot.num_completed + snapshot.num_failed
    grid.add_row(ProgressBar(total=snapshot.num_requests, completed=done, width=24), Text(line))
    return grid


def plain_console() -> Console:
    """Return the console of stdout: a file or a pipe has no width to fit."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def tables_of(
    runs: Mapping[str, tuple[Run, Mapping[str, Any]]],
    latencies: Collection[str] = LATENCIES,
    *,
    title: str | None = None,
) -> Iterator[RenderableType]:
    """Yield the figures of runs side by side, their latencies, errors, and the client's health.

    `runs` is name -> the run and its figures.
    """
    results = [result for _, result in runs.values()]
    table = Table(title=title, title_justify="left", min_width=60, show_header=len(runs) > 1)
    table.add_column("figure")
    for name in runs:
        table.add_column(name, justify="right")
    for name, (key, form) in _FIGURES.items():
        values = [result[key] for result in results]
        if any(value is not None for value in values):
            table.add_row(name, *("-" if v is None else format(v, form) for v in values))
    yield table
    for name, (run, result) in runs.items():
        yield _latency_table(name if len(runs) > 1 else "Latency", result, latencies)
        yield from _remarks(run, result)


def _latency_table(name: str, result: Mapping[str, Any], latencies: Collection[str]) -> Table:
    table = Table(title=f"{name} (ms), from the intended send time", title_justify="left")
    ending = "_ttft_ms"
    statistics = [key.removesuffix(ending) for key in result if key.endswith(ending)]
    table.add_column("")
    for statistic in statistics:
        table.add_column(statistic, justify="right")
    for latency in (*latencies, QUEUE):
        values = [result[f"{statistic}_{latency}_ms"] for statistic in statistics]
        table.add_row(_LATENCIES[latency], *("-" if v is None else f"{v:.2f}" for v in values))
    return table


def _remarks(run: Run, result: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the errors by kind, and whether the client kept up."""
    ours = result["topspin"]
    if run.interrupted:
        yield Text(f"Interrupted: {ours['unfinished']} requests did not finish.", style="red")
    for kind, count in ours["errors_by_kind"].items():
        first = next(record for record in run.records if record.error_kind == kind)
        line = f"{count} x {kind}, first: request {first.index}: {first.error}"
        yield Text(line, style="red")
    if ours["requests_without_usage"]:
        yield Text(
            f"{ours['requests_without_usage']} replies came without usage: their tokens are "
            "counted by events, which is too few where an event carries several."
        )
    health = run.health
    yield Text(
        f"Client: {health.cpu_share:.0%} of a core; event loop late by "
        f"{health.loop_lag_p50_s * 1000:.1f} ms at p50, {health.loop_lag_p99_s * 1000:.1f} at "
        f"p99; requests sent late by {health.send_lateness_p99_s * 1000:.1f} ms at p99"
    )
    if health.saturated:
        reasons = "\n  ".join(("its own delays are in these figures.", *health.reasons))
        yield Text(f"THE CLIENT IS SATURATED: {reasons}", style="bold red")

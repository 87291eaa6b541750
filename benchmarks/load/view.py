"""The display of a load test: progress while it runs, and the table at its end.

Owns both. On a terminal the progress is one live line (rich), elsewhere an occasional plain
line on stderr; the table goes to stdout. Knows no request: it is given snapshots and metrics.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from benchmarks.load.contracts import Run
from benchmarks.load.metrics import Metrics, Summary
from benchmarks.load.runner import Snapshot

PLAIN_PERIOD_S = 10.0
PLAIN_WIDTH = 100
_TITLES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Wait between arrivals (ITL)",
    "e2el": "End-to-end latency",
    "queue": "Of which queued in the client",
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


def print_table(
    run: Run, metrics: Metrics, latencies: Collection[str], console: Console | None = None
) -> None:
    """Print the figures, the errors by kind, and whether the client kept up."""
    # A file or a pipe has no width to fit, and a folded table is hard to read.
    console = console or Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    title = f"{run.target.model} at {run.target.url}"
    table = Table(title=title, show_header=False, title_justify="left", min_width=60)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in _totals(run, metrics):
        table.add_row(name, value)
    console.print(table)
    console.print(_latency_table(metrics, latencies))
    _print_errors(run, metrics, console)
    _print_health(run, console)


def _totals(run: Run, metrics: Metrics) -> list[tuple[str, str]]:
    rows = [
        ("Successful requests", str(metrics.completed)),
        ("Failed requests", str(metrics.failed)),
    ]
    if run.interrupted:
        rows.append(("Unfinished requests (interrupted)", str(metrics.unfinished)))
    rows += [
        ("Duration (s)", f"{metrics.duration_s:.2f}"),
        ("Input tokens", str(metrics.total_input_tokens)),
        ("Output tokens", str(metrics.total_output_tokens)),
        ("Request throughput (req/s)", f"{metrics.request_throughput:.2f}"),
    ]
    if metrics.request_goodput is not None:
        rows.append(("Request goodput (req/s)", f"{metrics.request_goodput:.2f}"))
    rows += [
        ("Output token throughput (tok/s)", f"{metrics.output_throughput:.2f}"),
        ("Best second (tok/s)", f"{metrics.max_output_tokens_per_s:.0f}"),
        ("Total token throughput (tok/s)", f"{metrics.total_token_throughput:.2f}"),
        ("Peak concurrent requests", str(metrics.max_concurrent_requests)),
    ]
    if metrics.tokens_per_arrival is not None:
        rows.append(("Output tokens per arrival", f"{metrics.tokens_per_arrival:.2f}"))
    return rows


def _latency_table(metrics: Metrics, latencies: Collection[str]) -> Table:
    table = Table(title="Latency (ms), from the intended send time", title_justify="left")
    table.add_column("")
    percentiles = list(metrics.ttft.percentiles or {})
    for name in ("mean", "median", "std", *(f"P{percentile:g}" for percentile in percentiles)):
        table.add_column(name, justify="right")
    for name in (*latencies, "queue"):
        summary: Summary = getattr(metrics, name)
        values = (summary.mean, summary.median, summary.std)
        tail = (summary.percentiles or {}).values()
        table.add_row(_TITLES[name], *(_ms(value) for value in (*values, *tail)))
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.2f}"


def _print_errors(run: Run, metrics: Metrics, console: Console) -> None:
    for kind, count in metrics.errors.items():
        first = next(record for record in run.records if record.error_kind == kind)
        line = f"{count} x {kind}, first: request {first.index}: {first.error}"
        console.print(Text(line, style="red"), soft_wrap=True)
    if metrics.num_without_usage:
        console.print(
            f"{metrics.num_without_usage} replies came without usage: their tokens are counted "
            "by events, which is too few where an event carries several."
        )


def _print_health(run: Run, console: Console) -> None:
    health = run.health
    console.print(
        f"Client: {health.cpu_share:.0%} of a core; event loop late by "
        f"{health.loop_lag_p50_s * 1000:.1f} ms at p50, {health.loop_lag_p99_s * 1000:.1f} at "
        f"p99; requests sent late by {health.send_lateness_p99_s * 1000:.1f} ms at p99",
        soft_wrap=True,
    )
    if health.saturated:
        warning = "THE CLIENT IS SATURATED: its own delays are in these figures."
        console.print(Text(warning, style="bold red"), soft_wrap=True)
        for reason in health.reasons:
            console.print(Text(f"  {reason}", style="red"), soft_wrap=True)

"""The display of a load test: progress while it runs, and the tables at its end.

Owns both. On a terminal the progress is one live line (rich), elsewhere an occasional plain
line on stderr; the tables have a column or a line per run. Knows no request: it is given
snapshots and figures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from benchmarks.experiment import TextTable, cell, say
from benchmarks.load.client.http import Snapshot
from benchmarks.load.client.runner import Watch
from benchmarks.load.contracts import LoadRun
from benchmarks.load.figures.metrics import LATENCIES, QUEUE

PLAIN_PERIOD_S = 10.0
_FIGURES = {
    "Successful requests": "{completed}",
    "Failed requests": "{failed}",
    "Duration (s)": "{duration:.2f}",
    "Input tokens": "{total_input_tokens}",
    "Output tokens": "{total_output_tokens}",
    "Request throughput (req/s)": "{request_throughput:.2f}",
    "Request goodput (req/s)": "{request_goodput:.2f}",
    "Output token throughput (tok/s)": "{output_throughput:.2f}",
    "Best second (tok/s)": "{max_output_tokens_per_s:.0f}",
    "Total token throughput (tok/s)": "{total_token_throughput:.2f}",
    "Peak concurrent requests": "{max_concurrent_requests}",
}
_LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token after the first",
    "itl": "Wait between arrivals (ITL)",
    "e2el": "End-to-end latency",
    QUEUE: "Of which queued in the client",
}


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Watch]:
    """Yield what shows the state of a run: in one line on a terminal, else in one now and then."""
    console = Console(stderr=True)
    # No drawing thread: it would take the interpreter lock from the event loop.
    live = Live(console=console, auto_refresh=False, transient=True)
    before, next_line_s = Snapshot(), 0.0

    def show(snapshot: Snapshot) -> None:
        nonlocal before, next_line_s
        if quiet or snapshot.elapsed_s < next_line_s:
            return
        line, before = progress_line(snapshot, before), snapshot
        if console.is_terminal:
            live.update(line, refresh=True)
        else:
            next_line_s = snapshot.elapsed_s + PLAIN_PERIOD_S
            say(line)

    with live if console.is_terminal and not quiet else nullcontext():
        yield show


def progress_line(snapshot: Snapshot, before: Snapshot) -> str:
    """Return one line on `snapshot`, with the rate of events since `before`."""
    elapsed_s = max(snapshot.elapsed_s - before.elapsed_s, 1e-9)
    rate = (snapshot.num_events - before.num_events) / elapsed_s
    failed = f", {snapshot.num_failed} failed" if snapshot.num_failed else ""
    return (
        f"{snapshot.elapsed_s:6.1f} s  {snapshot.num_completed}/{snapshot.num_requests} done, "
        f"{snapshot.num_running} running{failed}, {rate:.0f} events/s"
    )


def tables_of(
    runs: Mapping[str, tuple[LoadRun, Mapping[str, Any]]], latencies: Collection[str] = LATENCIES
) -> Iterator[TextTable | str | Text]:
    """Yield the figures of runs side by side, their latencies, errors, and the client's health.

    `runs` is name -> the run and its figures.
    """
    results = [result for _, result in runs.values()]
    rows = [[name, *(cell(form, each) for each in results)] for name, form in _FIGURES.items()]
    yield TextTable(["figure", *runs], [row for row in rows if set(row[1:]) != {"-"}])
    for name, (run, result) in runs.items():
        ending = "_ttft_ms"
        statistics = [key.removesuffix(ending) for key in result if key.endswith(ending)]
        yield TextTable(
            [f"{name} latency (ms), from the intended send time".lstrip(), *statistics],
            [
                [_LATENCIES[each], *(_ms(result[f"{name}_{each}_ms"]) for name in statistics)]
                for each in (*latencies, QUEUE)
            ],
        )
        yield from _remarks(run, result)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _remarks(run: LoadRun, result: Mapping[str, Any]) -> Iterator[str | Text]:
    """Yield the errors by kind, and whether the client kept up."""
    ours = result["topspin"]
    if run.interrupted:
        yield Text(f"Interrupted: {ours['unfinished']} requests did not finish.", style="red")
    for kind, count in ours["errors_by_kind"].items():
        first = next(record for record in run.records if record.error_kind == kind)
        line = f"{count} x {kind}, first: request {first.index}: {first.error}"
        yield Text(line, style="red")
    if ours["requests_without_usage"]:
        yield (
            f"{ours['requests_without_usage']} replies came without usage: their tokens are "
            "counted by events, which is too few where an event carries several."
        )
    health = run.health
    yield (
        f"Client: {health.cpu_share:.0%} of a core; event loop late by "
        f"{health.loop_lag_p50_s * 1000:.1f} ms at p50, {health.loop_lag_p99_s * 1000:.1f} at "
        f"p99; requests sent late by {health.send_lateness_p99_s * 1000:.1f} ms at p99"
    )
    if health.saturated:
        reasons = "\n  ".join(("its own delays are in these figures.", *health.reasons))
        yield Text(f"THE CLIENT IS SATURATED: {reasons}", style="bold red")

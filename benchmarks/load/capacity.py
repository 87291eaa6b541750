"""How much load can the load tester drive from one core? Streams, events/s, CPU share, lag.

Owns the measurement and its JSON (results/load_client.json): the client of `topspin bench serve`
against benchmarks.load.flood in another process, one row per rate of events. The server is cheap,
but if both share a core its work slows the client; the CPU time per event does not depend on that.
Run as `python -m benchmarks.load.capacity`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.load.contracts import BenchRequest, Load, Target
from benchmarks.load.metrics import peak_concurrency
from benchmarks.load.runner import run_load

# All streams begin within this time, evenly, so that the start is not one burst.
START_S = 2.0
PROMPT = list(range(128))


@contextmanager
def flood(period_s: float) -> Iterator[str]:
    """Run the server in a separate process; yields its base URL."""
    command = [sys.executable, "-P", "-m", "benchmarks.load.flood"]
    with subprocess.Popen(
        [*command, "--period-ms", str(period_s * 1000)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"


def measure(num_streams: int, period_s: float, seconds: float) -> dict[str, Any]:
    """Drive `num_streams` streams of one event a period for `seconds`; return one row."""
    num_tokens = max(2, round(seconds / period_s))
    requests = [BenchRequest(max_tokens=num_tokens, prompt=PROMPT) for _ in range(num_streams)]
    load = Load(request_rate=num_streams / START_S, burstiness=float("inf"))
    with flood(period_s) as url:
        cpu_before = time.process_time()
        run = run_load(Target(url, "flood"), requests, load)
        cpu_s = time.process_time() - cpu_before
    num_events = sum(record.num_events for record in run.records)
    return {
        "streams": num_streams,
        "peak_streams": peak_concurrency(run.records),
        "failed": sum(not record.ok for record in run.records),
        "events_per_s": num_events / run.duration_s,
        # All CPU time, including the requests' preparation and connections.
        "cpu_us_per_event": cpu_s / max(num_events, 1) * 1e6,
        "cpu_share": run.health.cpu_share,
        "loop_lag_p99_ms": run.health.loop_lag_p99_s * 1000,
        "send_lateness_p99_ms": run.health.send_lateness_p99_s * 1000,
        "saturated": run.health.saturated,
    }


def main(flags: Sequence[str] | None = None) -> int:
    """Measure every period, print the table and write the JSON; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load.capacity")
    parser.add_argument("--streams", type=int, default=2000, metavar="N")
    parser.add_argument("--periods-ms", type=float, nargs="+", default=[400, 200, 100])
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="of each stream")
    parser.add_argument("--write", action="store_true", help="write results/load_client.json")
    parsed = parser.parse_args(flags)
    rows = [measure(parsed.streams, ms / 1000, parsed.seconds) for ms in parsed.periods_ms]
    table = Table()
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if parsed.write:
        print(f"Written to {report.write('load_client', {'rows': rows})}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The time from `topspin serve` to the first token by its phases, and the memory of each process.

Starts the engine several times and timestamps its log lines: processes started (a role has imported
its modules and sent Hello), weights loaded and packed, ready; then the first request and a second
one. Memory is the proportional set size (PSS: shared pages count once) of each process, idle after
these requests. The files are in the page cache from the second start on. Then each node is killed
once while streams run, and their longest pause is told. Run as `topspin bench startup`.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.experiment import Experiment, Result, TextTable, number, say
from benchmarks.load.client.targets import first_model
from benchmarks.load.contracts import BenchRequest, Target
from benchmarks.load.figures.metrics import ttft_s
from benchmarks.servers.topspin import (
    ask_at_once,
    children_of,
    command_line,
    descendants,
    pss_bytes,
)
from models.sources.hub import DEFAULT_MODEL, resolve_model

TIMEOUT_S = 300.0
NUM_STREAMS = 8
STREAM_TOKENS = 400
KILL_AFTER_S = 2.0
_READY = re.compile(r"Topspin is ready at (\S+)")
# Phase -> the log line that ends it; a phase ends with the last process that logs it.
_PHASES = (
    ("gateway listens", re.compile(r"gateway: listens")),
    ("nodes imported", re.compile(r"(attention|expert) \d+ joined")),
    ("weights loaded and packed", re.compile(r"scheduler: (attention|expert) \d+ ready")),
    ("ready", _READY),
)
# Command line -> role.
_ROLES = {
    "app.launch.standby_process": "standby",
    "server.gateway": "gateway",
    "server.scheduler": "scheduler",
    "app.launch.local_node": "local node",
    "attention_nodes": "attention nodes",
    "expert_nodes": "expert nodes",
    "topspin serve": "supervisor",
}


def run_once(model: str, flags: Sequence[str]) -> dict[str, Any]:
    """Start, send two requests, stop; returns seconds by phase (from the start), MB by role."""
    started_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "topspin", "serve", model, "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        stamps, url = phases(_stamped(process.stdout, started_s))
        stamps["first token of a first request"] = _ask(url)
        stamps["first token of a second request"] = _ask(url)
        pss_mb = memory(process.pid)
        return {"seconds": stamps, "pss_mb": pss_mb, "pause_s": pauses(url, process.pid)}
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=TIMEOUT_S)


def _stamped(lines: Iterator[str], started_s: float) -> Iterator[tuple[float, str]]:
    for line in lines:
        yield time.perf_counter() - started_s, line


def phases(lines: Iterator[tuple[float, str]]) -> tuple[dict[str, float], str]:
    """Return the end of each phase, in seconds, and the server's URL; reads up to that line.

    `lines` are (seconds since the start, log line).
    """
    ends: dict[str, float] = {}
    for at_s, line in lines:
        for name, pattern in _PHASES:
            if pattern.search(line):
                ends[name] = at_s
        if found := _READY.search(line):
            return ends, found[1]
    raise SystemExit("topspin serve ended before it was ready")


def _ask(url: str) -> float:
    """Return the seconds to the first token of a short request."""
    request = BenchRequest(prompt="The sky is", max_tokens=4, extra_body={"temperature": 0})
    (record,) = ask_at_once(Target(url, first_model(url)), [request]).records
    seconds = ttft_s(record)
    if seconds is None:
        raise SystemExit("a request had no token")
    return seconds


def pauses(url: str, pid: int) -> dict[str, float]:
    """Return the longest pause of running streams by the role of the node that is killed (s).

    `pid` is the supervisor. Raises EngineUnavailable if a stream is lost.
    """
    found = {}
    for role in ("app.launch.local_node", "expert_nodes", "attention_nodes"):
        if (node := _child_with(role, pid)) is not None:
            kill = threading.Timer(KILL_AFTER_S, os.kill, (node, signal.SIGKILL))
            kill.start()
            body = {"temperature": 0, "ignore_eos": True}
            request = BenchRequest(prompt="Once", max_tokens=STREAM_TOKENS, extra_body=body)
            records = ask_at_once(Target(url, first_model(url)), [request] * NUM_STREAMS).records
            if kill.is_alive():
                raise SystemExit(f"the streams ended before {KILL_AFTER_S:g} s; make them longer")
            found[_ROLES[role]] = max(
                after - before
                for record in records
                for before, after in pairwise(record.arrival_times_s)
            )
    return found


def _child_with(word: str, pid: int) -> int | None:
    """Return a child of `pid` with `word` in its command line, if there is one."""
    for child in children_of(pid):
        if word in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
            return child
    return None


def memory(pid: int) -> dict[str, float]:
    """Return MB of PSS by role, for the engine whose supervisor is `pid`."""
    found: dict[str, float] = {}
    for child in descendants(pid):
        command = command_line(child)
        role = next((role for name, role in _ROLES.items() if name in command), "other")
        found[role] = found.get(role, 0.0) + pss_bytes(child) / 1e6
    return {**found, "all": sum(found.values())}


def layout(result: Result) -> Iterator[TextTable | str]:
    """Yield seconds until each phase's end, and memory by role."""
    yield f"{result['model']}, {result['weights_mb']:.0f} MB of weights:"
    yield _medians("until", "seconds", result["seconds"])
    yield _medians("memory (PSS) of", "MB", result["pss_mb"])
    yield _medians(f"pause of {NUM_STREAMS} streams, killed:", "seconds", result["pause_s"])


def _medians(name: str, unit: str, values: Result) -> TextTable:
    return TextTable([name, unit], [[each, number(value)] for each, value in values.items()])


EXPERIMENT = Experiment("startup", __doc__, layout)


def main(argv: Sequence[str] | None = None) -> int:
    """Start several times, print medians, write the result."""
    parser = EXPERIMENT.parser(model=DEFAULT_MODEL)
    parser.add_argument("--starts", type=int, default=5)
    args, flags = parser.parse_known_args(argv)
    path = resolve_model(args.model)
    runs = []
    for start in range(1, args.starts + 1):
        say(f"start {start} of {args.starts}")
        runs.append(run_once(str(path), flags))
    medians = {
        kind: {name: statistics.median(run[kind][name] for run in runs) for name in runs[0][kind]}
        for kind in ("seconds", "pss_mb", "pause_s")
    }
    weights_mb = sum(file.stat().st_size for file in path.glob("*.safetensors")) / 1e6
    result = {"model": args.model, "flags": flags, "weights_mb": weights_mb, **medians}
    return EXPERIMENT.finish(args, {**result, "starts": runs})


if __name__ == "__main__":
    raise SystemExit(main())

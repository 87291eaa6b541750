"""What does a grammar cost a request: until its first token, and for each token?

Chats of one user in turn: without a grammar, with a schema that nobody has sent before, with one
that the server has compiled, and forced to choose one of some texts; then chats of several users at
once that share a schema, and without one. Medians of a server that this starts, or of `--url`. Run
as `python -m benchmarks.structured_output`.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.startup import phases

TIMEOUT_S = 300.0
NUM_TOKENS = 32
NUM_USERS = 8
KINDS = ("no grammar", "a new schema", "a known schema", "a choice")


def schema(number: int) -> dict[str, Any]:
    """Return a usual schema: an object with a text, a number and a list."""
    members = {
        f"name_{number}": {"type": "string", "minLength": 200},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
    }
    return {"type": "object", "properties": members, "required": list(members)}


def outputs_of(kind: str, number: int) -> dict[str, Any]:
    """Return the fields of a request of this kind."""
    if kind == "no grammar":
        return {}
    if kind == "a choice":
        return {"structured_outputs": {"choice": [f"{idx} is the answer" for idx in range(20)]}}
    return {"structured_outputs": {"json": schema(number if kind == "a new schema" else 0)}}


def ask(url: str, model: str, fields: dict[str, Any]) -> dict[str, float]:
    """Return a chat's milliseconds until its first token, and for each token behind it."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Describe a person."}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "stream": True,
        **fields,
    }
    begun_s = time.perf_counter()
    times_s = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S) as sent:
        sent.raise_for_status()
        for line in sent.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                if choices and choices[0]["delta"].get("content"):
                    times_s.append(time.perf_counter() - begun_s)
    behind = len(times_s) - 1
    token_s = (times_s[-1] - times_s[0]) / behind if behind > 0 else 0.0
    return {"ttft_ms": 1e3 * times_s[0], "token_ms": 1e3 * token_s}


def measure(url: str, *, rounds: int) -> dict[str, dict[str, float]]:
    """Return the medians of each kind of chat, in turn, and of several users at once."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(-2, rounds):
        for kind in KINDS:
            # A server keeps what it has compiled: another run is of other schemas.
            one = ask(url, model, outputs_of(kind, time.time_ns()))
            if number >= 0:  # the first ones warm up
                found.setdefault(kind, []).append(one)
    with ThreadPoolExecutor(NUM_USERS) as users:
        for _ in range(max(1, rounds // 4)):
            for kind in ("no grammar", "a known schema"):
                fields = outputs_of(kind, 0)
                for each in [users.submit(ask, url, model, fields) for _ in range(NUM_USERS)]:
                    found.setdefault(f"{kind}, {NUM_USERS} users", []).append(each.result())
    return {
        kind: {name: statistics.median(each[name] for each in times) for name in times[0]}
        for kind, times in found.items()
    }


@contextmanager
def serving(model: str, flags: Sequence[str]) -> Iterator[str]:
    """Run `topspin serve` and give its URL."""
    command = [sys.executable, "-m", "topspin", "serve", model, "--port", "0", *flags]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    try:
        yield phases((0.0, line) for line in server.stdout)[1]
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=TIMEOUT_S)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structured_output", description=__doc__
    )
    parser.add_argument("model", nargs="?", default="smollm2-moe")
    parser.add_argument("--url", help="of a server that runs, instead of one of MODEL")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-write", action="store_true", help="print only")
    args, flags = parser.parse_known_args(argv)
    if args.url:
        medians = measure(args.url, rounds=args.rounds)
    else:
        with serving(args.model, flags) as url:
            medians = measure(url, rounds=args.rounds)
    table = Table(title=f"{args.model}: medians of {args.rounds} rounds")
    table.add_column("chats with")
    table.add_column("first token, ms", justify="right")
    table.add_column("each token, ms", justify="right")
    for kind, each in medians.items():
        table.add_row(kind, f"{each['ttft_ms']:.1f}", f"{each['token_ms']:.2f}")
    console = Console()
    console.print(table)
    if not args.no_write:
        result = {"model": args.model, "flags": flags, "rounds": args.rounds, "medians": medians}
        console.print(f"written to {report.write('structured_output', result)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

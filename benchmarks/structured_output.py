"""What does a grammar cost a request: until its first token, and for each token?

Chats of one user in turn: without a grammar, with a schema that nobody has sent before, with one
that the server has compiled, and forced to choose one of some texts; then chats of several users at
once that share a schema, and without one. Medians of a server that this starts, or of `--url`; with
`--before TREE` those of another checkout's server too, which is asked in turn with this one. Run as
`python -m benchmarks.structured_output`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks import report
from benchmarks.startup import phases

TIMEOUT_S = 300.0
Medians = dict[str, dict[str, float]]
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


def measure(urls: Sequence[str], *, rounds: int) -> list[Medians]:
    """Return each server's medians of each kind of chat, and of several users at once."""
    models = [httpx.get(f"{url}/v1/models").json()["data"][0]["id"] for url in urls]
    servers = list(zip(urls, models, strict=True))
    found: list[dict[str, list[dict[str, float]]]] = [{} for _ in urls]
    for number in range(-2, rounds):
        for kind in KINDS:
            turns = list(zip(found, servers, strict=True))
            # The one that is asked first finds its weights in no cache.
            for times, (url, model) in reversed(turns) if number % 2 else turns:
                # A server keeps what it has compiled: another run is of other schemas.
                one = ask(url, model, outputs_of(kind, time.time_ns()))
                if number >= 0:  # the first ones warm up
                    times.setdefault(kind, []).append(one)
    with ThreadPoolExecutor(NUM_USERS) as users:
        for _ in range(max(1, rounds // 4)):
            for kind in ("no grammar", "a known schema"):
                fields = outputs_of(kind, 0)
                for times, (url, model) in zip(found, servers, strict=True):
                    for each in [users.submit(ask, url, model, fields) for _ in range(NUM_USERS)]:
                        times.setdefault(f"{kind}, {NUM_USERS} users", []).append(each.result())
    return [
        {
            kind: {name: statistics.median(each[name] for each in every) for name in every[0]}
            for kind, every in times.items()
        }
        for times in found
    ]


@contextmanager
def serving(
    model: str,
    flags: Sequence[str],
    *,
    tree: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run `topspin serve`, of the checkout `tree` if there is one, and give its URL.

    `environment` is added to ours.
    """
    python = sys.executable if tree is None else str(tree.resolve() / ".venv/bin/python")
    server = subprocess.Popen(
        [python, "-P", "-m", "topspin", "serve", model, "--port", "0", *flags],
        cwd=tree,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert server.stdout is not None
    try:
        yield phases((0.0, line) for line in server.stdout)[1]
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=TIMEOUT_S)


def table_of(medians: Sequence[Medians], *, title: str) -> Table:
    """Return the medians of a server as a table, with the ratios to one before."""
    table = Table(title=title)
    table.add_column("chats with")
    for heading in ("first token, ms", "each token, ms"):
        table.add_column(heading, justify="right")
        if len(medians) > 1:
            table.add_column("ratio", justify="right")
    for kind, own in medians[0].items():
        cells = []
        for name in ("ttft_ms", "token_ms"):
            cells.append(f"{own[name]:.2f}")
            cells += [f"{own[name] / before[kind][name]:.2f}" for before in medians[1:]]
        table.add_row(kind, *cells)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structured_output", description=__doc__
    )
    parser.add_argument("model", nargs="?", default="smollm2-moe")
    parser.add_argument("--url", help="of a server that runs, instead of one of MODEL")
    parser.add_argument("--before", type=Path, metavar="TREE", help="a checkout with its .venv")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-write", action="store_true", help="print only")
    args, flags = parser.parse_known_args(argv)
    with ExitStack() as running:
        urls = [args.url or running.enter_context(serving(args.model, flags))]
        if args.before is not None:
            urls.append(running.enter_context(serving(args.model, flags, tree=args.before)))
        medians = measure(urls, rounds=args.rounds)
    console = Console()
    console.print(
        table_of(medians, title=f"{args.model} {' '.join(flags)}: medians of {args.rounds} rounds")
    )
    if not args.no_write:
        result = {
            "model": args.model,
            "flags": flags,
            "rounds": args.rounds,
            **dict(zip(("medians", "before"), medians, strict=False)),
        }
        console.print(f"written to {report.write('structured_output', result)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

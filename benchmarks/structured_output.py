"""The cost of a grammar to a request: until its first token, and for each token.

Chats of one user in turn: without a grammar, with a schema that nobody has sent before, with one
that the server has compiled, and forced to choose one of some texts; then chats of several users at
once that share a schema, and without one. Medians of a server that this starts, or of `--url`; with
`--before TREE` those of another checkout's server too, which is asked in turn with this one. Run as
`python -m benchmarks.structured_output`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.experiment import Experiment, Result, Table, rounds_in_turn
from benchmarks.load.client.targets import first_model
from benchmarks.servers.topspin import TopspinServer
from models.sources.hub import DEFAULT_MODEL

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


def measure(urls: Mapping[str, str], *, rounds: int) -> dict[str, Medians]:
    """Return each server's medians of each kind of chat, and of several users at once."""
    models = {url: first_model(url) for url in urls.values()}

    def alone(url: str, turn: int) -> dict[str, dict[str, float]]:
        # A server keeps what it has compiled: another run is of other schemas.
        return {kind: ask(url, models[url], outputs_of(kind, time.time_ns())) for kind in KINDS}

    def together(url: str, turn: int) -> dict[str, list[dict[str, float]]]:
        found = {}
        with ThreadPoolExecutor(NUM_USERS) as users:
            for kind in KINDS[0], KINDS[2]:
                fields = outputs_of(kind, 0)
                asked = [users.submit(ask, url, models[url], fields) for _ in range(NUM_USERS)]
                found[f"{kind}, {NUM_USERS} users"] = [each.result() for each in asked]
        return found

    times: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in urls}
    for turn in rounds_in_turn(urls, alone, rounds=rounds, warm_ups=2):
        for name, kinds in turn.items():
            for kind, one in kinds.items():
                times[name].setdefault(kind, []).append(one)
    for crowd in rounds_in_turn(urls, together, rounds=max(1, rounds // 4), warm_ups=0):
        for name, crowds in crowd.items():
            for kind, many in crowds.items():
                times[name].setdefault(kind, []).extend(many)
    return {
        name: {
            kind: {key: statistics.median(each[key] for each in every) for key in every[0]}
            for kind, every in kinds.items()
        }
        for name, kinds in times.items()
    }


def layout(result: Result) -> Iterator[Table]:
    """Yield the medians, and the ratios to those of a checkout before."""
    before = result.get("before")
    keys = {"first token, ms": "ttft_ms", "each token, ms": "token_ms"}
    rows = []
    for kind, own in result["medians"].items():
        row = [kind]
        for key in keys.values():
            row.append(f"{own[key]:.2f}")
            if before is not None:
                row.append(f"{own[key] / before[kind][key]:.2f}")
        rows.append(row)
    headings = [each for key in keys for each in ([key] if before is None else [key, "ratio"])]
    yield Table(["chats with", *headings], rows)


EXPERIMENT = Experiment(
    "structured_output", __doc__, layout, command="python -m benchmarks.structured_output"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the result."""
    parser = EXPERIMENT.parser(rounds=20)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--url", help="of a server that runs, instead of one of MODEL")
    parser.add_argument("--before", type=Path, metavar="TREE", help="a checkout with its .venv")
    args, flags = parser.parse_known_args(argv)
    with ExitStack() as running:
        words = [args.model, *flags]
        urls = {"medians": args.url or running.enter_context(TopspinServer(words)).url}
        if args.before is not None:
            server = TopspinServer(words, tree=args.before)
            urls["before"] = running.enter_context(server).url
        medians = measure(urls, rounds=args.rounds)
    about = {"model": args.model, "flags": flags, "rounds": args.rounds}
    return EXPERIMENT.finish(args, {**about, **medians})


if __name__ == "__main__":
    raise SystemExit(main())

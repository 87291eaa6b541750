"""The cost of a grammar to a request: until its first token, and for each token.

Chats of one user in turn: without a grammar, with a schema that nobody has sent before, with one
that the server has compiled, and forced to choose one of some texts; then chats of several users at
once that share a schema, and without one. Medians of a server that this starts, or of `--url`; with
`--before TREE` those of another checkout's server too, which is asked in turn with this one. Run as
`python -m benchmarks.structured_output`.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.experiment import Experiment, Result, TextTable, rounds_in_turn
from benchmarks.load.client.targets import first_model
from benchmarks.load.contracts import BenchRequest, Target
from benchmarks.load.figures.metrics import tpot_s, ttft_s
from benchmarks.servers.topspin import TopspinServer, ask_at_once
from models.sources.hub import DEFAULT_MODEL

Times = dict[str, float]
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


def ask(url: str, model: str, fields: dict[str, Any], *, users: int = 1) -> list[Times]:
    """Return each user's milliseconds until the first token, and for each token behind it."""
    request = BenchRequest(
        prompt="Describe a person.", max_tokens=NUM_TOKENS, extra_body={"temperature": 0, **fields}
    )
    run = ask_at_once(Target(url, model, backend="openai-chat"), [request] * users)
    return [
        {"ttft_ms": 1e3 * (ttft_s(each) or 0.0), "token_ms": 1e3 * (tpot_s(each) or 0.0)}
        for each in run.records
    ]


def measure(urls: Mapping[str, str], *, rounds: int) -> dict[str, dict[str, Times]]:
    """Return each server's medians of each kind of chat, and of several users at once."""
    models = {url: first_model(url) for url in urls.values()}

    def alone(url: str, turn: int) -> dict[str, list[Times]]:
        # A server keeps what it has compiled: another run is of other schemas.
        return {kind: ask(url, models[url], outputs_of(kind, time.time_ns())) for kind in KINDS}

    def together(url: str, turn: int) -> dict[str, list[Times]]:
        return {
            f"{kind}, {NUM_USERS} users": ask(
                url, models[url], outputs_of(kind, 0), users=NUM_USERS
            )
            for kind in (KINDS[0], KINDS[2])
        }

    turns = rounds_in_turn(urls, alone, rounds=rounds, warm_ups=2)
    turns += rounds_in_turn(urls, together, rounds=max(1, rounds // 4), warm_ups=0)
    times: dict[str, dict[str, list[Times]]] = {name: defaultdict(list) for name in urls}
    for turn in turns:
        for name, kinds in turn.items():
            for kind, found in kinds.items():
                times[name][kind] += found
    return {
        name: {
            kind: {key: statistics.median(each[key] for each in every) for key in every[0]}
            for kind, every in kinds.items()
        }
        for name, kinds in times.items()
    }


def layout(result: Result) -> Iterator[TextTable]:
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
    yield TextTable(["chats with", *headings], rows)


EXPERIMENT = Experiment(
    "structured_output", __doc__, layout, command="python -m benchmarks.structured_output"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the result."""
    parser = EXPERIMENT.parser(model=DEFAULT_MODEL, rounds=20)
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

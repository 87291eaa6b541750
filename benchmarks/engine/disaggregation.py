"""The cost of separating attention and experts on one machine.

Starts `topspin serve MODEL` twice, once over --transport local (everything in one process)
and once disaggregated (shm, 1x1, unless flags say otherwise), sends both the same
prompts, taking turns, and compares the decode rate: tokens per second while all answers
decode, so that neither prefill nor start-up counts. Run as `topspin bench disaggregation`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.experiment import (
    Experiment,
    Result,
    TextTable,
    number,
    ratio_text,
    rounds_in_turn,
    settings_of,
)
from benchmarks.servers.topspin import Streams, running
from models.description.config import load_model_config
from models.sources.hub import DEFAULT_MODEL, resolve_model


def layout(result: Result) -> Iterator[TextTable]:
    """Yield the decode rates of one process and of two."""
    rates = result["median_decode_tokens_per_s"]
    yield TextTable(
        ["", "decode tokens/s"],
        [
            ["one process (local)", number(rates["local"])],
            ["attention and experts apart", number(rates["disaggregated"])],
            ["ratio", ratio_text([each["ratio"] for each in result["rounds"]])],
        ],
    )


EXPERIMENT = Experiment("disaggregation", __doc__, layout)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare in turn, print the table, and write the result."""
    parser = EXPERIMENT.parser(model=DEFAULT_MODEL, rounds=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("flags", nargs="*", help="flags of the disaggregated engine, after --")
    args = parser.parse_args(argv)
    path = resolve_model(args.model)
    vocab_size = load_model_config(path).vocab_size
    flags = {"local": ["--transport", "local"]}
    flags["disaggregated"] = args.flags or ["--transport", "shm"]
    streams = Streams(args.requests, args.prompt_len, args.output_len, vocab_size)
    with running({name: [str(path), *each] for name, each in flags.items()}) as servers:
        found = rounds_in_turn(
            servers, lambda server, turn: server.decode_rate(streams, turn), rounds=args.rounds
        )
    rows = [
        {name: round(each, 1) for name, each in row.items()}
        | {"ratio": round(row["disaggregated"] / row["local"], 3)}
        for row in found
    ]
    return EXPERIMENT.finish(
        args,
        {
            "settings": settings_of(args, flags=flags["disaggregated"]),
            "rounds": rows,
            "median_decode_tokens_per_s": {
                name: statistics.median(row[name] for row in rows) for name in flags
            },
            "median_ratio": statistics.median(row["ratio"] for row in rows),
        },
    )


if __name__ == "__main__":
    raise SystemExit(main())

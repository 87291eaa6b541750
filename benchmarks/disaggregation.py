"""What does separating attention and experts cost on one machine?

Starts `topspin serve MODEL` twice, once over --transport local (everything in one process)
and once disaggregated (shm, 1x1, unless flags say otherwise), sends both the same
prompts, taking turns, and compares the decode rate: tokens per second from the last first
token to the first end, so that neither prefill nor start-up counts. Run as
`topspin bench disaggregation`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from benchmarks import report
from benchmarks.vs_transformers import READY_TIMEOUT_S, TopspinServer


class Server(Protocol):
    """A running server: its address, and the name of its model."""

    @property
    def url(self) -> str: ...

    @property
    def model(self) -> str: ...


class _Stream(threading.Thread):
    """One request; `arrivals` are the arrival times of its tokens."""

    def __init__(self, server: Server, prompt: list[int], output_len: int) -> None:
        super().__init__(daemon=True)
        self._url = f"{server.url}/v1/completions"
        self._body = {
            "model": server.model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        self.arrivals: list[float] = []
        self.tokens: list[int] = []

    def run(self) -> None:
        """Stream until the end."""
        with httpx.stream("POST", self._url, json=self._body, timeout=READY_TIMEOUT_S) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    for choice in json.loads(line[6:])["choices"]:
                        found = choice.get("token_ids") or []
                        self.tokens += found
                        self.arrivals += [now] * len(found)


def decode_rate(streams: Sequence[Sequence[float]]) -> float:
    """Return tokens per second while every stream was decoding.

    `streams` are the arrival times of each request's tokens.
    """
    start = max(arrivals[0] for arrivals in streams)
    end = min(arrivals[-1] for arrivals in streams)
    count = sum(1 for arrivals in streams for at in arrivals if start < at <= end)
    if end <= start:
        raise SystemExit("the requests never decoded all at once; take longer outputs")
    return count / (end - start)


def run_once(
    server: Server, prompts: list[list[int]], output_len: int
) -> tuple[float, list[list[int]]]:
    """Send all prompts at once; return the decode rate and the tokens."""
    streams = [_Stream(server, prompt, output_len) for prompt in prompts]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.join()
    return decode_rate([stream.arrivals for stream in streams]), [s.tokens for s in streams]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, print a line per round, and write the result."""
    parser = argparse.ArgumentParser(prog="topspin bench disaggregation", description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-moe")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="disaggregation", help="name of the result file")
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("flags", nargs="*", help="flags of the disaggregated engine, after --")
    args = parser.parse_args(argv)
    from models.sources.hub import resolve_model

    path = str(resolve_model(args.model))
    vocab_size = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    flags = args.flags or ["--transport", "shm"]
    sides = {
        "local": TopspinServer(path, ["--transport", "local"]),
        "disaggregated": TopspinServer(path, flags),
    }
    rates: dict[str, list[float]] = {name: [] for name in sides}
    rows: list[dict[str, Any]] = []
    try:
        for turn in range(-1, args.rounds):
            prompts = [
                [rng.randrange(vocab_size) for _ in range(args.prompt_len)]
                for _ in range(args.requests)
            ]
            row: dict[str, Any] = {}
            # The order alternates, so that slow moments affect both sides equally.
            for name in sorted(sides, reverse=turn % 2 == 0):
                rate, _ = run_once(sides[name], prompts, args.output_len)
                row[name] = round(rate, 1)
                if turn >= 0:
                    rates[name].append(rate)
            row["ratio"] = round(row["disaggregated"] / row["local"], 3)
            if turn >= 0:
                rows.append(row)
                print(json.dumps(row), flush=True)
    finally:
        for side in sides.values():
            side.close()
    result = {
        "settings": {
            "model": args.model,
            "requests": args.requests,
            "prompt_len": args.prompt_len,
            "output_len": args.output_len,
            "flags": flags,
        },
        "rounds": rows,
        "median_decode_tokens_per_s": {
            name: round(statistics.median(found), 1) for name, found in rates.items()
        },
        "median_ratio": statistics.median(row["ratio"] for row in rows),
    }
    print(f"disaggregated / local: {result['median_ratio']}")
    if not args.no_write:
        print(f"written: {report.write(args.name, result).name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

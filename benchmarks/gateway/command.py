"""The tokens per second that one gateway process streams, and how late they come.

A stub engine (engine_stub.py) sends every stream a token per step at a given total rate, all
streams at once (one group) or spread over the step's time (several groups, as engines that are out
of step would); one real gateway process turns them into server-sent events; this process reads
all streams. Added latency is the time from the stub's send to this client's read of the token's
event, all on one clock, so it includes the client's lateness. A rate counts as sustained if all
tokens come at no less than 98 % of it. Run as `topspin bench gateway`.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.experiment import Experiment, Result, TextTable, number, say, table
from benchmarks.gateway import large_bodies
from benchmarks.gateway.processes import running_gateway
from benchmarks.gateway.watch import TOKEN_PERIOD_MS
from benchmarks.servers.topspin import cpu_s
from models.sources.hub import DEFAULT_MODEL, resolve_model

SUSTAINED_SHARE = 0.98
# A limit that a text's length alone can exceed, and one that needs tokenisation to check.
BODY_TOKEN_LIMITS = (8192, 1_000_000)
TOKEN_IDS = re.compile(rb'"token_ids":\[([0-9,]+)\]')


async def _stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], arrivals: list[float]
) -> None:
    """Append the arrival time of every token; an event may carry several, or none."""
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"the gateway answered {response.status}: {await response.text()}")
        rest = b""
        async for piece in response.content.iter_any():
            now_s = time.monotonic()
            events, separator, rest = (rest + piece).rpartition(b"\n\n")
            found = TOKEN_IDS.findall(events) if separator else []
            arrivals += [now_s] * sum(ids.count(b",") + 1 for ids in found)


async def _load(url: str, *, num_streams: int, num_tokens: int) -> list[list[float]]:
    arrivals: list[list[float]] = [[] for _ in range(num_streams)]
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        body = {"model": "stub", "prompt": [300, 301], "max_tokens": num_tokens, "stream": True}
        body["return_token_ids"] = True
        bodies = [body | {"seed": seed} for seed in range(num_streams)]
        await asyncio.gather(
            *(_stream(session, url, b, a) for b, a in zip(bodies, arrivals, strict=True))
        )
    return arrivals


def measure_large_bodies(
    model: Path, *, size_bytes: int, max_request_tokens: int
) -> list[dict[str, Any]]:
    """Return the rows of large_bodies for an engine with that limit of tokens."""
    flags = ("--max-request-tokens", str(max_request_tokens))
    with running_gateway(model, period_ms=TOKEN_PERIOD_MS, flags=flags) as gateway:
        bodies = large_bodies.make_bodies(size_bytes)
        rows = asyncio.run(large_bodies.measure(gateway.url, gateway.pid, bodies))
    return [row | {"max_request_tokens": max_request_tokens} for row in rows]


def measure(
    model: Path, *, rate: float, num_streams: int, seconds: float, num_groups: int
) -> dict[str, Any]:
    """Stream `rate` tokens per second over `num_streams` streams for about `seconds`."""
    period_s = num_streams / rate
    num_tokens = max(2, round(seconds / period_s))
    flags = ("--groups", str(num_groups))
    with running_gateway(model, period_ms=period_s * 1e3, flags=flags) as gateway:
        gateway_cpu_s, started_cpu_s = cpu_s(gateway.pid), time.process_time()
        arrivals = asyncio.run(_load(gateway.url, num_streams=num_streams, num_tokens=num_tokens))
        gateway_cpu_s = cpu_s(gateway.pid) - gateway_cpu_s
        client_cpu_s = time.process_time() - started_cpu_s
    return summarise(gateway.sent, arrivals) | {
        "rate": rate,
        "streams": num_streams,
        "groups": num_groups,
        "gateway_cpu_us_per_token": gateway_cpu_s / (num_streams * num_tokens) * 1e6,
        "client_cpu_us_per_token": client_cpu_s / (num_streams * num_tokens) * 1e6,
    }


def summarise(sent: dict[int, list[float]], arrivals: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return achieved tokens/s, and added latency in ms after the first tenth of each stream.

    The first tokens also wait for the other streams' requests to be accepted.
    """
    latencies = []
    for seed, times in enumerate(arrivals):
        if len(times) != len(sent[seed]):
            raise SystemExit(f"stream {seed}: {len(times)} tokens came of {len(sent[seed])}")
        skipped = len(times) // 10
        latencies.append((np.array(times) - np.array(sent[seed]))[skipped:])
    joined = np.concatenate(latencies) * 1e3
    start = max(times[0] for times in arrivals)
    end = min(times[-1] for times in arrivals)
    count = sum(1 for times in arrivals for at_s in times if start < at_s <= end)
    return {
        "achieved": count / (end - start) if end > start else 0.0,
        "latency_ms": {
            "p50": float(np.percentile(joined, 50)),
            "p99": float(np.percentile(joined, 99)),
            "max": float(joined.max()),
        },
    }


def layout(result: Result) -> Iterator[TextTable | str]:
    """Yield added latency per rate, the highest rate sustained, and the delays by large bodies."""
    columns = {
        "tokens/s asked": "{rate}",
        "groups": "{groups}",
        "achieved": "{achieved}",
        "added p50 ms": "{latency_ms[p50]}",
        "p99 ms": "{latency_ms[p99]}",
        "CPU us/token": "{gateway_cpu_us_per_token}",
    }
    yield table(columns, result["rows"])
    yield f"Highest rate sustained: {number(result['sustained_tokens_per_s'])} tokens/s."
    columns = {
        "two bodies at once": "{bodies}",
        "MiB each": "{size_mib:.1f}",
        "most tokens": "{max_request_tokens}",
        "took s": "{took_s:.2f}",
        "longest token gap ms": "{longest_token_gap_ms:.0f}",
        "slowest /health ms": "{slowest_health_ms:.0f}",
        "memory before MiB": "{before_mib:.0f}",
        "peak": "{peak_mib:.0f}",
        "after": "{after_mib:.0f}",
    }
    if result["large_bodies"]:
        yield table(columns, result["large_bodies"])


EXPERIMENT = Experiment("gateway", __doc__, layout)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each rate, print a table, write the result."""
    parser = EXPERIMENT.parser(model=DEFAULT_MODEL)
    parser.add_argument("--rates", default="2500,5000,10000,15000", help="total tokens per second")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--groups", default="1,16", help="of streams that get tokens together")
    parser.add_argument("--seconds", type=float, default=8.0, help="per rate")
    parser.add_argument("--body-mib", type=float, default=4.0, help="of large bodies; 0: none")
    args = parser.parse_args(argv)
    model = resolve_model(args.model)
    rows = []
    rates = [float(rate) for rate in args.rates.split(",") if rate]
    groups = [int(count) for count in args.groups.split(",")]
    for rate, num_groups in product(rates, groups):
        say(f"{rate:.0f} tokens/s, {num_groups} groups")
        row = measure(
            model,
            rate=rate,
            num_streams=args.streams,
            seconds=args.seconds,
            num_groups=num_groups,
        )
        rows.append(row)
    sustained = [row["rate"] for row in rows if row["achieved"] >= SUSTAINED_SHARE * row["rate"]]
    bodies = []
    for limit in BODY_TOKEN_LIMITS if args.body_mib else ():
        say(f"large bodies, at most {limit} tokens")
        bodies += measure_large_bodies(
            model, size_bytes=int(args.body_mib * 2**20), max_request_tokens=limit
        )
    result = {"rows": rows, "sustained_tokens_per_s": max(sustained, default=0)}
    return EXPERIMENT.finish(args, {**result, "large_bodies": bodies})


if __name__ == "__main__":
    raise SystemExit(main())

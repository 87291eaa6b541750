"""The delay of one gateway's clients by others that have no key.

A stub engine streams a token every 10 ms to a client that has a key, while another asks `/live` on
a new connection each time, one after the other. Meanwhile a process of its own, at the lowest
priority, is hostile in one way: it sends as much as the gateway takes and connects anew whenever it
is cut off. The figures are the slowest `/live`, its median, and the longest time between two
tokens. Run as `python -m benchmarks.gateway_hostile`; `--before TREE` measures the gateway of
another checkout too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from benchmarks.experiment import Experiment, Result, TextTable, say, table
from benchmarks.gateway.processes import running_gateway
from benchmarks.gateway.watch import TOKEN_PERIOD_MS, watching
from models.sources.hub import DEFAULT_MODEL, resolve_model
from topspin.plan.settings import API_KEY_VARIABLE

KEY = "benchmark-key-of-the-honest-client"
HEADERS = {"Authorization": f"Bearer {KEY}"}
_POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"
_GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"


@dataclass(frozen=True)
class Hostile:
    """A kind of client: it sends `first`, then `again` for ever, or byte by byte (`trickles`)."""

    first: bytes = b""
    again: bytes = b""
    connections: int = 1
    trickles: bool = False


_TINY = Hostile(_CHUNKED, b"1\r\n \r\n" * 10_000)
_REFUSED = Hostile(_POST + b"Content-Length: 20000000\r\n\r\n", b" " * 2**18)
_PIPELINED = Hostile(b"", (_GET + b"\r\n") * 1000)
_LINES = Hostile(_CHUNKED, b"ffff\r\n" + b"\r\n" * 0x7FFF + b"\n\r\n")
KINDS = {
    "nobody": Hostile(connections=0),
    "tiny chunks": _TINY,
    "large chunks": Hostile(_CHUNKED, b"40000\r\n" + b" " * 2**18 + b"\r\n"),
    "chunks of empty lines": _LINES,
    "chunk extensions": Hostile(_CHUNKED, b"1" + b";a=b" * 10_000 + b"\r\n \r\n"),
    "endless header": Hostile(_GET + b"X: ", b"x" * 2**16),
    "tiny headers": Hostile(_GET, b"a:b\r\n" * 10_000),
    "trickled heads": Hostile(_GET + b"X: ", b"x", connections=64, trickles=True),
    "pipelined requests": _PIPELINED,
    "refused bodies": _REFUSED,
    "64 with tiny chunks": Hostile(_TINY.first, _TINY.again, 64),
    "64 with empty lines": Hostile(_LINES.first, _LINES.again, 64),
    "64 with tiny headers": Hostile(_GET, b"a:b\r\n" * 10_000, 64),
    "64 with pipelined requests": Hostile(b"", _PIPELINED.again, 64),
    "64 with refused bodies": Hostile(_REFUSED.first, _REFUSED.again, 64),
}


async def _be_hostile(port: int, kind: Hostile) -> None:
    async def receive(reader: asyncio.StreamReader) -> None:
        while await reader.read(2**16):
            pass

    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            receiving = asyncio.create_task(receive(reader))
            with contextlib.suppress(OSError):
                writer.write(kind.first)
                while not receiving.done():
                    writer.write(kind.again)
                    await writer.drain()
                    await asyncio.sleep(0.001 if kind.trickles else 0)
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            writer.close()


async def _be_all_hostile(port: int, kind: Hostile) -> None:
    await asyncio.gather(*(_be_hostile(port, kind) for _ in range(kind.connections)))


@contextlib.contextmanager
def _hostile_process(port: int, name: str) -> Iterator[None]:
    command = [sys.executable, "-P", "-m", "benchmarks.gateway_hostile"]
    command += ["--be", name, "--port", str(port)]
    process = subprocess.Popen(command)
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def _watch(url: str, name: str, seconds: float) -> dict[str, Any]:
    async with watching(url, "/live", HEADERS) as waits:
        with _hostile_process(urlsplit(url).port or 0, name):
            await asyncio.sleep(1.0)
            waits.clear()
            await asyncio.sleep(seconds)
            live_s = waits.answers_s
            return {
                "clients": name,
                "live_ms": {"p50": statistics.median(live_s) * 1e3, "max": max(live_s) * 1e3},
                "longest_token_gap_ms": waits.longest_gap_s * 1e3,
            }


def measure(name: str, *, model: Path, seconds: float, tree: Path | None) -> dict[str, Any]:
    """Return the row of a kind; `tree`: the checkout whose gateway is measured (None: this)."""
    environment = os.environ | {API_KEY_VARIABLE: KEY}
    if tree is not None:
        environment["PYTHONPATH"] = str(tree)
    with running_gateway(
        model, period_ms=TOKEN_PERIOD_MS, environment=environment, headers=HEADERS
    ) as gateway:
        return asyncio.run(_watch(gateway.url, name, seconds))


def layout(result: Result) -> Iterator[TextTable]:
    """Yield each kind's figures, of the gateways side by side."""
    by_kind: dict[str, dict[str, Result]] = {}
    for row in result["rows"]:
        by_kind.setdefault(row["clients"], {})[row["gateway"]] = row
    figures = {
        "/live p50 ms": "[live_ms][p50]",
        "max ms": "[live_ms][max]",
        "token gap ms": "[longest_token_gap_ms]",
    }
    columns = {"clients": "{clients}"} | {
        f"{gateway}: {heading}": f"{{{gateway}{key}:.1f}}"
        for gateway in next(iter(by_kind.values()))
        for heading, key in figures.items()
    }
    yield table(columns, ({"clients": kind, **rows} for kind, rows in by_kind.items()))


EXPERIMENT = Experiment(
    "gateway_hostile", __doc__, layout, command="python -m benchmarks.gateway_hostile"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure each kind, print a table, write the result."""
    parser = EXPERIMENT.parser(model=DEFAULT_MODEL)
    parser.add_argument("--seconds", type=float, default=5.0, help="per kind")
    parser.add_argument("--kinds", default=",".join(KINDS), help="those to measure")
    parser.add_argument("--before", type=Path, metavar="TREE", help="measure this checkout too")
    parser.add_argument("--be", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.be is not None:
        os.nice(19)
        uvloop.run(_be_all_hostile(args.port, KINDS[args.be]))
        return 0
    model = resolve_model(args.model)
    trees: dict[str, Path | None] = {} if args.before is None else {"before": args.before}
    trees["now"] = None
    rows = []
    for name in args.kinds.split(","):
        for label, tree in trees.items():
            say(f"{name}, {label}")
            row = measure(name, model=model, seconds=args.seconds, tree=tree)
            rows.append(row | {"gateway": label})
    return EXPERIMENT.finish(args, {"rows": rows})


if __name__ == "__main__":
    raise SystemExit(main())

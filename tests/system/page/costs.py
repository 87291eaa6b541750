"""`python -m tests.system.page.costs MODEL`: what the page costs its server, and a newcomer's time.

Runs `topspin serve MODEL` with two expert nodes and two micro-batches, and prints the processor
time of a watcher, the speed of a stream beside one, the first paint and the page's bytes. A watcher
asks as the page does; no browser draws meanwhile, as that is seldom on the server's host.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from benchmarks.report import machine
from server.gateway.page.files import page_files
from tests.system.page.browser import chromium, find_chromium
from tests.system.rig.server import Server

FLAGS = ("--expert-nodes", "2", "--micro-batches", "2", "--kv-cache-memory", "64MiB")
# How often the page asks.
EVERY_S = 1.0
# A watch has ended by then.
QUIET_S = 6.0
NUM_LOADS = 7
PAINTED = """new Promise((resolve) => {
  const look = () => {
    const [{ startTime } = {}] = performance.getEntriesByName("first-contentful-paint");
    if (startTime === undefined) setTimeout(look, 20);
    else resolve(startTime);
  };
  look();
})"""
SHIFTED = """new Promise((resolve) => {
  let sum = 0;
  new PerformanceObserver((list) => { for (const each of list.getEntries()) sum += each.value; })
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => resolve(sum), 500);
})"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the costs; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.page.costs", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of each look at an idle engine"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of idle looks")
    parser.add_argument("--pairs", type=int, default=10, help="of streams")
    parser.add_argument("--tokens", type=int, default=120, help="of each stream")
    parsed = parser.parse_args(argv)
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores")
    with (
        tempfile.TemporaryDirectory() as directory,
        Server(parsed.model, Path(directory), *FLAGS) as server,
    ):
        asyncio.run(idle(server, parsed.rounds, parsed.seconds))
        asyncio.run(beside(server, parsed.pairs, parsed.tokens))
        asyncio.run(paint(server.url))
    files = page_files()
    print(f"page: {sum(len(file.content) for file in files.values()):,} bytes, {len(files)} files")
    return 0


@asynccontextmanager
async def watching(url: str, sizes: list[int]) -> AsyncIterator[None]:
    """Watch the engine as the page does, while the block runs; `sizes` gets those of answers."""

    async def watch() -> None:
        cursor = 0
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"{url}/feed?after={cursor}&experts=1") as answer:
                    body = await answer.read()
                sizes.append(len(body))
                cursor = json.loads(body)["cursor"]
                await asyncio.sleep(EVERY_S)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)


async def idle(server: Server, rounds: int, seconds: float) -> None:
    """Print the processor time of a watcher of an idle engine, by the kernel's own count."""

    async def spent() -> dict[str, float]:
        before = {role: _cpu_ns(pid) for role, pid in server.pids.items()}
        began = time.monotonic()
        await asyncio.sleep(seconds)
        took = time.monotonic() - began
        return {
            role: (_cpu_ns(pid) - before[role]) / 1e6 / took for role, pid in server.pids.items()
        }

    alone, watched, sizes = [], [], list[int]()
    for _ in range(rounds):
        await asyncio.sleep(QUIET_S)
        alone.append(await spent())
        async with watching(server.url, sizes):
            await asyncio.sleep(EVERY_S)
            watched.append(await spent())
    await asyncio.sleep(QUIET_S)
    after = await spent()
    by_role = {
        role: statistics.median(each[role] for each in watched)
        - statistics.median(each[role] for each in alone)
        for role in server.pids
    }
    parts = ", ".join(f"{role} {value:.2f}" for role, value in by_role.items())
    print(f"a watcher of an idle engine: {sum(by_role.values()):.2f} ms/s ({parts})")
    quiet = statistics.median(sum(each.values()) for each in alone)
    print(f"nobody watches: {quiet:.2f} ms/s before, {sum(after.values()):.2f} after")
    print(f"an answer to a watcher: {statistics.median(sizes):,.0f} bytes of an idle engine")


async def beside(server: Server, pairs: int, num_tokens: int) -> None:
    """Print the speed of streams beside a watcher over that of streams alone, pair by pair."""

    async def rate(session: aiohttp.ClientSession) -> float:
        body = {"model": "tiny", "prompt": "The ball", "stream": True, "temperature": 0}
        body |= {"max_tokens": num_tokens, "ignore_eos": True}
        times = []
        async with session.post(f"{server.url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
        return (len(times) - 1) / (times[-1] - times[0])

    async with aiohttp.ClientSession() as session:
        await rate(session)
        alone, ratios, sizes = [], [], list[int]()
        for pair in range(pairs):
            rates: dict[bool, float] = {}
            for is_watched in (False, True) if pair % 2 else (True, False):
                if is_watched:
                    async with watching(server.url, sizes):
                        rates[is_watched] = await rate(session)
                    await asyncio.sleep(QUIET_S)
                else:
                    rates[is_watched] = await rate(session)
            alone.append(rates[False])
            ratios.append(rates[True] / rates[False])
    print(
        f"a stream beside a watcher: {statistics.median(ratios):.3f} times as fast as alone "
        f"({pairs} pairs, {min(ratios):.3f} to {max(ratios):.3f}; {statistics.median(alone):.1f} "
        f"tokens/s alone); an answer to the watcher: {statistics.median(sizes):,.0f} bytes"
    )


async def paint(url: str) -> None:
    """Print when the page is painted first, from an empty cache, and how far it moves later."""
    command = find_chromium()
    if command is None:
        print("first paint: no Chromium here")
        return
    with tempfile.TemporaryDirectory() as profile:
        async with chromium(command, Path(profile)) as browser:
            paints, shifts = [], []
            for number in range(NUM_LOADS):
                tab = await browser.tab()
                await tab.open(url)
                painted = await tab.run(PAINTED)
                # The first one is the browser's own start.
                if number:
                    paints.append(painted)
                    shifts.append(await tab.run(SHIFTED))
    print(
        f"first paint: {statistics.median(paints):.0f} ms ({min(paints):.0f} to {max(paints):.0f}, "
        f"{len(paints)} loads); layout shift {max(shifts):.3f}"
    )


def _cpu_ns(pid: int) -> int:
    """Return the time that the threads of a process have run, which /proc counts exactly."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads)


if __name__ == "__main__":
    raise SystemExit(main())

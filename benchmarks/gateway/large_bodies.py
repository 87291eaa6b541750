"""The delay of one gateway's other clients by large request bodies.

A stub engine streams a token every 10 ms to one client while another keeps asking `/health`; then
two large bodies arrive at once. The figures are the longest time between two tokens and the slowest
`/health`, without and with the bodies, and the gateway's memory before, at its peak, and after.
Called by benchmarks.gateway.command, which starts the processes.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.gateway.watch import watching

NUM_BODIES = 2
SETTLE_S = 1.0
# Memory is freed when no large body has come for a while.
MEMORY_WAIT_S = 5.0
TEXT = Path(__file__).parents[1] / "payload_text.txt"


def make_bodies(size_bytes: int) -> dict[str, bytes]:
    """Return a request of about `size_bytes` for each kind of large body."""
    text = TEXT.read_text(encoding="utf-8")
    text = (text * (size_bytes // len(text) + 1))[:size_bytes]
    head: dict[str, Any] = {"model": "stub", "max_tokens": 1}
    user = {"role": "user", "content": "Good morning."}
    bodies = {
        "one long message": head | {"messages": [{"role": "user", "content": text}]},
        "many short messages": head | {"messages": [user] * (size_bytes // 45)},
        "token ids": head | {"prompt": [30_000] * (size_bytes // 7)},
    }
    return {kind: json.dumps(body).encode() for kind, body in bodies.items()}


def memory_mib(pid: int, field: str = "VmRSS") -> float:
    """Return a memory figure of /proc/PID/status."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024


async def measure(url: str, pid: int, bodies: dict[str, bytes]) -> list[dict[str, Any]]:
    """Return a row without large bodies, and one for two of each kind at once."""
    rows = []
    async with watching(url, "/health") as waits:
        for kind, body in [("none", b""), *bodies.items()]:
            before_mib = memory_mib(pid)
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak counts from here
            waits.clear()
            sent_s = time.monotonic()
            statuses = []
            if body:
                calls = (asyncio.to_thread(_post, url, kind, body) for _ in range(NUM_BODIES))
                statuses = await asyncio.gather(*calls)
            took_s = time.monotonic() - sent_s
            await asyncio.sleep(SETTLE_S)
            row = {
                "bodies": kind,
                "size_mib": len(body) / 2**20,
                "statuses": statuses,
                "took_s": took_s,
                "longest_token_gap_ms": waits.longest_gap_s * 1e3,
                "slowest_health_ms": max(waits.answers_s) * 1e3,
                "peak_mib": memory_mib(pid, "VmHWM"),
                "before_mib": before_mib,
            }
            await asyncio.sleep(MEMORY_WAIT_S)
            rows.append(row | {"after_mib": memory_mib(pid)})
    return rows


def _post(url: str, kind: str, body: bytes) -> int:
    """Return the status; called in a thread, since writing would block this event loop."""
    path = "/v1/completions" if kind == "token ids" else "/v1/chat/completions"
    address = urlsplit(url)
    with closing(HTTPConnection(str(address.hostname), address.port)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status

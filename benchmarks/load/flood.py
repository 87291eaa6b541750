"""A server that streams to thousands at almost no cost, to find the limits of a client.

Answers every POST on any path with max_tokens prepared events, one per period; it has no model and
parses only a body's length from HTTP. `python -m benchmarks.load.flood --period-ms 100` prints its
port and serves until its stdin closes. benchmarks.load.capacity starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

from benchmarks.load.files import allow_open_files

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
# The size of a real server's event.
_EVENT = json.dumps(
    {
        "id": "cmpl-0123456789abcdef",
        "object": "text_completion",
        "created": 1700000000,
        "model": "flood",
        "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
        "usage": None,
    }
).encode()
MAX_CONNECTIONS = 16384


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_WORD = _chunk(b"data: " + _EVENT + b"\n\n")


def _last(num_tokens: int) -> bytes:
    """Return the event that ends an answer, its usage, [DONE] and the end of the body."""
    end = b"data: " + _EVENT.replace(b'"finish_reason": null', b'"finish_reason": "length"')
    usage = {"prompt_tokens": 1, "completion_tokens": num_tokens}
    counted = b"data: " + json.dumps({"choices": [], "usage": usage}).encode()
    return _chunk(b"\n\n".join([end, counted, b"data: [DONE]", b""])) + b"0\r\n\r\n"


class _Stream(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if not blank or len(body) < _content_length(head):
            return
        self._received = b""
        self._num_tokens = self._left = int(json.loads(body)["max_tokens"])
        self._transport.write(_HEAD)
        self._due_s = self._loop.time()
        self._next()

    def _next(self) -> None:
        self._due_s += self._period_s
        self._timer = self._loop.call_at(self._due_s, self._send)

    def _send(self) -> None:
        self._left -= 1
        if self._left:
            self._transport.write(_WORD)
            self._next()
        else:
            self._transport.write(_last(self._num_tokens))


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


async def _serve(period_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Stream(period_s), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


def main(flags: Sequence[str] | None = None) -> int:
    """Serve until stdin closes; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load.flood", description=__doc__)
    parser.add_argument("--period-ms", type=float, default=100.0, metavar="MS")
    parsed = parser.parse_args(flags)
    allow_open_files(MAX_CONNECTIONS)
    asyncio.run(_serve(parsed.period_ms / 1000))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""An HTTP server of the OpenAI API whose replies and their times are given by the test.

Real sockets, one thread of its own, no model. A test gives `respond`, which makes a Reply of each
request: bytes to stream and seconds to wait, in order. `requests` keeps the received requests.
`stream_reply` makes a correct reply; tests edit its steps for other cases.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

DONE = b"data: [DONE]\n\n"


class Disconnect:
    """A step of a Reply: close the connection without ending the reply."""


Step = float | bytes | Disconnect


@dataclass(frozen=True)
class Received:
    """One received request; `at_s` is time.perf_counter()."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at_s: float


@dataclass(frozen=True)
class Reply:
    """A status, and for each step bytes to send (one HTTP chunk) or seconds to wait."""

    steps: Iterable[Step] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "text/event-stream"})


Respond = Callable[[Received], Reply]


def event(payload: dict[str, Any]) -> bytes:
    """Return `payload` as one server-sent event."""
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def text_event(received: Received, text: str, finish_reason: str | None = None) -> bytes:
    """Return the event that carries `text` on the request's endpoint."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    if received.path.endswith("/chat/completions"):
        choice["delta"] = {"content": text} if text else {}
    else:
        choice["text"] = text
    return event({"choices": [choice], "usage": None})


def usage_event(prompt_tokens: int, completion_tokens: int) -> bytes:
    """Return the closing event of stream_options.include_usage."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    return event({"choices": [], "usage": usage})


def prompt_length(received: Received) -> int:
    """Return this server's count of prompt tokens: ids, or words."""
    prompt = received.body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    if isinstance(prompt, str):
        return len(prompt.split())
    return sum(len(message["content"].split()) for message in received.body["messages"])


def stream_reply(
    received: Received,
    texts: Sequence[str] | None = None,
    *,
    first_delay_s: float = 0.0,
    delay_s: float = 0.0,
    completion_tokens: int | None = None,
) -> Reply:
    """Return a good reply: one event per text, waits between them, usage and the end.

    `texts` defaults to max_tokens short words; `completion_tokens` to one for each text.
    """
    if texts is None:
        texts = [f"w{index} " for index in range(received.body["max_tokens"])]
    steps: list[Step] = []
    for index, text in enumerate(texts):
        pause = delay_s if index else first_delay_s
        if pause:
            steps.append(pause)
        last = index == len(texts) - 1
        steps.append(text_event(received, text, "length" if last else None))
    count = len(texts) if completion_tokens is None else completion_tokens
    if (received.body.get("stream_options") or {}).get("include_usage"):
        steps.append(usage_event(prompt_length(received), count))
    steps.append(DONE)
    return Reply(steps)


class ScriptedServer:
    """Listens on loopback while its `with` block runs; every POST is answered by `respond`."""

    def __init__(
        self,
        respond: Respond = stream_reply,
        *,
        model: str = "scripted",
        port: int = 0,
        card: Mapping[str, object] | None = None,
    ) -> None:
        self.respond = respond
        self.card = {"id": model, **(card or {})}
        self.port = port
        self.requests: list[Received] = []
        self.base_url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = threading.Event()

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._serve())
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, backlog=1024)
        port = server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}"
        self._started.set()
        try:
            await asyncio.Event().wait()
        finally:
            server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (received := await _read_request(reader)) is not None:
                if received.method == "GET":
                    await _write_json(writer, {"data": [self.card]})
                    continue
                self.requests.append(received)
                await _write_reply(writer, self.respond(received))
                if writer.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            return
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> Received | None:
    line = await reader.readline()
    if not line:
        return None
    method, path, _ = line.decode().split(" ", 2)
    headers: dict[str, str] = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    data = await reader.readexactly(int(headers.get("content-length", 0)))
    at_s = time.perf_counter()
    return Received(method, path, headers, json.loads(data) if data else {}, at_s)


async def _write_json(writer: asyncio.StreamWriter, payload: dict[str, Any]) -> None:
    data = json.dumps(payload).encode()
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(data), data)
    )
    await writer.drain()


async def _write_reply(writer: asyncio.StreamWriter, reply: Reply) -> None:
    lines = [f"HTTP/1.1 {reply.status} Scripted", "transfer-encoding: chunked"]
    lines += [f"{name}: {value}" for name, value in reply.headers.items()]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    for step in reply.steps:
        if isinstance(step, Disconnect):
            await writer.drain()
            writer.close()
            return
        if isinstance(step, bytes):
            writer.write(b"%x\r\n%b\r\n" % (len(step), step))
            await writer.drain()
        else:
            await asyncio.sleep(step)
    writer.write(b"0\r\n\r\n")
    await writer.drain()

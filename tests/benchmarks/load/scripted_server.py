"""An HTTP server of the OpenAI API whose replies and their times are given by the test.

Real sockets, one thread of its own, no model. A test gives `respond`, which makes a Reply of each
POST: bytes to stream and seconds to wait, in order. `requests` keeps the received POSTs.
`stream_reply` makes a correct reply; tests edit its steps for other cases.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

DONE = b"data: [DONE]\n\n"


class Disconnect:
    """A step of a Reply: close the connection without ending the reply."""


Step = float | bytes | Disconnect


@dataclass(frozen=True)
class Received:
    """One received request; `at_s` is time.perf_counter()."""

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
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"choices": [], "usage": usage})


def prompt_length(received: Received) -> int:
    """Return this server's count of prompt tokens: ids, or words."""
    prompt = received.body.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    texts = [prompt] if prompt else [each["content"] for each in received.body["messages"]]
    return sum(len(text.split()) for text in texts)


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
        last = index == len(texts) - 1
        steps += [delay_s if index else first_delay_s]
        steps += [text_event(received, text, "length" if last else None)]
    count = len(texts) if completion_tokens is None else completion_tokens
    if (received.body.get("stream_options") or {}).get("include_usage"):
        steps.append(usage_event(prompt_length(received), count))
    return Reply([*steps, DONE])


class ScriptedServer:
    """Listens on loopback while its `with` block runs; every POST is answered by `respond`.

    A GET gets the path's statuses and bodies of `pages` in turn, the last one from then on, else a
    list of one model, `card`.
    """

    def __init__(
        self,
        respond: Respond = stream_reply,
        *,
        model: str = "scripted",
        port: int = 0,
        card: Mapping[str, object] | None = None,
        pages: Mapping[str, list[tuple[int, bytes]]] | None = None,
    ) -> None:
        self.respond = respond
        self.card = {"id": model, **(card or {})}
        self.port = port
        self.pages = pages
        self.requests: list[Received] = []
        self.base_url = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._started = threading.Event()

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", self._get), web.post("/{path:.*}", self._post)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, backlog=1024).start()
        self.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._stopped.wait()
        await runner.cleanup()

    async def _get(self, request: web.Request) -> web.Response:
        if self.pages is None:
            return web.json_response({"data": [self.card]})
        left = self.pages.get(request.path, [(404, b"")])
        status, body = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=status, body=body)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body, at_s = json.loads(await request.read()), time.perf_counter()
        headers = {name.lower(): value for name, value in request.headers.items()}
        received = Received(request.path, headers, body, at_s)
        self.requests.append(received)
        reply = self.respond(received)
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        response.enable_chunked_encoding()
        await response.prepare(request)
        for step in reply.steps:
            if isinstance(step, Disconnect):
                assert request.transport is not None
                request.transport.close()
                break
            if isinstance(step, bytes):
                await response.write(step)
            else:
                await asyncio.sleep(step)
        return response

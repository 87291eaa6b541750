"""The connection side of an answer: watching the client, sending events.

Owns the detection of a client that has gone, and the ASGI response that sends server-sent
events as they come. Knows no JSON and no engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.gateway.http.exchange import exchange_of

SEND_DEADLINE_S = 60.0

_log = logging.getLogger("gateway")


async def watch_client(receive: Receive, on_gone: Callable[[], None]) -> None:
    """Call `on_gone` when the client has closed the connection; to be run as a task."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            on_gone()
            return


class EventStream(Response):
    """Sends each block of events as it comes; always calls `close` at the end.

    `keep_alive` is sent when nothing has been for `keep_alive_s`; 0: never. The stream of a client
    that reads nothing for `send_deadline_s` ends: its unread events would otherwise accumulate
    without limit.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        blocks: AsyncGenerator[bytes, None],
        *,
        close: Callable[[], None],
        keep_alive: bytes = b"",
        keep_alive_s: float = 0.0,
        send_deadline_s: float = SEND_DEADLINE_S,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # The length is not known yet.
        del self.headers["content-length"]
        self._blocks = blocks
        self._close = close
        self._keep_alive = keep_alive
        self._keep_alive_s = keep_alive_s
        self._send_deadline_s = send_deadline_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        try:
            async with asyncio.timeout(None) as limit:
                watch = _SendWatch(limit, self._send_deadline_s)
                try:
                    await self._send_all(send, exchange_of(scope).send, watch)
                finally:
                    watch.close()
        except TimeoutError:
            _log.warning("a client read nothing for %g s; its stream ends", self._send_deadline_s)
        finally:
            self._close()

    async def _send_all(self, send: Send, send_direct: Send, watch: _SendWatch) -> None:
        """Send the head by `send`, and the rest past all middleware: that costs time per event."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        beats = asyncio.create_task(self._beat(send_direct, watch))
        now = asyncio.get_running_loop().time
        try:
            async with aclosing(self._blocks) as blocks:
                async for block in blocks:
                    watch.is_sending = True
                    part = {"type": "http.response.body", "body": block, "more_body": True}
                    await send_direct(part)
                    watch.is_sending = False
                    watch.sent_at_s = now()
        finally:
            beats.cancel()
        await send_direct({"type": "http.response.body", "body": b"", "more_body": False})

    async def _beat(self, send: Send, watch: _SendWatch) -> None:
        """Send the keep-alive whenever nothing has been sent for its interval."""
        block, interval_s = self._keep_alive, self._keep_alive_s
        now = asyncio.get_running_loop().time
        while interval_s:
            left_s = interval_s - (0.0 if watch.is_sending else now() - watch.sent_at_s)
            if left_s <= 0:
                await send({"type": "http.response.body", "body": block, "more_body": True})
                watch.sent_at_s, left_s = now(), interval_s
            await asyncio.sleep(left_s)


class _SendWatch:
    """Ends a timeout scope when one send exceeds a deadline; costs next to nothing per send.

    Checks once per deadline: a send in progress at two checks in a row is late, so it ends
    after one to two deadlines.
    """

    def __init__(self, limit: asyncio.Timeout, deadline_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._period_s = deadline_s
        self._seen_s = -1.0
        self.sent_at_s = self._loop.time()
        self.is_sending = False
        self._timer = self._loop.call_later(self._period_s, self._look)

    def _look(self) -> None:
        if self.is_sending and self._seen_s == self.sent_at_s:
            self._limit.reschedule(self._loop.time())
            return
        self._seen_s = self.sent_at_s if self.is_sending else -1.0
        self._timer = self._loop.call_later(self._period_s, self._look)

    def close(self) -> None:
        """Stop the checks."""
        self._timer.cancel()

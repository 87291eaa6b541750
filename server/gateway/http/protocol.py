"""One HTTP/1.1 connection: its deadlines, how it ends, and errors in OpenAI's shape.

Owns connections outside of a request: one that sends nothing or an incomplete head is closed,
invalid HTTP is answered in JSON, of a request that was refused little is taken, and a client that
has closed only its sending side still gets its answer. Requests run one after the other, each in
uvicorn's cycle. Knows no route; server.gateway.http.listener passes it to uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Literal
from urllib.parse import unquote

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from server.gateway.errors import PASSING, RETRY_AFTER_S, describe
from server.gateway.http.exchange import HEADER, make_request_id
from server.gateway.http.fairness import Room, Turns
from server.gateway.http.request_reader import Head, RequestReader
from topspin.errors import Overloaded, RequestError, TopspinError
from topspin.logs import about

# For a request's head, from its first byte to its last. Bodies have a deadline of their own.
HEAD_DEADLINE_S = 20.0
# Of a request that was answered before all of it had come, the rest is thrown away. A short rest of
# known length may be followed by another request; after any other the connection is closed, but not
# at once: a client that sends all before it reads would not learn why.
DISCARD_DEADLINE_S = 2.0
MAX_REST_BYTES = 2**20
MAX_DISCARDED_BYTES = 32 * 2**20
# A request that has had no more turns goes before others of its address.
NEW_TURNS: Final = 4
# If so much waits to be parsed, no more is received.
READ_AHEAD_BYTES: Final = 64 * 1024
# If the client has closed the connection in both directions, the second send fails.
FIRST_PROBE_S = 0.05
MAX_PROBE_S = 5.0
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

# Before a request; in a head; a request runs; the rest of a body that was refused comes, after
# which there may be another request; the same, after which the connection is closed.
Phase = Literal["idle", "head", "busy", "rest", "ending"]

_log = logging.getLogger("gateway")


class HeadTimeout(RequestError):
    """A request's head did not arrive in time."""

    code = "request_timeout"
    status = 408


class _Flow(FlowControl):
    """uvicorn's, of which only the connection lets more be received; others say they want it."""

    def __init__(self, transport: asyncio.Transport, on_wanted: Callable[[], None]) -> None:
        super().__init__(transport)
        self._on_wanted = on_wanted

    def resume_reading(self) -> None:
        self._on_wanted()

    def receive_on(self) -> None:
        super().resume_reading()


class _Cycle(RequestResponseCycle):
    """uvicorn's request and answer, without chunks for HTTP/1.0; its connection does the closing.

    `may_go_on` says, when the answer begins, whether another request can follow. `closes`: at the
    answer's end, whether none can.
    """

    may_go_on: Callable[[], bool]
    closes = False
    is_probed = False
    _ends_by_closing = False

    async def send(self, message: Any) -> None:
        if not self.response_started:
            names = {name.lower() for name, _ in message.get("headers", ())}
            self.keep_alive = self.keep_alive and self.may_go_on()
            self._ends_by_closing = (
                self.scope["http_version"] == "1.0" and b"content-length" not in names
            )
            if self._ends_by_closing:
                self.chunked_encoding = False
        else:
            if self._ends_by_closing:
                self.expected_content_length = len(message.get("body", b""))
            if not message.get("more_body", False):
                self.closes, self.keep_alive = not self.keep_alive, True
        await super().send(message)


class HttpProtocol(HttpToolsProtocol):
    """One connection. Invariant: while no request is in progress, a timer runs that closes it."""

    cycle: _Cycle

    def __init__(self, *arguments: Any, room: Room, turns: Turns, **options: Any) -> None:
        """Read in `turns`, and take a place in `room`; the rest is uvicorn's."""
        super().__init__(*arguments, **options)
        self._room = room
        self._turns = turns
        self._reader = RequestReader(self)
        self._address = ""
        self._phase: Phase = "busy"
        self._timer: asyncio.TimerHandle | None = None
        self._num_discarded_bytes = 0
        self._num_turns = 0
        self._has_half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the keep-alive timer, as between two requests."""
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport, self._go_on)
        self._address = self.client[0] if self.client else ""
        self._watch("idle")
        if not self._room.enter(self):
            self._refuse(Overloaded("too many connections have requests in progress"))
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the place, and cancel the timer."""
        self._room.leave(self)
        super().connection_lost(exc)
        self._watch("busy")

    def give_way(self) -> None:
        """Close at once, also if the client has not read its last answer."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Keep `data` until it is this connection's turn, or throw it away."""
        if self._phase == "ending":
            self._discard(len(data))
            return
        self._reader.feed(data)
        if self._reader.num_unread_bytes > READ_AHEAD_BYTES:
            self.flow.pause_reading()
        self._enter()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open, as long as what came before is to be answered.

        HTTP lets a client close its sending side then. (TLS does not: it is closed.)
        """
        self._has_half_closed = True
        self._enter()
        return self.scheme == "http" and self._phase != "ending"

    def _enter(self) -> None:
        is_new = self._num_turns < NEW_TURNS and self._phase != "ending"
        self._turns.enter(self, self._address, is_new=is_new)

    def take_turn(self) -> None:
        """Read a part of a request, unless one is in progress that has all its body."""
        self._num_turns += 1
        if self.transport.is_closing():
            return
        if self._phase == "ending":
            self.flow.receive_on()
            return
        try:
            if self._may_read():
                self._reader.advance()
        except RequestError as error:
            self._refuse(error)
            return
        self._settle()

    def on_head(self, head: Head) -> None:
        """Start a request."""
        scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": head.version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": head.method,
            "root_path": self.root_path,
            "path": self.root_path + unquote(head.raw_path.decode()),
            "raw_path": self.root_path.encode() + head.raw_path,
            "query_string": head.query,
            "headers": head.headers,
            "state": self.app_state.copy(),
        }
        self.cycle = _Cycle(
            scope=scope,  # type: ignore[arg-type]
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=head.expects_continue,
            keep_alive=head.keeps_alive,
            on_response=self.on_response_complete,
        )
        self.cycle.may_go_on = self._may_go_on
        self._start_asgi_task(self.cycle, self.app)

    def on_content(self, data: bytes) -> None:
        """Pass on a part of the body; not if the request has been answered."""
        if not self.cycle.response_complete:
            self.cycle.body += data
            self.cycle.message_event.set()

    def on_end(self) -> None:
        """Note that the body is complete."""
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def on_response_complete(self) -> None:
        """Go on with the next request, or close."""
        self.server_state.total_requests += 1
        self._num_turns = 0
        if self.transport.is_closing():
            return
        if not self.cycle.closes:
            self._settle()
        elif self.cycle.more_body or self._reader.num_unread_bytes:
            self._end()
        else:
            self.transport.close()

    def _is_running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _may_read(self) -> bool:
        return not self._is_running() or (
            self.cycle.more_body and len(self.cycle.body) <= HIGH_WATER_LIMIT
        )

    def _may_go_on(self) -> bool:
        """Say whether the rest of the body, if the application leaves it, is known to be short."""
        num_missing_bytes = self._reader.num_missing_bytes
        return num_missing_bytes == 0 or (
            num_missing_bytes is not None
            and num_missing_bytes <= MAX_REST_BYTES
            and not self.cycle.waiting_for_100_continue
        )

    def _go_on(self) -> None:
        """Read or receive more: the application has taken what there was."""
        if self._reader.num_unread_bytes:
            self._enter()
        else:
            self.flow.receive_on()

    def _settle(self) -> None:
        """See what is next, after a turn or an answer."""
        if self._reader.can_advance and self._may_read():
            self._enter()
        elif self._has_half_closed:
            self._answer_the_last()
        if self._reader.num_unread_bytes <= READ_AHEAD_BYTES:
            self.flow.receive_on()
        if self._is_running():
            self._watch("busy")
        elif self._reader.num_missing_bytes != 0:
            self._watch("rest")
        else:
            self._watch("head" if self._reader.has_begun_head else "idle")

    def _answer_the_last(self) -> None:
        """Close a connection that will not send more, unless a request waits for its answer.

        Whether the client has closed both sides shows when something is sent, so interim
        responses, which clients skip, are sent until the answer begins. During an answer they
        cannot be sent, and the client counts as gone.
        """
        cycle = self.cycle
        if self._is_running() and cycle.more_body and self._reader.num_unread_bytes:
            return  # the application reads it
        if (
            not self._is_running()
            or cycle.response_started
            or cycle.more_body
            or cycle.scope["http_version"] != "1.1"
        ):
            self.transport.close()
        elif not cycle.is_probed:
            cycle.is_probed = True
            self._probe(FIRST_PROBE_S)

    def _watch(self, phase: Phase) -> None:
        """Be in `phase` from now on; if it is a new one, its deadline begins."""
        if phase == self._phase:
            return
        self._phase = phase
        self._room.note(self, waits=phase != "busy")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if phase != "busy":
            deadlines = {"idle": self.timeout_keep_alive, "head": HEAD_DEADLINE_S}
            delay_s = deadlines.get(phase, DISCARD_DEADLINE_S)
            self._timer = self.loop.call_later(delay_s, self._is_late)

    def _is_late(self) -> None:
        if self._phase == "head":
            self._refuse(HeadTimeout(f"the request did not arrive within {HEAD_DEADLINE_S:g} s"))
            return
        self.transport.close()
        if self.transport.get_write_buffer_size():  # the client has not read its last answer
            delay_s = 0 if self._phase == "idle" else self.timeout_keep_alive
            self._timer = self.loop.call_later(delay_s, self.transport.abort)

    def _refuse(self, error: TopspinError) -> None:
        """Answer with `error`, unless an answer has begun, and close."""
        if self._is_running():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                return
        failure, request_id = describe(error), make_request_id()
        _log.debug("gateway: %s", error, extra=about(request_id=request_id))
        body = failure.body()
        retry = f"retry-after: {RETRY_AFTER_S}\r\n" if failure.status in PASSING else ""
        head = (
            f"{retry}content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"connection: close\r\n{HEADER}: {request_id}\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[failure.status] + head.encode() + body)
        self._end()

    def _end(self) -> None:
        """Send no more, and throw away what still comes, for a while."""
        self._watch("ending")
        self._reader.clear()
        if self._has_half_closed:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.receive_on()

    def _discard(self, num_bytes: int) -> None:
        self._num_discarded_bytes += num_bytes
        self.flow.pause_reading()
        if self._num_discarded_bytes < MAX_DISCARDED_BYTES:
            self._enter()

    def _probe(self, delay_s: float) -> None:
        """Send interim responses, at growing intervals, until the answer begins."""
        if self.transport.is_closing() or self.cycle.response_started:
            return
        self.transport.write(CONTINUE)
        self.loop.call_later(delay_s, self._probe, min(2 * delay_s, MAX_PROBE_S))

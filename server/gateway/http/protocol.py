"""uvicorn's HTTP/1.1 protocol, with a deadline for request heads and errors in OpenAI's shape.

Owns connections outside of a request: one that sends nothing or an incomplete head is closed,
invalid HTTP is answered in JSON, and a client that has closed only its sending side still gets
its answer. Knows no route; server.gateway.http.listener passes it to uvicorn.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from server.gateway.errors import PASSING, RETRY_AFTER_S, describe, truncated
from server.gateway.http.exchange import HEADER, make_request_id
from server.gateway.http.room import Room
from topspin.errors import Overloaded, RequestError, TopspinError
from topspin.logs import about

# For a request's head from its first byte to its last, and for the rest of a body whose request
# has already been answered. Other bodies have their own deadline.
HEAD_DEADLINE_S = 20.0
# If the client has closed the connection in both directions, the second send fails.
FIRST_PROBE_S = 0.05
MAX_PROBE_S = 5.0
MAX_DETAIL_CHARS = 128

_log = logging.getLogger("gateway")


class InvalidHttp(RequestError):
    """The received bytes are not a valid HTTP request."""

    code = "invalid_http"


class HeadTooLarge(RequestError):
    """The request's head is over the limit."""

    code = "headers_too_large"
    status = 431


class HeadTimeout(RequestError):
    """A request's head did not arrive in time."""

    code = "request_timeout"
    status = 408


class HttpProtocol(H11Protocol):
    """One connection. Invariant: while no request is in progress, a timer runs that closes it."""

    _head_timer: asyncio.TimerHandle | None = None
    _has_half_closed = False

    def __init__(self, *arguments: Any, room: Room, **options: Any) -> None:
        """Take a place in `room`; the rest is uvicorn's."""
        super().__init__(*arguments, **options)
        self._room = room

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the keep-alive timer, as between two requests."""
        super().connection_made(transport)
        self._start_keep_alive_timer()
        if not self._room.enter(self):
            self._refuse(Overloaded("too many connections have requests in progress"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel both timers."""
        self._room.leave(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._stop_head_timer()

    def give_way(self) -> None:
        """Close at once, also if the client has not read its last answer."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Handle `data`; an incomplete head or refused body starts the head's deadline."""
        super().data_received(data)
        self._note_work()
        conn = self.conn
        is_head = conn.their_state is h11.IDLE and bool(conn.trailing_data[0])
        is_refused_body = conn.their_state is h11.SEND_BODY and conn.our_state is h11.DONE
        if not is_head and not is_refused_body:
            self._stop_head_timer()
            if conn.their_state is h11.IDLE:
                self._start_keep_alive_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_DEADLINE_S, self._head_is_late)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open if a complete request waits for its answer to begin.

        HTTP lets a client close its sending side then. Whether it has closed both sides shows
        when something is sent, so interim responses, which clients skip, are sent until the
        answer begins. During an answer they cannot be sent, and the client counts as gone.
        """
        cycle = self.cycle
        if (
            cycle is None
            or cycle.response_started
            or cycle.more_body
            or cycle.scope["http_version"] != "1.1"
        ):
            return False
        self._has_half_closed = True
        self._probe(FIRST_PROBE_S)
        return True

    def on_response_complete(self) -> None:
        """Go on with the next request; closes a half-closed connection that has none."""
        super().on_response_complete()
        self._note_work()
        if self._has_half_closed and self.cycle.response_complete:
            self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        """Close the idle connection, even if the client has not read its last answer."""
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP; uvicorn calls it while it handles h11's error."""
        reason = sys.exc_info()[1]
        if isinstance(reason, h11.RemoteProtocolError) and reason.error_status_hint == 431:
            self._refuse(HeadTooLarge("the request's line and headers are too long"))
        else:
            # h11 quotes the received bytes as a Python bytearray: the quote is cut off.
            detail = truncated(str(reason or msg).partition(": bytearray(")[0], MAX_DETAIL_CHARS)
            self._refuse(InvalidHttp(f"invalid HTTP request: {detail}"))

    def _note_work(self) -> None:
        self._room.note(self, waits=self.cycle is None or self.cycle.response_complete)

    def _start_keep_alive_timer(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._refuse(HeadTimeout(f"the request did not arrive within {HEAD_DEADLINE_S:g} s"))

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: TopspinError) -> None:
        """Answer with `error`, unless an answer has begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            failure, request_id = describe(error), make_request_id()
            _log.debug("gateway: %s", error, extra=about(request_id=request_id))
            body = failure.encode()
            passing = failure.status in PASSING
            head = h11.Response(
                status_code=failure.status,
                reason=STATUS_PHRASES[failure.status],
                headers=[
                    *((("retry-after", str(RETRY_AFTER_S)),) if passing else ()),
                    ("content-type", "application/json"),
                    ("content-length", str(len(body))),
                    ("connection", "close"),
                    (HEADER, request_id),
                ],
            )
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _probe(self, delay_s: float) -> None:
        """Send interim responses, at growing intervals, until the answer begins."""
        if self.transport.is_closing() or self.cycle.response_started:
            return
        interim = h11.InformationalResponse(status_code=100, reason=b"Continue", headers=[])
        self.transport.write(self.conn.send(interim) or b"")
        self.loop.call_later(delay_s, self._probe, min(2 * delay_s, MAX_PROBE_S))

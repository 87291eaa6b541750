"""An HTTP request and its answer as the operator sees them: an id, and a line in the access log.

Owns the id: the client's (`X-Request-Id`, or the body's `request_id`) or one made here. It
is returned on every answer and names the request in the engine and in all logs. Knows no route and
no JSON; wraps the application as ASGI middleware, server.gateway.handler fills in what it learns.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.gateway.bodies.fields import MAX_REQUEST_ID_CHARS
from server.gateway.errors import error_response, truncated
from server.gateway.operations.otlp import SpanSender
from server.gateway.operations.spans import GONE_STATUS, OPERATIONS, RequestRecord, request_spans
from topspin.errors import InvalidRequest
from topspin.logs import about
from topspin.messages import Tenant

HEADER = "X-Request-Id"
TIMEOUT_HEADER = "X-Request-Timeout"

# Asked for every few seconds by machines, and by the page; their lines would hide the others.
UNLOGGED_PATHS = frozenset({"/feed", "/health", "/live", "/load", "/metrics", "/ping"})
MAX_LOGGED_PATH_CHARS = 256

_HEADER_BYTES = HEADER.lower().encode()
_TIMEOUT_BYTES = TIMEOUT_HEADER.lower().encode()
MAX_TIMEOUT_S = 86400.0
_KEY = "topspin.exchange"

_log = logging.getLogger("access")


@dataclass(slots=True)
class Exchange:
    """One request and its answer. `is_named`: the id is the header's, so the body's is not used.

    `send` is the connection's own, without middleware: what is sent of an answer after its start
    needs none. `tenant` is whose key it came with; without a name: keys are not asked for. Its
    client waits for `timeout_s` (None: it has not said). The counts are None unless it generates,
    `record` unless it also has spans.
    """

    request_id: str
    is_named: bool
    send: Send
    tenant: Tenant = field(default_factory=Tenant)
    timeout_s: float | None = None
    started_s: float = field(default_factory=time.monotonic)
    status: int | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    ttft_s: float | None = None
    record: RequestRecord | None = None

    def failed(self, error: Exception) -> None:
        """Take note of the error that the client is told."""
        if self.record is not None:
            self.record.failed(error)

    def salted(self, salt: str) -> str:
        """Return the salt of what may be cached for this request: no two tenants have the same."""
        if not self.tenant.name:
            return salt
        return hashlib.sha256(f"{self.tenant.name}\0{salt}".encode()).hexdigest()

    def left_s(self) -> float | None:
        """Return how long the client will wait from now on; None: it has not said."""
        if self.timeout_s is None:
            return None
        return max(0.0, self.timeout_s - (time.monotonic() - self.started_s))

    def name(self, request_id: str | None) -> str:
        """Take the id in a request's body, if it has one and the header had none; return the id."""
        if request_id is not None and not self.is_named:
            self.request_id, self.is_named = request_id, True
        return self.request_id


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange of a request that came through `Exchanges`."""
    exchange: Exchange = scope[_KEY]
    return exchange


def make_request_id() -> str:
    """Return a new id."""
    return secrets.token_hex(16)


class Exchanges:
    """ASGI middleware, outside of all other: an Exchange for each request, logged at its end.

    `answered` is called with the path and the status of each request at its end. `spans`: where the
    spans of requests that generate go; None: they have none. `timeout_s`: a request ends after it,
    unless its header says less; 0: never. `root_path`: where a proxy shows the application; it is
    taken away from paths that have it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access_log: bool,
        answered: Callable[[str, int], None] = lambda path, status: None,
        spans: SpanSender | None = None,
        timeout_s: float = 0.0,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._root_path = root_path
        self._is_logging = access_log
        self._answered = answered
        self._spans = spans
        self._timeout_s = timeout_s or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root, path = self._root_path, scope["path"]
        if root and (path == root or path.startswith(f"{root}/")):
            scope = {**scope, "path": path.removeprefix(root) or "/"}
        exchange = Exchange(make_request_id(), False, send)
        scope[_KEY] = exchange
        if self._spans is not None and scope["path"] in OPERATIONS and scope["method"] == "POST":
            exchange.record = RequestRecord(scope["path"], exchange.started_s)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                named = (_HEADER_BYTES, exchange.request_id.encode())
                message["headers"] = [*message.get("headers", ()), named]
            await send(message)

        app = self._app
        try:
            if given := _given_id(scope["headers"]):
                exchange.request_id, exchange.is_named = given, True
            asked = (self._timeout_s, _given_timeout_s(scope["headers"]))
            exchange.timeout_s = min((each for each in asked if each is not None), default=None)
        except InvalidRequest as error:
            app = error_response(error, scope["path"])
        try:
            await app(scope, receive, send_named)
        finally:
            self._answered(scope["path"], exchange.status or GONE_STATUS)
            if self._is_logging and scope["path"] not in UNLOGGED_PATHS:
                _write(scope, exchange)
            if self._spans is not None and exchange.record is not None:
                spans = request_spans(
                    exchange.record,
                    request_id=exchange.request_id,
                    status=exchange.status,
                    ended_s=time.monotonic(),
                )
                self._spans.send(spans, scope["headers"])


def _write(scope: Scope, exchange: Exchange) -> None:
    """Log a request at its end; without a status its client had gone before the answer."""
    ttft_s = exchange.ttft_s
    path = scope["raw_path"].decode("latin-1")
    fields = about(
        method=scope["method"],
        # Percent-encoded: it cannot begin a line of its own.
        path=path if len(path) <= MAX_LOGGED_PATH_CHARS else truncated(path, MAX_LOGGED_PATH_CHARS),
        status=exchange.status,
        request_id=exchange.request_id,
        prompt_tokens=exchange.num_prompt_tokens,
        output_tokens=exchange.num_output_tokens,
        ttft_s=None if ttft_s is None else round(ttft_s, 4),
        duration_s=round(time.monotonic() - exchange.started_s, 4),
    )
    _log.info("gateway: answered", extra=fields)


def _given_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the id in the headers, or nothing; raises InvalidRequest."""
    given = next((value for name, value in headers if name == _HEADER_BYTES), b"").decode("latin-1")
    if len(given) > MAX_REQUEST_ID_CHARS or not (given.isascii() and given.isprintable()):
        raise InvalidRequest(
            f"`{HEADER}` must have at most {MAX_REQUEST_ID_CHARS} characters, all printable ASCII",
            param=HEADER,
        )
    return given


def _given_timeout_s(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """Return how long the client waits, in seconds, if the headers say; raises InvalidRequest."""
    given = next((value for name, value in headers if name == _TIMEOUT_BYTES), None)
    if given is None:
        return None
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = 0.0
    if not 0.0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"`{TIMEOUT_HEADER}` must be a number of seconds above 0, at most {MAX_TIMEOUT_S:g}",
            param=TIMEOUT_HEADER,
        )
    return timeout_s

"""GET /trace: the stamps of all nodes, for `topspin trace`.

Owns the route, its limits and its form: JSON with each node's records in base64 (the client
converts them to Perfetto's form, not this event loop). Only clients on this host are
answered, and not through a proxy: stamps reveal when others are served. Called by
server.gateway.app.
"""

from __future__ import annotations

import ipaddress
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.gateway.engine_client import EngineClient
from server.gateway.http.answer import json_response
from server.gateway.openapi.endpoint import Endpoint, Query
from topspin.errors import InvalidRequest, NotFound

# The scheduler gives up on a silent node after 5 s.
TRACE_DEADLINE_S = 8.0
DEFAULT_SECONDS = 2.0
MAX_SECONDS = 60.0
# A proxy adds one of them. What it says of the client is not believed: the client may have said it.
PROXY_HEADERS: Final = frozenset({"forwarded", "via", "x-forwarded-for", "x-real-ip"})


TRACE = Endpoint(
    method="get",
    path="/trace",
    summary="Take the stamps of all nodes, for `topspin trace`, on the server's host only",
    media_type="application/json",
    refusals=(404, 503),
    query=(
        Query(
            name="seconds",
            schema={"type": "number", "exclusiveMinimum": 0, "maximum": 60},
            text="how many seconds of the past",
        ),
    ),
)


async def trace(request: Request, *, engine: EngineClient) -> Response:
    """Answer GET /trace?seconds=S."""
    if not is_of_this_host(request):
        raise NotFound("traces are shown to clients of the server's own host only")
    seconds = _seconds(request.query_params.get("seconds"))
    return json_response(msgspec.json.encode(await engine.trace(seconds, TRACE_DEADLINE_S)))


def is_of_this_host(request: Request) -> bool:
    """Say whether the client is on this host and has come without a proxy."""
    if request.client is None or not PROXY_HEADERS.isdisjoint(request.headers):
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _seconds(text: str | None) -> float:
    if text is None:
        return DEFAULT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidRequest(
            f"seconds is {text[:32]!r}: must be above 0, at most {MAX_SECONDS:g}", param="seconds"
        )
    return seconds

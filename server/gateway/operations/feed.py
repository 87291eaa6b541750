"""GET /feed: the engine now, and what has happened lately, for operators who watch it.

Owns the route and who may ask: its times show when others are served. With keys that is who has an
operator's; without any, who is on this host. Each request has the scheduler note for a few seconds
what the next one may ask for. Called by server.gateway.app.
"""

from __future__ import annotations

import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.gateway.engine_client import EngineClient
from server.gateway.http.answer import json_response
from server.gateway.http.exchange import exchange_of
from server.gateway.openapi.endpoint import Endpoint, Query
from server.gateway.operations.probes import STATS_DEADLINE_S, is_set
from server.gateway.operations.tracing import is_of_this_host
from topspin.errors import InvalidRequest, NotFound

FEED = Endpoint(
    method="get",
    path="/feed",
    summary="Show operators the engine's nodes, last steps and counters",
    media_type="application/json",
    refusals=(404, 503),
    query=(
        Query(
            name="after",
            schema={"type": "integer", "minimum": 0},
            text="the `cursor` of an earlier answer: only what is newer",
        ),
        Query(
            name="experts",
            schema={"enum": ["0", "1"]},
            text="1: how often each expert is chosen, too",
        ),
    ),
)


async def feed(request: Request, *, engine: EngineClient) -> Response:
    """Answer GET /feed?after=CURSOR&experts=1."""
    tenant = exchange_of(request.scope).tenant
    if tenant.name and not tenant.operator:
        raise NotFound("the engine is shown to operators only: keys with operator=1 behind them")
    if not tenant.name and not is_of_this_host(request):
        raise NotFound("without keys the engine is shown to clients of the server's own host only")
    found = await engine.feed(
        _cursor(request.query_params.get("after", "0")),
        experts=is_set(request, "experts"),
        deadline_s=STATS_DEADLINE_S,
    )
    return json_response(msgspec.json.encode(found))


def _cursor(text: str) -> int:
    if re.fullmatch(r"\d{1,18}", text, re.ASCII) is None:
        raise InvalidRequest(f"after is {text[:32]!r}: must be a cursor, from 0 on", param="after")
    return int(text)

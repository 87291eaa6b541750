"""GET /health, /live, /load, /metrics and /version, which machines ask for every few seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from server.gateway.engine_client import EngineClient
from server.gateway.errors import truncated
from server.gateway.http.answer import json_response
from server.gateway.openapi.endpoint import Endpoint, Query
from server.gateway.operations.health import ProgressWatch
from server.gateway.operations.metrics import GatewayMetrics
from topspin import __version__
from topspin.errors import EngineError, InvalidRequest

STATS_DEADLINE_S = 2.0
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /health; `detail` says why the engine does not serve."""

    state: str
    detail: str | UnsetType = UNSET


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /live."""

    state: Literal["alive"] = "alive"


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /load: how many choices this gateway waits for."""

    server_load: int


class ServerVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /version."""

    version: str


HEALTH = Endpoint(
    method="get",
    path="/health",
    summary="Say whether the engine serves",
    answer=Health,
    refusals=(503,),
    failure=Health,
)
LIVE = Endpoint(
    method="get",
    path="/live",
    summary="Say that this gateway runs, whatever its engine does",
    answer=Live,
)
PING = Endpoint(
    method="get",
    path="/ping",
    summary="Say the same as /health, where hosts of models look for it",
    answer=Health,
    refusals=(503,),
    failure=Health,
)
PING_BY_POST = replace(PING, method="post")
LOAD = Endpoint(
    method="get",
    path="/load",
    summary="Show how many answers are being generated",
    answer=ServerLoad,
)
METRICS = Endpoint(
    method="get",
    path="/metrics",
    summary="Show counters in Prometheus' format",
    media_type="text/plain",
    query=(
        Query(name="per_expert", schema={"enum": ["0", "1"]}, text="1: a line for each expert"),
    ),
)
VERSION = Endpoint(
    method="get", path="/version", summary="Show the server's version", answer=ServerVersion
)


@dataclass(frozen=True, slots=True)
class Probes:
    """The answers of one gateway; `watch` sees an engine that makes no progress."""

    engine: EngineClient
    metrics: GatewayMetrics
    watch: ProgressWatch

    async def health(self, _: Request) -> Response:
        """Answer 200 if the engine is ready or recovering, answers, and has not stalled."""
        engine = self.engine
        try:
            engine.check_ready()
            if engine.is_waiting:
                return _answer(Health(state=engine.condition))
            stats = await engine.stats(STATS_DEADLINE_S)
            engine.check_ready()  # the state may have changed before the answer came
        except EngineError as error:
            return _answer(Health(state=engine.condition, detail=str(error)), status=503)
        stalled_s = self.watch.stalled_for_s(stats, time.monotonic())
        if stalled_s is not None:
            detail = f"work waits, and no step got on for {stalled_s:.0f} s"
            return _answer(Health(state="stalled", detail=detail), status=503)
        return _answer(Health(state=engine.condition))

    async def live(self, _: Request) -> Response:
        """Answer 200 as long as this process does, whatever its engine does."""
        return _answer(Live())

    async def load(self, _: Request) -> Response:
        """Answer with the number of choices in flight."""
        return _answer(ServerLoad(server_load=self.engine.num_in_flight))

    async def prometheus(self, request: Request) -> Response:
        """Answer with the counts of this gateway and, if it answers, of the engine."""
        try:
            stats = await self.engine.stats(STATS_DEADLINE_S)
        except EngineError:
            stats = None  # reported by topspin_engine_up
        text = self.metrics.render(stats, per_expert=is_set(request, "per_expert"))
        return Response(text, headers={"Content-Type": PROMETHEUS_TEXT})

    async def version(self, _: Request) -> Response:
        """Answer with the server's version."""
        return _answer(ServerVersion(version=__version__))


def is_set(request: Request, name: str) -> bool:
    """Return whether the query sets `name` to 1; raises InvalidRequest for other values than 0."""
    text = request.query_params.get(name, "0")
    if text not in ("0", "1"):
        raise InvalidRequest(f"`{name}` is {truncated(text, 32)!r}: must be 0 or 1", param=name)
    return text == "1"


def _answer(content: msgspec.Struct, *, status: int = 200) -> Response:
    return json_response(msgspec.json.encode(content), status=status)

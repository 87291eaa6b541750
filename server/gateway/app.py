"""The routes of the gateway, and nothing else.

Composes them into a FastAPI application that reports every failure in OpenAI's error shape, or in
Anthropic's. Called by server.gateway.service and by tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from server.gateway.call import ClientGone
from server.gateway.dialects.anthropic.dialect import COUNT_TOKENS, CREATE_MESSAGE, AnthropicDialect
from server.gateway.dialects.anthropic.reply import TokenCount
from server.gateway.dialects.chat.batch import BATCH, INLINE_BATCH_BYTES, BatchDialect
from server.gateway.dialects.chat.dialect import CHAT, ChatDialect
from server.gateway.dialects.completions.dialect import COMPLETIONS, CompletionDialect
from server.gateway.dialects.models import LIST_MODELS, SHOW_MODEL, Models
from server.gateway.dialects.responses.dialect import (
    CANCEL_RESPONSE,
    FORGET_RESPONSE,
    INPUT_TOKENS,
    RESPONSES,
    SHOW_RESPONSE,
    ResponsesDialect,
)
from server.gateway.dialects.responses.input_items import INPUT_ITEMS
from server.gateway.dialects.responses.reply import ResponseInputTokens
from server.gateway.dialects.tokenization import (
    DETOKENIZE,
    MAX_BODY_BYTES,
    TOKENIZE,
    TOKENIZER_INFO,
    detokenize,
    tokenize,
    tokenizer_info,
)
from server.gateway.engine_client import EngineClient
from server.gateway.errors import error_response, truncated
from server.gateway.generation.served_model import ServedModel
from server.gateway.handler import Handler
from server.gateway.http.answer import json_response
from server.gateway.http.auth import ApiKeys, Authentication
from server.gateway.http.exchange import Exchanges, exchange_of
from server.gateway.openapi.document import document
from server.gateway.openapi.endpoint import Endpoint
from server.gateway.openapi.pages import DOCS, OPENAPI, docs_page, show_page
from server.gateway.operations.feed import FEED, feed
from server.gateway.operations.health import ProgressWatch
from server.gateway.operations.metrics import GatewayMetrics
from server.gateway.operations.otlp import SpanSender
from server.gateway.operations.probes import (
    HEALTH,
    LIVE,
    LOAD,
    METRICS,
    PING,
    PING_BY_POST,
    VERSION,
    Probes,
)
from server.gateway.operations.spans import GONE_STATUS
from server.gateway.operations.tracing import TRACE, trace
from server.gateway.page.files import PAGE, PAGE_FILE, page_paths, send_file
from topspin import __version__
from topspin.errors import TopspinError

# Of the paths in no route's text: those with a parameter, and those that are not served.
OTHER_ENDPOINT = "other"

Handling = Callable[[Request], Awaitable[Response]]


def create_app(
    engine: EngineClient,
    *,
    model: ServedModel,
    progress_deadline_s: float,
    allowed_origins: Sequence[str] = (),
    access_log: bool = True,
    keys: ApiKeys | None = None,
    spans: SpanSender | None = None,
    keep_alive_s: float = 0.0,
    request_timeout_s: float = 0.0,
    root_path: str = "",
) -> ASGIApp:
    """Return the application. The caller runs `engine.run()` concurrently.

    `keys`: those of which a request must have one (None or empty: it needs none). Pages of
    `allowed_origins` (`*`: all) may call it from a browser (CORS). `access_log`: each request is
    logged at its end. `spans`: where the spans of requests go (None: they have none).
    `keep_alive_s` is Handler's, `request_timeout_s` and `root_path` are Exchanges'.
    """
    metrics = GatewayMetrics(model.names[0])
    handler = Handler(engine=engine, model=model, metrics=metrics, keep_alive_s=keep_alive_s)
    probes = Probes(engine, metrics, ProgressWatch(progress_deadline_s))
    app = FastAPI(
        title="Topspin",
        version=__version__,
        openapi_url=None,
        routes=_routes(_handlings(handler, probes)),
        middleware=_cross_origin(allowed_origins),
        exception_handlers={
            TopspinError: _answer_error,
            HTTPException: _answer_error,
            Exception: _answer_error,
            ClientGone: _answer_nobody,
        },
    )
    checked = (
        Authentication(app, keys, preflights=bool(allowed_origins), open_paths=page_paths())
        if keys
        else app
    )
    answered = _counted_by(metrics, app.routes)
    return Exchanges(
        checked,
        access_log=access_log,
        answered=answered,
        spans=spans,
        timeout_s=request_timeout_s,
        root_path=root_path,
    )


def _handlings(handler: Handler, probes: Probes) -> dict[Endpoint, Handling]:
    """Return every route, in the order of the description, and what answers its requests."""
    engine, model = handler.engine, handler.model
    responses, anthropic = ResponsesDialect(model), AnthropicDialect(model)
    models = Models(model, engine)
    tokens = partial(handler.convert, max_bytes=MAX_BODY_BYTES)

    async def openapi(_: Request) -> Response:
        return json_response(description())

    async def info(_: Request) -> Response:
        return json_response(msgspec.json.encode(tokenizer_info(model)))

    found: dict[Endpoint, Handling] = {
        CHAT: partial(handler.generate, dialect=ChatDialect(model)),
        BATCH: partial(
            handler.generate, dialect=BatchDialect(model), inline_bytes=INLINE_BATCH_BYTES
        ),
        COMPLETIONS: partial(handler.generate, dialect=CompletionDialect(model)),
        RESPONSES: partial(handler.generate, dialect=responses),
        INPUT_TOKENS: partial(
            handler.count, prepare=responses.prepare_count, answer=ResponseInputTokens
        ),
        SHOW_RESPONSE: responses.stored,
        INPUT_ITEMS: responses.input_items,
        CANCEL_RESPONSE: responses.cancel,
        FORGET_RESPONSE: responses.stored,
        CREATE_MESSAGE: partial(handler.generate, dialect=anthropic),
        COUNT_TOKENS: partial(handler.count, prepare=anthropic.prepare_count, answer=TokenCount),
        TOKENIZE: partial(tokens, conversion=partial(tokenize, model=model, engine=engine)),
        DETOKENIZE: partial(tokens, conversion=partial(detokenize, model=model)),
        TOKENIZER_INFO: info,
        LIST_MODELS: models.list,
        SHOW_MODEL: models.show,
        HEALTH: probes.health,
        PING: probes.health,
        PING_BY_POST: probes.health,
        LIVE: probes.live,
        LOAD: probes.load,
        METRICS: probes.prometheus,
        VERSION: probes.version,
        TRACE: partial(trace, engine=engine),
        FEED: partial(feed, engine=engine),
        OPENAPI: openapi,
        DOCS: partial(show_page, page=docs_page()),
        PAGE: send_file,
        PAGE_FILE: send_file,
    }
    description = cache(partial(document, tuple(found)))
    return found


def _routes(handlings: Mapping[Endpoint, Handling]) -> list[BaseRoute]:
    """Return a route for each path; methods of the same path are answered by the same."""
    methods: dict[str, list[str]] = defaultdict(list)
    for endpoint in handlings:
        methods[endpoint.path].append(endpoint.method)
    routes = [
        Route(endpoint.path, answer, methods=methods[endpoint.path])
        for endpoint, answer in handlings.items()
        if endpoint.method == methods[endpoint.path][0]
    ]
    return [Route(f"{LIST_MODELS.path}/", handlings[LIST_MODELS]), *routes]


def _counted_by(metrics: GatewayMetrics, routes: Sequence[BaseRoute]) -> Callable[[str, int], None]:
    """Return what counts an answer under its route; paths that clients make up are one."""
    endpoints = frozenset(route.path for route in routes if isinstance(route, Route))

    def count(path: str, status: int) -> None:
        metrics.observe_answer(path if path in endpoints else OTHER_ENDPOINT, status)

    return count


async def _answer_error(request: Request, error: Exception) -> Response:
    exchange_of(request.scope).failed(error)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        path = truncated(request.url.path, 64)
        # A set's order: not the same in every process.
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        error.detail = (
            f"`{path}` does not exist here"
            if not allowed
            else f"`{path}` takes {allowed}, not {truncated(request.method, 16)}"
        )
    return error_response(error, request.url.path)


async def _answer_nobody(_: Request, __: Exception) -> Response:
    # The client has closed the connection: this is never sent.
    return Response(status_code=GONE_STATUS)


def _cross_origin(allowed_origins: Sequence[str]) -> list[Middleware]:
    if not allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    ]

"""The routes of the gateway, and nothing else.

Composes handler, metrics and health into a FastAPI application that reports every failure in
OpenAI's error shape. Called by server.gateway.service and by tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from models.text.chat_template import ChatTemplate
from models.text.tokenizer import Tokenizer
from server.gateway.answers.wire import ModelCard, ModelList
from server.gateway.engine_client import ClientGone, EngineClient
from server.gateway.errors import MESSAGES, ModelNotFound, error_response, truncated
from server.gateway.handler import GenerationHandler
from server.gateway.http.auth import ApiKeys, Authentication
from server.gateway.http.exchange import Exchanges, exchange_of
from server.gateway.openapi.routes import documentation_routes
from server.gateway.operations.health import ProgressWatch
from server.gateway.operations.metrics import GatewayMetrics
from server.gateway.operations.otlp import SpanSender
from server.gateway.operations.spans import GONE_STATUS
from server.gateway.operations.tracing import trace_route
from server.gateway.requests.params import ServedModel
from server.gateway.requests.tools import MessageFormats
from server.gateway.tokenization import TokenizationHandler
from topspin import __version__
from topspin.errors import EngineError, InvalidRequest, TopspinError

STATS_DEADLINE_S = 2.0
# Of the paths in no route's text: those with a parameter, and those that are not served.
OTHER_ENDPOINT = "other"
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    engine: EngineClient,
    *,
    model: ServedModel,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    progress_deadline_s: float,
    formats: MessageFormats,
    allowed_origins: Sequence[str] = (),
    access_log: bool = True,
    keys: ApiKeys | None = None,
    spans: SpanSender | None = None,
    keep_alive_s: float = 0.0,
) -> ASGIApp:
    """Return the application. The caller runs `engine.run()` concurrently.

    `keys`: those of which a request must have one (None or empty: it needs none). `formats`: what
    can be read in the model's text. Pages of `allowed_origins` (`*`: all) may call it from a
    browser (CORS). `access_log`: each request is logged at its end. `spans`: where the spans of
    requests go (None: they have none). `keep_alive_s` is GenerationHandler's.
    """
    metrics = GatewayMetrics(model.names[0])
    handler = GenerationHandler(
        engine=engine,
        model=model,
        tokenizer=tokenizer,
        template=template,
        metrics=metrics,
        formats=formats,
        keep_alive_s=keep_alive_s,
    )
    tokenization = TokenizationHandler(
        engine=engine,
        model=model,
        tokenizer=tokenizer,
        template=template,
        formats=formats,
        threads=handler.threads,
        bodies=handler.bodies,
    )
    app = FastAPI(
        title="Topspin",
        version=__version__,
        openapi_url=None,
        routes=[
            Route("/v1/chat/completions", handler.chat, methods=["POST"]),
            Route("/v1/completions", handler.completion, methods=["POST"]),
            Route(MESSAGES, handler.messages, methods=["POST"]),
            Route(f"{MESSAGES}/count_tokens", handler.count_tokens, methods=["POST"]),
            Route("/v1/responses", handler.respond, methods=["POST"]),
            Route(
                "/v1/responses/{response_id}",
                handler.stored_response,
                methods=["GET", "DELETE"],
            ),
            Route("/tokenize", tokenization.tokenize, methods=["POST"]),
            Route("/detokenize", tokenization.detokenize, methods=["POST"]),
            *_model_routes(engine, model),
            *_operation_routes(engine, metrics, ProgressWatch(progress_deadline_s)),
            trace_route(engine),
            *documentation_routes(),
        ],
        middleware=_cross_origin(allowed_origins),
        exception_handlers={
            TopspinError: _answer_error,
            HTTPException: _answer_error,
            Exception: _answer_error,
            ClientGone: _answer_nobody,
        },
    )
    checked = Authentication(app, keys, preflights=bool(allowed_origins)) if keys else app
    answered = _counted_by(metrics, app.routes)
    return Exchanges(checked, access_log=access_log, answered=answered, spans=spans)


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
    return error_response(error, to_anthropic=request.url.path.startswith(MESSAGES))


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


def _model_routes(engine: EngineClient, model: ServedModel) -> list[Route]:
    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=model.created_at_s,
            root=model.root,
            max_model_len=engine.state.max_request_tokens or None,
            vocab_size=model.vocab_size,
            default_sampling_params=msgspec.structs.asdict(model.defaults),
        )

    async def list_models(_: Request) -> Response:
        return _json(ModelList(data=[card(name) for name in model.names]))

    async def retrieve_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in model.names:
            raise ModelNotFound(f"the model `{truncated(name, 64)}` is not served here")
        return _json(card(name))

    return [
        Route("/v1/models", list_models),
        Route("/v1/models/", list_models),
        Route("/v1/models/{name:path}", retrieve_model),
    ]


def _operation_routes(
    engine: EngineClient, metrics: GatewayMetrics, watch: ProgressWatch
) -> list[Route]:
    async def health(_: Request) -> Response:
        """Return 200 if the engine is ready or recovering, answers, and has not stalled."""
        try:
            engine.check_ready()
            if engine.is_waiting:
                return _json({"state": engine.condition})
            stats = await engine.stats(STATS_DEADLINE_S)
            engine.check_ready()  # the state may have changed before the answer came
        except EngineError as error:
            return _unhealthy(engine.condition, str(error))
        stalled_s = watch.stalled_for_s(stats, time.monotonic())
        if stalled_s is not None:
            return _unhealthy("stalled", f"work waits, and no step got on for {stalled_s:.0f} s")
        return _json({"state": engine.condition})

    async def live(_: Request) -> Response:
        """Return 200 as long as this process answers, whatever its engine does."""
        return _json({"state": "alive"})

    async def prometheus(request: Request) -> Response:
        try:
            stats = await engine.stats(STATS_DEADLINE_S)
        except EngineError:
            stats = None  # reported by topspin_engine_up
        per_expert = _is_set(request, "per_expert")
        return Response(
            metrics.render(stats, per_expert=per_expert), headers={"Content-Type": PROMETHEUS_TEXT}
        )

    async def version(_: Request) -> Response:
        return _json({"version": __version__})

    return [
        Route("/health", health),
        Route("/live", live),
        Route("/metrics", prometheus),
        Route("/version", version),
    ]


def _is_set(request: Request, name: str) -> bool:
    """Return whether the query sets `name` to 1; raises InvalidRequest for other values than 0."""
    text = request.query_params.get(name, "0")
    if text not in ("0", "1"):
        raise InvalidRequest(f"`{name}` is {truncated(text, 32)!r}: must be 0 or 1", param=name)
    return text == "1"


def _unhealthy(state: str, detail: str) -> Response:
    return _json({"state": state, "detail": detail}, status=503)


def _json(content: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")

"""The routes of the gateway, and nothing else.

Composes handler, metrics and health into a FastAPI application whose every failure has
OpenAI's error shape. Called by server.gateway.service and by tests.
"""

from __future__ import annotations

import time

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from models.chat_template import ChatTemplate
from models.tokenizer import Tokenizer
from server.gateway.engine_client import ClientGone, EngineClient
from server.gateway.errors import ModelNotFound, error_response, truncated
from server.gateway.handler import GenerationHandler
from server.gateway.health import ProgressWatch
from server.gateway.metrics import GatewayMetrics
from server.gateway.params import ServedModel
from server.gateway.tracing import add_trace_route
from server.gateway.wire import ModelCard, ModelList
from topspin import __version__
from topspin.errors import EngineError, TopspinError

STATS_DEADLINE_S = 2.0
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    engine: EngineClient,
    *,
    model: ServedModel,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    progress_deadline_s: float,
) -> FastAPI:
    """Return the application. The caller runs `engine.run()` beside it."""
    app = FastAPI(title="Topspin", version=__version__, openapi_url=None)
    metrics = GatewayMetrics()
    handler = GenerationHandler(
        engine=engine, model=model, tokenizer=tokenizer, template=template, metrics=metrics
    )
    _add_error_handlers(app)
    _add_model_routes(app, engine, model)
    _add_operation_routes(app, engine, metrics, ProgressWatch(progress_deadline_s))
    add_trace_route(app, engine)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await handler.chat(request)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await handler.completion(request)

    return app


def _add_error_handlers(app: FastAPI) -> None:
    async def answer_error(_: Request, error: Exception) -> Response:
        return error_response(error)

    async def answer_nobody(_: Request, __: Exception) -> Response:
        # The client has closed the connection: this is never sent.
        return Response(status_code=499)

    app.add_exception_handler(TopspinError, answer_error)
    app.add_exception_handler(HTTPException, answer_error)
    app.add_exception_handler(Exception, answer_error)
    app.add_exception_handler(ClientGone, answer_nobody)


def _add_model_routes(app: FastAPI, engine: EngineClient, model: ServedModel) -> None:
    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=model.created_at_s,
            root=model.root,
            max_model_len=engine.state.max_request_tokens or None,
            vocab_size=model.vocab_size,
            default_sampling_params=msgspec.structs.asdict(model.defaults),
        )

    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json(ModelList(data=[card(name) for name in model.names]))

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        if name not in model.names:
            raise ModelNotFound(f"the model `{truncated(name, 64)}` is not served here")
        return _json(card(name))


def _add_operation_routes(
    app: FastAPI, engine: EngineClient, metrics: GatewayMetrics, watch: ProgressWatch
) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200: ready or recovering, answering, and no work waits without progress."""
        try:
            engine.check_ready()
            stats = await engine.stats(STATS_DEADLINE_S)
            engine.check_ready()  # what the scheduler said before its answer counts too
        except EngineError as error:
            return _unhealthy(engine.condition, str(error))
        stalled_s = watch.stalled_for_s(stats, time.monotonic())
        if stalled_s is not None:
            return _unhealthy("stalled", f"work waits, and no step got on for {stalled_s:.0f} s")
        return _json({"state": engine.condition})

    @app.get("/metrics")
    async def prometheus() -> Response:
        try:
            stats = await engine.stats(STATS_DEADLINE_S)
        except EngineError:
            stats = None  # told by topspin_engine_up
        return Response(metrics.render(stats), headers={"Content-Type": PROMETHEUS_TEXT})

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})


def _unhealthy(state: str, detail: str) -> Response:
    return _json({"state": state, "detail": detail}, status=503)


def _json(content: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")

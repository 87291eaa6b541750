"""GET /v1/models and the names below it: the served model."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.gateway.engine_client import EngineClient
from server.gateway.errors import ModelNotFound, truncated
from server.gateway.generation.served_model import ServedModel
from server.gateway.http.answer import json_response
from server.gateway.openapi.endpoint import Endpoint


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of /v1/models; max_model_len is null until the engine has reported it.

    `root` is the checkpoint's directory on the server's host. `default_sampling_params` apply
    unless a request sets them; their `max_tokens` is for chats.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "topspin"
    root: str
    max_model_len: int | None
    vocab_size: int
    default_sampling_params: dict[str, float | None]


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/models."""

    object: str = "list"
    data: list[ModelCard]


LIST_MODELS = Endpoint(
    method="get", path="/v1/models", summary="List the model's names", answer=ModelList
)
SHOW_MODEL = Endpoint(
    method="get",
    path="/v1/models/{name:path}",
    summary="Describe one of them",
    answer=ModelCard,
    refusals=(404,),
    path_text="a name of the list, which may contain slashes",
)


@dataclass(frozen=True, slots=True)
class Models:
    """The served model under each of its names."""

    model: ServedModel
    engine: EngineClient

    async def list(self, _: Request) -> Response:
        """Answer with all names."""
        cards = [self._card(name) for name in self.model.names]
        return json_response(msgspec.json.encode(ModelList(data=cards)))

    async def show(self, request: Request) -> Response:
        """Answer with one of them."""
        name = request.path_params["name"]
        if name not in self.model.names:
            raise ModelNotFound(f"the model `{truncated(name, 64)}` is not served here")
        return json_response(msgspec.json.encode(self._card(name)))

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name,
            created=self.model.created_at_s,
            root=self.model.root,
            max_model_len=self.engine.state.max_request_tokens or None,
            vocab_size=self.model.vocab_size,
            default_sampling_params=msgspec.structs.asdict(self.model.defaults),
        )

"""POST /v1/responses: from a body to its request, on top of the conversation of an earlier one."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.gateway.dialects.chat.dialect import MakeReplies, prepared_chat
from server.gateway.dialects.chat.request import ChatMessage
from server.gateway.dialects.dialect import PreparedRequest
from server.gateway.dialects.responses.input_items import page_of, with_id
from server.gateway.dialects.responses.reply import (
    BackgroundResponse,
    ResponseAnswer,
    ResponseDeleted,
    ResponseInputTokens,
    ResponsesReplies,
)
from server.gateway.dialects.responses.request import (
    ITEMS,
    ResponsesBody,
    decode_response,
    following,
)
from server.gateway.dialects.responses.store import ResponseStore
from server.gateway.dialects.responses.tools import TOOLS
from server.gateway.generation.served_model import ServedModel
from server.gateway.http.answer import json_response
from server.gateway.http.exchange import exchange_of
from server.gateway.openapi.endpoint import EXAMPLE_MODEL, OF_GENERATION, Endpoint
from topspin.errors import InvalidRequest

RESPONSES = Endpoint(
    method="post",
    path="/v1/responses",
    summary="Answer a chat, by OpenAI's newer API",
    body=ResponsesBody,
    parts=(*ITEMS, *TOOLS),
    answer=ResponseAnswer,
    events="OpenAI's, from `response.created` to `response.completed`",
    refusals=OF_GENERATION,
    example={"model": EXAMPLE_MODEL, "input": "Why is the sky blue?", "max_output_tokens": 100},
)
SHOW_RESPONSE = Endpoint(
    method="get",
    path="/v1/responses/{response_id}",
    summary="Show a response that is still stored",
    answer=ResponseAnswer,
    refusals=(404,),
    path_text="the id of a response",
)
FORGET_RESPONSE = Endpoint(
    method="delete",
    path="/v1/responses/{response_id}",
    summary="Forget a response",
    answer=ResponseDeleted,
    refusals=(404,),
    path_text="the id of a response",
)
CANCEL_RESPONSE = Endpoint(
    method="post",
    path="/v1/responses/{response_id}/cancel",
    summary="End a response that goes on in the background",
    answer=ResponseAnswer,
    refusals=(404,),
    path_text="the id of a response",
)
INPUT_TOKENS = Endpoint(
    method="post",
    path="/v1/responses/input_tokens",
    summary="Count the tokens of a response's prompt",
    body=ResponsesBody,
    parts=(*ITEMS, *TOOLS),
    answer=ResponseInputTokens,
    refusals=OF_GENERATION,
    example={"model": EXAMPLE_MODEL, "input": "Why is the sky blue?"},
)


@dataclass(frozen=True, slots=True)
class ResponsesDialect:
    """OpenAI's newer API; `stores` keep the responses of each tenant."""

    model: ServedModel
    stores: dict[str, ResponseStore] = field(default_factory=dict)

    def answer_id(self, request_id: str) -> str:
        """Return an id of its own: the response is kept by it, and clients choose request ids."""
        return f"resp_{secrets.token_hex(16)}"

    def prepare(self, data: bytes, *, max_tokens: int, tenant: str) -> PreparedRequest:
        """Return the request in a body; see Dialect."""
        return self._prepared(data, max_tokens, tenant)

    def prepare_count(self, data: bytes, *, max_tokens: int, tenant: str) -> PreparedRequest:
        """Return the request in a body that is only counted, and may have any length."""
        return self._prepared(data, None, tenant)

    def _prepared(self, data: bytes, max_tokens: int | None, tenant: str) -> PreparedRequest:
        request, chat, items, places = decode_response(data, self.model.reader())
        messages, num_bytes, store = chat.messages, len(data), self._store_of(tenant)
        if request.previous_response_id is not None:
            earlier = store.conversation(request.previous_response_id, param="previous_response_id")
            messages = following(earlier.messages, messages)
            num_bytes += earlier.num_bytes
        _check_background(request)
        options: dict[str, Any] = {
            "tokenizer": self.model.tokenizer,
            "request": request,
            "places": places,
            "keep": None,
        }
        given: dict[str, Any] = {}
        if request.store is not False:
            given = {"items": tuple(map(with_id, items)), "num_bytes": num_bytes}
            options["keep"] = partial(store.keep, messages=messages, **given)
        if request.instructions:
            messages = [ChatMessage(role="system", content=request.instructions), *messages]
        replies: MakeReplies = partial(ResponsesReplies, **options)
        if request.background:
            replies = partial(BackgroundResponse, **options, hold=partial(store.hold, **given))
        return prepared_chat(
            chat._replace(messages=messages),
            self.model,
            lambda _: replies,
            max_tokens=max_tokens,
            scores_text=True,
            drops_turns=request.truncation == "auto",
        )

    async def stored(self, request: Request) -> Response:
        """Show a response that is still stored, or forget it."""
        store = self._store_of(exchange_of(request.scope).tenant.name)
        response_id = request.path_params["response_id"]
        if request.method == "DELETE":
            store.remove(response_id)
            return json_response(msgspec.json.encode(ResponseDeleted(id=response_id)))
        return json_response(store.get(response_id).body)

    async def input_items(self, request: Request) -> Response:
        """List what a stored response answers."""
        store = self._store_of(exchange_of(request.scope).tenant.name)
        stored = store.get(request.path_params["response_id"])
        return json_response(msgspec.json.encode(page_of(stored.items, request.query_params)))

    async def cancel(self, request: Request) -> Response:
        """End a response that goes on in the background, and show it."""
        store = self._store_of(exchange_of(request.scope).tenant.name)
        response_id = request.path_params["response_id"]
        cancel = store.get(response_id).cancel
        if cancel is None:
            raise InvalidRequest(
                "only a response that goes on in the background can be cancelled",
                param="response_id",
            )
        cancel()
        return json_response(store.get(response_id).body)

    def _store_of(self, tenant: str) -> ResponseStore:
        # In one operation of the dictionary: requests are prepared in several threads.
        return self.stores.setdefault(tenant, ResponseStore())


def _check_background(request: ResponsesBody) -> None:
    """Raise InvalidRequest for what does not go with a response that nobody waits for."""
    reasons = {
        "stream": "it is asked for by GET, whole" if request.stream else "",
        "store": "it is found only there" if request.store is False else "",
    }
    for name, reason in reasons.items():
        if request.background and reason:
            raise InvalidRequest(
                f"`background` does not go with this `{name}`: {reason}", param="background"
            )

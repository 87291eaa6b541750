"""POST /v1/responses: from a body to its request, on top of the conversation of an earlier one."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.gateway.dialects.chat.dialect import prepared_chat
from server.gateway.dialects.chat.request import ChatMessage
from server.gateway.dialects.dialect import PreparedRequest
from server.gateway.dialects.responses.reply import (
    ResponseAnswer,
    ResponseDeleted,
    ResponsesReplies,
)
from server.gateway.dialects.responses.request import (
    ITEMS,
    ResponsesBody,
    decode_response,
    following,
)
from server.gateway.dialects.responses.store import ResponseStore
from server.gateway.generation.served_model import ServedModel
from server.gateway.http.answer import json_response
from server.gateway.http.exchange import exchange_of
from server.gateway.openapi.endpoint import EXAMPLE_MODEL, OF_GENERATION, Endpoint

RESPONSES = Endpoint(
    method="post",
    path="/v1/responses",
    summary="Answer a chat, by OpenAI's newer API",
    body=ResponsesBody,
    parts=ITEMS,
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
        request, chat = decode_response(data)
        messages, num_bytes, store = chat.messages, len(data), self._store_of(tenant)
        if request.previous_response_id is not None:
            previous = store.get(request.previous_response_id, param="previous_response_id")
            messages = following(previous.messages, messages)
            num_bytes += previous.num_bytes
        keep = None
        if request.store is not False:
            keep = partial(store.keep, messages=messages, num_bytes=num_bytes)
        if request.instructions:
            messages = [ChatMessage(role="system", content=request.instructions), *messages]
        replies = partial(
            ResponsesReplies, tokenizer=self.model.tokenizer, request=request, keep=keep
        )
        return prepared_chat(
            chat._replace(messages=messages),
            self.model,
            lambda _: replies,
            max_tokens=max_tokens,
            scores_text=True,
        )

    async def stored(self, request: Request) -> Response:
        """Show a response that is still stored, or forget it."""
        store = self._store_of(exchange_of(request.scope).tenant.name)
        response_id = request.path_params["response_id"]
        if request.method == "DELETE":
            store.remove(response_id)
            return json_response(msgspec.json.encode(ResponseDeleted(id=response_id)))
        return json_response(store.get(response_id).body)

    def _store_of(self, tenant: str) -> ResponseStore:
        # In one operation of the dictionary: requests are prepared in several threads.
        return self.stores.setdefault(tenant, ResponseStore())

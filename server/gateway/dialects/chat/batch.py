"""POST /v1/chat/completions/batch, vLLM's: one choice for each of several conversations.

Owns their list, and what they must have in common. Each is prepared as a chat of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Raw

from server.gateway.bodies.decoding import decode
from server.gateway.bodies.fields import MESSAGE_LIST_SCHEMA, SCHEMA_REF
from server.gateway.dialects.chat.dialect import prepared_chat
from server.gateway.dialects.chat.reply import ChatAnswer, ChatReplies
from server.gateway.dialects.chat.request import (
    ChatBody,
    ChatMessage,
    DecodedChat,
    checked_messages,
    decode_fields,
)
from server.gateway.dialects.dialect import PreparedRequest
from server.gateway.generation.served_model import ServedModel
from server.gateway.openapi.endpoint import EXAMPLE_MODEL, OF_GENERATION, Endpoint
from topspin.errors import InvalidRequest

MAX_CONVERSATIONS = 256
# Rendering and tokenising take half a millisecond for each conversation, however short.
INLINE_BATCH_BYTES = 512
_ALONE = ("stream", "tools", "continue_final_message", "report_prefix_cache", "echo")
_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_CONVERSATIONS,
    "items": {**MESSAGE_LIST_SCHEMA, "items": {"$ref": SCHEMA_REF.format(name="ChatMessage")}},
}


class BatchBody(ChatBody, kw_only=True, frozen=True):
    """POST /v1/chat/completions/batch: a chat's fields, with lists of `messages`."""

    messages: Annotated[Raw, Meta(extra_json_schema=_SCHEMA)]


_Conversations = Annotated[list[Raw], Meta(min_length=1, max_length=MAX_CONVERSATIONS)]
BATCH = Endpoint(
    method="post",
    path="/v1/chat/completions/batch",
    summary="Answer several chats at once",
    body=BatchBody,
    parts=(ChatMessage,),
    answer=ChatAnswer,
    refusals=OF_GENERATION,
    example={
        "model": EXAMPLE_MODEL,
        "messages": [
            [{"role": "user", "content": "Why is the sky blue?"}],
            [{"role": "user", "content": "Why is grass green?"}],
        ],
        "max_tokens": 50,
    },
)


@dataclass(frozen=True, slots=True)
class BatchDialect:
    """Several of OpenAI's chats in one request."""

    model: ServedModel

    def answer_id(self, request_id: str) -> str:
        """Return the id of the answer to a request."""
        return f"chatcmpl-{request_id}"

    def prepare(self, data: bytes, *, max_tokens: int, tenant: str) -> PreparedRequest:
        """Return the request in a body; see Dialect."""
        reader = self.model.reader()
        body = decode_fields(data, BatchBody, reader)
        _check(body)
        conversations = decode(body.messages, _Conversations, param="messages")
        made: list[PreparedRequest] = []
        for idx, messages in enumerate(conversations):
            try:
                chat = DecodedChat(body, checked_messages(messages, reader), reader.names)
                made.append(
                    prepared_chat(
                        chat,
                        self.model,
                        lambda _: partial(ChatReplies, tokenizer=self.model.tokenizer),
                        max_tokens=max_tokens,
                    )
                )
            except InvalidRequest as error:
                if (error.param or "").startswith("messages"):
                    error.param = f"messages[{idx}]" + (error.param or "").removeprefix("messages")
                raise
        first = made[0]
        if any(_manner(other) != _manner(first) for other in made):
            raise InvalidRequest(
                "`messages`: some conversations end within the model's reasoning and others do "
                "not; send them apart",
                param="messages",
            )
        return first._replace(prompts=[prompt for each in made for prompt in each.prompts])


def _manner(request: PreparedRequest) -> tuple[object, ...]:
    """Return what the answers to all conversations must have in common."""
    return request.message, request.params.sampling.grammar


def _check(body: ChatBody) -> None:
    """Raise InvalidRequest for fields that conversations in a batch do not have."""
    names = [name for name in _ALONE if getattr(body, name)]
    names += ["n"] if body.n not in (None, 1) else []
    for name in names:
        raise InvalidRequest(f"`{name}` does not go with several conversations", param=name)

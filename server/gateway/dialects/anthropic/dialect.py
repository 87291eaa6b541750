"""POST /v1/messages and /v1/messages/count_tokens: from a body to its request."""

from __future__ import annotations

from dataclasses import dataclass

from server.gateway.dialects.anthropic.reply import MessageAnswer, MessagesReplies, TokenCount
from server.gateway.dialects.anthropic.request import (
    InputMessage,
    MessagesBody,
    PromptFields,
    decode_count,
    decode_messages,
)
from server.gateway.dialects.chat.dialect import prepared_chat
from server.gateway.dialects.chat.prompt import switched_off
from server.gateway.dialects.chat.request import DecodedChat
from server.gateway.dialects.dialect import PreparedRequest
from server.gateway.errors import AnthropicErrorBody
from server.gateway.generation.served_model import ServedModel
from server.gateway.openapi.endpoint import EXAMPLE_MODEL, OF_GENERATION, Endpoint

CREATE_MESSAGE = Endpoint(
    method="post",
    path="/v1/messages",
    summary="Answer a chat, by Anthropic's API",
    body=MessagesBody,
    parts=(InputMessage,),
    answer=MessageAnswer,
    events="Anthropic's, from `message_start` to `message_stop`",
    refusals=OF_GENERATION,
    error=AnthropicErrorBody,
    example={
        "model": EXAMPLE_MODEL,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    },
)
COUNT_TOKENS = Endpoint(
    method="post",
    path="/v1/messages/count_tokens",
    summary="Count the tokens of a chat's prompt",
    body=PromptFields,
    parts=(InputMessage,),
    answer=TokenCount,
    refusals=OF_GENERATION,
    error=AnthropicErrorBody,
    example={
        "model": EXAMPLE_MODEL,
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    },
)


@dataclass(frozen=True, slots=True)
class AnthropicDialect:
    """Anthropic's API."""

    model: ServedModel

    def answer_id(self, request_id: str) -> str:
        """Return the id of the answer to a request."""
        return f"msg_{request_id}"

    def prepare(self, data: bytes, *, max_tokens: int, tenant: str) -> PreparedRequest:
        """Return the request in a body; see Dialect."""
        return self._prepared(decode_messages(data, self.model.reader()), max_tokens)

    def prepare_count(self, data: bytes, *, max_tokens: int, tenant: str) -> PreparedRequest:
        """Return the request in a body that is only counted, and may have any length."""
        return self._prepared(decode_count(data, self.model.reader()), None)

    def _prepared(self, decoded: DecodedChat, max_tokens: int | None) -> PreparedRequest:
        template = self.model.chat_template("use /v1/completions")
        decoded = decoded._replace(body=switched_off(decoded.body, template))
        return prepared_chat(decoded, self.model, lambda _: MessagesReplies, max_tokens=max_tokens)

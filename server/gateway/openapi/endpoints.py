"""The routes as clients see them: their bodies, answers, statuses and an example each.

Owns this one table; a new route needs an entry here (a test compares them with the application's).
Knows no handler and no schema's form; server.gateway.openapi.document turns it into OpenAPI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from server.gateway.answers.replies.anthropic import MessageAnswer, TokenCount
from server.gateway.answers.replies.responses import ResponseAnswer, ResponseDeleted
from server.gateway.answers.wire import (
    ChatAnswer,
    ChatChunk,
    Completion,
    ModelCard,
    ModelList,
)
from server.gateway.errors import AnthropicErrorBody, ErrorBody
from server.gateway.http.body import MAX_BODY_BYTES
from server.gateway.requests.anthropic import InputMessage, MessagesBody, PromptFields
from server.gateway.requests.responses import ITEMS, ResponsesBody
from server.gateway.requests.schema import ChatBody, ChatMessage, CompletionBody
from server.gateway.requests.tokenization import (
    DetokenizeBody,
    Detokenized,
    TokenizeBody,
    Tokenized,
)
from server.gateway.tokenization import MAX_BODY_BYTES as MAX_TOKENS_BODY_BYTES

MODEL = "smollm2-moe"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /health; `detail` says why the engine does not serve."""

    state: str
    detail: str | UnsetType = UNSET


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /live."""

    state: Literal["alive"] = "alive"


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /version."""

    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A parameter of the URL."""

    name: str
    schema: dict[str, Any]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """One method of one path.

    `parts` are types that only lists in `body` name which are decoded later.
    `answer` is the type of a JSON answer, `event` that of a stream's events, or `events` a word on
    them, `media_type` another answer's. `refusals` are the statuses of failures beside 400 and
    500, which all have; `failure` is the type of the answer with 503 if it is not the usual one,
    `error` that of all failures. `max_bytes` bounds the body.
    """

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    parts: tuple[type[msgspec.Struct], ...] = ()
    max_bytes: int = MAX_BODY_BYTES
    answer: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    events: str = ""
    media_type: str = "application/json"
    refusals: tuple[int, ...] = ()
    failure: type[msgspec.Struct] | None = None
    error: type[msgspec.Struct] = ErrorBody
    query: tuple[Query, ...] = ()
    path_text: str = ""
    example: dict[str, Any] | None = None


_OF_BODIES = (408, 413, 415, 429)
_OF_GENERATION = (404, *_OF_BODIES, 503)

ENDPOINTS = (
    Endpoint(
        method="post",
        path="/v1/chat/completions",
        summary="Answer a chat",
        body=ChatBody,
        parts=(ChatMessage,),
        answer=ChatAnswer,
        event=ChatChunk,
        refusals=_OF_GENERATION,
        example={
            "model": MODEL,
            "messages": [{"role": "user", "content": "Why is the sky blue?"}],
            "max_tokens": 100,
        },
    ),
    Endpoint(
        method="post",
        path="/v1/completions",
        summary="Continue a text",
        body=CompletionBody,
        answer=Completion,
        event=Completion,
        refusals=_OF_GENERATION,
        example={"model": MODEL, "prompt": "Once upon a time", "max_tokens": 50},
    ),
    Endpoint(
        method="post",
        path="/v1/responses",
        summary="Answer a chat, by OpenAI's newer API",
        body=ResponsesBody,
        parts=ITEMS,
        answer=ResponseAnswer,
        events="OpenAI's, from `response.created` to `response.completed`",
        refusals=_OF_GENERATION,
        example={"model": MODEL, "input": "Why is the sky blue?", "max_output_tokens": 100},
    ),
    Endpoint(
        method="get",
        path="/v1/responses/{response_id}",
        summary="Show a response that is still stored",
        answer=ResponseAnswer,
        refusals=(404,),
        path_text="the id of a response",
    ),
    Endpoint(
        method="delete",
        path="/v1/responses/{response_id}",
        summary="Forget a response",
        answer=ResponseDeleted,
        refusals=(404,),
        path_text="the id of a response",
    ),
    Endpoint(
        method="post",
        path="/v1/messages",
        summary="Answer a chat, by Anthropic's API",
        body=MessagesBody,
        parts=(InputMessage,),
        answer=MessageAnswer,
        events="Anthropic's, from `message_start` to `message_stop`",
        refusals=_OF_GENERATION,
        error=AnthropicErrorBody,
        example={
            "model": MODEL,
            "max_tokens": 100,
            "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        },
    ),
    Endpoint(
        method="post",
        path="/v1/messages/count_tokens",
        summary="Count the tokens of a chat's prompt",
        body=PromptFields,
        parts=(InputMessage,),
        answer=TokenCount,
        refusals=_OF_GENERATION,
        error=AnthropicErrorBody,
        example={
            "model": MODEL,
            "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        },
    ),
    Endpoint(
        method="post",
        path="/tokenize",
        summary="Show the tokens of a prompt",
        body=TokenizeBody,
        max_bytes=MAX_TOKENS_BODY_BYTES,
        answer=Tokenized,
        refusals=(404, *_OF_BODIES),
        example={"prompt": "Once upon a time", "return_token_strs": True},
    ),
    Endpoint(
        method="post",
        path="/detokenize",
        summary="Show the text of tokens",
        body=DetokenizeBody,
        max_bytes=MAX_TOKENS_BODY_BYTES,
        answer=Detokenized,
        refusals=(404, *_OF_BODIES),
        example={"tokens": [6403, 1980, 253, 655]},
    ),
    Endpoint(method="get", path="/v1/models", summary="List the model's names", answer=ModelList),
    Endpoint(
        method="get",
        path="/v1/models/{name}",
        summary="Describe one of them",
        answer=ModelCard,
        refusals=(404,),
        path_text="a name of the list, which may contain slashes",
    ),
    Endpoint(
        method="get",
        path="/health",
        summary="Say whether the engine serves",
        answer=Health,
        refusals=(503,),
        failure=Health,
    ),
    Endpoint(
        method="get",
        path="/live",
        summary="Say that this gateway runs, whatever its engine does",
        answer=Live,
    ),
    Endpoint(
        method="get",
        path="/metrics",
        summary="Show counters in Prometheus' format",
        media_type="text/plain",
        query=(
            Query(
                name="per_expert",
                schema={"enum": ["0", "1"]},
                text="1: a line for each expert",
            ),
        ),
    ),
    Endpoint(method="get", path="/version", summary="Show the server's version", answer=Version),
    Endpoint(
        method="get",
        path="/trace",
        summary="Take the stamps of all nodes, for `topspin trace`, on the server's host only",
        media_type="application/json",
        refusals=(404, 503),
        query=(
            Query(
                name="seconds",
                schema={"type": "number", "exclusiveMinimum": 0, "maximum": 60},
                text="how many seconds of the past",
            ),
        ),
    ),
    Endpoint(
        method="get",
        path="/openapi.json",
        summary="Show this description",
        media_type="application/json",
    ),
    Endpoint(method="get", path="/docs", summary="Show it as a page", media_type="text/html"),
    Endpoint(method="get", path="/", summary="Show the way", media_type="text/html"),
)

"""POST /tokenize and /detokenize, vLLM's: their bodies, and their conversion.

Owns their fields and what goes with what; a chat's fields are handed to the chat endpoint's own
checks, so that a prompt is refused here exactly if it is there. Knows no HTTP.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from server.gateway.bodies.decoding import decode
from server.gateway.bodies.fields import Count, Fields, items_of
from server.gateway.dialects.chat.prompt import chat_prompt
from server.gateway.dialects.chat.request import decode_chat
from server.gateway.dialects.chat.tools import tool_use
from server.gateway.engine_client import EngineClient
from server.gateway.generation.served_model import ServedModel
from server.gateway.openapi.endpoint import OF_BODIES, Endpoint
from topspin.errors import InvalidRequest

MAX_BODY_BYTES = 2**20
MAX_TOKENS = 2**18
CHAT_FIELDS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "tools",
)


def _like(*types: str) -> Meta:
    """Describe a Raw field by its JSON types."""
    return Meta(extra_json_schema={"type": list(types)})


_SWITCH = _like("boolean", "null")


class TokenizeBody(Fields, kw_only=True, frozen=True):
    """POST /tokenize: a `prompt`, or `messages` with the fields that a chat has for its prompt."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # As in ChatBody, which checks them.
    messages: Annotated[Raw, items_of("ChatMessage")] | UnsetType = UNSET
    add_generation_prompt: Annotated[Raw, _SWITCH] | UnsetType = UNSET
    continue_final_message: Annotated[Raw, _SWITCH] | UnsetType = UNSET
    chat_template: Annotated[Raw, _like("null")] | UnsetType = UNSET
    chat_template_kwargs: Annotated[Raw, _like("object", "null")] | UnsetType = UNSET
    mm_processor_kwargs: Annotated[Raw, _like("object", "null")] | UnsetType = UNSET
    tools: Annotated[Raw, _like("array", "null")] | UnsetType = UNSET


class DetokenizeBody(Fields, kw_only=True, frozen=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Count], Meta(max_length=MAX_TOKENS)]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /tokenize. `max_model_len` is null until the engine has reported it.

    `token_strs` are the tokens as the vocabulary writes them; null unless asked for.
    """

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /detokenize."""

    prompt: str


TOKENIZE = Endpoint(
    method="post",
    path="/tokenize",
    summary="Show the tokens of a prompt",
    body=TokenizeBody,
    max_bytes=MAX_BODY_BYTES,
    answer=Tokenized,
    refusals=(404, *OF_BODIES),
    example={"prompt": "Once upon a time", "return_token_strs": True},
)
DETOKENIZE = Endpoint(
    method="post",
    path="/detokenize",
    summary="Show the text of tokens",
    body=DetokenizeBody,
    max_bytes=MAX_BODY_BYTES,
    answer=Detokenized,
    refusals=(404, *OF_BODIES),
    example={"tokens": [6403, 1980, 253, 655]},
)


def tokenize(data: bytes, *, model: ServedModel, engine: EngineClient) -> Tokenized:
    """Return the tokens of a prompt, which may be longer than the model's context.

    Raises InvalidRequest or ModelNotFound naming the field.
    """
    body, tokenizer = decode(data, TokenizeBody), model.tokenizer
    model.checked_name(body.model)
    if body.prompt is None:
        tokens = _chat_tokens(body, model)
    else:
        for name in CHAT_FIELDS:
            if getattr(body, name) is not UNSET:
                raise InvalidRequest(f"`{name}` does not go with `prompt`", param=name)
        special = body.add_special_tokens is not False
        tokens = tokenizer.encode(body.prompt, add_special_tokens=special)
    shown = [tokenizer.vocabulary_entry(idx) for idx in tokens] if body.return_token_strs else None
    limit = engine.state.max_request_tokens or None
    return Tokenized(count=len(tokens), max_model_len=limit, tokens=tokens, token_strs=shown)


def _chat_tokens(body: TokenizeBody, model: ServedModel) -> list[int]:
    if body.messages is UNSET:
        raise InvalidRequest("one of `prompt` and `messages` is needed", param="prompt")
    template = model.chat_template("give a `prompt`")
    given = {name: getattr(body, name) for name in CHAT_FIELDS}
    given["add_special_tokens"] = body.add_special_tokens
    fields = {name: value for name, value in given.items() if value is not UNSET}
    chat, messages, _ = decode_chat(msgspec.json.encode(fields))
    # Tools are only shown here, whether or not calls of them could be read.
    shown = msgspec.structs.replace(chat, tool_choice="none")
    tools = tool_use(shown, template=template, formats=model.formats)
    return chat_prompt(chat, messages, model=model, tools=tools).ids


def detokenize(data: bytes, *, model: ServedModel) -> Detokenized:
    """Return the text of token ids, special ones included; raises as tokenize."""
    body = decode(data, DetokenizeBody)
    model.checked_name(body.model)
    model.check_vocabulary(body.tokens, param="tokens")
    return Detokenized(prompt=model.tokenizer.decode(body.tokens, skip_special_tokens=False))

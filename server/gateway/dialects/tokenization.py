"""POST /tokenize and /detokenize, GET /tokenizer_info, vLLM's: their bodies, and their conversion.

Owns their fields and what goes with what; a chat's fields have the chat endpoint's own types and
checks, so that a prompt is refused here exactly if it is there. Knows no HTTP.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw

from models.description.config_fields import read_json
from server.gateway.bodies.fields import (
    ABSENT,
    NOT_GIVEN,
    BodyFields,
    BodyReader,
    Count,
    Refused,
    RefusedObject,
    items_of,
)
from server.gateway.dialects.chat.generic_tools import shown_chat
from server.gateway.dialects.chat.prompt import chat_prompt
from server.gateway.dialects.chat.request import (
    ChatBody,
    TemplateVariables,
    Tools,
    checked_messages,
)
from server.gateway.dialects.chat.tools import tool_use
from server.gateway.engine_client import EngineClient
from server.gateway.generation.served_model import ServedModel
from server.gateway.openapi.endpoint import OF_BODIES, Endpoint
from topspin.errors import InvalidRequest

MAX_BODY_BYTES = 2**20
MAX_TOKENS = 2**18
CHAT_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeBody(BodyFields, kw_only=True, frozen=True):
    """POST /tokenize: a `prompt`, or `messages` with the fields that a chat has for its prompt."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Annotated[Raw, items_of("ChatMessage", may_be_null=True)] = ABSENT
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None
    chat_template: Refused = ABSENT
    mm_processor_kwargs: RefusedObject = ABSENT


class DetokenizeBody(BodyFields, kw_only=True, frozen=True):
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


TOKENIZER_INFO = Endpoint(
    method="get",
    path="/tokenizer_info",
    summary="Show the tokenizer's configuration and the chat template",
    media_type="application/json",
)


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
    """Return what the checkpoint's tokenizer_config.json says, with the template that is used."""
    file = Path(model.root) / "tokenizer_config.json"
    read = read_json(file) if file.is_file() else {}
    shown = {"tokenizer_class": "PreTrainedTokenizerFast", "vocab_size": model.vocab_size, **read}
    return {**shown, "chat_template": None if model.template is None else model.template.text}


def tokenize(
    data: bytes, reader: BodyReader, *, model: ServedModel, engine: EngineClient
) -> Tokenized:
    """Return the tokens of a prompt, which may be longer than the model's context.

    Raises InvalidRequest or ModelNotFound naming the field.
    """
    body, tokenizer = reader.read(data, TokenizeBody), model.tokenizer
    model.checked_name(body.model)
    if body.prompt is None:
        tokens = _chat_tokens(body, reader, model)
    else:
        for name in ("messages", *CHAT_FIELDS):
            if getattr(body, name) not in (None, NOT_GIVEN):
                raise InvalidRequest(f"`{name}` does not go with `prompt`", param=name)
        special = body.add_special_tokens is not False
        tokens = tokenizer.encode(body.prompt, add_special_tokens=special)
    shown = [tokenizer.vocabulary_entry(idx) for idx in tokens] if body.return_token_strs else None
    limit = engine.state.max_request_tokens or None
    return Tokenized(count=len(tokens), max_model_len=limit, tokens=tokens, token_strs=shown)


def _chat_tokens(body: TokenizeBody, reader: BodyReader, model: ServedModel) -> list[int]:
    if body.messages == NOT_GIVEN:
        raise InvalidRequest("one of `prompt` and `messages` is needed", param="prompt")
    template = model.chat_template("give a `prompt`")
    chat = ChatBody(
        messages=body.messages,
        add_special_tokens=body.add_special_tokens,
        tool_choice="none",  # tools are only shown here, whether or not calls could be read
        **{name: getattr(body, name) for name in CHAT_FIELDS},
    )
    tools = tool_use(chat, formats=model.formats)
    messages = checked_messages(body.messages, reader)
    shown = shown_chat(chat, messages, tools, template, calls=model.formats.calls)
    return chat_prompt(chat, shown.messages, model=model, tools=shown.tools).ids


def detokenize(data: bytes, reader: BodyReader, *, model: ServedModel) -> Detokenized:
    """Return the text of token ids, special ones included; raises as tokenize."""
    body = reader.read(data, DetokenizeBody)
    model.checked_name(body.model)
    model.check_vocabulary(body.tokens, param="tokens")
    return Detokenized(prompt=model.tokenizer.decode(body.tokens, skip_special_tokens=False))

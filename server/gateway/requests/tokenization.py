"""The bodies of POST /tokenize and /detokenize, vLLM's, and their conversion.

Owns their fields and what goes with what; a chat's fields are handed to the chat endpoint's own
checks, so that a prompt is refused here exactly if it is there. Knows no HTTP and no engine;
server.gateway.tokenization calls it, for large bodies in a worker thread.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from models.text.chat_template import ChatTemplate
from models.text.tokenizer import Tokenizer
from server.gateway.requests.decoding import decode
from server.gateway.requests.params import ServedModel, check_vocabulary
from server.gateway.requests.prompts import chat_prompt
from server.gateway.requests.schema import Count, Fields, decode_chat, items_of
from server.gateway.requests.tools import MessageFormats, tool_use
from topspin.errors import InvalidRequest

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


def tokenize(
    data: bytes,
    *,
    model: ServedModel,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    formats: MessageFormats,
    max_model_len: int | None,
) -> Tokenized:
    """Return the tokens of a prompt, which may be longer than the model's context.

    Raises InvalidRequest or ModelNotFound naming the field.
    """
    body = decode(data, TokenizeBody)
    model.checked_name(body.model)
    if body.prompt is None:
        tokens = _chat_tokens(
            body, model=model, tokenizer=tokenizer, template=template, formats=formats
        )
    else:
        for name in CHAT_FIELDS:
            if getattr(body, name) is not UNSET:
                raise InvalidRequest(f"`{name}` does not go with `prompt`", param=name)
        special = body.add_special_tokens is not False
        tokens = tokenizer.encode(body.prompt, add_special_tokens=special)
    shown = [tokenizer.vocabulary_entry(idx) for idx in tokens] if body.return_token_strs else None
    return Tokenized(
        count=len(tokens), max_model_len=max_model_len, tokens=tokens, token_strs=shown
    )


def _chat_tokens(
    body: TokenizeBody,
    *,
    model: ServedModel,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    formats: MessageFormats,
) -> list[int]:
    if body.messages is UNSET:
        raise InvalidRequest("one of `prompt` and `messages` is needed", param="prompt")
    if template is None:
        raise InvalidRequest("the model has no chat template; give a `prompt`", param="messages")
    given = {name: getattr(body, name) for name in CHAT_FIELDS}
    given["add_special_tokens"] = body.add_special_tokens
    fields = {name: value for name, value in given.items() if value is not UNSET}
    chat, messages, _ = decode_chat(msgspec.json.encode(fields))
    # Tools are only shown here, whether or not calls of them could be read.
    shown = msgspec.structs.replace(chat, tool_choice="none")
    tools = tool_use(shown, template=template, formats=formats)
    prompt = chat_prompt(
        chat,
        messages,
        template=template,
        tokenizer=tokenizer,
        check_fewest=lambda _: None,
        tools=tools.for_template(),
        call_id_chars=formats.calls.id_chars if formats.calls else None,
    )
    return prompt.ids


def detokenize(data: bytes, *, model: ServedModel, tokenizer: Tokenizer) -> Detokenized:
    """Return the text of token ids, special ones included; raises as tokenize."""
    body = decode(data, DetokenizeBody)
    model.checked_name(body.model)
    check_vocabulary(body.tokens, vocab_size=model.vocab_size, param="tokens")
    return Detokenized(prompt=tokenizer.decode(body.tokens, skip_special_tokens=False))

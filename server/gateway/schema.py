"""The request bodies that the gateway accepts, field by field, and their decoding.

Owns names, types and static ranges: a field that is not listed here is refused by name, and
so is a listed one that Topspin does not implement (unless it is set to what happens anyway).
Knows no tokenizer and no model; server.gateway.params gives the fields their meaning.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw

from server.gateway.errors import truncated
from server.sampling_limits import (
    MAX_BIAS,
    MAX_COUNT,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from topspin.errors import InvalidRequest

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_NAME_CHARS = 256
MAX_TEMPLATE_KWARGS = 32

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]

_NULL = Raw(b"null")


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`include_usage`: a last chunk carries the token counts."""

    include_usage: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """What chat and plain completions have in common; null means "not given".

    `user` is accepted because clients send it, and has no effect: nothing is kept about users.
    """

    model: str
    max_tokens: PositiveCount | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None
    ) = None
    logit_bias: (
        Annotated[
            dict[int, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]],
            Meta(max_length=MAX_LOGIT_BIAS),
        ]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Name | None = None
    user: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    response_format: Raw = _NULL


class ContentPart(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One part of a message's content. Only text is served; other kinds are refused by name."""

    type: str
    text: str | None = None
    image_url: Raw = _NULL
    video_url: Raw = _NULL
    input_audio: Raw = _NULL
    file: Raw = _NULL
    refusal: Raw = _NULL


class ChatMessage(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One message. The raw members are what clients send back from an earlier answer."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: Name | None = None
    refusal: Raw = _NULL
    tool_calls: Raw = _NULL
    function_call: Raw = _NULL
    audio: Raw = _NULL
    annotations: Raw = _NULL


class ChatBody(GenerationBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: (
        Annotated[
            dict[
                Annotated[str, Meta(max_length=MAX_NAME_CHARS)],
                bool | int | float | Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None,
            ],
            Meta(max_length=MAX_TEMPLATE_KWARGS),
        ]
        | None
    ) = None
    tools: Raw = _NULL
    tool_choice: Raw = _NULL
    parallel_tool_calls: Raw = _NULL
    functions: Raw = _NULL
    function_call: Raw = _NULL


class CompletionBody(GenerationBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | Count | list[Count]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Raw = _NULL
    best_of: Raw = _NULL
    suffix: Raw = _NULL


# Fields that are refused, with the values that change nothing and are therefore let pass.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": (),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": (),
    "function_call": ("none",),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
_RESENT = ("refusal", "tool_calls", "function_call", "audio", "annotations")

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_FIELD = re.compile(
    r"Object (?:contains unknown|missing required) field `(.*?)`(?: - at `\$|$)", re.DOTALL
)

_Body = TypeVar("_Body", bound=GenerationBody)


def decode_chat(data: bytes) -> ChatBody:
    """Return the chat request in `data`; raises InvalidRequest naming the field."""
    body = _decode(data, ChatBody)
    for idx, message in enumerate(body.messages):
        for field in _RESENT:
            _refuse_set(getattr(message, field), param=f"messages[{idx}].{field}")
        if not isinstance(message.content, str):
            _check_parts(message.content, param=f"messages[{idx}].content")
    return body


def decode_completion(data: bytes) -> CompletionBody:
    """Return the completion request in `data`; raises InvalidRequest naming the field."""
    return _decode(data, CompletionBody)


def _decode(data: bytes, kind: type[_Body]) -> _Body:
    try:
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from None
    for field, neutral in _NEUTRAL.items():
        if (raw := getattr(body, field, None)) is not None:
            _refuse_set(raw, param=field, neutral=neutral)
    return body


def _refuse_set(raw: Raw, *, param: str, neutral: tuple[object, ...] = ()) -> None:
    """Raise InvalidRequest unless the field is null or has a value that changes nothing."""
    text = bytes(raw)
    if text == b"null":
        return
    # What is no short scalar or object cannot be neutral, and is not worth decoding.
    if len(text) > 64 or msgspec.json.decode(text) not in neutral:
        raise InvalidRequest(f"`{param}` is not supported by this server", param=param)


def _check_parts(parts: list[ContentPart], *, param: str) -> None:
    for idx, part in enumerate(parts):
        if part.type != "text":
            raise InvalidRequest(
                f"content of type `{truncated(part.type, 64)}` is not supported, only `text`",
                param=f"{param}[{idx}].type",
            )
        if part.text is None:
            raise InvalidRequest("a text part needs `text`", param=f"{param}[{idx}].text")


def _invalid(message: str) -> InvalidRequest:
    """Turn msgspec's message into ours: the path becomes `param`."""
    found = _PATH.search(message)
    path = found.group(1).removesuffix("[...]") if found else ""
    reason = message[: found.start()] if found else message
    named = _FIELD.match(message)
    if named is None:
        param = truncated(path, 128)
        return InvalidRequest(
            f"`{param}`: {reason}" if param else f"the request body: {reason}", param=param or None
        )
    field = truncated(named.group(1), 64)
    param = f"{path}.{field}" if path else field
    what = "missing required" if "missing required" in message[:24] else "unknown or unsupported"
    return InvalidRequest(f"{what} field `{param}`", param=param)

"""The request bodies that the gateway accepts, field by field, and their decoding.

Owns the one table of fields: the structs. A field that is listed plainly is implemented; one
listed as `Ignored` is documented by OpenAI, Anthropic, vLLM or llama.cpp and does not affect
the answer here, so it is accepted and reported; one listed as `Refused` would affect the answer
and is not implemented, so that only its neutral values pass. Any other field is unknown. Null
always means "not given". Knows no tokenizer and no model; server.gateway.requests.params gives the
fields their meaning, docs/api.md explains them (a test compares it with the structs).
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import Meta, Raw

from server.gateway.errors import truncated
from server.gateway.http.exchange import MAX_REQUEST_ID_CHARS
from server.gateway.requests.decoding import decode, decode_each
from server.gateway.requests.sampling_defaults import (
    MinP,
    PositiveCount,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
from server.sampling_limits import MAX_BIAS, MAX_COUNT, MAX_LOGPROBS, MAX_PENALTY
from topspin.errors import InvalidRequest
from topspin.plan.retrieval import MAX_TOKENS, MIN_TOKENS

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_NAME_CHARS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256
MAX_STRUCTURED_CHOICES = 4096
MAX_TEMPLATE_KWARGS = 32
MAX_MESSAGES = 10_000
MAX_ALLOWED_TOKEN_IDS = 2**14
MAX_TOOLS = 1024
MAX_TOOL_NAME_CHARS = 128

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
# Printable ASCII, as in the header.
RequestId = Annotated[str, Meta(min_length=1, max_length=MAX_REQUEST_ID_CHARS, pattern=r"^[ -~]*$")]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-MAX_PENALTY, le=MAX_PENALTY)]
NonEmpty = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[NonEmpty], Meta(min_length=1, max_length=MAX_STRUCTURED_CHOICES)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]

# How the OpenAPI document names a schema.
SCHEMA_REF = "#/components/schemas/{name}"
MESSAGE_LIST_SCHEMA: dict[str, object] = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
}
_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}
PROMPT_SCHEMA: dict[str, object] = {
    "anyOf": [
        _TEXT_SCHEMA,
        _IDS_SCHEMA,
        {"type": "array", "minItems": 1, "items": _TEXT_SCHEMA},
        {"type": "array", "minItems": 1, "items": _IDS_SCHEMA},
    ]
}

_Value = TypeVar("_Value")
_IGNORED = Meta(extra={"is_ignored": True})
NOT_GIVEN = Raw(b"null")
# As a factory: msgspec cannot show a default of this type in a JSON schema.
ABSENT: Any = msgspec.field(default_factory=lambda: NOT_GIVEN)

# A field of this type is checked for its JSON type and has no effect on the answer.
Ignored = Annotated[_Value | None, _IGNORED]
Object = dict[str, Raw]
NonEmptyList = Annotated[list[Raw], Meta(min_length=1)]
MessageList = Annotated[list[Raw], Meta(min_length=1, max_length=MAX_MESSAGES)]


def neutral(*values: object) -> Meta:
    """Mark a Raw field as refused unless it has one of `values`, which change nothing."""
    return Meta(extra={"neutral": values})


def items_of(name: str) -> Meta:
    """Describe a Raw field as a MessageList of the schema `name`."""
    items = {"$ref": SCHEMA_REF.format(name=name)}
    return Meta(extra_json_schema={**MESSAGE_LIST_SCHEMA, "items": items})


# A field of one of these types is refused unless null, false, or an empty value.
Refused = Annotated[Raw, neutral()]
RefusedSwitch = Annotated[Raw, neutral(False)]
RefusedList = Annotated[Raw, neutral([])]
RefusedObject = Annotated[Raw, neutral({})]


class Fields(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A JSON object of a request."""


class StreamOptions(Fields, kw_only=True, frozen=True):
    """Options of a stream; `include_usage`: a last chunk carries the token counts.

    `continuous_usage_stats`: with `include_usage`, every chunk carries the counts so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored[bool] = None


class KvRetrieval(Fields, kw_only=True, frozen=True):
    """How many keys a token of a long context attends to, in place of --kv-retrieval-tokens.

    Not `enabled`: all.
    """

    enabled: bool | None = None
    tokens: Annotated[int, Meta(ge=MIN_TOKENS, le=MAX_TOKENS)] | None = None


class JsonSchemaFormat(Fields, kw_only=True, frozen=True):
    """OpenAI's `json_schema`; the answer follows `schema` whether `strict` or not."""

    name: Name
    schema: Raw
    strict: bool | None = None
    description: Ignored[str] = None


class ResponseFormat(Fields, kw_only=True, frozen=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @classmethod
    def of_schema(cls, schema: dict[str, Any], *, name: str = "output") -> ResponseFormat:
        """Return the format of JSON that follows `schema`."""
        named = JsonSchemaFormat(name=name, schema=Raw(msgspec.json.encode(schema)))
        return cls(type="json_schema", json_schema=named)


class StructuredOutputs(Fields, kw_only=True, frozen=True):
    """vLLM's `structured_outputs`, one of whose fields is given."""

    json: Raw = ABSENT
    regex: NonEmpty | None = None
    choice: Choices | None = None
    grammar: NonEmpty | None = None
    json_object: bool | None = None


class GenerationBody(Fields, kw_only=True, frozen=True):
    """The fields that chat and plain completions have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
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
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: PositiveCount | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: Name | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    kv_retrieval: KvRetrieval | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    allowed_token_ids: (
        Annotated[list[Count], Meta(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    bad_words: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
            Meta(max_length=MAX_BAD_WORDS),
        ]
        | None
    ) = None

    # OpenAI's
    metadata: Ignored[Object] = None
    prompt_cache_key: Ignored[str] = None
    prompt_cache_retention: Ignored[str] = None
    safety_identifier: Ignored[str] = None
    service_tier: Ignored[str] = None
    store: Ignored[bool] = None
    user: Ignored[str] = None
    # vLLM's; length_penalty is for beam search, spaces_between_special_tokens for tokenizers
    # without a tokenizer.json.
    length_penalty: Ignored[float] = None
    session_id: Ignored[str] = None
    spaces_between_special_tokens: Ignored[bool] = None
    stream_interval: Ignored[int] = None
    kv_transfer_params: RefusedObject = ABSENT
    logprob_token_ids: Refused = ABSENT
    repetition_detection: Refused = ABSENT
    return_tokens_as_token_ids: RefusedSwitch = ABSENT
    thinking_token_budget: Annotated[Raw, neutral(-1)] = ABSENT
    truncation_side: Annotated[Raw, neutral("left")] = ABSENT
    use_beam_search: RefusedSwitch = ABSENT
    vllm_xargs: RefusedObject = ABSENT
    # llama.cpp's
    cache_prompt: Ignored[bool] = None
    id_slot: Ignored[int] = None
    return_progress: Ignored[bool] = None
    timings_per_token: Ignored[bool] = None
    dry_multiplier: Annotated[Raw, neutral(0)] = ABSENT
    dynatemp_range: Annotated[Raw, neutral(0)] = ABSENT
    grammar: Annotated[Raw, neutral("")] = ABSENT
    json_schema: RefusedObject = ABSENT
    mirostat: Annotated[Raw, neutral(0)] = ABSENT
    n_probs: Annotated[Raw, neutral(0)] = ABSENT
    repeat_penalty: Annotated[Raw, neutral(1)] = ABSENT
    typical_p: Annotated[Raw, neutral(1)] = ABSENT
    xtc_probability: Annotated[Raw, neutral(0)] = ABSENT


class ContentPart(Fields, kw_only=True, frozen=True):
    """One part of a message's content. Only text is served; other types are refused by name."""

    type: str
    text: str | None = None
    cache_control: Ignored[Object] = None
    annotations: Ignored[list[Raw]] = None
    image_url: Refused = ABSENT
    video_url: Refused = ABSENT
    input_audio: Refused = ABSENT
    file: Refused = ABSENT
    refusal: Refused = ABSENT


class ToolFunction(Fields, kw_only=True, frozen=True):
    """The function that a tool call names; `arguments` is JSON text, as in the API."""

    name: Name
    arguments: str
    parsed_arguments: Ignored[Any] = None  # openai's client adds it


class ToolCall(Fields, kw_only=True, frozen=True):
    """A tool call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolFunction
    index: Ignored[int] = None
    provider_specific_fields: Ignored[Object] = None


ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:-]+$", max_length=MAX_TOOL_NAME_CHARS)]


class FunctionDefinition(Fields, kw_only=True, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema.

    `strict`: its arguments are made to follow the schema.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields, kw_only=True, frozen=True):
    """A tool of a request; only functions are served."""

    type: Literal["function"] = "function"
    function: FunctionDefinition
    cache_control: Ignored[Object] = None


class ToolChoiceFunction(Fields, kw_only=True, frozen=True):
    """The name of the function to be called."""

    name: str


class NamedToolChoice(Fields, kw_only=True, frozen=True):
    """A choice of one function, which is then called."""

    type: Literal["function"] = "function"
    function: ToolChoiceFunction


CallChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ChatMessage(Fields, kw_only=True, frozen=True):
    """One message, in any form in which clients send an earlier answer back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: Name | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Ignored[list[Raw]] = None
    cache_control: Ignored[Object] = None
    provider_specific_fields: Ignored[Object] = None
    parsed: Ignored[Any] = None  # openai's client adds it
    audio: Refused = ABSENT
    function_call: Refused = ABSENT
    refusal: Refused = ABSENT


class ChatBody(GenerationBody, kw_only=True, frozen=True):
    """POST /v1/chat/completions, and what other APIs of chats are translated to."""

    # May be long: decode_chat decodes it message by message.
    messages: Annotated[Raw, items_of("ChatMessage")]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    reasoning_effort: Name | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: (
        Annotated[
            dict[
                Annotated[str, Meta(max_length=MAX_NAME_CHARS)],
                bool
                | Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)]
                | float
                | Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
                | None,
            ],
            Meta(max_length=MAX_TEMPLATE_KWARGS),
        ]
        | None
    ) = None

    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: CallChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    report_prefix_cache: bool | None = None

    # OpenAI's; a prediction only speeds up an answer.
    prediction: Ignored[Object] = None
    prompt_cache_options: Ignored[Object] = None
    verbosity: Ignored[str] = None
    audio: Refused = ABSENT
    function_call: Annotated[Raw, neutral("none", "auto")] = ABSENT
    functions: RefusedList = ABSENT
    modalities: Annotated[Raw, neutral(["text"])] = ABSENT
    moderation: Refused = ABSENT
    web_search_options: Refused = ABSENT
    # vLLM's
    chat_template: Refused = ABSENT
    documents: RefusedList = ABSENT
    echo: RefusedSwitch = ABSENT
    media_io_kwargs: RefusedObject = ABSENT
    mm_processor_kwargs: RefusedObject = ABSENT
    return_prompt_text: RefusedSwitch = ABSENT


class CompletionBody(GenerationBody, kw_only=True, frozen=True):
    """POST /v1/completions."""

    # May be long: server.gateway.requests.prompts decodes it piece by piece.
    prompt: Annotated[Raw, Meta(extra_json_schema=PROMPT_SCHEMA)]
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    include_reasoning: Ignored[bool] = None
    best_of: Annotated[Raw, neutral(1)] = ABSENT
    suffix: Annotated[Raw, neutral("")] = ABSENT


class FieldClasses(NamedTuple):
    """The fields not implemented: ignored ones, and refused ones with their neutral values."""

    ignored: tuple[str, ...]
    refused: dict[str, tuple[object, ...]]


@cache
def field_classes(kind: type[Fields]) -> FieldClasses:
    """Return the fields of `kind` that are ignored or refused."""
    ignored: list[str] = []
    refused: dict[str, tuple[object, ...]] = {}
    for field in msgspec.structs.fields(kind):
        marks = [meta.extra for meta in get_args(field.type)[1:] if isinstance(meta, Meta)]
        for mark in marks:
            if mark and "is_ignored" in mark:
                ignored.append(field.name)
            elif mark and "neutral" in mark:
                refused[field.name] = mark["neutral"]
    return FieldClasses(tuple(ignored), refused)


_Body = TypeVar("_Body", bound=GenerationBody)


class Decoded(NamedTuple, Generic[_Body]):
    """A body, and the ignored fields that it sets (`user`)."""

    body: _Body
    ignored: tuple[str, ...]


class DecodedChat(NamedTuple):
    """A chat's body, its messages, and the ignored fields of both (`messages.cache_control`)."""

    body: ChatBody
    messages: list[ChatMessage]
    ignored: tuple[str, ...]


def decode_chat(data: bytes) -> DecodedChat:
    """Return the chat request in `data`; raises InvalidRequest naming the field."""
    body = decode(data, ChatBody)
    ignored = _ignored(body)
    items = decode(body.messages, MessageList, param="messages")
    messages = decode_each(items, ChatMessage, param="messages")
    for idx, message in enumerate(messages):
        param = f"messages[{idx}]"
        ignored.update(check_fields(message, param=f"{param}.", shown="messages."))
        for call_idx, call in enumerate(message.tool_calls or ()):
            where = f"{param}.tool_calls[{call_idx}]."
            ignored.update(check_fields(call, param=where, shown="messages.tool_calls."))
            shown = "messages.tool_calls.function."
            ignored.update(check_fields(call.function, param=where, shown=shown))
        if message.content is None and message.role not in ("assistant", "tool"):
            raise InvalidRequest(
                f"missing required field `{param}.content`", param=f"{param}.content"
            )
        if isinstance(message.content, list):
            ignored.update(_check_parts(message.content, param=f"{param}.content"))
    return DecodedChat(body, messages, tuple(ignored))


def decode_completion(data: bytes) -> Decoded[CompletionBody]:
    """Return the completion request in `data`; raises InvalidRequest naming the field."""
    body = decode(data, CompletionBody)
    return Decoded(body, tuple(_ignored(body)))


def _ignored(body: GenerationBody) -> dict[str, None]:
    """Return the ignored fields outside of messages, in order, as the keys of a dict."""
    found = check_fields(body)
    if isinstance(body, ChatBody):
        for tool in body.tools or ():
            found.update(check_fields(tool, shown="tools."))
    if body.stream_options is not None:
        found.update(check_fields(body.stream_options, shown="stream_options."))
    form = body.response_format
    if form is not None and form.json_schema is not None:
        found.update(check_fields(form.json_schema, shown="response_format.json_schema."))
    return found


def check_fields(fields: Fields, *, param: str = "", shown: str = "") -> dict[str, None]:
    """Return the ignored fields that are set, prefixed with `shown`, as the keys of a dict.

    Raises InvalidRequest for a refused field, its name prefixed with `param`.
    """
    classes = field_classes(type(fields))
    for name, neutral_values in classes.refused.items():
        raw: Raw = getattr(fields, name)
        if raw is not NOT_GIVEN:
            _refuse_set(raw, param=f"{param}{name}", neutral_values=neutral_values)
    return {shown + name: None for name in classes.ignored if getattr(fields, name) is not None}


def _refuse_set(raw: Raw, *, param: str, neutral_values: tuple[object, ...]) -> None:
    """Raise InvalidRequest unless the field is null or has a value that changes nothing."""
    text = bytes(raw)
    if text == b"null":
        return
    # A value that is no short scalar or object cannot be neutral, and is not worth decoding.
    if len(text) > 64 or msgspec.json.decode(text) not in neutral_values:
        raise InvalidRequest(f"`{param}` is not supported by this server", param=param)


def _check_parts(parts: list[ContentPart], *, param: str) -> dict[str, None]:
    ignored: dict[str, None] = {}
    for idx, part in enumerate(parts):
        if part.type != "text":
            raise InvalidRequest(
                f"content of type `{truncated(part.type, 64)}` is not supported, only `text`",
                param=f"{param}[{idx}].type",
            )
        if part.text is None:
            raise InvalidRequest("a text part needs `text`", param=f"{param}[{idx}].text")
        ignored.update(check_fields(part, param=f"{param}[{idx}].", shown="messages.content."))
    return ignored

"""POST /v1/responses, OpenAI's newer API, as a chat.

Owns the request's fields and their translation to those of a chat; the classes of fields are those
of server.gateway.bodies.fields. Knows no tokenizer and no model; the conversation of an earlier
response comes from server.gateway.dialects.responses.store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Raw

from server.gateway.bodies.decoding import decode, decode_each
from server.gateway.bodies.fields import (
    ABSENT,
    MESSAGE_LIST_SCHEMA,
    NOT_GIVEN,
    SCHEMA_REF,
    BodyFields,
    BodyReader,
    Ignored,
    MessageList,
    Name,
    NumLogprobs,
    Object,
    Refused,
    RefusedSwitch,
)
from server.gateway.bodies.generation import ResponseFormat, SamplingBody
from server.gateway.bodies.sampling_defaults import PositiveCount
from server.gateway.dialects.chat.request import (
    ChatBody,
    ChatMessage,
    DecodedChat,
    NamedToolChoice,
    TemplateVariables,
    ToolCall,
)
from server.gateway.dialects.responses.tools import (
    TOOLS_SCHEMA,
    ServedTool,
    flat_name,
    functions_of,
    places_of,
    served_tools,
)
from topspin.errors import InvalidRequest

LOGPROBS = "message.output_text.logprobs"


class TextPart(BodyFields, kw_only=True, frozen=True):
    """A part of a message's content. Only text is served; other types are refused by name."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: Ignored[list[Raw]] = None
    logprobs: Ignored[list[Raw]] = None
    prompt_cache_breakpoint: Ignored[Object] = None


class MessageItem(BodyFields, kw_only=True, frozen=True, tag="message"):
    """A message."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    id: Ignored[str] = None
    status: Ignored[str] = None
    phase: Ignored[str] = None


class CallItem(BodyFields, kw_only=True, frozen=True, tag="function_call"):
    """A tool call of an earlier response; `namespace`: of the tool that it called."""

    call_id: str
    name: Name
    arguments: str
    namespace: Name | None = None
    id: Ignored[str] = None
    status: Ignored[str] = None


class CallOutputItem(BodyFields, kw_only=True, frozen=True, tag="function_call_output"):
    """The result of a call."""

    call_id: str
    output: str | list[TextPart]
    id: Ignored[str] = None
    status: Ignored[str] = None


class ReasoningItem(BodyFields, kw_only=True, frozen=True, tag="reasoning"):
    """Reasoning of an earlier response; its summary is left out."""

    content: list[TextPart] | None = None
    summary: Ignored[list[Raw]] = None
    id: Ignored[str] = None
    status: Ignored[str] = None
    encrypted_content: Ignored[str] = None


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


class FunctionChoice(BodyFields, kw_only=True, frozen=True):
    """A choice of one function, which is then called."""

    type: Literal["function"]
    name: str
    namespace: str | None = None


class TextFormat(BodyFields, kw_only=True, frozen=True):
    """What the answer's text follows."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    schema: dict[str, Any] | None = None
    description: Ignored[str] = None
    strict: bool | None = None


class TextConfig(BodyFields, kw_only=True, frozen=True):
    """How the answer's text is written."""

    format: TextFormat | None = None
    verbosity: Ignored[str] = None


class ReasoningOptions(BodyFields, kw_only=True, frozen=True):
    """How much the model reasons."""

    effort: Name | None = None
    summary: Ignored[str] = None
    generate_summary: Ignored[str] = None
    context: Ignored[str] = None


class ResponseStreamOptions(BodyFields, kw_only=True, frozen=True):
    """Options of a stream; none has an effect."""

    include_obfuscation: Ignored[bool] = None


ITEMS = (MessageItem, CallItem, CallOutputItem, ReasoningItem)
INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            **MESSAGE_LIST_SCHEMA,
            "items": {"anyOf": [{"$ref": SCHEMA_REF.format(name=each.__name__)} for each in ITEMS]},
        },
    ]
}


class ResponsesBody(SamplingBody, kw_only=True, frozen=True):
    """POST /v1/responses."""

    input: Annotated[Raw, Meta(extra_json_schema=INPUT_SCHEMA)]  # may be long: decoded by items
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: PositiveCount | None = None
    top_logprobs: NumLogprobs | None = None
    include: list[str] | None = None
    tools: Annotated[Raw, Meta(extra_json_schema=TOOLS_SCHEMA)] = ABSENT
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    include_reasoning: bool | None = None

    client_metadata: Ignored[Object] = None
    context_management: Ignored[list[Raw]] = None
    max_tool_calls: Ignored[int] = None
    prompt_cache_options: Ignored[Object] = None
    stream_options: ResponseStreamOptions | None = None
    conversation: Refused = ABSENT
    enable_response_messages: RefusedSwitch = ABSENT
    moderation: Refused = ABSENT
    previous_input_messages: Refused = ABSENT
    prompt: Refused = ABSENT


class DecodedResponse(NamedTuple):
    """A request: its own fields, and the chat that it is without the instructions.

    The chat's messages follow on those of the previous response. `items` are its input as it came;
    `places`: the namespaces and names of functions by the names that the model sees.
    """

    body: ResponsesBody
    chat: DecodedChat
    items: tuple[Raw, ...]
    places: Mapping[str, tuple[str, str]]


def decode_response(data: bytes, reader: BodyReader) -> DecodedResponse:
    """Return the request in `data`; raises InvalidRequest naming the field."""
    body = reader.read(data, ResponsesBody)
    given = _items(body.input)
    messages = _messages(reader.read_each(given, Item, param="input"))
    may_choose = body.tool_choice in (None, "auto", "none")
    tools = served_tools(body.tools, reader, may_choose=may_choose)
    chat = DecodedChat(_chat(body, tools), messages, reader.names)
    return DecodedResponse(body, chat, tuple(given), places_of(tools))


def _items(data: Raw) -> list[Raw]:
    """Return the items with their types; one without is a message, as OpenAI has it."""
    if bytes(data)[:1] == b'"':
        return [Raw(msgspec.json.encode(MessageItem(role="user", content=decode(data, str))))]
    given = decode_each(decode(data, MessageList, param="input"), dict[str, Raw], param="input")
    return [
        Raw(msgspec.json.encode(each if "type" in each else {"type": "message", **each}))
        for each in given
    ]


def _messages(items: Sequence[Item]) -> list[ChatMessage]:
    """Return the items as messages: reasoning, text and calls that follow each other are one."""
    messages: list[ChatMessage] = []
    for item in items:
        match item:
            case MessageItem():
                text = _text(item.content)
                message = ChatMessage(role=item.role, content=text)
            case CallItem():
                name = flat_name(item.namespace, item.name)
                call = ToolCall.of(item.call_id, name, item.arguments)
                message = ChatMessage.of_assistant(calls=[call])
            case CallOutputItem():
                text = _text(item.output)
                message = ChatMessage(role="tool", tool_call_id=item.call_id, content=text)
            case ReasoningItem():
                message = ChatMessage.of_assistant(thoughts=[_text(item.content or [])])
        if messages and message.role == messages[-1].role == "assistant":
            messages[-1] = joined(messages[-1], message)
        else:
            messages.append(message)
    return messages


def following(
    previous: Sequence[ChatMessage], messages: Sequence[ChatMessage]
) -> list[ChatMessage]:
    """Return the conversation of an earlier response, and what follows on it."""
    if previous and messages and previous[-1].role == messages[0].role == "assistant":
        return [*previous[:-1], joined(previous[-1], messages[0]), *messages[1:]]
    return [*previous, *messages]


def joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    """Return two parts of one assistant's message as one."""
    contents = [each.content for each in (first, second) if isinstance(each.content, str)]
    thoughts = [each.reasoning_content for each in (first, second) if each.reasoning_content]
    calls = [*(first.tool_calls or ()), *(second.tool_calls or ())]
    return ChatMessage.of_assistant(contents, thoughts=thoughts, calls=calls)


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _chat(body: ResponsesBody, tools: Sequence[ServedTool]) -> ChatBody:
    text, choice = body.text or TextConfig(), body.tool_choice
    reasoning = body.reasoning or ReasoningOptions()
    shows_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not shows_logprobs:
        raise InvalidRequest(
            f'`top_logprobs` needs "{LOGPROBS}" in `include`', param="top_logprobs"
        )
    functions = [function for tool in tools for function in functions_of(tool)]
    return ChatBody(
        **{name: getattr(body, name) for name in SamplingBody.__struct_fields__},
        messages=NOT_GIVEN,
        max_tokens=body.max_output_tokens,
        logprobs=shows_logprobs,
        top_logprobs=body.top_logprobs if shows_logprobs else None,
        chat_template_kwargs=body.chat_template_kwargs,
        include_reasoning=body.include_reasoning,
        reasoning_effort=reasoning.effort,
        tools=functions or None,
        tool_choice=NamedToolChoice.of(flat_name(choice.namespace, choice.name))
        if isinstance(choice, FunctionChoice)
        else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(text.format),
    )


def _response_format(given: TextFormat | None) -> ResponseFormat | None:
    if given is None:
        return None
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    if given.schema is None:
        raise InvalidRequest("`text.format` needs a `schema`", param="text.format.schema")
    return ResponseFormat.of_schema(given.schema, name=given.name or "output")

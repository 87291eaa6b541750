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
    MAX_TOOL_NAME_CHARS,
    MAX_TOOLS,
    MESSAGE_LIST_SCHEMA,
    NOT_GIVEN,
    SCHEMA_REF,
    BodyFields,
    Ignored,
    MessageList,
    Name,
    NumLogprobs,
    Object,
    Refused,
    RefusedSwitch,
    ToolName,
)
from server.gateway.bodies.generation import ResponseFormat, SamplingBody
from server.gateway.bodies.reading import BodyReader
from server.gateway.bodies.sampling_defaults import PositiveCount
from server.gateway.dialects.chat.request import (
    ChatBody,
    ChatMessage,
    DecodedChat,
    FunctionDefinition,
    NamedToolChoice,
    TemplateVariables,
    Tool,
    ToolCall,
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


class FunctionTool(BodyFields, kw_only=True, frozen=True, tag="function"):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Ignored[bool] = None


class NamespaceTool(BodyFields, kw_only=True, frozen=True, tag="namespace"):
    """Functions with a name in common, as Codex gives them; the model sees `NAME__FUNCTION`."""

    name: ToolName
    description: Ignored[str] = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]


class ToolKind(msgspec.Struct, frozen=True):
    """What is looked at first in a tool."""

    type: str


# Tools that a server would run, or that are no functions; left out where the model may do without.
BUILT_IN_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "custom",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
_ToolList = Annotated[list[Raw], Meta(max_length=MAX_TOOLS)]
NAMESPACE_MARK = "__"
"""Between a namespace and a function's name, as the model sees them."""


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
TOOLS = (FunctionTool, NamespaceTool)
TOOLS_SCHEMA: dict[str, object] = {
    "anyOf": [
        {
            "type": "array",
            "maxItems": MAX_TOOLS,
            "items": {
                "anyOf": [
                    *({"$ref": SCHEMA_REF.format(name=each.__name__)} for each in TOOLS),
                    {
                        "type": "object",
                        "properties": {"type": {"enum": sorted(BUILT_IN_TOOLS)}},
                        "required": ["type"],
                    },
                ]
            },
        },
        {"type": "null"},
    ]
}
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
    tools = _tools(body, reader)
    places = {
        _flat(tool.name, each.name): (tool.name, each.name)
        for tool in tools
        if isinstance(tool, NamespaceTool)
        for each in tool.tools
    }
    chat = DecodedChat(_chat(body, tools), messages, reader.names)
    return DecodedResponse(body, chat, tuple(given), places)


def _items(data: Raw) -> list[Raw]:
    """Return the items with their types; one without is a message, as OpenAI has it."""
    if bytes(data)[:1] == b'"':
        return [Raw(msgspec.json.encode(MessageItem(role="user", content=decode(data, str))))]
    given = decode_each(decode(data, MessageList, param="input"), dict[str, Raw], param="input")
    return [
        Raw(msgspec.json.encode(each if "type" in each else {"type": "message", **each}))
        for each in given
    ]


def _tools(body: ResponsesBody, reader: BodyReader) -> list[FunctionTool | NamespaceTool]:
    """Return the functions; other tools are named as ignored where the model may do without."""
    may_choose = body.tool_choice in (None, "auto", "none")
    given = [] if bytes(body.tools) == b"null" else decode(body.tools, _ToolList, param="tools")
    kept: list[Raw] = []
    for idx, tool in enumerate(given):
        kind = decode(tool, ToolKind, param=f"tools[{idx}]").type
        if kind in BUILT_IN_TOOLS and may_choose:
            reader.ignored[f"tools.{kind}"] = None
        elif kind in BUILT_IN_TOOLS:
            raise InvalidRequest(
                f"`tools[{idx}]`: this server runs no `{kind}`; it is ignored where `tool_choice` "
                "is auto",
                param=f"tools[{idx}].type",
            )
        else:
            kept.append(tool)
    return reader.read_each(kept, FunctionTool | NamespaceTool, param="tools")


def _flat(namespace: str | None, name: str) -> str:
    """Return the name of a function as the model sees it; raises InvalidRequest if it is long."""
    flat = name if namespace is None else f"{namespace}{NAMESPACE_MARK}{name}"
    if len(flat) > MAX_TOOL_NAME_CHARS:
        raise InvalidRequest(
            f"`tools`: a function has at most {MAX_TOOL_NAME_CHARS} characters in its name, with "
            f"that of its namespace and `{NAMESPACE_MARK}` between them",
            param="tools",
        )
    return flat


def _messages(items: Sequence[Item]) -> list[ChatMessage]:
    """Return the items as messages: reasoning, text and calls that follow each other are one."""
    messages: list[ChatMessage] = []
    for item in items:
        match item:
            case MessageItem():
                text = _text(item.content)
                message = ChatMessage(role=item.role, content=text)
            case CallItem():
                name = _flat(item.namespace, item.name)
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


def _chat(body: ResponsesBody, tools: Sequence[FunctionTool | NamespaceTool]) -> ChatBody:
    text, choice = body.text or TextConfig(), body.tool_choice
    reasoning = body.reasoning or ReasoningOptions()
    shows_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not shows_logprobs:
        raise InvalidRequest(
            f'`top_logprobs` needs "{LOGPROBS}" in `include`', param="top_logprobs"
        )
    functions = [function for tool in tools for function in _functions(tool)]
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
        tool_choice=NamedToolChoice.of(_flat(choice.namespace, choice.name))
        if isinstance(choice, FunctionChoice)
        else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(text.format),
    )


def _functions(tool: FunctionTool | NamespaceTool) -> list[Tool]:
    """Return the functions of a tool, under the names that the model sees."""
    namespace, functions = None, [tool] if isinstance(tool, FunctionTool) else tool.tools
    if isinstance(tool, NamespaceTool):
        namespace = tool.name
    return [
        Tool(
            function=FunctionDefinition(
                name=_flat(namespace, each.name),
                description=each.description,
                parameters=each.parameters,
                strict=each.strict,
            )
        )
        for each in functions
    ]


def _response_format(given: TextFormat | None) -> ResponseFormat | None:
    if given is None:
        return None
    if given.type != "json_schema":
        return ResponseFormat(type=given.type)
    if given.schema is None:
        raise InvalidRequest("`text.format` needs a `schema`", param="text.format.schema")
    return ResponseFormat.of_schema(given.schema, name=given.name or "output")

"""POST /v1/messages, Anthropic's API, as a chat.

Owns the request's fields and their translation to those of a chat; the classes of fields are those
of server.gateway.bodies.fields. Knows no tokenizer and no model. Errors name the fields of this
API, apart from those that only the chat's checks can find.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from server.gateway.bodies.decoding import decode
from server.gateway.bodies.fields import (
    ABSENT,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    NOT_GIVEN,
    BodyFields,
    BodyReader,
    Ignored,
    MessageList,
    Name,
    Object,
    Priority,
    RefusedList,
    StopString,
    ToolName,
    items_of,
)
from server.gateway.bodies.generation import KvRetrieval, ResponseFormat
from server.gateway.bodies.sampling_defaults import PositiveCount, TopK, TopP
from server.gateway.dialects.chat.prompt import BILLING_PREFIX
from server.gateway.dialects.chat.request import (
    CallChoice,
    ChatBody,
    ChatMessage,
    DecodedChat,
    FunctionDefinition,
    NamedToolChoice,
    ThinkingSwitch,
    Tool,
    ToolCall,
)
from topspin.errors import InvalidRequest


class TextBlock(BodyFields, kw_only=True, frozen=True, tag="text"):
    """Text."""

    text: str
    cache_control: Ignored[Object] = None
    citations: Ignored[list[Raw]] = None


class ThinkingBlock(BodyFields, kw_only=True, frozen=True, tag="thinking"):
    """Reasoning of an earlier answer."""

    thinking: str
    signature: Ignored[str] = None
    cache_control: Ignored[Object] = None


class RedactedThinkingBlock(BodyFields, kw_only=True, frozen=True, tag="redacted_thinking"):
    """Reasoning that another server hid; it is left out."""

    data: Ignored[str] = None


class ToolUseBlock(BodyFields, kw_only=True, frozen=True, tag="tool_use"):
    """A tool call of an earlier answer."""

    id: str
    name: Name
    input: dict[str, Raw]
    cache_control: Ignored[Object] = None
    caller: Ignored[Object] = None


class ToolResultBlock(BodyFields, kw_only=True, frozen=True, tag="tool_result"):
    """The result of a call; `is_error` is told to the model before the content."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Ignored[Object] = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(BodyFields, kw_only=True, frozen=True):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolDefinition(BodyFields, kw_only=True, frozen=True):
    """A function that the model may call. Tools that a server would run are refused by type."""

    name: ToolName
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Ignored[Object] = None
    defer_loading: Ignored[bool] = None
    eager_input_streaming: Ignored[bool] = None
    input_examples: Ignored[list[Raw]] = None


class ToolChoice(BodyFields, kw_only=True, frozen=True):
    """Whether, and which, tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(BodyFields, kw_only=True, frozen=True):
    """Whether the model reasons before it answers, for how many tokens, and the answer shows it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: PositiveCount | None = None
    display: Ignored[str] = None


class OutputFormat(BodyFields, kw_only=True, frozen=True):
    """The JSON schema that the answer's text follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(BodyFields, kw_only=True, frozen=True):
    """How the answer is written."""

    format: OutputFormat | None = None
    effort: Name | None = None


class PromptFields(BodyFields, kw_only=True, frozen=True):
    """The fields that say what the model gets: those of /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[Raw, items_of("InputMessage")]  # may be long: decoded one by one
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: Ignored[Object] = None
    context_management: Ignored[Object] = None
    mcp_servers: RefusedList = ABSENT


class MessagesBody(PromptFields, kw_only=True, frozen=True):
    """POST /v1/messages; `kv_retrieval` and `cache_salt` are Topspin's and vLLM's."""

    max_tokens: PositiveCount
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    cache_salt: Name | None = None
    kv_retrieval: KvRetrieval | None = None
    priority: Priority | None = None
    container: Ignored[str] = None
    metadata: Ignored[Object] = None
    service_tier: Ignored[str] = None
    diagnostics: Ignored[Object] = None
    inference_geo: Ignored[str] = None
    speed: Ignored[str] = None
    user_profile_id: Ignored[str] = None
    workspace_id: Ignored[str] = None


def decode_messages(data: bytes, reader: BodyReader) -> DecodedChat:
    """Return the chat that a request to /v1/messages is; raises InvalidRequest."""
    body = reader.read(data, MessagesBody)
    chat = _chat(body)
    chat = msgspec.structs.replace(
        chat,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
        stream=body.stream,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        cache_salt=body.cache_salt,
        priority=body.priority,
        kv_retrieval=body.kv_retrieval,
    )
    return _decoded(body, chat, reader)


def decode_count(data: bytes, reader: BodyReader) -> DecodedChat:
    """Return the chat that a request to /v1/messages/count_tokens is; raises InvalidRequest."""
    body = reader.read(data, PromptFields)
    return _decoded(body, _chat(body), reader)


def _decoded(body: PromptFields, chat: ChatBody, reader: BodyReader) -> DecodedChat:
    items = decode(body.messages, MessageList, param="messages")
    messages = _system(body.system)
    for idx, message in enumerate(reader.read_each(items, InputMessage, param="messages")):
        messages += _messages(message, f"messages[{idx}]")
    if messages[-1].role == "assistant":
        # As Anthropic has it, an answer then continues the assistant's words.
        chat = msgspec.structs.replace(chat, continue_final_message=True)
    return DecodedChat(chat, messages, reader.names)


def _chat(body: PromptFields) -> ChatBody:
    choice, config = body.tool_choice, body.output_config or OutputConfig()
    thinking = body.thinking
    thinks = None if thinking is None else thinking.type != "disabled"
    budget = thinking.budget_tokens if thinking and thinks else None
    output = config.format or body.output_format
    return ChatBody(
        model=body.model,
        messages=NOT_GIVEN,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        reasoning_effort=config.effort,
        chat_template_kwargs=None if thinks is None else {"enable_thinking": thinks},
        include_reasoning=bool(thinks),
        thinking=None if budget is None else ThinkingSwitch(type="enabled", budget_tokens=budget),
        thinking_token_budget=budget,
        response_format=None if output is None else ResponseFormat.of_schema(output.schema),
    )


def _tool(tool: ToolDefinition) -> Tool:
    return Tool(
        function=FunctionDefinition(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
    )


def _tool_choice(choice: ToolChoice | None) -> CallChoice | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("`tool_choice`: a tool needs its `name`", param="tool_choice.name")
        return NamedToolChoice.of(choice.name)
    if choice.type == "any":
        return "required"
    return choice.type


def _system(system: str | list[TextBlock] | None) -> list[ChatMessage]:
    texts = [system] if isinstance(system, str) else []
    for block in system if isinstance(system, list) else ():
        if not block.text.startswith(BILLING_PREFIX):
            texts.append(block.text)
    text = "\n".join(texts)
    return [ChatMessage(role="system", content=text)] if text else []


def _messages(message: InputMessage, param: str) -> list[ChatMessage]:
    """Return the chat messages of one message: results of calls are messages of their own."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results: list[ChatMessage] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for idx, block in enumerate(message.content):
        where = f"{param}.content[{idx}]"
        is_answer = isinstance(block, ThinkingBlock | RedactedThinkingBlock | ToolUseBlock)
        if is_answer and message.role != "assistant":
            raise InvalidRequest(f"`{where}`: only the assistant's messages have it", param=where)
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                arguments = msgspec.json.encode(block.input).decode()
                calls.append(ToolCall.of(block.id, block.name, arguments))
            case ToolResultBlock():
                if message.role != "user":
                    raise InvalidRequest(
                        f"`{where}`: results of tools belong to the user's messages", param=where
                    )
                results.append(_result(block))
    if message.role == "assistant":
        return [ChatMessage.of_assistant(texts, thoughts=thoughts, calls=calls)]
    if not texts and results:
        return results
    return [*results, ChatMessage(role=message.role, content="\n".join(texts))]


def _result(block: ToolResultBlock) -> ChatMessage:
    content = block.content or ""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    return ChatMessage(
        role="tool",
        tool_call_id=block.tool_use_id,
        content=f"Error: {text}" if block.is_error else text,
    )

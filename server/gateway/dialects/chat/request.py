"""The body of POST /v1/chat/completions: its fields, its messages, and their checks.

Knows no tokenizer and no model. Other APIs of chats are translated to this body.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from msgspec import Meta, Raw
from msgspec.structs import replace

from server.gateway.bodies.decoding import decode
from server.gateway.bodies.fields import (
    ABSENT,
    MAX_NAME_CHARS,
    MAX_TOOLS,
    BodyFields,
    BodyReader,
    Count,
    Ignored,
    MessageList,
    Name,
    NumLogprobs,
    Object,
    Refused,
    RefusedList,
    RefusedObject,
    RefusedSwitch,
    ToolName,
    items_of,
    neutral,
)
from server.gateway.bodies.generation import GenerationBody
from server.gateway.errors import truncated
from server.gateway.generation.params import meant
from server.sampling_limits import MAX_COUNT
from topspin.errors import InvalidRequest

MAX_TEMPLATE_KWARGS = 32


class ContentPart(BodyFields, kw_only=True, frozen=True):
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


class ToolFunction(BodyFields, kw_only=True, frozen=True):
    """The function that a tool call names; `arguments` is JSON text, as in the API."""

    name: Name
    arguments: str
    parsed_arguments: Ignored[Any] = None  # openai's client adds it


class ToolCall(BodyFields, kw_only=True, frozen=True):
    """A tool call in an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolFunction
    index: Ignored[int] = None
    provider_specific_fields: Ignored[Object] = None

    @classmethod
    def of(cls, call_id: str, name: str, arguments: str) -> ToolCall:
        """Return the call of a function; `arguments` is JSON text."""
        return cls(id=call_id, function=ToolFunction(name=name, arguments=arguments))


class FunctionDefinition(BodyFields, kw_only=True, frozen=True):
    """A function that the model may call; `parameters` is a JSON schema.

    `strict`: its arguments are made to follow the schema.
    """

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BodyFields, kw_only=True, frozen=True):
    """A tool of a request; only functions are served."""

    type: Literal["function"] = "function"
    function: FunctionDefinition
    cache_control: Ignored[Object] = None


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
TemplateVariables = Annotated[
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


class ToolChoiceFunction(BodyFields, kw_only=True, frozen=True):
    """The name of the function to be called."""

    name: str


class NamedToolChoice(BodyFields, kw_only=True, frozen=True):
    """A choice of one function, which is then called."""

    type: Literal["function"] = "function"
    function: ToolChoiceFunction

    @classmethod
    def of(cls, name: str) -> NamedToolChoice:
        """Return the choice of the function `name`."""
        return cls(function=ToolChoiceFunction(name=name))


CallChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ChatMessage(BodyFields, kw_only=True, frozen=True):
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
    # Other servers' and SDKs', in answers that are sent back.
    created_at: Ignored[Any] = None
    id: Ignored[Any] = None
    partial: Ignored[Any] = None
    prefix: Ignored[Any] = None
    reasoning_details: Ignored[Any] = None
    status: Ignored[Any] = None
    thinking_blocks: Ignored[Any] = None
    type: Ignored[Any] = None
    audio: Refused = ABSENT
    function_call: Refused = ABSENT
    refusal: Refused = ABSENT

    @classmethod
    def of_assistant(
        cls,
        contents: Sequence[str] = (),
        *,
        thoughts: Sequence[str] = (),
        calls: Sequence[ToolCall] = (),
    ) -> ChatMessage:
        """Return an earlier answer, its texts and its reasoning in pieces; without any: null."""
        return cls(
            role="assistant",
            content="".join(contents) if contents else None,
            reasoning_content="".join(thoughts) or None,
            tool_calls=list(calls) or None,
        )


class ThinkingSwitch(BodyFields, kw_only=True, frozen=True):
    """Whether the model reasons, as DeepSeek, GLM and Anthropic write it."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]
    budget_tokens: Count | None = None
    clear_thinking: Ignored[Any] = None
    keep: Ignored[Any] = None


class ReasoningChoice(BodyFields, kw_only=True, frozen=True):
    """How much the model reasons, as OpenRouter writes it; `exclude`: it is not shown."""

    effort: Name | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: Count | None = None
    summary: Ignored[str] = None


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
    chat_template_kwargs: TemplateVariables | None = None
    tools: Tools | None = None
    tool_choice: CallChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    report_prefix_cache: bool | None = None
    echo: bool | None = None
    # Other servers' forms of the fields above; decode_chat puts them there.
    enable_thinking: bool | None = None
    reasoning: ReasoningChoice | None = None
    thinking: ThinkingSwitch | None = None

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
    media_io_kwargs: RefusedObject = ABSENT
    mm_processor_kwargs: RefusedObject = ABSENT
    return_prompt_text: RefusedSwitch = ABSENT


class DecodedChat(NamedTuple):
    """A chat's body, its messages, and the ignored fields of both (`messages.cache_control`)."""

    body: ChatBody
    messages: list[ChatMessage]
    ignored: tuple[str, ...]

    def echoed(self) -> str:
        """Return what `echo` shows first: the last message, if it is the assistant's."""
        last = self.messages[-1]
        if not self.body.echo or last.role != "assistant":
            return ""
        content = last.content or ""
        return content if isinstance(content, str) else "".join(each.text or "" for each in content)


Body = TypeVar("Body", bound=ChatBody)


def decode_chat(data: bytes, reader: BodyReader) -> DecodedChat:
    """Return the chat request in `data`; raises InvalidRequest naming the field."""
    body = decode_fields(data, ChatBody, reader)
    messages = checked_messages(body.messages, reader)
    return DecodedChat(body, messages, reader.names)


def decode_fields(data: bytes, kind: type[Body], reader: BodyReader) -> Body:
    """Return the fields in `data`, under our names; its messages are yet to be read."""
    return _with_reasoning(meant(reader.read(data, kind)))


def _with_reasoning(body: Body) -> Body:
    """Return a body with what other servers' fields say of reasoning in our own.

    Ours count if they are there too.
    """
    switch = body.enable_thinking
    thinking, reasoning = body.thinking, body.reasoning or ReasoningChoice()
    if thinking is not None and thinking.type in ("enabled", "disabled"):
        switch = thinking.type == "enabled"
    switch = reasoning.enabled if switch is None else switch
    variables = body.chat_template_kwargs or {}
    if switch is not None:
        variables = {"enable_thinking": switch, **variables}
    budgets = (reasoning.max_tokens, thinking.budget_tokens if thinking else None)
    given = {
        "chat_template_kwargs": variables or None,
        "reasoning_effort": body.reasoning_effort or reasoning.effort,
        "thinking_token_budget": next(
            (each for each in (body.thinking_token_budget, *budgets) if each is not None), None
        ),
    }
    if reasoning.exclude and body.include_reasoning is None:
        given["include_reasoning"] = False
    return replace(body, **given)


def checked_messages(data: Raw, reader: BodyReader) -> list[ChatMessage]:
    """Return the messages in `data`; raises InvalidRequest."""
    items = decode(data, MessageList, param="messages")
    return reader.read_each(items, ChatMessage, param="messages", check=_check_content)


def _check_content(message: ChatMessage, place: str) -> None:
    content, param = message.content, f"{place}.content"
    if content is None and message.role not in ("assistant", "tool"):
        raise InvalidRequest(f"missing required field `{param}`", param=param)
    for idx, part in enumerate(content if isinstance(content, list) else ()):
        if part.type != "text":
            raise InvalidRequest(
                f"content of type `{truncated(part.type, 64)}` is not supported, only `text`",
                param=f"{param}[{idx}].type",
            )
        if part.text is None:
            raise InvalidRequest("a text part needs `text`", param=f"{param}[{idx}].text")

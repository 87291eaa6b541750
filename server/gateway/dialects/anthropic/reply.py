"""Answers of POST /v1/messages, Anthropic's API, streamed and whole.

Owns the sequence of events: a message begins, its content blocks begin, grow and stop, one after
the other, and the message stops with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from server.gateway.dialects.dialect import ReplyHead
from server.gateway.errors import describe
from server.gateway.generation.choice import Choice
from server.gateway.generation.usage import Usage
from server.gateway.parsing.json_scan import is_object
from server.gateway.parsing.message import MessageCall, MessageText
from server.gateway.parsing.parts import CallArguments, CallBegin, Content, Part, Reasoning

_Json = dict[str, Any]


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; as Anthropic has it, the cached tokens are not among the input's."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A message; `content` are blocks of type thinking, text and tool_use."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[_Json]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessagesReplies:
    """Answers of one request; it has one choice."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._encoder = msgspec.json.Encoder()
        self._num_blocks = 0
        self._open_kind: str | None = None

    def events(self, choice: Choice) -> bytes:
        """Return the message's begin (once) and what its blocks grew by."""
        events: list[bytes] = []
        if not choice.has_begun:
            prompt, cached = len(choice.prompt.ids), choice.num_cached_tokens
            usage = _usage(prompt, cached, choice.num_tokens)
            begun = self._message(content=[], stop_reason=None, stop_sequence=None, usage=usage)
            events.append(self._event("message_start", message=begun))
        for part in choice.parts:
            self._grow(part, events)
        return b"".join(events)

    def _grow(self, part: Part, events: list[bytes]) -> None:
        match part:
            case Content(text):
                self._open("text", {"type": "text", "text": ""}, events)
                grown = {"type": "text_delta", "text": text}
            case Reasoning(text):
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                self._open("thinking", empty, events)
                grown = {"type": "thinking_delta", "thinking": text}
            case CallBegin(_, id, name):
                self._close(events)
                self._open("call", _tool_use(id, name, {}), events)
                return
            case CallArguments(_, text):
                grown = {"type": "input_json_delta", "partial_json": text}
        event = self._event("content_block_delta", index=self._num_blocks - 1, delta=grown)
        events.append(event)

    def _open(self, kind: str, block: _Json, events: list[bytes]) -> None:
        """Begin a block, unless the last one is of this kind and goes on."""
        if self._open_kind == kind:
            return
        self._close(events)
        self._open_kind = kind
        self._num_blocks += 1
        index = self._num_blocks - 1
        events.append(self._event("content_block_start", index=index, content_block=block))

    def _close(self, events: list[bytes]) -> None:
        if self._open_kind is not None:
            events.append(self._event("content_block_stop", index=self._num_blocks - 1))
            self._open_kind = None

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the end of the last block and of the message."""
        [choice] = choices
        events: list[bytes] = []
        self._close(events)
        counts = _usage(usage.prompt_tokens, choice.num_cached_tokens, usage.completion_tokens)
        events.append(self._event("message_delta", delta=_stop(choice), usage=counts))
        events.append(self._event("message_stop"))
        return b"".join(events)

    def failed(self, error: Exception) -> bytes:
        """Return the error, after which nothing follows."""
        return b"event: error\ndata: " + describe(error).body(to_anthropic=True) + b"\n\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the whole answer."""
        [choice] = choices
        message = choice.message
        content = [_block(item) for item in message.items]
        counts = _usage(usage.prompt_tokens, choice.num_cached_tokens, usage.completion_tokens)
        return self._encoder.encode(self._message(content=content, usage=counts, **_stop(choice)))

    def _message(self, **members: Any) -> MessageAnswer:
        return MessageAnswer(id=self._head.id, model=self._head.params.model, **members)

    def _event(self, kind: str, **members: object) -> bytes:
        data = self._encoder.encode({"type": kind, **members})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _block(item: MessageText | MessageCall) -> _Json:
    if isinstance(item, MessageCall):
        return _tool_use(item.id, item.name, _input(item.arguments))
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": str(item), "signature": ""}
    return {"type": "text", "text": str(item)}


def _tool_use(id: str, name: str, input: object) -> _Json:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def _input(arguments: str) -> object:
    """Return the arguments as the object that they are; of a call that was cut, nothing."""
    return Raw(arguments.encode()) if is_object(arguments) else {}


def _stop(choice: Choice) -> _Json:
    stop = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    reason = "end_turn"
    if choice.finish_reason == "length":
        reason = "max_tokens"
    elif stop is not None:
        reason = "stop_sequence"
    elif choice.message.calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(num_prompt: int, num_cached: int, num_output: int) -> MessageUsage:
    return MessageUsage(
        input_tokens=num_prompt - num_cached,
        cache_read_input_tokens=num_cached,
        output_tokens=num_output,
    )

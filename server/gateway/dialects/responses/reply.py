"""Answers of POST /v1/responses, streamed and whole.

Owns the response object and the sequence of events: the response is created, its output items
begin, grow and end, one after the other, and the response is completed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Raw, UnsetType

from models.text.tokenizer import Tokenizer
from server.gateway.dialects.chat.reply import chat_logprobs
from server.gateway.dialects.chunks import COMMENT
from server.gateway.dialects.dialect import ReplyHead
from server.gateway.dialects.responses.request import FunctionChoice, ResponsesBody, TextFormat
from server.gateway.errors import describe
from server.gateway.generation.choice import Choice
from server.gateway.generation.usage import Usage
from server.gateway.parsing.message import AnswerMessage, MessageCall
from server.gateway.parsing.parts import CallArguments, CallBegin, Content, Reasoning

_Json = dict[str, Any]
CancelRun = Callable[[], None]
# Per kind of item: the prefix of its id, and of its events (their `delta` and `done`).
_KINDS = {
    "message": ("msg", "response.output_text"),
    "reasoning": ("rs", "response.reasoning_text"),
    "function_call": ("fc", "response.function_call_arguments"),
}


Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A response; `output` are items of type reasoning, message and function_call."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Status
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[_Json]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, _Json]
    tool_choice: str | FunctionChoice
    tools: Raw
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    background: bool
    usage: ResponseUsage | None
    metadata: dict[str, str]


class ResponseInputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens the prompt of a response has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the removal of a stored response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


@dataclass(kw_only=True, slots=True)
class _Item:
    """An output item as it grows; `parts` are the pieces of its text, or of its arguments."""

    kind: str
    id: str
    parts: list[str]
    logprobs: list[Any]
    call_id: str = ""
    name: str = ""
    namespace: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """Return the members with the name of a called function."""
        own = {"name": self.name}
        return own if self.namespace is None else {**own, "namespace": self.namespace}

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def content(self) -> _Json:
        """Return the one part of the content of an item with text."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return _output_text(self.text, self.logprobs)

    def shown(self, status: str) -> _Json:
        """Return the item; while it is in progress, it has no content yet."""
        begun = {"type": self.kind, "id": self.id, "status": status}
        is_open = status == "in_progress"
        match self.kind:
            case "function_call":
                arguments = "" if is_open else self.text
                return {**begun, "call_id": self.call_id, **self.names, "arguments": arguments}
            case "reasoning":
                return {**begun, "summary": [], "content": [] if is_open else [self.content()]}
        content = [] if is_open else [self.content()]
        return {**begun, "role": "assistant", "content": content}


class ResponsesReplies:
    """The answer to one request, which has one choice.

    `keep` is called once, with the body of the whole answer and its message. `places` are the
    namespaces and names of functions by the names that the model calls.
    """

    keep_alive = COMMENT

    def __init__(
        self,
        head: ReplyHead,
        *,
        tokenizer: Tokenizer,
        request: ResponsesBody,
        places: Mapping[str, tuple[str, str]],
        keep: Callable[[str, bytes, AnswerMessage], None] | None,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._request = request
        self._places = places
        self._keep = keep
        self._encoder = msgspec.json.Encoder()
        self._items: list[_Item] = []
        self._is_open = False
        self._waiting: list[Any] = []
        self._num_events = 0

    def events(self, choice: Choice) -> bytes:
        """Return the response's begin (once) and what its items grew by."""
        events: list[bytes] = []
        if not choice.has_begun:
            begun = self._response("in_progress", output=[], usage=None)
            events.append(self._event("response.created", response=begun))
            events.append(self._event("response.in_progress", response=begun))
        self._grow(choice, events)
        if choice.finish_reason is not None:
            self._close(events, "completed" if choice.finish_reason == "stop" else "incomplete")
        return b"".join(events)

    def _grow(self, choice: Choice, events: list[bytes]) -> None:
        """Add the parts of a choice; log-probabilities go with the next text of a message."""
        self._waiting += self._logprobs(choice)
        for part in choice.parts:
            match part:
                case CallBegin(_, id, name):
                    self._open("function_call", events, call_id=id, name=name)
                case Reasoning(text):
                    self._extend("reasoning", text, events)
                case Content(text):
                    self._extend("message", text, events, self._waiting)
                    self._waiting = []
                case CallArguments(_, text):
                    self._extend("function_call", text, events)

    def _extend(
        self, kind: str, text: str, events: list[bytes], logprobs: Sequence[Any] = ()
    ) -> None:
        if not self._is_open or self._items[-1].kind != kind:
            self._open(kind, events)
        item = self._items[-1]
        item.parts.append(text)
        item.logprobs.extend(logprobs)
        extra = {"logprobs": list(logprobs)} if kind == "message" else {}
        _, prefix = _KINDS[kind]
        events.append(self._event(f"{prefix}.delta", **self._place(), delta=text, **extra))

    def _open(self, kind: str, events: list[bytes], **names: str) -> None:
        self._close(events, "completed")
        self._add(kind, [], **names)
        self._is_open = True
        index, item = len(self._items) - 1, self._items[-1]
        shown = item.shown("in_progress")
        events.append(self._event("response.output_item.added", output_index=index, item=shown))
        if kind != "function_call":
            place = self._place()
            events.append(self._event("response.content_part.added", **place, part=item.content()))

    def _close(self, events: list[bytes], status: str) -> None:
        if not self._is_open:
            return
        item, place = self._items[-1], self._place()
        if item.kind == "message":
            item.logprobs += self._waiting
            self._waiting = []
        _, prefix = _KINDS[item.kind]
        if item.kind == "function_call":
            done = {"arguments": item.text, **item.names}
            events.append(self._event(f"{prefix}.done", **place, **done))
        else:
            extra = {"logprobs": item.logprobs} if item.kind == "message" else {}
            events.append(self._event(f"{prefix}.done", **place, text=item.text, **extra))
            events.append(self._event("response.content_part.done", **place, part=item.content()))
        index, shown = place["output_index"], item.shown(status)
        events.append(self._event("response.output_item.done", output_index=index, item=shown))
        self._is_open = False

    def _place(self) -> _Json:
        item = self._items[-1]
        place: _Json = {"item_id": item.id, "output_index": len(self._items) - 1}
        return place if item.kind == "function_call" else {**place, "content_index": 0}

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the event with the whole response."""
        [choice] = choices
        response = self._ended(choice, usage)
        return self._event(f"response.{response.status}", response=response)

    def failed(self, error: Exception) -> bytes:
        """Return the event of a response that failed."""
        return self._event("response.failed", response=self._failed(error))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the whole answer."""
        [choice] = choices
        for item in choice.message.items:
            if isinstance(item, MessageCall):
                self._add("function_call", item.pieces, call_id=item.id, name=item.name)
            else:
                self._add("reasoning" if item.kind == "reasoning" else "message", item.pieces)
        messages = [item for item in self._items if item.kind == "message"]
        if messages:
            messages[0].logprobs.extend(self._logprobs(choice))
        return self._encoder.encode(self._ended(choice, usage))

    def _add(self, kind: str, parts: list[str], *, name: str = "", call_id: str = "") -> None:
        prefix, _ = _KINDS[kind]
        namespace, name = self._places.get(name, (None, name))
        item = _Item(
            kind=kind,
            id=f"{prefix}_{secrets.token_hex(16)}",
            parts=[*parts],
            logprobs=[],
            call_id=call_id,
            name=name,
            namespace=namespace,
        )
        self._items.append(item)

    def _logprobs(self, choice: Choice) -> list[Any]:
        params = self._head.params
        found = chat_logprobs(params, self._tokenizer, choice.token_ids, choice.logprobs)
        return [] if found is None else found.content

    def _ended(self, choice: Choice, usage: Usage) -> ResponseAnswer:
        """Return the whole response, and keep it if it is to be kept."""
        is_cut = choice.finish_reason == "length"
        status: Status = "incomplete" if is_cut else "completed"
        output = [item.shown("completed") for item in self._items]
        if is_cut and output:
            output[-1] = self._items[-1].shown("incomplete")
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        response = self._response(status, output=output, usage=_usage(usage), **details)
        if self._keep is not None:
            self._keep(self._head.id, self._encoder.encode(response), choice.message)
        return response

    def _response(
        self, status: Status, *, output: list[_Json], usage: ResponseUsage | None, **members: Any
    ) -> ResponseAnswer:
        head, request, sampling = self._head, self._request, self._head.params.sampling
        reasoning, text = request.reasoning, request.text
        text_format = text.format if text is not None else None
        return ResponseAnswer(
            id=head.id,
            created_at=head.created_at_s,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            model=head.params.model,
            output=output,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=request.previous_response_id,
            reasoning={"effort": reasoning.effort if reasoning else None, "summary": None},
            store=self._keep is not None,
            temperature=sampling.temperature,
            text={"format": _shown_format(text_format)},
            tool_choice=request.tool_choice or "auto",
            tools=Raw(b"[]") if bytes(request.tools) == b"null" else request.tools,
            top_logprobs=request.top_logprobs or 0,
            top_p=sampling.top_p,
            truncation=request.truncation or "disabled",
            background=bool(request.background),
            usage=usage,
            metadata=request.metadata or {},
            **members,
        )

    def _failed(self, error: Exception) -> ResponseAnswer:
        failure = describe(error)
        shown = {"code": failure.code or "server_error", "message": failure.message}
        output = [item.shown("incomplete") for item in self._items]
        return self._response("failed", output=output, usage=None, error=shown)

    def _event(self, kind: str, **members: object) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        data = self._encoder.encode({"type": kind, "sequence_number": number, **members})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


class BackgroundResponse(ResponsesReplies):
    """The answer to a request that nobody waits for: what there is of it is kept.

    `hold` is called with the body of an answer that is not whole, and what ends it (None: nothing
    is to be ended any more).
    """

    def __init__(
        self, head: ReplyHead, *, hold: Callable[[str, bytes, CancelRun | None], None], **own: Any
    ) -> None:
        super().__init__(head, **own)
        self._hold = hold

    def begun(self, close: CancelRun) -> bytes:
        """Return the answer to the client; `close` ends the request."""
        self._hold_as("in_progress", partial(self._cancel, close))
        return self._encoder.encode(self._response("queued", output=[], usage=None))

    def _cancel(self, close: CancelRun) -> None:
        close()
        self._hold_as("cancelled", None)

    def _hold_as(self, status: Status, cancel: CancelRun | None) -> None:
        body = self._encoder.encode(self._response(status, output=[], usage=None))
        self._hold(self._head.id, body, cancel)

    def failed(self, error: Exception) -> bytes:
        """Keep the failure, and return it."""
        body = self._encoder.encode(self._failed(error))
        self._hold(self._head.id, body, None)
        return body


def _output_text(text: str, logprobs: list[Any]) -> _Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _shown_format(given: TextFormat | None) -> _Json:
    if given is None or given.type != "json_schema":
        return {"type": "text" if given is None else given.type}
    named = {"name": given.name or "output", "schema": given.schema, "strict": given.strict}
    return {"type": "json_schema", **named}


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    num_reasoning = 0 if isinstance(details, UnsetType) else details.reasoning_tokens
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details={"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        output_tokens=usage.completion_tokens,
        output_tokens_details={"reasoning_tokens": num_reasoning},
        total_tokens=usage.total_tokens,
    )

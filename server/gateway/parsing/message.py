"""One choice's text as a message that grows: reasoning, content, tool calls.

Owns the order of the parsers and the message so far. Pure: knows no API and no tokens, apart from
the count of those spent on reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from server.gateway.parsing.call_formats import OPENAI, CallFormat, openai_id
from server.gateway.parsing.channels import MARKS, Channels
from server.gateway.parsing.parts import (
    CallArguments,
    CallBegin,
    CallParser,
    Content,
    Part,
    Reasoning,
)
from server.gateway.parsing.reasoning import BEGIN, END, ReasoningSplit


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageOptions:
    """How the text of a request's answers becomes messages.

    `calls` None: text is never read as a call; `tools` are the JSON schemas of the arguments of the
    request's tools, by their names.
    `is_named`: the client named the function to be called. `reasons`: the model marks its
    reasoning; `is_inside_reasoning`: the prompt ends within it. `has_channels`: it writes messages
    in channels, and the prompt has `begun` the first. `hides_reasoning_tokens`: the reasoning's
    tokens are not shown either. `has_only_calls`: a grammar allows no content, so that text which
    is no call is a part of one that was cut.
    """

    calls: CallFormat | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    only_one_call: bool = False
    is_named: bool = False
    reasons: bool = False
    is_inside_reasoning: bool = False
    has_channels: bool = False
    begun: str = ""
    shows_reasoning: bool = True
    hides_reasoning_tokens: bool = False
    has_only_calls: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """Return the texts that the parsers must see even where they are special tokens."""
        if self.has_channels:
            return frozenset(MARKS)
        markers = self.calls.markers if self.calls else ()
        return frozenset((*markers, BEGIN, END) if self.reasons else markers)


@dataclass(slots=True)
class MessageText:
    """Reasoning or content without a call in between, in pieces."""

    kind: Literal["reasoning", "content"]
    pieces: list[str]

    def __str__(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class MessageCall:
    """A tool call: `pieces` are those of its arguments' JSON text."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """The arguments' JSON text."""
        return "".join(self.pieces)


class MessageParser(CallParser, Protocol):
    """Reads one message whole: reasoning, content and calls."""

    @property
    def place(self) -> Literal["undecided", "reasoning", "answer"]:
        """Where its text so far ends."""

    @property
    def is_inside(self) -> bool:
        """Whether its next text is reasoning, as far as can be told."""


class ThoughtFirst:
    """Text that may begin with one block of reasoning, and calls in what follows."""

    def __init__(self, options: MessageOptions) -> None:
        ended_by = options.calls.begin if options.calls and options.calls.ends_reasoning else ""
        self._reasoning = (
            ReasoningSplit(is_inside=options.is_inside_reasoning, ended_by=ended_by)
            if options.reasons
            else None
        )
        self._calls: CallParser | None = (
            options.calls.new_parser(options.tools) if options.calls else None
        )

    @property
    def place(self) -> Literal["undecided", "reasoning", "answer"]:
        """Where its text so far ends."""
        return "answer" if self._reasoning is None else self._reasoning.place

    @property
    def is_inside(self) -> bool:
        """Whether its next text is reasoning, as far as can be told."""
        return self._reasoning is not None and self._reasoning.is_inside

    def push(self, text: str) -> list[Part]:
        """Return the parts that `text` completes."""
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text)
        return self._parts(thought, text)

    def flush(self) -> list[Part]:
        """Return the parts that were held back, as no text follows."""
        parts = self._parts(*self._reasoning.flush()) if self._reasoning is not None else []
        return [*parts, *(self._calls.flush() if self._calls is not None else ())]

    def _parts(self, thought: str, text: str) -> list[Part]:
        parts: list[Part] = [Reasoning(thought)] if thought else []
        if text:
            parts += [Content(text)] if self._calls is None else self._calls.push(text)
        return parts


class AnswerMessage:
    """One choice's message; `items` are its parts in order."""

    def __init__(self, options: MessageOptions) -> None:
        self.options = options
        self._parser: MessageParser = (
            Channels(
                openai_id,
                options.tools if options.calls is OPENAI else None,
                reasons=options.reasons,
                begun=options.begun,
            )
            if options.has_channels
            else ThoughtFirst(options)
        )
        self.items: list[MessageText | MessageCall] = []
        self.calls: list[MessageCall] = []
        self.num_reasoning_tokens = 0

    @property
    def place(self) -> Literal["undecided", "reasoning", "answer"]:
        """Where its text so far ends."""
        return self._parser.place

    @property
    def is_inside_reasoning(self) -> bool:
        """Whether its next text is reasoning, as far as can be told."""
        return self._parser.is_inside

    def push(self, text: str, *, num_tokens: int = 0, is_last: bool = False) -> list[Part]:
        """Return the parts that `text`, of so many tokens, completes.

        Tokens count as reasoning if their step began within it.
        """
        was_inside = self._parser.is_inside
        parts = self._parser.push(text)
        if is_last:
            parts += self._parser.flush()
        if was_inside or self._parser.is_inside:
            self.num_reasoning_tokens += num_tokens
        if not self.options.shows_reasoning:
            parts = [each for each in parts if not isinstance(each, Reasoning)]
        if self.options.has_only_calls:
            parts = [each for each in parts if not isinstance(each, Content)]
        if self.options.only_one_call:
            parts = [each for each in parts if not _is_of_later_call(each)]
        self._keep(parts)
        return parts

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return self._all("reasoning")

    @property
    def content(self) -> str:
        """The content so far, without calls."""
        return self._all("content")

    def _all(self, kind: Literal["reasoning", "content"]) -> str:
        texts = [each for each in self.items if isinstance(each, MessageText)]
        return "".join(str(each) for each in texts if each.kind == kind)

    def _keep(self, parts: list[Part]) -> None:
        for part in parts:
            match part:
                case Reasoning(text):
                    self._extend("reasoning", text)
                case Content(text):
                    self._extend("content", text)
                case CallBegin(_, id, name):
                    self.calls.append(MessageCall(id, name))
                    self.items.append(self.calls[-1])
                case CallArguments(index, text):
                    self.calls[index].pieces.append(text)

    def _extend(self, kind: Literal["reasoning", "content"], text: str) -> None:
        last = self.items[-1] if self.items else None
        if isinstance(last, MessageText) and last.kind == kind:
            last.pieces.append(text)
        else:
            self.items.append(MessageText(kind, [text]))


def _is_of_later_call(part: Part) -> bool:
    return isinstance(part, CallBegin | CallArguments) and part.call > 0

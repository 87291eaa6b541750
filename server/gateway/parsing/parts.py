"""The parts of a message, as they grow.

Owns the types, and what is one part. Made by the parsers of this folder, turned into the events of
an API by server.gateway.dialects.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Reasoning(NamedTuple):
    """More of the model's reasoning."""

    text: str


class Content(NamedTuple):
    """More of the answer's text."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins; `call` counts those of a message from 0."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of the JSON text of a call's arguments."""

    call: int
    text: str


Part = Reasoning | Content | CallBegin | CallArguments


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with content that follows on content as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + part.text)
        else:
            found.append(part)
    return found


class CallParser(Protocol):
    """Finds the tool calls in one message's text."""

    def push(self, text: str) -> list[Part]:
        """Return the parts that `text` completes: content, and calls."""

    def flush(self) -> list[Part]:
        """Return the parts that were held back, as no text follows."""

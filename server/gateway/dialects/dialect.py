"""The two halves of an HTTP API as the gateway uses it: bodies to requests, and choices to answers.

Owns the types between server.gateway.handler and the dialects. Both halves are pure: they know no
engine and no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from server.gateway.generation.choice import Choice
from server.gateway.generation.params import RequestParams
from server.gateway.generation.prompts import Prompt
from server.gateway.generation.usage import Usage
from server.gateway.parsing.message import MessageOptions

# Gets a lower bound of a prompt's tokens; raises InvalidRequest if so many do not fit.
CheckFewest = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyHead:
    """The members that all parts of an answer share, and what the client asked for."""

    id: str
    created_at_s: int
    params: RequestParams


class Replies(Protocol):
    """The encoder of one answer, to JSON or to events; `keep_alive` says that more will come."""

    keep_alive: bytes

    def events(self, choice: Choice) -> bytes:
        """Return the events for what a choice has grown by."""

    def end(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the events behind those of all choices."""

    def failed(self, error: Exception) -> bytes:
        """Return the events for a failure after the stream has begun."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""


@runtime_checkable
class BackgroundReplies(Replies, Protocol):
    """The encoder of an answer that nobody waits for."""

    def begun(self, close: Callable[[], None]) -> bytes:
        """Return the body that says so; `close` ends the request."""


class PreparedRequest(NamedTuple):
    """A checked request: its parameters, its prompts, and the field that held them.

    `ignored` names the fields that were given and have no effect. `make_replies` gives the
    encoder of the answer. `tools_as_text`: the model's template shows no tools, so that they are in
    a generic prompt. `message`: how the answers' text is read; None: it is shown as it is.
    """

    params: RequestParams
    prompts: list[Prompt]
    prompt_field: str
    ignored: Sequence[str]
    make_replies: Callable[[ReplyHead], Replies]
    message: MessageOptions | None = None
    tools_as_text: bool = False


class Dialect(Protocol):
    """One HTTP API that generates; server.gateway.dialects has a room for each."""

    def prepare(self, data: bytes, *, max_tokens: int, tenant: str) -> PreparedRequest:
        """Return the request in a body; raises InvalidRequest naming the field, or NotFound.

        `max_tokens` are as many as a prompt and its output may have together. May be called in a
        thread.
        """

    def answer_id(self, request_id: str) -> str:
        """Return the id of the answer to a request."""

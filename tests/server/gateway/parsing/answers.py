"""Messages with calls as tests read them: whole, piece by piece, and cut at each place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from server.gateway.parsing.message import AnswerMessage, MessageOptions

Calls = list[tuple[str, str]]


class Read(Protocol):
    """Returns the content, and each call's name and arguments, of a format's message."""

    def __call__(self, name: str, *pieces: str) -> tuple[str, Calls]: ...


def reading(options_of: Callable[[str], MessageOptions]) -> Read:
    """Return what reads a message of the format of a name."""

    def read(name: str, *pieces: str) -> tuple[str, Calls]:
        message = AnswerMessage(options_of(name))
        for piece in pieces:
            assert all(part[-1] for part in message.push(piece)), "no part is empty"
        assert all(part[-1] for part in message.push("", is_last=True))
        assert len({call.id for call in message.calls}) == len(message.calls)
        return message.content, [(call.name, call.arguments) for call in message.calls]

    return read


def checking(read: Read) -> Callable[[str, str, str, Calls], None]:
    """Return what asserts that a text is read so, as a whole and cut at each place."""

    def check(name: str, text: str, content: str, calls: Calls) -> None:
        assert read(name, text) == (content, calls)
        assert read(name, *text) == (content, calls)
        for cut in range(len(text)):
            assert read(name, text[:cut], text[cut:]) == (content, calls)

    return check

"""Search for the markers that begin calls in a model's text.

Owns what parsers share: the turns of one that reads pieces, the text between marked calls, and the
parts of calls in order.
Pure; the forms of a call are server.gateway.parsing.call_formats', named_calls' and
tagged_calls'.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from server.gateway.parsing.markers import num_held
from server.gateway.parsing.parts import CallArguments, CallBegin, Content, Part


class Calls:
    """The parts of a message's calls, one after the other."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._ids: set[str] = set()
        self.num_begun = 0

    def begin(self, name: str, own_id: str | None = None) -> CallBegin:
        """Return the part that begins a call.

        `own_id` is the model's, which counts unless an earlier call has it.
        """
        self.num_begun += 1
        call_id = self._new_id() if own_id is None or own_id in self._ids else own_id
        self._ids.add(call_id)
        return CallBegin(self.num_begun - 1, call_id, name)

    def arguments(self, text: str) -> list[Part]:
        """Return more of the last call's arguments, as no part if `text` is empty."""
        return [CallArguments(self.num_begun - 1, text)] if text else []


class PieceParser(ABC):
    """Text that comes in pieces; `_held` is what cannot be told yet."""

    _held = ""

    def push(self, text: str) -> list[Part]:
        """Return the parts that `text` completes: content, and calls."""
        parts: list[Part] = []
        self._held += text
        while self._held and self._advance(parts):
            pass
        return parts

    @abstractmethod
    def _advance(self, parts: list[Part]) -> bool:
        """Read what is held up to the next change of state; return whether there was one."""


class MarkedCalls(PieceParser):
    """Text with calls behind markers; what is of `_behind` (None: blanks) follows a call."""

    _behind: str | None = None

    def __init__(self, new_id: Callable[[], str], *begins: str) -> None:
        self._calls = Calls(new_id)
        self._begins = begins
        self._any_begin = re.compile("|".join(map(re.escape, begins)))
        # Before the marker of the present call; content, if that is none.
        self._blanks = ""
        self._is_behind_call = False

    @abstractmethod
    def _begin_call(self, marker: str) -> None:
        """Take note of a marker; what is held stood behind it."""

    def _read_text(self, parts: list[Part]) -> bool:
        if self._is_behind_call:
            self._held = self._held.lstrip(self._behind)
            self._is_behind_call = not self._held
        found = self._any_begin.search(self._held)
        end = found.start() if found else len(self._held) - num_held(self._held, *self._begins)
        # Blanks before a call do not belong to the content.
        shown = self._held[:end].rstrip()
        if shown:
            parts.append(Content(shown))
        if found is None:
            self._held = self._held[len(shown) :]
            return False
        self._blanks = self._held[len(shown) : end]
        self._held = self._held[found.end() :]
        self._begin_call(found[0])
        return True

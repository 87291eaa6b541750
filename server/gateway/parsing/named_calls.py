"""Tool calls that name a function before a JSON object, as DeepSeek, Kimi and Mistral write them.

Owns the marks of each format and their one parser. The object is passed on to the letter, as it
comes. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from server.gateway.parsing.json_scan import ValueScan
from server.gateway.parsing.marked_calls import MarkedCalls
from server.gateway.parsing.parts import Content, Part

# Longer text before a call's object is not a call.
_MAX_HEAD_CHARS: Final = 512
_BLANKS: Final = r"[ \t\r\n]*"
_NAME_CHAR: Final = "[a-zA-Z0-9_.:-]"
_NAME: Final = rf"(?P<name>{_NAME_CHAR}{{1,128}})"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallMarks:
    """The marks of a format's calls, in the order in which models write them.

    `section`: before and behind all calls (empty: none). Of a call: `before` and `after` its name,
    and `behind` its object; `between` two calls. `holds_several`: a section has all calls.
    `head` is the regular expression of what is read as all that stands before the object, with a
    group `name`, and `id` if the model gives calls ids that it is to see again. `is_numbered`:
    the name has a number behind it; `id_mark`: it may have this mark and an id behind it.
    """

    section: tuple[str, str]
    head: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    between: str = ""
    holds_several: bool = True
    is_numbered: bool = False
    id_mark: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """Return every mark; some may be empty."""
        return (*self.section, *self.before, self.id_mark, *self.after, *self.behind)

    def written(self, name: str, arguments: str) -> str:
        """Return the text of a message with one call."""
        begin, end = self.section
        number = ":0" if self.is_numbered else ""
        parts = (*self.before, name, number, *self.after, arguments, *self.behind)
        return begin + "".join(parts) + end


DEEPSEEK_V31_MARKS: Final = CallMarks(
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    head=rf"<｜tool▁call▁begin｜>{_BLANKS}{_NAME}{_BLANKS}<｜tool▁sep｜>{_BLANKS}",
    before=("<｜tool▁call▁begin｜>",),
    after=("<｜tool▁sep｜>",),
    behind=("<｜tool▁call▁end｜>",),
)
DEEPSEEK_V3_MARKS: Final = replace(
    DEEPSEEK_V31_MARKS,
    head=rf"<｜tool▁call▁begin｜>{_BLANKS}function{_BLANKS}<｜tool▁sep｜>{_BLANKS}{_NAME}"
    rf"{_BLANKS}(?:```(?:json)?)?{_BLANKS}",
    before=("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"),
    after=("\n```json\n",),
    behind=("\n```", "<｜tool▁call▁end｜>"),
    between="\n",
)
KIMI_K2_MARKS: Final = CallMarks(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    head=rf"<\|tool_call_begin\|>{_BLANKS}"
    rf"(?P<id>(?:functions\.)?(?P<name>{_NAME_CHAR}{{1,128}}?)(?::[0-9]+)?)"
    rf"{_BLANKS}<\|tool_call_argument_begin\|>{_BLANKS}",
    before=("<|tool_call_begin|>", "functions."),
    after=("<|tool_call_argument_begin|>",),
    behind=("<|tool_call_end|>",),
    is_numbered=True,
)
# Some of these models leave out `[ARGS]`.
MISTRAL_MARKS: Final = CallMarks(
    section=("[TOOL_CALLS]", ""),
    head=rf"{_NAME}(?:\[CALL_ID\]{_BLANKS}{_NAME_CHAR}*)?(?:\[ARGS\]{_BLANKS})?",
    after=("[ARGS]",),
    holds_several=False,
    id_mark="[CALL_ID]",
)


class NamedCalls(MarkedCalls):
    """The calls in a message of one format."""

    def __init__(self, new_id: Callable[[], str], marks: CallMarks) -> None:
        super().__init__(new_id, marks.section[0])
        self._head = re.compile(rf"{_BLANKS}{marks.head}(?=\{{)")
        # Some models forget marks behind a call, or write a bracket too many.
        ends = [each.strip() for each in (*marks.behind, marks.section[1]) if each]
        skipped = (rf"(?:{re.escape(each)})?{_BLANKS}" for each in ends)
        self._tail = re.compile(rf"[ \t\r\n}}\]]*{''.join(skipped)}")
        self._next_begin = marks.before[0] if marks.holds_several else ""
        self._awaited = (*ends, self._next_begin)
        self._read: Callable[[list[Part]], bool] = self._read_text
        # What has begun the present call; content, if that is none.
        self._opened = ""
        self._arguments = ValueScan()

    def _begin_call(self, marker: str) -> None:
        self._opened, self._read = self._blanks + marker, self._read_head

    def _advance(self, parts: list[Part]) -> bool:
        return self._read(parts)

    def _read_head(self, parts: list[Part]) -> bool:
        """Begin a call where its object begins, or show its mark as content if none does."""
        begin = self._held.find("{", 0, _MAX_HEAD_CHARS)
        if begin < 0 and len(self._held) < _MAX_HEAD_CHARS:
            return False
        found = self._head.match(self._held, 0, begin + 1)
        if found is None:
            parts += [Content(self._opened)] if self._opened else []
            self._read = self._read_text
            return True
        parts.append(self._calls.begin(found["name"], found.groupdict().get("id")))
        self._held = self._held[found.end() :]
        self._arguments, self._read = ValueScan(), self._read_arguments
        return True

    def _read_arguments(self, parts: list[Part]) -> bool:
        end = self._arguments.push(self._held)
        parts += self._calls.arguments(self._held[:end])
        self._held = self._held[end:]
        if self._arguments.is_done:
            self._read = self._read_tail
        return True

    def _read_tail(self, parts: list[Part]) -> bool:
        """Skip the marks behind a call; find the section's next one, or text."""
        found = self._tail.match(self._held)
        assert found is not None, "it matches the empty text"
        rest = self._held[found.end() :]
        if any(each.startswith(rest) for each in self._awaited):
            return False
        is_next = bool(self._next_begin) and rest.startswith(self._next_begin)
        self._held, self._opened = rest, ""
        self._read = self._read_head if is_next else self._read_text
        return True

    def flush(self) -> list[Part]:
        """Return what was held; a call that ends before its name is known is content.

        Marks behind a call are none.
        """
        held, self._held = self._held, ""
        if self._read == self._read_text:
            return [Content(held)] if held else []
        is_shown = self._read == self._read_head and held.strip()
        return [Content(self._opened + held)] if is_shown else []

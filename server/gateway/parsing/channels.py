"""Messages in channels, as gpt-oss writes them (OpenAI's harmony form).

Owns the marks and the one parser. An answer is a row of messages, each a header and a body: of the
channel `analysis` it is reasoning, of `commentary` with a recipient a call, any other is content.
What has no such form is shown as content to the letter. Pure: knows no tokens and no grammar; a
mark that is quoted within the arguments of a call, or without a header behind it, is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Final, Literal

from server.gateway.parsing.json_scan import ValueScan
from server.gateway.parsing.marked_calls import Calls, PieceParser
from server.gateway.parsing.markers import num_held
from server.gateway.parsing.parts import Content, Part, Reasoning

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
CONSTRAIN: Final = "<|constrain|>"
MESSAGE: Final = "<|message|>"
END: Final = "<|end|>"
_ENDS: Final = (END, "<|call|>", "<|return|>")
MARKS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, *_ENDS)
ASSISTANT: Final = "assistant"
FUNCTIONS: Final = "functions."
"""Stands before the name of a function that is called."""

_BLANKS: Final = " \t\r\n"
_HEADER: Final = re.compile(
    r"""\s*(?:<\|start\|>\s*assistant)?\s*(?:to=(?P<before>[\w.:-]+)\s*)?
    <\|channel\|>\s*(?P<channel>analysis|commentary|final)(?:\s+to=(?P<behind>[\w.:-]+))?
    (?:\s*<\|constrain\|>\s*[\w.-]+|\s+[\w.-]+)?\s*""",
    re.VERBOSE,
)
_HEADER_BEGINS: Final = (START, CHANNEL, "to=")
_MAX_HEADER_CHARS: Final = 300
# What the end of the text may cut off without a loss: nothing is said yet.
_WORDS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, ASSISTANT, "analysis", "commentary", "final")
_CUT_HEADER: Final = re.compile(rf"(?:\s|{'|'.join(map(re.escape, _WORDS))})*")
# Where a header follows, or should.
_BODY_ENDS: Final = (*_ENDS, START, CHANNEL)
_BODY_END: Final = re.compile("|".join(map(re.escape, _BODY_ENDS)))


def begun_answer(prompt: str) -> str:
    """Return the header with which the prompt begins the answer's present message, if it does."""
    _, found, begun = prompt.rpartition(START + ASSISTANT)
    is_over = not found or begun.rstrip().endswith(_ENDS)
    header, mark, _ = begun[: _MAX_HEADER_CHARS + len(MESSAGE)].partition(MESSAGE)
    return "" if is_over else header + mark


class Channels(PieceParser):
    """Reads one answer, which the prompt has `begun`.

    `names` are those of the functions that may be called, None: none may; models write them behind
    `functions.`, which some forget. Not `reasons`: `analysis` is content too.
    """

    def __init__(
        self,
        new_id: Callable[[], str],
        names: Container[str] | None,
        *,
        reasons: bool = True,
        begun: str = "",
    ) -> None:
        self._calls = Calls(new_id)
        self._names = names
        self._reasons = reasons
        self._state: Literal["header", "body", "call", "arguments", "behind call"] = "header"
        self._kind: type[Content | Reasoning] = Content
        # The mark that ended the last body; text, if no header follows.
        self._ended_by = ""
        # The header of a call, until its arguments begin, and its function.
        self._header, self._function = "", ""
        self._arguments = ValueScan()
        # Whether there is a text of this kind already, from which a message's is set apart.
        self._shown: set[type[Part]] = set()
        self._has_body = False
        self.push(begun)

    @property
    def is_inside(self) -> bool:
        """Whether the next text is reasoning, as far as can be told."""
        return self._state == "body" and self._kind is Reasoning

    @property
    def place(self) -> Literal["undecided", "reasoning", "answer"]:
        """Where the text so far ends; an answer's header still belongs to the reasoning."""
        if self._state == "header":
            return "undecided"
        return "reasoning" if self.is_inside or not self._has_body else "answer"

    def flush(self) -> list[Part]:
        """Return the parts that were held back; a call that has no arguments yet has none."""
        held, self._held = self._held, ""
        parts: list[Part] = []
        match self._state:
            case "header":
                if held.lstrip().startswith(_HEADER_BEGINS):
                    whole = held[: len(held) - num_held(held, *_WORDS)]
                    is_text = _CUT_HEADER.fullmatch(whole) is None
                else:
                    is_text = bool(held.strip()) or not self._ended_by
                self._show(self._text_of(held) + held if is_text else "", parts)
            case "body":
                self._show(held, parts)
            case "call":
                self._begin_call("{}", parts)
            case "arguments":
                parts += self._calls.arguments(held)
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        match self._state:
            case "header":
                return self._read_header(parts)
            case "body":
                return self._read_body(parts)
            case "call":
                return self._read_call(parts)
            case "arguments":
                return self._read_arguments(parts)
            case "behind call":
                self._held = self._held.lstrip(_BLANKS + "}")
                self._state = "body" if self._held else "behind call"
                return bool(self._held)

    def _read_header(self, parts: list[Part]) -> bool:
        end = self._held.find(MESSAGE)
        begins = self._held.lstrip()
        if end < 0 and len(self._held) < _MAX_HEADER_CHARS + len(MESSAGE):
            if any(each.startswith(begins[: len(each)]) for each in _HEADER_BEGINS):
                return False
        elif 0 <= end <= _MAX_HEADER_CHARS and self._open(self._held[:end]):
            self._held, self._ended_by = self._held[end + len(MESSAGE) :], ""
            return True
        # It is none: the mark that it begins with, if any, is text too.
        mark = next((each for each in (START, CHANNEL) if begins.startswith(each)), "")
        size = len(self._held) - len(begins) + len(mark)
        self._show(self._text_of(self._held) + self._held[:size], parts)
        self._held, self._ended_by, self._state = self._held[size:], "", "body"
        return True

    def _text_of(self, header: str) -> str:
        """Return what of the mark before a header that is none is text.

        One that begins as a header does is content, whatever was before it.
        """
        if self._ended_by and header.lstrip().startswith(_HEADER_BEGINS):
            self._kind = Content
            return ""
        return self._ended_by

    def _open(self, header: str) -> bool:
        """Begin a body, unless `header` is none."""
        found = _HEADER.fullmatch(header)
        if found is None:
            return False
        recipient = found["behind"] or found["before"]
        if recipient is not None:
            name = recipient.removeprefix(FUNCTIONS)
            if self._names is None or (name == recipient and name not in self._names):
                return False
            self._header, self._function = header + MESSAGE, name
        is_thought = found["channel"] == "analysis" and self._reasons and recipient is None
        self._kind = Reasoning if is_thought else Content
        self._state = "body" if recipient is None else "call"
        self._has_body = False
        return True

    def _read_body(self, parts: list[Part]) -> bool:
        end, mark = self._next_end()
        self._show(self._held[:end], parts)
        self._held = self._held[end:]
        return self._end_body(mark)

    def _next_end(self) -> tuple[int, str]:
        """Return where the text ends that is certain, and the mark there, which may end a body."""
        found = _BODY_END.search(self._held)
        if found is None:
            return len(self._held) - num_held(self._held, *_BODY_ENDS), ""
        return found.start(), found[0]

    def _end_body(self, mark: str) -> bool:
        """Go on to the next header if a mark is held, which ends the body or begins that."""
        if mark:
            self._state, self._ended_by = "header", mark if mark in _ENDS else ""
            self._held = self._held.removeprefix(self._ended_by)
        return bool(mark)

    def _read_call(self, parts: list[Part]) -> bool:
        """Begin a call, unless no object follows its header: then that is text."""
        body = self._held.lstrip(_BLANKS)
        if num_held(body, *_BODY_ENDS) == len(body):
            return False
        if body[0] == "{":
            self._begin_call("", parts)
            self._arguments, self._state = ValueScan(), "arguments"
        elif body.startswith(_BODY_ENDS):
            self._begin_call("{}", parts)
            self._state = "behind call"
        else:
            self._show(self._header, parts)
            self._state = "body"
            return True
        self._held = body
        return True

    def _read_arguments(self, parts: list[Part]) -> bool:
        end, mark = self._next_end()
        num_read = self._arguments.push(self._held[:end])
        is_quoted = bool(mark) and self._arguments.is_in_string
        if is_quoted:
            num_read += self._arguments.push(mark)
        parts += self._calls.arguments(self._held[:num_read])
        self._held = self._held[num_read:]
        if self._arguments.is_done:
            self._state = "behind call"
            return True
        return is_quoted or self._end_body(mark)

    def _begin_call(self, arguments: str, parts: list[Part]) -> None:
        self._has_body = True
        parts.append(self._calls.begin(self._function))
        parts += self._calls.arguments(arguments)

    def _show(self, text: str, parts: list[Part]) -> None:
        """Add text of the present kind; an empty line sets it apart from that before."""
        if not text:
            return
        if not self._has_body and self._kind in self._shown:
            text = "\n\n" + text
        self._has_body = True
        self._shown.add(self._kind)
        parts.append(self._kind(text))

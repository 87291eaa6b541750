"""Tool calls that mark each argument by tags, as GLM, MiniMax and Qwen3-Coder write them.

Owns the tags of each format, their one parser, and the rule by which text becomes a value: models
write strings as they are and all else as JSON, so that only a tool's schema tells `5` from `"5"`.
The arguments are passed on as the text of one JSON object; a string's as it comes, others once they
are whole. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import msgspec

from server.gateway.grammars.json_schemas import ANY_TYPE, TEXT, type_of, value_types
from server.gateway.parsing.marked_calls import MarkedCalls
from server.gateway.parsing.markers import num_held
from server.gateway.parsing.parts import Content, Part

_BLANKS: Final = " \t\r\n"
_NAME: Final = r"[ \t\r\n]*([a-zA-Z0-9_.:-]{1,128})[ \t\r\n]*"
# The beginning of a call, as long as no tag behind its marker is whole.
_OPEN_HEAD: Final = re.compile(r"[ \t\r\n]*[^ \t\r\n<>]{0,160}[ \t\r\n]*(<[^<>\r\n]{0,160})?")
_WHOLE_STRING: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
# Qwen3-Coder's template shows models these words of Python.
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}

Tags = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTags:
    """The tags of a call; of two, one stands before what it marks, and one behind it.

    `begins` may each begin a call in text, the first of them a block that ends with `end`. Behind
    its name a call has keys and values, and ends with `call_end` (empty: with the block).
    `holds_several`: a block has all calls. Models write `between` from one tag to the next;
    `breaks_values`: also around a value, to which it does not belong.
    """

    begins: tuple[str, ...]
    end: str
    name: Tags
    call_end: str
    key: Tags
    value: Tags
    between: str = "\n"
    holds_several: bool = False
    breaks_values: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """Return every tag; some may be empty."""
        return (*self.begins, self.end, *self.name, self.call_end, *self.key, *self.value)

    @property
    def value_break(self) -> str:
        """Return what stands around a value without being a part of it."""
        return self.between if self.breaks_values else ""


GLM45_TAGS: Final = CallTags(
    begins=("<tool_call>",),
    end="</tool_call>",
    name=("", ""),
    call_end="",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
)
GLM47_TAGS: Final = replace(GLM45_TAGS, between="")
MINIMAX_M2_TAGS: Final = CallTags(
    begins=("<minimax:tool_call>",),
    end="</minimax:tool_call>",
    name=('<invoke name="', '">'),
    call_end="</invoke>",
    key=('<parameter name="', '">'),
    value=("", "</parameter>"),
    holds_several=True,
)
# These models sometimes forget the tag of the block.
QWEN3_CODER_TAGS: Final = CallTags(
    begins=("<tool_call>", "<function="),
    end="</tool_call>",
    name=("<function=", ">"),
    call_end="</function>",
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    breaks_values=True,
)


def is_key(name: str) -> bool:
    """Return whether tags can mark an argument of this name."""
    return bool(name) and name == name.strip() and not set(name) & set("<>\r\n")


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the types of an argument by the schema of all; models write TEXT as it is."""
    named = schema.get("properties")
    others = schema.get("additionalProperties")
    return value_types(named.get(name, others) if isinstance(named, dict) else others, schema)


def json_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON text of a value that need not be a string, as the model wrote it.

    Text that is no JSON becomes a string, and so does JSON of another type than `types` if they
    have strings.
    """
    written = text.strip(_BLANKS)
    if types != ANY_TYPE:
        written = _PYTHON_WORDS.get(written, written)
    value = _decoded(written)
    if value is _NO_JSON or ("string" in types and type_of(value) not in types):
        return json.dumps(text, ensure_ascii=False)
    return written


_NO_JSON: Final = object()


def _decoded(text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _NO_JSON


def _ends_in_string(text: str) -> bool:
    """Return whether `text` may be JSON that is cut off within a string."""
    begins = text.lstrip(_BLANKS)[:1]
    return begins in ("{", "[", '"') and '"' in _WHOLE_STRING.sub("", text)


class TaggedCalls(MarkedCalls):
    """The calls in a message of one format; `schemas` are those of the tools' arguments, by name.

    Text between the tags of a call is passed over, as is an argument whose name cannot be read.
    """

    def __init__(
        self,
        new_id: Callable[[], str],
        tags: CallTags,
        schemas: Mapping[str, Mapping[str, Any]],
    ) -> None:
        super().__init__(new_id, *tags.begins)
        self._tags = tags
        self._schemas = schemas
        name_begin, name_end = map(re.escape, tags.name)
        behind = name_end or f"(?={re.escape(tags.key[0])}|{re.escape(tags.end)})"
        first = f"(?:{re.escape(tags.begins[0])}[ \t\r\n]*)?" if name_begin else tags.begins[0]
        self._head = re.compile(f"{first}{name_begin}{_NAME}{behind}")
        self._state: Literal["text", "head", "members", "key", "value", "block"] = "text"
        # The tag before the name of the present call; content, if that is none.
        self._opened_by = ""
        self._schema: Mapping[str, Any] = {}
        self._num_members = 0
        # Of the present value.
        self._types = TEXT
        self._is_begun = False
        self._num_searched = 0
        # Whether no more text follows.
        self._is_last = False

    def _begin_call(self, marker: str) -> None:
        self._held = marker + self._held
        self._opened_by, self._state = marker, "head"

    def _advance(self, parts: list[Part]) -> bool:
        match self._state:
            case "text":
                return self._read_text(parts)
            case "head":
                return self._read_head(parts)
            case "members":
                return self._read_members(parts)
            case "key":
                return self._read_key(parts)
            case "value":
                return self._read_value(parts)
            case "block":
                return self._read_block()

    def _read_head(self, parts: list[Part]) -> bool:
        """Begin a call once its name is known, or show its tag as content if no name follows."""
        tag_end = self._held.find(">", len(self._opened_by))
        if tag_end < 0 and _OPEN_HEAD.fullmatch(self._held, len(self._opened_by)):
            return False
        found = self._head.match(self._held)
        if found is None:
            parts.append(Content(self._blanks + self._opened_by))
            self._held = self._held[len(self._opened_by) :]
            self._state = "text"
            return True
        parts.append(self._calls.begin(found[1]))
        self._schema, self._num_members = self._schemas.get(found[1], {}), 0
        self._held, self._state = self._held[found.end() :], "members"
        return True

    def _read_members(self, parts: list[Part]) -> bool:
        tags = self._tags
        self._held = self._held.lstrip(_BLANKS)
        # Some models forget the end of a call.
        ends = [each for each in (tags.call_end, tags.end, tags.name[0], *tags.begins) if each]
        if self._held.startswith(tags.key[0]):
            self._held, self._state = self._held[len(tags.key[0]) :], "key"
        elif self._held.startswith(tuple(ends)):
            if tags.call_end:
                self._held = self._held.removeprefix(tags.call_end)
            self._end_call(parts)
        elif any(each.startswith(self._held) for each in (tags.key[0], *ends)):
            return False
        else:
            begin = self._held.find("<", 1)
            self._held = self._held[begin:] if begin > 0 else ""
        return True

    def _end_call(self, parts: list[Part]) -> None:
        parts += self._calls.arguments("}" if self._num_members else "{}")
        self._state = "block"

    def _read_block(self) -> bool:
        """Skip the end of a block, which some models forget, or find its next call."""
        self._held = self._held.lstrip(_BLANKS)
        end, name_begin = self._tags.end, self._tags.name[0]
        if name_begin and self._held.startswith(name_begin):
            self._opened_by, self._state, self._blanks = name_begin, "head", ""
            return True
        if self._held != end and any(each.startswith(self._held) for each in (end, name_begin)):
            return False
        self._held = self._held.removeprefix(end)
        self._state, self._is_behind_call = "text", True
        return True

    def _read_key(self, parts: list[Part]) -> bool:
        """Begin an argument where its value begins, unless it has no name that can be read."""
        key_end, value_begin = self._tags.key[1], self._tags.value[0]
        found = self._held.find(key_end)
        end = len(self._held) - num_held(self._held, key_end) if found < 0 else found
        name = self._held[:end]
        if found >= 0 and is_key(name.strip()):
            rest = self._held[found + len(key_end) :]
            rest = rest.lstrip(_BLANKS) if value_begin else rest
            if rest.startswith(value_begin):
                self._held = rest[len(value_begin) :]
                self._begin_value(name.strip(), parts)
                return True
            if value_begin.startswith(rest):
                return False
        elif found < 0 and (not name.strip() or is_key(name.strip())):
            return False
        self._state = "members"
        return True

    def _begin_value(self, name: str, parts: list[Part]) -> None:
        self._types = parameter_types(self._schema, name)
        key = json.dumps(name, ensure_ascii=False)
        quote = '"' if self._types == TEXT else ""
        parts += self._calls.arguments(f"{', ' if self._num_members else '{'}{key}: {quote}")
        self._num_members += 1
        self._is_begun, self._num_searched, self._state = False, 0, "value"

    def _read_value(self, parts: list[Part]) -> bool:
        tag, line_break = self._tags.value[1], self._tags.value_break
        if not self._is_begun:
            self._held, self._is_begun = self._held.removeprefix(line_break), True
        is_text = self._types == TEXT
        found = self._held.find(tag) if is_text else self._json_end()
        if found < 0 and not is_text:
            return False
        held = num_held(self._held, tag, line_break + tag)
        end = len(self._held) - held if found < 0 else found
        text, self._held = self._held[:end], self._held[end:]
        if found >= 0:
            text, self._held = text.removesuffix(line_break), self._held[len(tag) :]
            self._state = "members"
        if not is_text:
            parts += self._calls.arguments(json_value(text, self._types))
            return True
        quote = '"' if found >= 0 else ""
        parts += self._calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1] + quote)
        return found >= 0

    def _json_end(self) -> int:
        """Return where a value ends that need not be a string, -1 if that is not known yet.

        A tag within a string of JSON does not end it, unless the whole turns out to be no JSON.
        """
        tag = self._tags.value[1]
        while (end := self._held.find(tag, self._num_searched)) >= 0:
            text = self._held[:end]
            if _decoded(text) is not _NO_JSON:
                return end
            if self._is_last or not _ends_in_string(text):
                break
            self._num_searched = end + 1
        return self._held.find(tag) if end >= 0 or self._is_last else -1

    def flush(self) -> list[Part]:
        """Return what was held; a call that ends before its name is known is content.

        One whose last argument is whole is ended, as some models do not end it.
        """
        self._is_last = True
        parts = self.push("")
        held, self._held = self._held, ""
        if self._state == "head":
            parts.append(Content(self._blanks + held))
        elif self._state == "members" and not held:
            self._end_call(parts)
        elif held and self._state in ("text", "block"):
            parts.append(Content(held))
        return parts

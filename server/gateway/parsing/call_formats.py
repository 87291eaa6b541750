"""The forms in which models write tool calls, and the one that a checkpoint's template uses.

Owns, per format, its markers and the parser of a message; the parser of calls in tags is
server.gateway.parsing.tagged_calls'. JSON arguments are passed on as the model wrote them, as they
come; text that looked like a call and is none becomes content. Pure: knows no HTTP; the grammars
that force a format are server.gateway.dialects.chat.tools'.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from models.text.chat_template import ChatTemplate
from server.gateway.parsing.channels import CHANNEL, MESSAGE, Channels
from server.gateway.parsing.json_scan import CallScan
from server.gateway.parsing.marked_calls import Calls, MarkedCalls
from server.gateway.parsing.markers import num_held
from server.gateway.parsing.named_calls import (
    DEEPSEEK_V3_MARKS,
    DEEPSEEK_V31_MARKS,
    KIMI_K2_MARKS,
    MISTRAL_MARKS,
    CallMarks,
    NamedCalls,
)
from server.gateway.parsing.parts import CallParser, Content, Part
from server.gateway.parsing.tagged_calls import (
    GLM45_TAGS,
    GLM47_TAGS,
    MINIMAX_M2_TAGS,
    QWEN3_CODER_TAGS,
    CallTags,
    TaggedCalls,
)

_ALPHANUMERIC = string.ascii_letters + string.digits
_MISTRAL_ID_CHARS = 9
_BLANKS = " \t\r\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallFormat:
    """How a model writes calls.

    `begin` is the marker before a call, `end` the one after it (empty: none). `new_parser` takes
    the JSON schemas of the arguments of the request's tools, by the tools' names. `marks`: a call
    is its name and its arguments between these, not one object. `tags`: a call has no JSON object,
    but these tags. `id_chars`: the template takes only ids of this length. `ends_reasoning`: a call
    may follow on reasoning without the mark of its end.
    """

    name: str
    begin: str
    end: str
    new_parser: Callable[[Mapping[str, Mapping[str, Any]]], CallParser]
    marks: CallMarks | None = None
    tags: CallTags | None = None
    id_chars: int | None = None
    ends_reasoning: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts that are shown to the parser even where they are special tokens."""
        form = self.marks or self.tags
        return tuple(each for each in (self.begin, self.end, *(form.all if form else ())) if each)


class _Object:
    """One call written as a JSON object; `raw` is its text until its name is known."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.scan = CallScan()
        self.has_begun = False
        self.raw = ""

    def push(self, text: str, parts: list[Part]) -> int:
        """Add the call's parts to `parts`; return how much of `text` belongs to it."""
        num_read = self.scan.push(text)
        if not self.has_begun:
            self.raw += text[:num_read]
        if self.scan.has_begun:
            if not self.has_begun:
                self.has_begun = True
                parts.append(self._calls.begin(self.scan.name or ""))
            parts += self._calls.arguments(self.scan.take())
        return num_read


class HermesCalls(MarkedCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it."""

    begin = "<tool_call>"
    end = "</tool_call>"

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(new_id, self.begin)
        self._object: _Object | None = None

    def _begin_call(self, marker: str) -> None:
        self._object = _Object(self._calls)

    def _advance(self, parts: list[Part]) -> bool:
        if self._object is None:
            return self._read_text(parts)
        if not self._object.scan.is_done and not self._object.scan.is_failed:
            self._held = self._held[self._object.push(self._held, parts) :]
            if self._object.scan.is_failed and not self._object.has_begun:
                # It is no call: the text is shown as it is.
                parts.append(Content(self._blanks + self.begin + self._object.raw))
                self._object = None
                return True
            return bool(self._held)
        if self._object.scan.is_done:
            return self._end_call()
        found = self._held.find(self.end)
        if found < 0:
            kept = num_held(self._held, self.end)
            self._held = self._held[len(self._held) - kept :]
            return False
        self._held = self._held[found + len(self.end) :]
        self._object, self._is_behind_call = None, True
        return True

    def _end_call(self) -> bool:
        """Skip the end mark behind a whole call, which some models forget, and braces too many."""
        self._held = self._held.lstrip(_BLANKS + "}")
        has_mark = self._held.startswith(self.end)
        if not has_mark and self.end.startswith(self._held):
            return False
        self._held = self._held[len(self.end) if has_mark else 0 :]
        self._object, self._is_behind_call = None, True
        return True

    def flush(self) -> list[Part]:
        """Return what was held; a call that ends before its name is known is content."""
        held, self._held = self._held, ""
        if self._object is None:
            return [Content(held)] if held else []
        if self._object.has_begun:
            return [Content(held)] if self._object.scan.is_done and held else []
        return [Content(self._blanks + self.begin + self._object.raw + held)]


class MistralCalls(NamedCalls):
    """`[TOOL_CALLS]` and a list of objects, or `[TOOL_CALLS]name[ARGS]{...}` per call.

    Newer Mistral models write the second form, some without `[ARGS]`, and some with `[CALL_ID]` and
    an id before it; clients get an id of ours.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        super().__init__(new_id, MISTRAL_MARKS)
        self._object = _Object(self._calls)
        self._is_listed = False

    def _read_head(self, parts: list[Part]) -> bool:
        """Tell the form by what follows the marker: a list, an object, or a name."""
        text = self._held.lstrip()
        if not text or text[0] not in "[{":
            return bool(text) and super()._read_head(parts)
        self._is_listed = text[0] == "["
        self._held = text[self._is_listed :]
        self._object = _Object(self._calls)
        self._read = self._read_list if self._is_listed else self._read_object
        return True

    def _read_list(self, parts: list[Part]) -> bool:
        self._held = self._held.lstrip(_BLANKS + ",}")
        if not self._held:
            return False
        is_object = self._held[0] == "{"
        self._object = _Object(self._calls)
        self._read = self._read_object if is_object else self._read_tail
        return True

    def _read_object(self, parts: list[Part]) -> bool:
        self._held = self._held[self._object.push(self._held, parts) :]
        if self._object.scan.is_failed:
            if not self._object.has_begun:
                parts.append(Content(self._opened + self._object.raw))
            self._read = self._read_text
        elif self._object.scan.is_done:
            self._read = self._read_list if self._is_listed else self._read_tail
        return bool(self._held)

    def flush(self) -> list[Part]:
        """Return what was held; a call that ends before its name is known is content."""
        if self._read == self._read_object and not self._object.has_begun:
            return [Content(self._opened + self._object.raw)]
        return super().flush()


class LlamaCalls:
    """`{"name": ..., "parameters": {...}}` as the whole message, as Llama 3 writes it.

    Several are separated by `;`. A message may be any other JSON, so that only an object that names
    one of the request's tools is a call.
    """

    begin = "<|python_tag|>"

    def __init__(self, new_id: Callable[[], str], names: Collection[str]) -> None:
        self._calls = Calls(new_id)
        self._names = names
        self._held = ""
        self._is_text = False
        self._skipped = ""
        self._object: _Object | None = None

    def push(self, text: str) -> list[Part]:
        if self._is_text:
            return [Content(text)] if text else []
        parts: list[Part] = []
        self._held += text
        while self._held and not self._is_text:
            if self._object is None and not self._find_object():
                break
            if self._object is not None:
                self._read(parts)
        if self._is_text and self._held:
            parts.append(Content(self._held))
            self._held = ""
        return parts

    @property
    def _between(self) -> str:
        """What may stand before an object: behind one, a brace too many."""
        return _BLANKS + (";,}" if self._calls.num_begun else ";,")

    def _find_object(self) -> bool:
        """Skip to the next object; return whether more can be told from what is held."""
        text = self._held.lstrip(self._between)
        if self.begin.startswith(text[: len(self.begin)]) and text:
            if len(text) < len(self.begin):
                return False
            text = text[len(self.begin) :].lstrip()
        if not text:
            return False
        if text[0] == "{":
            self._skipped = self._held.removesuffix(text)
            self._held, self._object = text, _Object(self._calls)
        else:
            self._is_text = True
        return True

    def _read(self, parts: list[Part]) -> None:
        assert self._object is not None
        found: list[Part] = []
        num_read = self._object.push(self._held, found)
        is_known = self._object.scan.name is None or self._object.scan.name in self._names
        if is_known and self._object.has_begun:
            parts += found
            self._held = self._held[num_read:]
        elif self._object.scan.is_failed or not is_known:
            self._held = self._skipped + self._object.raw + self._held[num_read:]
        else:
            self._held = self._held[num_read:]
        if self._object.scan.is_failed or not is_known:
            self._is_text = True
            return
        if self._object.scan.is_done:
            self._object = None

    def flush(self) -> list[Part]:
        """Return what was held; a call that ends before its name is known is content."""
        is_open = self._object is not None and not self._is_text and not self._object.has_begun
        raw = self._skipped + self._object.raw if self._object is not None and is_open else ""
        held, self._held = raw + self._held, ""
        shown = held.strip(self._between if self._calls.num_begun else None)
        return [Content(held)] if shown else []


def openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Return an id of the one length that Mistral's templates take."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_MISTRAL_ID_CHARS))


HERMES = CallFormat(
    name="hermes",
    begin=HermesCalls.begin,
    end=HermesCalls.end,
    new_parser=lambda _: HermesCalls(openai_id),
)
MISTRAL = CallFormat(
    name="mistral",
    begin=MISTRAL_MARKS.section[0],
    end="",
    new_parser=lambda _: MistralCalls(_mistral_id),
    marks=MISTRAL_MARKS,
    id_chars=_MISTRAL_ID_CHARS,
)
# Older templates show a list of objects; the parser is the same.
MISTRAL_LIST = replace(MISTRAL, marks=None)
LLAMA3 = CallFormat(
    name="llama3_json",
    begin=LlamaCalls.begin,
    end="",
    new_parser=lambda names: LlamaCalls(openai_id, names),
)


def _tagged(name: str, tags: CallTags) -> CallFormat:
    new_parser = partial(TaggedCalls, openai_id, tags)
    return CallFormat(
        name=name, begin=tags.begins[0], end=tags.end, new_parser=new_parser, tags=tags
    )


def _named(name: str, marks: CallMarks) -> CallFormat:
    begin, end = marks.section
    return CallFormat(
        name=name,
        begin=begin,
        end=end,
        new_parser=lambda _: NamedCalls(openai_id, marks),
        marks=marks,
    )


OPENAI = CallFormat(
    name="openai",
    begin="",
    end="",
    new_parser=lambda names: Channels(openai_id, names),
)
GLM45 = _tagged("glm45", GLM45_TAGS)
GLM47 = _tagged("glm47", GLM47_TAGS)
MINIMAX_M2 = _tagged("minimax_m2", MINIMAX_M2_TAGS)
QWEN3_CODER = _tagged("qwen3_coder", QWEN3_CODER_TAGS)
DEEPSEEK_V3 = _named("deepseek_v3", DEEPSEEK_V3_MARKS)
DEEPSEEK_V31 = _named("deepseek_v31", DEEPSEEK_V31_MARKS)
KIMI_K2 = replace(_named("kimi_k2", KIMI_K2_MARKS), ends_reasoning=True)
_ALL = (
    *(HERMES, MISTRAL, LLAMA3, OPENAI, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2),
    *(GLM45, GLM47, MINIMAX_M2, QWEN3_CODER),
)
FORMATS = {each.name: each for each in _ALL}


def writes_channels(template: ChatTemplate) -> bool:
    """Return whether a template writes messages in channels."""
    return template.has_text(CHANNEL) and template.has_text(MESSAGE)


def call_format(name: str, template: ChatTemplate | None) -> CallFormat | None:
    """Return the format `name`: of FORMATS, "none", or "auto", the template's if it has one."""
    if name != "auto":
        return FORMATS.get(name)
    if template is None:
        return None
    if writes_channels(template):
        return OPENAI if template.mentions("tools") else None
    # DeepSeek's own templates show calls, but no tools.
    if template.has_text(DEEPSEEK_V3.begin):
        return DEEPSEEK_V3 if template.has_text("```json") else DEEPSEEK_V31
    if template.has_text(KIMI_K2.begin):
        return KIMI_K2
    if not template.mentions("tools"):
        return HERMES  # of server.gateway.dialects.chat.generic_tools
    # Most of these have Hermes' `<tool_call>` too.
    if template.has_text(GLM47_TAGS.key[0]):
        return GLM47 if template.has_text(GLM47_TAGS.key[1] + GLM47_TAGS.value[0]) else GLM45
    if template.has_text(MINIMAX_M2.begin):
        return MINIMAX_M2
    if template.has_text(QWEN3_CODER_TAGS.name[0]):
        # Llama's `<function=` has JSON in it.
        return QWEN3_CODER if template.has_text(QWEN3_CODER_TAGS.key[0]) else None
    if template.has_text(HERMES.begin):
        return HERMES
    if template.has_text(MISTRAL.begin):
        return MISTRAL if template.has_text(MISTRAL_MARKS.after[0]) else MISTRAL_LIST
    is_llama = template.has_text("<|start_header_id|>") and template.has_text("parameters")
    return LLAMA3 if is_llama else None

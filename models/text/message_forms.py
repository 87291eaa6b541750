"""The forms in which a chat template takes messages: found by rendering a few.

Owns the choice between a text and a list of parts, null and empty contents, and arguments of calls
as objects or as JSON text. Knows no request; server.gateway.dialects.chat.prompt calls it by way of
models.text.chat_template. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from topspin.errors import InvalidRequest

Part = Mapping[str, object]
Render = Callable[[Sequence[Mapping[str, object]]], str]
"""Returns a chat as the template writes it; raises InvalidRequest if it refuses."""

# No template has a use for these; nine characters, as some want of the ids of calls.
_FIRST: Final = "probe1abc"
_SECOND: Final = "probe2xyz"
_USER: Final = {"role": "user", "content": "x"}


class CallForm(NamedTuple):
    """A message with calls and no content: its content's place, and whether arguments are a text.

    `members` are the content, if it has one.
    """

    members: Mapping[str, str | None]
    has_texts: bool


# As transformers leaves it out, as clients send it, and as the templates want it that can do
# neither.
_CALL_FORMS: Final = (
    CallForm({}, False),
    CallForm({"content": None}, False),
    CallForm({"content": None}, True),
    CallForm({"content": ""}, False),
)


class MessageForms:
    """The forms that one template takes; may be shared by threads."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._of_role: dict[str, tuple[bool, bool]] = {}
        self.calls = self._call_form()

    def content(self, role: str, texts: Sequence[str], *, is_list: bool) -> str | list[Part]:
        """Return the content of a message of `role`, given as a text or as a list of several.

        It stays as it was given where the template takes that. Otherwise texts are joined by line
        breaks, or a text is made a part of its own.
        """
        if role not in self._of_role:
            self._of_role[role] = self._takes_text(role), self._takes_parts(role)
        takes_text, takes_parts = self._of_role[role]
        if texts and takes_parts and (is_list or not takes_text):
            return _parts(texts)
        return "\n".join(texts)

    def _takes_text(self, role: str) -> bool:
        return _FIRST in self._shown(role, _FIRST)

    def _takes_parts(self, role: str) -> bool:
        """Return whether both parts are shown, and not as JSON or a Python list."""
        shown = self._shown(role, _parts([_FIRST, _SECOND]))
        is_raw = re.search(rf"text\W+{_FIRST}", shown) is not None
        return _FIRST in shown and _SECOND in shown and not is_raw

    def _shown(self, role: str, content: object) -> str:
        """Return a chat with a message of `role` as the template writes it; "" if it refuses."""
        message = {"role": role, "content": content}
        if role == "tool":
            message |= {"tool_call_id": _FIRST, "name": "f"}
            return self._try([_USER, _call({}, {"content": ""}), message])
        return self._try([message, _USER] if role == "system" else [_USER, message])

    def _call_form(self) -> CallForm:
        """Return the form closest to what clients send, in which the calls are shown."""
        result = {"role": "tool", "tool_call_id": _FIRST, "name": "f", "content": "x"}
        for form in _CALL_FORMS:
            arguments = json.dumps({"a": _SECOND}) if form.has_texts else {"a": _SECOND}
            shown = self._try([_USER, _call(arguments, form.members), result])
            if _SECOND in shown and re.search("None|null", shown) is None:
                return form
        return _CALL_FORMS[-1]

    def _try(self, messages: Sequence[Mapping[str, object]]) -> str:
        try:
            return self._render(messages)
        except InvalidRequest:
            return ""


def marked(content: str | list[Part], *, before: str = "", after: str = "") -> str | list[Part]:
    """Return a content with text added at its ends."""
    if isinstance(content, str):
        return f"{before}{content}{after}"
    texts = [str(part["text"]) for part in content]
    texts[0] = before + texts[0]
    texts[-1] += after
    return _parts(texts)


def text_of(content: str | list[Part]) -> str:
    """Return the text of a content."""
    return content if isinstance(content, str) else "".join(str(part["text"]) for part in content)


def _parts(texts: Sequence[str]) -> list[Part]:
    return [{"type": "text", "text": text} for text in texts]


def _call(arguments: object, members: Mapping[str, object]) -> dict[str, object]:
    call = {"id": _FIRST, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", **members, "tool_calls": [call]}

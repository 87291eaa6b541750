"""Messages reach a chat template as the client gave them, where it takes them so."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from models.text.tokenizer import Tokenizer
from server.gateway.bodies.fields import BodyReader
from server.gateway.dialects.chat.prompt import ChatPrompt, chat_prompt
from server.gateway.dialects.chat.request import decode_chat
from server.gateway.dialects.chat.tools import ToolUse
from tests.checkpoints import write_tokenizer
from tests.server.gateway.fakes import served_model, template_of

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "now", "arguments": "{}"}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": PARTS},
    {"role": "user", "content": PARTS},
    {"role": "assistant", "content": "text"},
    {"role": "user", "content": "text"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": PARTS},
]
_EACH = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
_BOTH = "{% if m.content is string %}{{ m.content }}{% else %}" + _EACH + "{% endif %}"
_CALLS = "{% for c in m.tool_calls %}[{{ c.function.name }}{{ c.function.arguments }}]{% endfor %}"
_JSON = "{% for c in m.tool_calls %}[{{ c.function | tojson }}]{% endfor %}"


def _each_message(body: str) -> str:
    begin = "{% for m in messages %}<{{ 'tool' if m.role == 'tool' else m.role }}>"
    return begin + body + "{% endfor %}"


# By the form that a template takes: with parts, with null content and with JSON text.
AS_GIVEN = {
    "both": _each_message(_BOTH + _CALLS),
    "absent": _each_message("{% if not m.content %}!{% else %}" + _BOTH + "{% endif %}" + _JSON),
    "macro": "{% macro show(content) %}{% if content is string %}{{ content }}{% elif content %}"
    "{% for p in content %}{{ p['text'] }}{% endfor %}{% endif %}{% endmacro %}"
    + _each_message("{{ show(m.content) }}" + _JSON),
}
AS_TEXT = {
    "strings": _each_message("{{ m.content }}" + _JSON),
    "strings checked": _each_message(
        "{% if m.content is string %}{{ m.content }}{% endif %}" + _JSON
    ),
    "trimmed": _each_message("{{ m.content | trim }}" + _JSON),
    "sum": _each_message("{{ m.content + '.' }}" + _JSON),
    "raw": _each_message("{{ m.content if m.content is string else m.content | tojson }}" + _JSON),
}


def _prompt(path: Path, template: str, messages: list[dict[str, Any]], **more: Any) -> ChatPrompt:
    write_tokenizer(path)
    decoded = decode_chat(
        json.dumps({"model": "m", "messages": messages, **more}).encode(), BodyReader()
    )
    return chat_prompt(
        decoded.body,
        decoded.messages,
        model=served_model(
            template=template_of(template), tokenizer=Tokenizer.from_directory(path)
        ),
        tools=ToolUse(),
    )


def _theirs(path: Path, template: str, messages: list[dict[str, Any]]) -> str:
    auto = importlib.import_module("transformers").AutoTokenizer.from_pretrained(path)
    text: str = auto.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    return text


def _with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat with arguments as objects, for which templates are written."""
    text = json.dumps(messages).replace('"arguments": "{}"', '"arguments": {}')
    found: list[dict[str, Any]] = json.loads(text)
    return found


@pytest.mark.parametrize("name", AS_GIVEN)
def test_parts_and_null_stay_where_the_template_takes_them(tmp_path: Path, name: str) -> None:
    ours = _prompt(tmp_path, AS_GIVEN[name], CHAT)
    assert ours.text == _theirs(tmp_path, AS_GIVEN[name], _with_objects(CHAT))
    assert "one two" in ours.text


@pytest.mark.parametrize("name", AS_TEXT)
def test_other_templates_get_lines_and_no_null(tmp_path: Path, name: str) -> None:
    joined = [
        {**message, "content": "one\n two" if message["content"] is PARTS else message["content"]}
        for message in CHAT
    ]
    joined[4] = {**CHAT[4], "content": ""}
    ours = _prompt(tmp_path, AS_TEXT[name], CHAT)
    assert ours.text == _theirs(tmp_path, AS_TEXT[name], _with_objects(joined))
    assert "None" not in ours.text


def test_a_text_is_a_part_where_the_template_takes_only_parts(tmp_path: Path) -> None:
    template = _each_message(_EACH)
    ours = _prompt(tmp_path, template, [{"role": "user", "content": "text"}])
    theirs = [{"role": "user", "content": [{"type": "text", "text": "text"}]}]
    assert ours.text == _theirs(tmp_path, template, theirs)


def test_roles_may_differ(tmp_path: Path) -> None:
    template = _each_message(
        "{% if m.role == 'user' %}" + _BOTH + "{% else %}{{ m.content }}{% endif %}"
    )
    ours = _prompt(tmp_path, template, CHAT[:3])
    assert ours.text == "<system>one\n two<user>one two<assistant>text"


def test_calls_are_text_where_the_template_appends_them_to_text(tmp_path: Path) -> None:
    """As DeepSeek-R1-Distill's: a null content begins calls, whose arguments are JSON text."""
    template = _each_message(
        "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
        "{{ '[' + c.function.name + c.function.arguments + ']' }}{% endfor %}"
        "{% elif m.role == 'assistant' %}{{ m.content }}<end>{% else %}{{ m.content }}{% endif %}"
    )
    chat = [CHAT[3], CHAT[4], {**CHAT[5], "content": "noon"}]
    ours = _prompt(tmp_path, template, chat)
    assert ours.text == "<user>text<assistant>[now{}]<tool>noon"


def test_the_last_parts_are_continued_and_have_places(tmp_path: Path) -> None:
    template = AS_GIVEN["both"]
    chat = [*CHAT[1:2], {"role": "assistant", "content": PARTS}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    ours = _prompt(tmp_path, template, chat, report_prefix_cache=True, **more)
    assert ours.text == "<user>one two<assistant>one two"
    assert ours.continued == "one two"
    assert ours.map is not None
    assert [begin for begin, _, _ in ours.map.begins] == [6, 24]
    places = _prompt(tmp_path, template, CHAT, report_prefix_cache=True).map
    assert places is not None
    assert [idx for _, idx, _ in places.begins] == [0, 1, 2, 3, 5], "null content has no place"

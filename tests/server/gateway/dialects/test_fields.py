"""The three classes of request fields, and the messages that clients send back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.text.chat_template import ChatTemplate
from server.gateway.bodies.fields import Fields, field_classes
from server.gateway.bodies.generation import JsonSchemaFormat, StreamOptions
from server.gateway.dialects.anthropic.request import MessagesBody
from server.gateway.dialects.chat.request import (
    ChatBody,
    ChatMessage,
    ContentPart,
    Tool,
    ToolCall,
    ToolFunction,
)
from server.gateway.dialects.completions.request import CompletionBody
from server.gateway.dialects.responses.request import ResponsesBody
from tests.server.gateway.calls import (
    CHAT,
    CHAT_BODY,
    PLAIN,
    PLAIN_BODY,
    USER,
    answer_to,
    prompt_of,
)
from tests.server.gateway.fakes import FakeEngine, gateway, saying

PAGE = Path(__file__).parents[4] / "docs" / "api.md"
HEADER = "x-topspin-ignored"

# A template of a model that was trained with tools and reasoning.
TOOL_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.role == 'tool' %}[{{ m.tool_call_id }}] {% endif %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "({{ call.function.arguments['x'] }}){% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}quick{% endif %}"
)


def send(
    path: str, body: dict[str, Any], fake: FakeEngine, *, source: str | None = None
) -> httpx.Response:
    """Post `body` to a gateway whose chat template is `source`, if given."""
    chat_template = None
    if source is not None:
        chat_template = ChatTemplate({"default": source}, special_tokens={}, source="test")

    return answer_to(path, body, fake=fake, chat_template=chat_template, max_request_tokens=1000)


def accepted(path: str, body: dict[str, Any], *, source: str | None = None) -> tuple[str, str]:
    """Return the engine's prompt, and the fields named as ignored."""
    fake = FakeEngine(saying("ok"))
    response = send(path, body, fake, source=source)
    assert response.status_code == 200, response.text
    return prompt_of(fake.added[0]), response.headers.get(HEADER, "")


IGNORED: dict[str, Any] = {
    "metadata": {"run": "7"},
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": False,
    "user": "me",
    "spaces_between_special_tokens": True,
    "cache_prompt": True,
    "include_reasoning": True,
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
}


def test_documented_fields_without_effect_are_accepted_and_named() -> None:
    names = [name for name in IGNORED if not name.startswith("stream")]
    names.append("stream_options.include_obfuscation")
    assert accepted(PLAIN, {**PLAIN_BODY, **IGNORED}) == ("hi", ", ".join(names))
    chat = {"verbosity": "low", "reasoning_effort": "low"}
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [part, part], "cache_control": None},
        {"role": "assistant", "content": "so", "provider_specific_fields": {"a": [1]}},
    ]
    body = {**CHAT_BODY, **chat, "messages": messages}
    _, named = accepted(CHAT, body)
    assert named == (
        "reasoning_effort, verbosity, messages.content.cache_control, "
        "messages.provider_specific_fields"
    )


def test_variables_that_the_template_does_not_read_are_named() -> None:
    variables = {"prefix": "x", "enable_thinking": False}
    _, named = accepted(CHAT, {**CHAT_BODY, "chat_template_kwargs": variables})
    assert named == "chat_template_kwargs.enable_thinking"


def test_nothing_is_named_when_nothing_is_ignored() -> None:
    fake = FakeEngine(saying("ok"))
    response = send(PLAIN, {**PLAIN_BODY, "user": None, "echo": False}, fake)
    assert HEADER not in response.headers


def _refused(kind: type[Fields]) -> list[tuple[str, object]]:
    """Return every refused field of `kind` with each accepted value."""
    return [
        (name, value)
        for name, values in field_classes(kind).refused.items()
        for value in (None, *values)
    ]


@pytest.mark.parametrize(
    ("path", "body", "kind"), [(PLAIN, PLAIN_BODY, CompletionBody), (CHAT, CHAT_BODY, ChatBody)]
)
async def test_neutral_values_pass_and_others_are_refused(
    path: str, body: dict[str, Any], kind: type[Fields]
) -> None:
    async with gateway(FakeEngine(saying("ok"))) as client:
        for name, value in _refused(kind):
            response = await client.post(path, json={**body, name: value})
            assert response.status_code == 200, (name, value, response.text)
        for name in field_classes(kind).refused:
            response = await client.post(path, json={**body, name: "something"})
            assert response.status_code == 400, name
            assert response.json()["error"]["param"] == name


def test_an_answer_can_be_sent_back() -> None:
    """A message as the OpenAI client and litellm dump it."""
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning_content": None,
        "provider_specific_fields": {"refusal": None},
        "cache_control": {"type": "ephemeral"},
    }
    prompt, _ = accepted(CHAT, {**CHAT_BODY, "messages": [USER, answer, USER]})
    assert prompt == "user: hi\nassistant: \nuser: hi\nassistant: "


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42"}


def test_tools_of_the_past_go_to_a_template_that_shows_them() -> None:
    body = {**CHAT_BODY, "messages": [USER, CALLING, RESULT]}
    prompt, _ = accepted(CHAT, body, source=TOOL_TEMPLATE)
    assert prompt == "user: hi\nassistant: f(1)\ntool: [c1] 42\n"


@pytest.mark.parametrize(
    ("messages", "source", "param"),
    [
        ([USER, RESULT], None, "messages[1].role"),
        ([USER, CALLING], None, "messages[1].tool_calls"),
        ([{**CALLING, "role": "user", "content": "x"}], TOOL_TEMPLATE, "messages[0].tool_calls"),
        (
            [{**CALLING, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]}],
            TOOL_TEMPLATE,
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_tools_that_the_template_cannot_show_are_refused(
    messages: list[dict[str, Any]], source: str | None, param: str
) -> None:
    body = {**CHAT_BODY, "messages": messages}
    response = send(CHAT, body, FakeEngine(saying("ok")), source=source)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), None])
def test_reasoning_goes_to_a_template_that_reads_it(names: tuple[str, ...] | None) -> None:
    names = names or ("reasoning", "reasoning_content")
    answer = {"role": "assistant", "content": "4"} | dict.fromkeys(names, "2 + 2")
    prompt, _ = accepted(CHAT, {**CHAT_BODY, "messages": [answer]}, source=TOOL_TEMPLATE)
    assert prompt == "assistant: (2 + 2) 4\n"


def test_reasoning_effort_goes_to_a_template_that_reads_it() -> None:
    body = {**CHAT_BODY, "reasoning_effort": "none"}
    assert accepted(CHAT, body, source=TOOL_TEMPLATE) == ("user: hi\nquick", "")


def _table(title: str) -> set[str]:
    """Return the fields in the first column of the page's tables under `title`."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_page_lists_every_field_in_its_class() -> None:
    kinds: list[tuple[str, type[Fields]]] = [
        ("", ChatBody),
        ("", CompletionBody),
        ("stream_options.", StreamOptions),
        ("response_format.json_schema.", JsonSchemaFormat),
        ("messages.", ChatMessage),
        ("messages.content.", ContentPart),
        ("messages.tool_calls.", ToolCall),
        ("messages.tool_calls.function.", ToolFunction),
        ("tools.", Tool),
    ]
    ignored, refused, implemented = set(), set(), set()
    for prefix, kind in kinds:
        classes = field_classes(kind)
        ignored |= {prefix + name for name in classes.ignored}
        refused |= {prefix + name for name in classes.refused}
        if not prefix:
            known = {*classes.ignored, *classes.refused}
            implemented |= set(kind.__struct_fields__) - known
    assert _table("Ignored") == ignored
    assert _table("Refused") == refused
    assert _table("Implemented") == implemented


@pytest.mark.parametrize(
    ("title", "kind"), [("/v1/responses", ResponsesBody), ("/v1/messages", MessagesBody)]
)
def test_the_page_lists_every_field_of_the_other_apis(title: str, kind: type[Fields]) -> None:
    section = PAGE.read_text().split(f"\n# {title}\n")[1].split("\n# ")[0]
    tables: dict[str, set[str]] = {}
    for line in section.splitlines():
        first = line.split("|")[1].strip() if line.startswith("| ") else ""
        if first in ("implemented", "ignored", "refused"):
            names = tables.setdefault(first, set())
        elif first.startswith("`"):
            names |= set(re.findall(r"`([^`]+)`", first))
    classes = field_classes(kind)
    assert tables["ignored"] == set(classes.ignored)
    assert tables["refused"] == set(classes.refused)
    known = {*classes.ignored, *classes.refused}
    assert tables["implemented"] == set(kind.__struct_fields__) - known

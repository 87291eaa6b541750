"""The three classes of request fields, and the messages that clients send back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from server.gateway.bodies.fields import BodyFields, field_classes
from server.gateway.bodies.generation import JsonSchemaFormat, StreamOptions
from server.gateway.dialects.anthropic.request import MessagesBody
from server.gateway.dialects.chat.request import (
    ChatBody,
    ChatMessage,
    ContentPart,
    ReasoningChoice,
    ThinkingSwitch,
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
    post,
    prompt_of,
)
from tests.server.gateway.fakes import TOOL_TEMPLATE, FakeEngine, gateway, saying, template_of

PAGE = Path(__file__).parents[4] / "docs" / "api.md"

# Of a model that was trained with tools, and whose reasoning can be turned off.
TEMPLATE = TOOL_TEMPLATE + "{{ 'quick' if enable_thinking is defined and not enable_thinking }}"


def accepted(path: str, body: dict[str, Any], *, source: str | None = None) -> tuple[str, str]:
    """Return the engine's prompt, and the fields named as ignored, if there are any.

    `source` is the chat template, if it is another.
    """
    fake = FakeEngine(saying("ok"))
    options = {} if source is None else {"template": template_of(source)}
    response = post(path, body, fake, max_request_tokens=1000, **options)
    return prompt_of(fake.added[0]), response.headers.get("x-topspin-ignored", "")


IGNORED: dict[str, Any] = {
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "service_tier": "auto",
    "user": "me",
    "metadata": {"run": "7"},
    "store": False,
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
    variables = {"prefix": "x", "enable_thinking": False}
    body = {**CHAT_BODY, **chat, "messages": messages, "chat_template_kwargs": variables}
    _, named = accepted(CHAT, body)
    assert named == (
        "reasoning_effort, verbosity, messages.content.cache_control, "
        "messages.provider_specific_fields, chat_template_kwargs.enable_thinking"
    )


def test_nothing_is_named_when_nothing_is_ignored() -> None:
    assert accepted(PLAIN, {**PLAIN_BODY, "user": None, "echo": False}) == ("hi", "")


@pytest.mark.parametrize(
    ("path", "body", "kind"), [(PLAIN, PLAIN_BODY, CompletionBody), (CHAT, CHAT_BODY, ChatBody)]
)
async def test_neutral_values_pass_and_others_are_refused(
    path: str, body: dict[str, Any], kind: type[BodyFields]
) -> None:
    async with gateway(FakeEngine(saying("ok"))) as client:
        for name, values in field_classes(kind).refused.items():
            for value in (None, *values):
                response = await client.post(path, json={**body, name: value})
                assert response.status_code == 200, (name, value, response.text)
            response = await client.post(path, json={**body, name: "something"})
            assert response.status_code == 400, name
            assert response.json()["error"]["param"] == name


def test_an_answer_can_be_sent_back() -> None:
    """A message as the OpenAI client and litellm dump it."""
    absent = ("content", "refusal", "audio", "function_call", "reasoning_content")
    answer: dict[str, Any] = {
        "role": "assistant",
        **dict.fromkeys(absent),
        "annotations": [],
        "tool_calls": [],
        "provider_specific_fields": {"refusal": None},
        "cache_control": {"type": "ephemeral"},
    }
    prompt, _ = accepted(CHAT, {**CHAT_BODY, "messages": [USER, answer, USER]})
    assert prompt == "user: hi\nassistant: \nuser: hi\nassistant: "


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "42"}
LISTED = {**CALL, "function": {"name": "f", "arguments": "[1]"}}


@pytest.mark.parametrize(
    ("messages", "source", "param"),
    [
        ([{**CALLING, "role": "user", "content": "x"}], TOOL_TEMPLATE, "messages[0].tool_calls"),
        (
            [{**CALLING, "tool_calls": [LISTED]}],
            *(TOOL_TEMPLATE, "messages[0].tool_calls[0].function.arguments"),
        ),
    ],
)
def test_tools_that_the_template_cannot_show_are_refused(
    messages: list[dict[str, Any]], source: str, param: str
) -> None:
    body = {**CHAT_BODY, "messages": messages}
    response = answer_to(CHAT, body, template=template_of(source))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_to_a_template_that_reads_it(name: str) -> None:
    messages = [{"role": "assistant", "content": "4", name: "2 + 2"}]
    body = {**CHAT_BODY, "messages": messages, "reasoning_effort": "none"}
    shown = "assistant: 4<think>2 + 2</think>assistant: "
    assert accepted(CHAT, body, source=TOOL_TEMPLATE) == (shown, "reasoning_effort")
    assert accepted(CHAT, body, source=TEMPLATE) == (f"{shown}quick", "")


def _listed(text: str) -> set[str]:
    """Return the fields in the first column of tables."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def _implemented(kind: type[BodyFields]) -> set[str]:
    classes = field_classes(kind)
    return set(kind.__struct_fields__).difference(classes.ignored, classes.refused)


def test_the_page_lists_every_field_in_its_class() -> None:
    sections = dict(each.split("\n", 1) for each in PAGE.read_text().split("\n## ")[1:])
    kinds: list[tuple[str, type[BodyFields]]] = [
        ("", ChatBody),
        ("", CompletionBody),
        ("stream_options.", StreamOptions),
        ("response_format.json_schema.", JsonSchemaFormat),
        ("messages.", ChatMessage),
        ("messages.content.", ContentPart),
        ("messages.tool_calls.", ToolCall),
        ("messages.tool_calls.function.", ToolFunction),
        ("tools.", Tool),
        ("reasoning.", ReasoningChoice),
        ("thinking.", ThinkingSwitch),
    ]
    ignored, refused = set(), set()
    for prefix, kind in kinds:
        ignored |= {prefix + name for name in field_classes(kind).ignored}
        refused |= {prefix + name for name in field_classes(kind).refused}
    assert _listed(sections["Ignored"]) == ignored
    assert _listed(sections["Refused"]) == refused
    assert _listed(sections["Implemented"]) == _implemented(ChatBody) | _implemented(CompletionBody)


@pytest.mark.parametrize(
    ("title", "kind"), [("/v1/responses", ResponsesBody), ("/v1/messages", MessagesBody)]
)
def test_the_page_lists_every_field_of_the_other_apis(title: str, kind: type[BodyFields]) -> None:
    section = PAGE.read_text().split(f"\n# {title}\n")[1].split("\n# ")[0]
    _, implemented, ignored, refused = re.split(r"\n\| (?:implemented|ignored|refused) \|", section)
    assert _listed(ignored) == set(field_classes(kind).ignored)
    assert _listed(refused) == set(field_classes(kind).refused)
    assert _listed(implemented) == _implemented(kind)

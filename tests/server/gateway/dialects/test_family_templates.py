"""DeepSeek's and Kimi's chats: prompts as transformers writes them, and what comes of answers."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from models.text.tokenizer import Tokenizer
from server.gateway.bodies.fields import BodyReader
from server.gateway.dialects.chat.prompt import chat_prompt
from server.gateway.dialects.chat.request import decode_chat
from server.gateway.dialects.chat.tools import tool_use
from server.gateway.parsing.formats import message_formats
from tests.checkpoints import write_tokenizer
from tests.pairwise import few
from tests.server.gateway.calls import CHAT as CHAT_PATH
from tests.server.gateway.calls import CHAT_BODY, USER, post, prompt_of
from tests.server.gateway.fakes import (
    FakeEngine,
    backend,
    output,
    saying,
    served_model,
    template_of,
)
from tests.server.gateway.named import NAMES, written_section
from tests.server.gateway.templates import TEMPLATES
from topspin.messages import AddRequest, RequestOutput
from topspin.plan.settings import GatewaySection

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "<now> ü", "parameters": {"type": "object"}},
    }
    for name in ("clock", "add")
]


def call(name: str, idx: int, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"functions.{name}:{idx}", "type": "function", "function": function}


def result(name: str, idx: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"functions.{name}:{idx}", "content": text}


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "The time, and 1 + 2?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "two calls",
        "tool_calls": [call("clock", 0, {"zone": "ü <x>"}), call("add", 1, {"a": 1, "b": [2]})],
    },
    result("clock", 0, "noon"),
    result("add", 1, "3"),
    {"role": "assistant", "content": "Noon, 3.", "reasoning_content": "simple"},
    {"role": "user", "content": "And now?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "again",
        "tool_calls": [call("clock", 2, {})],
    },
    result("clock", 2, "later"),
]


def prompt_text(name: str, messages: list[dict[str, Any]], **fields: Any) -> str:
    """Return the prompt of a chat with the tools, as the gateway gives it to the model."""
    body = {"model": "m", "messages": messages, "tools": TOOLS, **fields}
    decoded = decode_chat(json.dumps(body).encode(), BodyReader())
    model = served_model(template=template_of(TEMPLATES[name]))
    tools = tool_use(decoded.body, formats=model.formats)
    return chat_prompt(decoded.body, decoded.messages, model=model, tools=tools).text


def in_form(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as transformers' users must write it for this template."""
    if name in ("deepseek_v3", "deepseek_r1"):
        # transformers leaves out a null, and these take no message without content.
        return {**message, "content": message["content"] or ""}
    if name != "glm47" or "tool_calls" not in message:
        return message
    functions = [each["function"] for each in message["tool_calls"]]
    objects = [{**each, "arguments": json.loads(each["arguments"])} for each in functions]
    return {**message, "tool_calls": [{"function": each} for each in objects]}


@pytest.mark.parametrize("name", few(TEMPLATES, "glm47"))
def test_prompts_are_as_transformers_writes_them(tmp_path: Path, name: str) -> None:
    write_tokenizer(tmp_path)
    auto = importlib.import_module("transformers").AutoTokenizer.from_pretrained(tmp_path)
    auto.bos_token = ""  # as template_of has none
    switch = "enable_thinking" if name == "glm47" else "thinking"
    for num_messages in (3, 4, 5, 7, 8, 9, 10):
        for variables in ({}, {switch: True}, {switch: False}):
            ours = prompt_text(name, CHAT[:num_messages], chat_template_kwargs=variables)
            options = {"tools": TOOLS, "add_generation_prompt": True, **variables}
            theirs = auto.apply_chat_template(
                [in_form(name, message) for message in CHAT[:num_messages]],
                **{"chat_template": TEMPLATES[name], "tokenize": False, **options},
            )
            assert ours == theirs
            assert len(ours) > 50


SECTION = written_section("kimi_k2", [("clock", "{}"), ("add", '{"a": 1}')])
IDS = ["functions.clock:0", "functions.add:1"]


def served(
    name: str, said: str, path: str = CHAT_PATH, **fields: Any
) -> tuple[Any, str, dict[str, str]]:
    """Return the answer to a request, its prompt and its headers."""
    body = {"model": "tiny", **fields}
    fake = FakeEngine(saying(said, finish_reason="stop"))
    template = template_of(TEMPLATES[name])
    response = post(path, body, fake, template=template, max_request_tokens=5000)
    return response.json(), prompt_of(fake.added[0]), dict(response.headers)


def test_ids_that_the_model_gives_reach_clients_and_come_back_to_it() -> None:
    answer, _, _ = served("kimi_k2", f"Well.{SECTION}", messages=[USER], tools=TOOLS)
    message = answer["choices"][0]["message"]
    assert [each["id"] for each in message["tool_calls"]] == IDS
    results = [{"role": "tool", "tool_call_id": each, "content": each[-1]} for each in IDS]
    messages = [USER, message, *results]
    _, prompt, _ = served("kimi_k2", "ok", messages=messages, tools=TOOLS)
    assert f"Well.{SECTION}<|im_end|>" in prompt
    assert f"## Return of {IDS[1]}\n1<|im_end|>" in prompt
    named = {"tools": [{"name": "clock", "input_schema": {}}], "messages": [USER]}
    answer, _, _ = served("kimi_k2", SECTION, "/v1/messages", max_tokens=900, **named)
    assert [each["id"] for each in answer["content"]] == IDS
    functions = [{"type": "function", "name": "clock", "parameters": {}}]
    answer, _, _ = served("kimi_k2", SECTION, "/v1/responses", input="hi", tools=functions)
    assert [each["call_id"] for each in answer["output"]] == IDS


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_found_where_their_marks_are_special_tokens(name: str) -> None:
    said = "Well." + written_section(name, [("clock", "{}"), ("add", '{"a": 1}')])
    made = tokenizers.Tokenizer.from_str(backend().to_str())
    marks = dict.fromkeys(re.findall("<[^<>]*>", said))
    made.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokens = Tokenizer(made, special_tokens={}, source="test")
    token_ids = tokens.encode(said, add_special_tokens=False)

    def script(request: AddRequest) -> Iterator[RequestOutput]:
        yield output(request, token_ids, finish_reason="stop")

    model = {"template": template_of(TEMPLATES[name]), "tokenizer": tokens}
    fields = {"tools": TOOLS, "tool_choice": "required"}
    fake = FakeEngine(script)
    answer = post(CHAT_PATH, {**CHAT_BODY, **fields}, fake, **model, max_request_tokens=5000)
    message = answer.json()["choices"][0]["message"]
    calls = [each["function"] for each in message["tool_calls"]]
    assert [each["arguments"] for each in calls] == ["{}", '{"a": 1}']
    assert message["content"] is None  # no grammar lets text before forced calls
    assert all(f"<[{tokens.token_id(mark)}]>" in fake.added[0].sampling.grammar for mark in marks)


@pytest.mark.parametrize(
    ("template", "form"), [("deepseek_v3", "deepseek_v3"), ("deepseek_r1", "deepseek_v3")]
)
def test_tools_that_a_template_does_not_show_are_described_in_its_form(
    template: str, form: str
) -> None:
    said = written_section(form, [("add", '{"a": 1}')])
    answer, prompt, headers = served(template, said, messages=CHAT[:6], tools=TOOLS)
    [made] = answer["choices"][0]["message"]["tool_calls"]
    assert made["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert headers["x-topspin-tools"] == "generic"
    system, _, rest = prompt.partition("<｜User｜>")
    first, _, described = system.partition("\n\n")
    assert first == "Be brief."
    assert json.dumps(TOOLS[1]["function"], ensure_ascii=False) in described
    assert written_section(form, [("NAME", "{...}")]) in described
    assert described.endswith("\n\nBe kind.")
    assert rest == prompt_text(template, CHAT[:6]).partition("<｜User｜>")[2]
    _, prompt, headers = served(template, "ok", messages=CHAT[:6])
    assert prompt == prompt_text(template, CHAT[:6])
    assert "x-topspin-tools" not in headers
    no = {"tools": TOOLS, "tool_choice": "none"}
    assert served(template, "ok", messages=CHAT[:6], **no)[1] == prompt


THINKS, ANSWERS = "<｜Assistant｜><think>", "<｜Assistant｜></think>"


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, ANSWERS),
        ({"chat_template_kwargs": {"thinking": True}}, THINKS),
        ({"chat_template_kwargs": {"enable_thinking": True}}, THINKS),
        ({"chat_template_kwargs": {"enable_thinking": True, "thinking": False}}, ANSWERS),
        ({"reasoning_effort": "high"}, THINKS),
        ({"reasoning_effort": "none"}, ANSWERS),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, ANSWERS),
    ],
)
def test_a_request_says_whether_to_reason_under_any_name(fields: dict[str, Any], end: str) -> None:
    said = "hm</think>Yes." if end == THINKS else "Yes."
    answer, prompt, headers = served("deepseek_v31", said, messages=[USER], **fields)
    assert prompt == f"<｜User｜>hi{end}"
    message = answer["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert message.get("reasoning_content") == ("hm" if end == THINKS else None)
    assert "x-topspin-ignored" not in headers


def test_anthropics_thinking_is_the_switch_of_the_template() -> None:
    asked: dict[str, Any] = {"messages": [USER], "max_tokens": 90}
    for kind, end in (("enabled", THINKS), ("disabled", ANSWERS)):
        thinking = {"type": kind, **({"budget_tokens": 50} if kind == "enabled" else {})}
        fields = {**asked, "thinking": thinking}
        _, prompt, headers = served("deepseek_v31", "ok", "/v1/messages", **fields)
        assert prompt.endswith(end)
        assert "enable_thinking" not in headers.get("x-topspin-ignored", "")


@pytest.mark.parametrize(
    ("parser", "template", "said"),
    [
        ("auto", "deepseek_r1", "<think>\nhm\n</think>\n\nYes."),
        ("deepseek_r1", "deepseek_r1", "<think>hm</think>Yes."),
        ("deepseek_v3", "deepseek_v3", "<think>hm</think>Yes."),
        ("kimi_k2", "kimi_k2", "<think>hm</think>Yes."),
        ("glm45", "glm47", "hm</think>Yes."),
    ],
)
def test_reasoning_has_the_same_marks_under_each_name(
    parser: Any, template: str, said: str
) -> None:
    shown = template_of(TEMPLATES[template])
    formats = message_formats(GatewaySection(reasoning_parser=parser), shown)
    options = {"template": shown, "formats": formats, "max_request_tokens": 1000}
    answer = post(CHAT_PATH, CHAT_BODY, FakeEngine(saying(said)), **options)
    message = answer.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")

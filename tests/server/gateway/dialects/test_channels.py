"""Chats of a model that writes in channels: prompts, answers, and what is forced."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.gateway.parsing.formats import message_formats
from tests.checkpoints import write_tokenizer
from tests.server.gateway.calls import CHAT, USER, answer_to, events_of
from tests.server.gateway.channels import (
    CALL,
    FINAL,
    NEXT,
    TEMPLATE,
    THOUGHT,
    marked_backend,
    marked_tokenizer,
)
from tests.server.gateway.fakes import FakeEngine, output, template_of
from topspin.errors import ConfigError
from topspin.messages import AddRequest, RequestOutput, unpack_ints
from topspin.plan.settings import GatewaySection

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "of": {"type": "array", "items": {"type": ["string", "null"]}},
        "unit": {"type": "string", "enum": ["m", "\u00b5m"]},
    },
    "required": ["a"],
}
ADD = {"name": "add", "description": "adds", "parameters": PARAMETERS}
FORM = {"name": "x", "schema": {"type": "array", "items": {"type": "integer"}}}
SCHEMA: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": FORM}}


def offering(*functions: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": each} for each in functions]}


TOOLS = offering(ADD, {"name": "now"})
STRICT = offering({**ADD, "strict": True}, {"name": "now"})


def ids(text: str) -> list[int]:
    return marked_tokenizer().encode(text, add_special_tokens=False)


def ask(
    said: str,
    *,
    step: int = 1,
    ended_by: str = "<|return|>",
    path: str = CHAT,
    num_cached: int = 0,
    **fields: Any,
) -> tuple[Any, AddRequest]:
    """Return the answer of a model that says `said`, so many tokens a step, and its request."""

    def script(request: AddRequest) -> Iterator[RequestOutput]:
        tokens = ids(said + ended_by)
        for index in range(0, len(tokens), step):
            part, is_last = tokens[index : index + step], index + step >= len(tokens)
            ends: dict[str, Any] = {"finish_reason": "stop", "stop_token_id": part[-1]}
            ends = ends if ended_by else {"finish_reason": "length"}
            more = ends if is_last else {}
            yield output(request, part, index=index, num_cached_tokens=num_cached, **more)

    fake = FakeEngine(script)
    given = {"input": "hi"} if path == "/v1/responses" else {"messages": [USER]}
    response = answer_to(
        path,
        {"model": "tiny", **given, **fields},
        fake=fake,
        template=template_of(TEMPLATE),
        tokenizer=marked_tokenizer(),
        vocab_size=marked_tokenizer().vocab_size,
        eos_token_ids=(ids("<|return|>")[0], ids("<|call|>")[0]),
        max_request_tokens=5000,
    )
    assert response.status_code == 200, response.text
    return events_of(response) if "stream" in fields else response.json(), fake.added[0]


def message_of(answer: Any) -> Any:
    return answer["choices"][0]["message"]


def prompt_of(**fields: Any) -> str:
    _, request = ask(FINAL, **fields)
    return marked_tokenizer().decode(list(unpack_ints(request.prompt)), skip_special_tokens=False)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_channels_are_reasoning_calls_and_content(step: int) -> None:
    answer, _ = ask(f"{THOUGHT}{NEXT}{CALL}", step=step, ended_by="<|call|>", **TOOLS)
    message = message_of(answer)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("hm", None)
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    answer, _ = ask(f"{THOUGHT}{NEXT}{FINAL}", step=step)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert (message_of(answer)["reasoning"], message_of(answer)["content"]) == ("hm", "Yes.")
    num_tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert num_tokens == 4 or step > 1


@pytest.mark.parametrize("step", [1, 4])
def test_a_stream_has_the_same_message(step: int) -> None:
    said = f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I add.{NEXT}{CALL}"
    events, _ = ask(said, step=step, ended_by="<|call|>", stream=True, **TOOLS)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "I add."
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["name"] == "add"
    assert "".join(call["arguments"] for call in calls) == '{"a": 1}'
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("said", [
    "hi", "<|channel|>x<|message|>hi", "<|channel|>final hi", CALL.replace('{"a"', '"a"'),
])  # fmt: skip
@pytest.mark.parametrize("ended_by", ["", "<|return|>"])
def test_a_wrong_form_is_text(said: str, ended_by: str) -> None:
    assert message_of(ask(said, ended_by=ended_by, **TOOLS)[0])["content"] == said


def test_every_api_tells_channels_apart() -> None:
    answer, _ = ask(f"{THOUGHT}{NEXT}{CALL}", ended_by="<|call|>", path="/v1/responses")
    assert [each["type"] for each in answer["output"]] == ["reasoning", "message"]
    tools = [{"type": "function", **ADD}]
    answer, _ = ask(f"{THOUGHT}{NEXT}{CALL}", path="/v1/responses", tools=tools)
    assert [each["type"] for each in answer["output"]] == ["reasoning", "function_call"]
    tools = [{"name": "add", "input_schema": PARAMETERS}]
    fields: dict[str, Any] = {
        "max_tokens": 99,
        "thinking": {"type": "enabled", "budget_tokens": 50},
    }
    answer, _ = ask(f"{THOUGHT}{NEXT}{CALL}", path="/v1/messages", tools=tools, **fields)
    assert [each["type"] for each in answer["content"]] == ["thinking", "tool_use"]


@pytest.mark.parametrize("step", [1, 3, 100])
def test_tokens_of_reasoning_and_headers_that_are_not_shown(step: int) -> None:
    asked: dict[str, Any] = {"include_reasoning": False, "return_token_ids": True}
    answer, _ = ask(f"{THOUGHT}{NEXT}{FINAL}", step=step, **asked)
    assert answer["choices"][0]["token_ids"] == ids("Yes.<|return|>")
    assert "reasoning" not in message_of(answer)


def call_of(name: str, arguments: Any, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat(arguments: Any) -> list[dict[str, Any]]:
    """Return a chat with a call, whose arguments are those given."""
    return [
        {"role": "system", "content": "Be brief <&> \u00fc."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello.", "thinking": "greet"},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "thinking": "so", "tool_calls": [call_of("add", arguments, "c")]},
        {"role": "tool", "tool_call_id": "c", "content": '{"\u00fc": 3}'},
    ]


@cache
def theirs(path: Path) -> Any:
    write_tokenizer(path)
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("fields", [
    TOOLS, {"reasoning_effort": "high", "chat_template_kwargs": {"model_identity": "I."}},
    {"messages": chat({"a": 1})[:2]},
    {"messages": [*chat({"a": 1}), {"role": "assistant", "content": "3", "thinking": "done"}],
     "add_generation_prompt": False},
])  # fmt: skip
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_prompt_is_that_of_transformers(
    tmp_path: Path, fields: dict[str, Any], name: str
) -> None:
    def as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
        sent = {name if key == "thinking" else key: value for key, value in message.items()}
        if "tool_calls" in sent:
            sent["tool_calls"] = [call_of("add", '{"a": 1}', "c")]
        return sent

    messages = fields.get("messages", chat({"a": 1}))
    ours = prompt_of(**{**fields, "messages": [as_sent(each) for each in messages]})
    shown = {key: fields[key] for key in ("tools", "reasoning_effort") if key in fields}
    shown |= fields.get("chat_template_kwargs", {})
    is_open = fields.get("add_generation_prompt", True)
    wanted = theirs(tmp_path).apply_chat_template(
        messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=is_open, **shown
    )
    assert ours == wanted


def test_thoughts_of_an_anthropic_client_reach_the_prompt() -> None:
    said = [
        {"type": "thinking", "thinking": "so", "signature": ""},
        {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "3"}
    results = {"role": "user", "content": [result]}
    messages = [USER, {"role": "assistant", "content": said}, results]
    prompt = prompt_of(path="/v1/messages", messages=messages, max_tokens=9)
    assert "<|channel|>analysis<|message|>so<|end|><|start|>assistant to=functions.add" in prompt


def test_what_the_template_shows_once_is_shown_in_several_messages() -> None:
    """Its message with calls has one call, and content or reasoning; both would be refused."""
    calls = [call_of("add", '{"a": 1}', "c"), call_of("now", "{}", "d")]
    messages = [
        USER,
        {"role": "assistant", "content": "I add.", "reasoning": "so", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "d", "content": "noon"},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        USER,
    ]
    prompt = prompt_of(messages=messages)
    shown = prompt[prompt.index("<|start|>user") :]
    to = "<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>{}<|call|>"
    by = '<|start|>functions.{} to=assistant<|channel|>commentary<|message|>"{}"<|end|>'
    said = "<|start|>assistant<|channel|>analysis<|message|>so\n\nI add.<|end|>"
    user = "<|start|>user<|message|>hi<|end|>"
    added = said + to.format("add", '{"a": 1}') + by.format("add", "3")
    told = to.format("now", "{}") + by.format("now", "noon")
    assert shown == f"{user}{told}{added}{user}<|start|>assistant"
    num_cached = len(ids(prompt)) - 1
    answer, _ = ask(FINAL, messages=messages, report_prefix_cache=True, num_cached=num_cached)
    assert answer["prefix_cache"]["message"] == 4


def settings_of(**given: Any) -> Any:
    return message_formats(GatewaySection(**given), template_of(TEMPLATE))


def test_settings_choose_the_form() -> None:
    auto = settings_of()
    assert (auto.calls.name, auto.reasons, auto.has_channels) == ("openai", True, True)
    named = settings_of(tool_call_parser="none", reasoning_parser="openai_gptoss")
    assert (named.calls, named.reasons, named.has_channels) == (None, True, True)
    assert not settings_of(tool_call_parser="none", reasoning_parser="none").has_channels
    for name in ("glm45", "minimax_m2"):
        formats = message_formats(GatewaySection(reasoning_parser=name), template_of("{{ tools }}"))
        assert (formats.reasons, formats.has_channels) == (True, False)
    with pytest.raises(ConfigError, match=r"--tool-call-parser hermes: .* openai, or none"):
        settings_of(tool_call_parser="hermes")


@cache
def grammar_tokenizer() -> LLTokenizer:
    return LLTokenizer(marked_backend().to_str(), eos_token=ids("<|return|><|call|>"))


def allowed(*answers: str, **fields: Any) -> set[int]:
    """Return the indices of the answers that the grammar of a request allows as a whole."""
    matcher = LLMatcher(grammar_tokenizer(), ask("hi", **fields)[1].sampling.grammar)
    assert not matcher.is_error(), matcher.get_error()
    found = set()
    for idx, tokens in enumerate(map(ids, answers)):
        if matcher.validate_tokens(tokens) == len(tokens):
            matcher.consume_tokens(tokens)
            found |= {idx} if matcher.is_accepting() else set()
            matcher.reset()
    return found


NOW = CALL.replace("add", "now").replace('{"a": 1}', "{}")
LIST = "<|channel|>final<|message|>[1]"
ANSWERS = [
    FINAL, CALL, NOW, LIST, f"{THOUGHT}{NEXT}{CALL}", f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{LIST}",
    CALL.replace(" <|constrain|>json", ""), CALL.replace("1", '"x"'), CALL.replace("add", "sub"),
    f"{CALL}{NEXT}{NOW}", f"{THOUGHT}{NEXT}{FINAL}", THOUGHT, f"{FINAL}{NEXT}{CALL}", "[1]", "Yes.",
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({**TOOLS, "tool_choice": "required"}, {1, 2, 4, 6, 9}),
        ({**TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, {1, 2, 4, 6}),
        ({**TOOLS, "tool_choice": {"function": {"name": "now"}}}, {2}),
        (SCHEMA, {3, 5}),
        ({**SCHEMA, **TOOLS}, {1, 2, 3, 4, 5, 6, 9}),
        ({**SCHEMA, **TOOLS, "tool_choice": "none"}, {3, 5}),
        ({**SCHEMA, **TOOLS, "tool_choice": "required"}, {1, 2, 4, 6, 9}),
        (STRICT, {0, 1, 2, 3, 4, 5, 6, 9, 10, 11, 12}),
        ({**STRICT, "parallel_tool_calls": False}, {0, 1, 2, 3, 4, 5, 6, 10, 11, 12}),
    ],
)
def test_a_grammar_leaves_reasoning_free(fields: dict[str, Any], wanted: set[int]) -> None:
    assert allowed(*ANSWERS, **fields) == wanted


def test_only_what_is_forced_has_a_grammar() -> None:
    for fields in ({}, TOOLS, {**STRICT, "tool_choice": "none"}):
        assert ask(FINAL, **fields)[1].sampling.grammar == ""


def test_a_grammar_goes_on_with_what_the_client_began() -> None:
    messages = [USER, {"role": "assistant", "content": "["}]
    begun: dict[str, Any] = {"messages": messages, "continue_final_message": True}
    assert allowed("1, 2]", FINAL, **begun, structured_outputs={"regex": "[0-9, ]+]"}) == {0}
    assert message_of(ask("1]", **begun)[0])["content"] == "1]"
    required = {**begun, **TOOLS, "tool_choice": "required"}
    called = f"]{NEXT}{THOUGHT}{NEXT}{CALL}"
    answers = ("]", called, called.replace("1", '"x"'))
    assert allowed(*answers, **required) == {1}
    assert allowed(*answers, **begun, **STRICT) == {0, 1}

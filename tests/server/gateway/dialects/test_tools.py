"""Chats with tools and reasoning: what the prompt shows, and how the answer is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from server.gateway.parsing.call_formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM45,
    GLM47,
    HERMES,
    KIMI_K2,
    LLAMA3,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_LIST,
    QWEN3_CODER,
    CallFormat,
    call_format,
)
from server.gateway.parsing.formats import message_formats
from tests.pairwise import few
from tests.server.gateway.calls import (
    CHAT,
    CHAT_BODY,
    answer_to,
    events_of,
    post,
    prompt_of,
    without_head,
)
from tests.server.gateway.fakes import TOOL_TEMPLATE as SOURCE
from tests.server.gateway.fakes import (
    FakeEngine,
    gateway,
    ids,
    output,
    saying,
    template_of,
    tool_template,
)
from tests.server.gateway.named import NAMES, written_section
from topspin.messages import AddRequest, RequestOutput, TokenLogprobs, unpack_ints
from topspin.plan.settings import GatewaySection

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def ask(text: str, *, fake: FakeEngine | None = None, **fields: Any) -> Any:
    """Return the answer to a chat with the tools, of a model that says `text`."""
    fake = fake or FakeEngine(saying(text, finish_reason="stop"))
    body = {**CHAT_BODY, "tools": TOOLS, **fields}
    response = post(CHAT, body, fake, template=tool_template(), max_request_tokens=1000)
    return events_of(response) if fields.get("stream") else response.json()


def called(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": "so", "tool_calls": [call]}


def test_a_call_is_the_answer() -> None:
    choice = ask(CALL)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    [call] = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}


def test_a_streamed_call_comes_in_pieces() -> None:
    events = [without_head(event) for event in ask("I add. " + CALL, stream=True)]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == "I add."
    first, *more = (call for delta in deltas for call in delta.get("tool_calls", []))
    assert set(first) == {"index", "id", "type", "function"}
    assert first["function"] == {"name": "add", "arguments": ""}
    assert len(more) > 2
    assert all(set(call) == {"index", "function"} for call in more)
    assert "".join(call["function"]["arguments"] for call in more) == '{"a": 1, "b": 2}'
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_schemas_of_a_request_tell_the_values_of_a_call_in_tags() -> None:
    template = template_of("{{ tools and 1 }}<tool_call><function=f><parameter=a>")
    said = "<function=add>\n<parameter=a>\n5\n</parameter>\n<parameter=s>\n5\n</parameter>\n"
    properties = {"a": {"type": "integer"}, "s": {"type": "string"}}
    function = {"name": "add", "parameters": {"type": "object", "properties": properties}}
    body = {**CHAT_BODY, "tools": [{"type": "function", "function": function}]}
    fake = FakeEngine(saying(said, finish_reason="stop"))
    formats = message_formats(GatewaySection(), template)
    response = answer_to(CHAT, body, fake=fake, template=template, formats=formats)
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 5, "s": "5"}'}


NAMED = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("said", "finish", "fields", "reason", "content", "num_calls"),
    [
        ("No need.", "stop", {}, "stop", "No need.", 0),
        (CALL[:-20], "length", {}, "length", None, 1),
        (CALL + CALL, "stop", {}, "tool_calls", None, 2),
        (CALL + CALL, "stop", {"parallel_tool_calls": False}, "tool_calls", None, 1),
        (CALL, "stop", {"tool_choice": "none"}, "stop", CALL, 0),
        (CALL, "stop", {"tool_choice": "required"}, "tool_calls", None, 1),
        # OpenAI's reason of the end of a call that the client named is `stop`.
        (CALL, "stop", {"tool_choice": NAMED}, "stop", None, 1),
        (CALL, "stop", {"stop": ["}"]}, "stop", None, 1),
    ],
)
def test_what_an_answer_shows_and_why_it_ends(
    *, said: str, finish: Any, fields: Any, reason: str, content: str | None, num_calls: int
) -> None:
    fake = FakeEngine(saying(said, finish_reason=finish))
    choice = ask("", fake=fake, **fields)["choices"][0]
    assert choice["finish_reason"] == reason
    assert choice["message"]["content"] == content
    calls = choice["message"].get("tool_calls", [])
    assert len(calls) == num_calls
    assert all(call["function"]["arguments"].startswith('{"a": 1') for call in calls)
    is_forced = fields.get("tool_choice") in ("required", NAMED)
    assert ("call_0_arguments" in fake.added[0].sampling.grammar) is is_forced
    assert choice.get("stop_reason") == ("}" if "stop" in fields else None)


def test_the_prompt_shows_tools_calls_and_results() -> None:
    fake = FakeEngine(saying("3"))
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    history = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    # A call without arguments, and a tool that has nothing to say.
    nothing = [called(""), {"role": "tool", "tool_call_id": "c", "content": None}]
    ask("", fake=fake, messages=history + nothing)
    shown, _, rest = prompt_of(fake.added[0]).partition("user: ")
    assert json.loads(shown) == TOOLS[0]
    assert rest == (
        "1+2?assistant: <think>hm</think>"
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>tool: 3(c1)'
        'assistant: so<tool_call>{"name": "add", "arguments": {}}</tool_call>tool: (c)assistant: '
    )


def test_the_order_of_keys_does_not_change_the_prompt() -> None:
    def reversed_keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reversed_keys(value[key]) for key in reversed(value)}
        return [reversed_keys(item) for item in value] if isinstance(value, list) else value

    first, second = FakeEngine(saying("ok")), FakeEngine(saying("ok"))
    ask("", fake=first)
    cached = {"cache_control": {"type": "ephemeral"}}
    ask("", fake=second, tools=[{**reversed_keys(TOOLS[0]), **cached}])
    assert prompt_of(first.added[0]) == prompt_of(second.added[0])


def test_an_answer_goes_on_within_reasoning_that_the_client_began() -> None:
    messages = [{"role": "assistant", "content": "<think>Let me"}]
    answer = ask(" see</think>42", messages=messages, continue_final_message=True)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" see", "42")


async def test_ids_of_calls_have_the_length_that_the_template_takes() -> None:
    source = (
        "{{ tools }}[TOOL_CALLS]name[ARGS]{% for message in messages %}"
        "{% for call in message.tool_calls or [] %}{{ call.id }} {% endfor %}"
        "{% if message.role == 'tool' %}{{ message.tool_call_id }}{% endif %}{% endfor %}"
    )
    messages: list[Any] = []
    for call_id in ("call_0123456789abcdef", "c1"):
        call = {"id": call_id, "function": {"name": "add", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call_id, "content": "3"})
    fake = FakeEngine(saying("ok"))
    async with gateway(fake, template=template_of(source)) as client:
        body = {"model": "tiny", "messages": messages}
        assert (await client.post(CHAT, json=body)).status_code == 200
        shown = (await client.post("/tokenize", json=body)).json()["tokens"]
    prompt = prompt_of(fake.added[0])
    assert prompt.endswith("789abcdef 789abcdef0000000c1 0000000c1")
    assert shown == list(unpack_ints(fake.added[0].prompt))


@pytest.mark.parametrize("opens", [True, False])
def test_reasoning_is_shown_apart_and_counted(opens: bool) -> None:
    said = "hm</think>\n\nYes." if opens else "<think>\nhm</think>\n\nYes."
    answer = ask(said, chat_template_kwargs={"think": opens})
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "hm"
    assert message["content"] == "Yes."
    num_tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert num_tokens == len(said.partition("</think>")[0] + "</think>") - (0 if opens else 6)
    hidden = ask(said, chat_template_kwargs={"think": opens}, include_reasoning=False)
    assert not {"reasoning_content", "reasoning"} & set(hidden["choices"][0]["message"])
    events = ask(said, chat_template_kwargs={"think": opens}, stream=True)
    deltas = [event["choices"][0]["delta"] for event in events]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == "hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


V3_CALL, V31_CALL, KIMI_CALL = (written_section(name, [("f", "{}")]) for name in NAMES)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (SOURCE, HERMES),
        ("{{ tools }}[TOOL_CALLS] [", MISTRAL_LIST),
        ("{{ tools }}[TOOL_CALLS]name[ARGS]", MISTRAL),
        ("<|start_header_id|>{{ tools }}{{ '\"parameters\"' }}", LLAMA3),
        ("{{ tools }}<tool_call><function=f><parameter=a>", QWEN3_CODER),
        ("{{ tools }}<function=f>", None),
        ("{{ tools }}<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>", GLM45),
        ("{{ tools }}<tool_call>f<arg_key>a</arg_key><arg_value>", GLM47),
        ("{{ tools }}<minimax:tool_call><invoke>", MINIMAX_M2),
        (f"{{{{ tools }}}}{V3_CALL}", DEEPSEEK_V3),
        (f"{{{{ tools }}}}{V31_CALL}", DEEPSEEK_V31),
        (f"{{{{ tools }}}}{KIMI_CALL}", KIMI_K2),
        ("{{ messages }}", HERMES),
        ("{{ tools }}", None),
    ],
)
def test_the_template_tells_the_format(text: str, wanted: CallFormat | None) -> None:
    assert call_format("auto", template_of(text)) is wanted
    assert call_format("mistral", template_of(text)) is MISTRAL
    assert call_format("none", template_of(text)) is None


def test_settings_choose_the_formats() -> None:
    def reasons(name: Any) -> bool:
        return message_formats(GatewaySection(reasoning_parser=name), tool_template()).reasons

    assert [reasons(name) for name in ("auto", "none", "qwen3")] == [True, False, True]
    plain = template_of("{{ messages }}")
    assert not message_formats(GatewaySection(), plain).reasons


@pytest.mark.parametrize(
    ("fields", "source", "settings", "param"),
    [
        ({"report_prefix_cache": True}, "{{ messages }}", {}, "report_prefix_cache"),
        ({}, "{{ tools }}", {}, "tools"),
        ({"tool_choice": {"function": {"name": "sub"}}}, SOURCE, {}, "tool_choice"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, SOURCE, {}, "tools[1]"),
        ({}, SOURCE, {"enable_auto_tool_choice": False}, "tool_choice"),
        ({"tool_choice": "required", "ignore_eos": True}, SOURCE, {}, "ignore_eos"),
        (
            {"messages": [called("{}")], "continue_final_message": True},
            *(SOURCE, {}, "messages[0]"),
        ),
    ],
)
def test_a_refused_use_of_tools_is_named(
    fields: dict[str, Any], source: str, settings: dict[str, Any], param: str
) -> None:
    fake, template = FakeEngine(saying("ok")), template_of(source)
    formats = message_formats(GatewaySection(**settings), template)
    body = {**CHAT_BODY, "tools": TOOLS, **fields}
    response = answer_to(CHAT, body, fake=fake, template=template, formats=formats)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert fake.added == []


def test_tools_that_may_not_be_called_are_ignored_by_a_template_without_them() -> None:
    plain = template_of("{% for message in messages %}{{ message.content }}{% endfor %}")
    for path, more, none in (
        (CHAT, {"tools": TOOLS}, "none"),
        ("/v1/messages", {"tools": [{"name": "add", "input_schema": {}}]}, {"type": "none"}),
    ):
        body = {**CHAT_BODY, **more, "tool_choice": none, "max_tokens": 9}
        fake = FakeEngine(saying("ok"))
        answer = post(path, body, fake, template=plain)
        assert answer.headers["x-topspin-ignored"] == "tools"
        assert prompt_of(fake.added[0]) == "hi"


def test_a_template_without_tools_gets_a_generic_prompt() -> None:
    turn = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    result = {"role": "tool", "tool_call_id": "c", "content": "3"}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "1 + 2, 3 + 4?"},
        called('{"a": 1, "b": 2}'),
        result,
        {**result, "content": "7"},
    ]
    fake = FakeEngine(saying(CALL, finish_reason="stop"))
    body = {**CHAT_BODY, "tools": TOOLS, "messages": messages}
    answer = post(CHAT, body, fake, template=template_of(turn), max_request_tokens=2000)
    assert answer.headers["x-topspin-tools"] == "generic"
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
    prompt = prompt_of(fake.added[0])
    assert prompt.startswith("[system]Be brief.\n")
    head, user, said, results = re.split(r"\[user\]|\[assistant\]", prompt)
    assert json.dumps(TOOLS[0]["function"]) in head
    assert user == "1 + 2, 3 + 4?"
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert said == f"so\n{written}"
    assert results == "<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response>"


def test_without_a_system_message_the_generic_prompt_is_one() -> None:
    turn = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    fake = FakeEngine(saying("No."))
    body = {**CHAT_BODY, "tools": TOOLS}
    answer = post(CHAT, body, fake, template=template_of(turn), max_request_tokens=2000)
    assert answer.json()["choices"][0]["message"]["content"] == "No."
    assert prompt_of(fake.added[0]).startswith("[system]You can call these functions.")
    plain = post(CHAT, CHAT_BODY, FakeEngine(saying("Yes.")), template=template_of(turn))
    assert "x-topspin-tools" not in plain.headers


def in_steps(text: str, step: int) -> FakeEngine:
    """Return an engine that says `text`, so many tokens a step, with log-probabilities."""

    def script(request: AddRequest) -> Iterator[RequestOutput]:
        said = ids(text)
        for index in range(0, len(said), step):
            part = said[index : index + step]
            scores = tuple(TokenLogprobs(-0.5) for _ in part)
            finish = "stop" if index + step >= len(said) else None
            yield output(request, part, index=index, finish_reason=finish, logprobs=scores)

    return FakeEngine(script)


@pytest.mark.parametrize("step", few([1, 2, 3, 7, 100], 1, 7))
@pytest.mark.parametrize(
    ("said", "opens", "shown"),
    [
        ("<think>\nhm</think>\n\nYes, 1", False, "Yes, 1"),
        ("hm</think>No", True, "No"),
        ("\n<thin ice", False, "\n<thin ice"),
        ("<think>never ends", False, ""),
    ],
)
def test_tokens_of_reasoning_that_is_not_shown_are_not_either(
    step: int, said: str, opens: bool, shown: str
) -> None:
    asked = {
        "include_reasoning": False,
        "logprobs": True,
        "return_token_ids": True,
        "chat_template_kwargs": {"think": opens},
    }
    for stop in ({}, {"stop": "never"}):
        choice = ask("", fake=in_steps(said, step), **asked, **stop)["choices"][0]
        assert choice["message"]["content"] == shown
        assert "".join(each["token"] for each in choice["logprobs"]["content"]) == shown
        assert choice["token_ids"] == ids(shown)
        events = ask("", fake=in_steps(said, step), **asked, **stop, stream=True)
        parts = [event["choices"][0] for event in events]
        entries = [each for part in parts for each in (part["logprobs"] or {}).get("content", ())]
        assert "".join(each["token"] for each in entries) == shown
        assert [each for part in parts for each in part.get("token_ids", ())] == ids(shown)


def test_a_responses_text_has_its_own_log_probabilities_only() -> None:
    said, path = "<think>hm</think>Yes", "/v1/responses"
    body = {"model": "tiny", "input": "hi", "include": ["message.output_text.logprobs"]}
    options: dict[str, Any] = {"template": tool_template(), "max_request_tokens": 1000}
    answer = post(path, body, in_steps(said, 3), **options).json()
    [reasoning, message] = answer["output"]
    assert reasoning["content"][0]["text"] == "hm"
    entries = message["content"][0]["logprobs"]
    assert "".join(each["token"] for each in entries) == "Yes"
    streamed = post(path, {**body, "stream": True}, in_steps(said, 3), **options)
    last = json.loads(streamed.text.strip().rpartition("data: ")[2])
    assert last["response"]["output"][1]["content"][0]["logprobs"] == entries

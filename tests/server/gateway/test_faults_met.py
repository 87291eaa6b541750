"""Faults that users of other servers met here, one row each: a request, and what it gets now.

The faults' numbers are those of the outside review of 2026-11-24, section 2. Those that are not of
one request are tested elsewhere: packages' names (2) in tests/test_docs.py, early headers (3) in
test_early_streams.py, the log after a grammar's end (9) in tests/attention_nodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from server.gateway.openapi.pages import docs_page
from tests.server.gateway.calls import CHAT, PLAIN, USER, answer_to, events_of
from tests.server.gateway.dialects.test_tools import TOOLS
from tests.server.gateway.fakes import FakeEngine, saying, tool_template

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CHATS: dict[str, Any] = {"messages": [USER]}
FORCED = {**CHATS, "tools": TOOLS, "tool_choice": "required"}
NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}


class Row(NamedTuple):
    """A fault: the request, what the model says, and what the answer has or has not."""

    number: int
    path: str
    body: dict[str, Any]
    says: str = "ok"
    status: int = 200
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()


CUT = '<tool_call>\n{"name": "get_wea'
WHOLE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ROWS = [
    Row(4, RESPONSES, {"input": "hi", "tools": [NAMESPACE, {"type": "web_search"}]}),
    Row(5, RESPONSES, {"input": "hi"}, has=('"model":"tiny"',)),
    Row(5, CHAT, CHATS, has=('"model":"tiny"',)),
    Row(5, PLAIN, {"prompt": "hi"}, has=('"model":"tiny"',)),
    Row(5, MESSAGES, {**CHATS, "max_tokens": 5}, has=('"model":"tiny"',)),
    Row(
        6,
        CHAT,
        CHATS,
        says="<think>hm</think>so",
        has=('"reasoning":"hm"', '"reasoning_content":"hm"', '"content":"so"'),
    ),
    Row(7, CHAT, {**CHATS, "random_seed": 3, "provider": {}, "dry_base": 1.7}),
    Row(7, CHAT, {**CHATS, "max_tokens": -1, "seed": 1.0}),
    Row(7, CHAT, {**CHATS, "guided_choice": ["yes"]}),
    Row(7, CHAT, {**CHATS, "zip": 1}, status=400, has=('"param":"zip"',)),
    Row(
        8,
        RESPONSES,
        {"input": "hi", "repetition_penalty": 1.1, "frequency_penalty": 0.1, "stop": "x"},
    ),
    Row(8, RESPONSES, {"input": "hi", "truncation": "auto", "chat_template_kwargs": {"a": 1}}),
    Row(8, RESPONSES, {"input": "hi", "background": True}, has=('"status":"queued"',)),
    Row(8, f"{RESPONSES}/input_tokens", {"input": "hi"}, has=('"input_tokens":',)),
    Row(10, CHAT, FORCED, says=CUT, has=('"content":""',), lacks=("tool_call", "get_wea")),
    Row(
        10,
        CHAT,
        FORCED,
        says=f"{WHOLE}\n<tool_call>",
        has=('"content":null', '"name":"add"'),
        lacks=("<tool_call>",),
    ),
    Row(
        10,
        RESPONSES,
        {
            "input": "hi",
            "tools": [{"type": "function", **TOOLS[0]["function"]}],
            "tool_choice": "required",
        },
        says=CUT,
        lacks=("<tool_call>", "get_wea"),
    ),
    Row(
        11,
        CHAT,
        {**CHATS, "structured_outputs": {"json": "INVALID"}},
        status=400,
        has=("`structured_outputs.json` is not valid JSON", '"param":"structured_outputs.json"'),
    ),
    Row(
        11,
        CHAT,
        {**CHATS, "logit_bias": {"x": 1}},
        status=400,
        has=("the key `x`", '"param":"logit_bias.x"'),
    ),
    Row(
        11,
        CHAT,
        {**CHATS, "logit_bias": {"-1": 1}},
        status=400,
        has=('"param":"logit_bias.-1"',),
    ),
    Row(
        12,
        MESSAGES,
        {"messages": [{"role": "user", "content": "x" * 5000}], "max_tokens": 5},
        status=400,
        has=("prompt is too long: ",),
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.number}-{row.path}")
def test_a_fault_is_mended(row: Row) -> None:
    fake = FakeEngine(saying(row.says))
    options: dict[str, Any] = {"template": tool_template(), "max_request_tokens": 2000}
    answer = answer_to(row.path, row.body, fake=fake, **options)
    assert answer.status_code == row.status, answer.text
    for text in row.has:
        assert text in answer.text
    for text in row.lacks:
        assert text not in answer.text


@pytest.mark.parametrize("says", [CUT, f"{WHOLE}\n<tool_call>", f"<think>hm</think>{CUT}"])
def test_no_event_of_a_forced_call_has_markup(says: str) -> None:
    fake = FakeEngine(saying(says))
    options: dict[str, Any] = {"template": tool_template(), "max_request_tokens": 2000}
    events = events_of(answer_to(CHAT, {**FORCED, "stream": True}, fake=fake, **options))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == ""
    names = [call["function"].get("name") for each in deltas for call in each.get("tool_calls", ())]
    assert [name for name in names if name] == (["add"] if "add" in says else [])
    assert "".join(delta.get("reasoning", "") for delta in deltas) == ("hm" if "hm" in says else "")


def test_the_pages_examples_can_be_run_in_a_shell() -> None:
    """13: a place in a path was percent-encoded, and DELETE was a GET."""
    assert '"-X " + method.toUpperCase()' in docs_page()
    assert "name.toUpperCase()" in docs_page()

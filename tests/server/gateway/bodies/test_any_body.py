"""Any bytes and any JSON as a body: an answer or an error of 4xx, in the API's shape, never a 5xx.

Beside tests of exact errors (test_errors.py) and of what the description allows (test_conformance).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import msgspec
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from server.gateway.dialects.anthropic.request import MessagesBody
from server.gateway.dialects.chat.request import ChatBody
from server.gateway.dialects.completions.request import CompletionBody
from server.gateway.dialects.responses.request import ResponsesBody
from server.gateway.dialects.tokenization import TokenizeBody
from tests.mutations import damaged
from tests.server.gateway.calls import CHAT, JSON, PLAIN, USER, scored
from tests.server.gateway.fakes import FakeEngine, gateway, tool_template

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]}
ROUTES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    CHAT: (ChatBody, {"messages": [USER]}),
    PLAIN: (CompletionBody, {"prompt": "hi"}),
    "/v1/responses": (ResponsesBody, {"input": "hi"}),
    "/v1/messages": (MessagesBody, {"messages": [USER], "max_tokens": 4}),
    "/v1/messages/count_tokens": (MessagesBody, {"messages": [USER]}),
    "/tokenize": (TokenizeBody, {"prompt": "hi"}),
    "/detokenize": (TokenizeBody, {"tokens": [1, 2]}),
}
# What fields of some API are like; each is also given to fields of another kind.
PLAUSIBLE: list[Any] = [
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}],
    [{"role": "tool", "content": [{"type": "text", "text": "x"}], "tool_call_id": "c"}, USER],
    [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}],
    [TOOL],
    [{"name": "f", "input_schema": SCHEMA}],
    [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
    {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    {"type": "json_schema", "schema": SCHEMA},
    {"json": SCHEMA},
    {"regex": "[a-z"},
    {"grammar": 'root ::= "a" | root'},
    {"choice": ["a", "\u0000"]},
    {"type": "function", "function": {"name": "f"}},
    {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    {"include_usage": True},
    {"enable_thinking": True, "x": 1.5},
    {"1": 2.0, "-1": 1},
    {"type": "enabled"},
    ["message.output_text.logprobs"],
    "required",
    [[1, 2], [3]],
    ["\ud800", "<|eos|>", ""],
]
SCALARS = st.sampled_from(
    [
        *(None, True, False, 0, 1, 2, 5, -1, 2**31, 2**63, -(2**63) - 1, 10**40, 0.5, 1e308),
        *("", "a", "hi \u0000 <|eos|>", "\ud800", "\U0001f600", "auto", "none", "x" * 300),
    ]
)
VALUES = st.recursive(
    SCALARS | st.sampled_from(PLAUSIBLE),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "name", "text", "a", "$ref", "", "anyOf"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def _body(path: str) -> st.SearchStrategy[bytes]:
    """Return bodies of a route with any values in some fields."""
    kind, least = ROUTES[path]
    names = st.sampled_from([field.name for field in msgspec.structs.fields(kind)])
    fields = st.dictionaries(names, SCALARS | st.sampled_from(PLAUSIBLE) | VALUES, max_size=4)
    return fields.map(lambda own: json.dumps({"model": "tiny", **least, **own}).encode())


def _damaged(path: str) -> st.SearchStrategy[bytes]:
    """Return bodies of a route that are no JSON any more, or other JSON."""
    _, least = ROUTES[path]
    full = {"model": "tiny", **least, "tools": [TOOL], "stop": ["a"], "seed": 5}
    return damaged([json.dumps(full).encode(), json.dumps({"model": "tiny", **least}).encode()])


REQUESTS = st.sampled_from(list(ROUTES)).flatmap(
    lambda path: st.tuples(st.just(path), _body(path) | _body(path) | _damaged(path))
)
ANYTHING = st.tuples(
    st.sampled_from(list(ROUTES)),
    st.binary(max_size=40) | VALUES.map(lambda value: json.dumps(value).encode()),
)


async def statuses_of(requests: list[tuple[str, bytes]]) -> list[int]:
    """Send the requests and return the answers' statuses, after checks of the errors."""
    fake, found = FakeEngine(scored("hello")), []
    async with gateway(fake, template=tool_template(), max_request_tokens=10_000) as client:
        for path, body in requests:
            answer = await client.post(path, content=body, headers=JSON)
            assert answer.status_code < 500, (path, body, answer.text)
            if answer.status_code != 200:
                message = answer.json()["error"]["message"]
                assert 0 < len(message) <= 700, (path, body)
            found.append(answer.status_code)
    return found


def test_any_body_is_answered_or_refused() -> None:
    statuses: Counter[int] = Counter()

    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(REQUESTS | REQUESTS | ANYTHING, min_size=1, max_size=6))
    @example([(CHAT, b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}')])
    @example([(PLAIN, b'{"model": "tiny", "prompt": "hi", "stop": "\\ud800"}')])
    @example([(PLAIN, b'{"model": "tiny", "prompt": "hi", "cache_salt": "\\ud800"}')])
    @example([("/v1/responses", b'{"model": "tiny", "input": "hi", "metadata": {"a": "\\ud800"}}')])
    @example([(PLAIN, b'{"model": "tiny", "prompt": "\xff"}')])
    @example([(PLAIN, b"[" * 100_000)])
    def send(requests: list[tuple[str, bytes]]) -> None:
        statuses.update(asyncio.run(statuses_of(requests)))

    send()
    assert statuses[200] > 5, "only refusals were checked"
    assert statuses[400] > 5

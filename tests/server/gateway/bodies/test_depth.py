"""JSON that is nested without end: an error of 4xx from every place that takes a client's JSON."""

from __future__ import annotations

import json

import pytest

from models.text.chat_template import ChatTemplate
from server.gateway.bodies.decoding import MAX_DEPTH, check_depth
from tests.server.gateway.calls import CHAT, USER
from tests.server.gateway.fakes import FakeEngine, gateway, saying
from topspin.errors import InvalidRequest

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{{ message.tool_calls | tojson if message.tool_calls }}{% endfor %}"
    "{{ tools | tojson if tools }}{# <tool_call> tool #}"
)
HI = json.dumps([USER])
FUNCTION = '{"type": "function", "function": {"name": "f", %s}}'
# The place of a value in a body, and the field that an error names.
PLACES = {
    "schema": (
        CHAT,
        '"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": %s}}',
        "response_format.json_schema.schema",
    ),
    "text": (CHAT, '"structured_outputs": {"json": %r}', "structured_outputs.json"),
    "tool": (
        CHAT,
        f'"tools": [{FUNCTION}]' % '"parameters": %s',
        "tools[0].function.parameters",
    ),
    "strict": (
        CHAT,
        f'"tools": [{FUNCTION}]' % '"strict": true, "parameters": %s',
        "tools[0].function.parameters",
    ),
    "call": (
        CHAT,
        f'"messages": [{{"role": "assistant", "tool_calls": [{FUNCTION}]}}]' % '"arguments": %r',
        "messages[0].tool_calls[0].function.arguments",
    ),
    "anthropic": (
        "/v1/messages",
        '"output_format": {"type": "json_schema", "schema": %s}',
        "response_format.json_schema.schema",
    ),
    "response": (
        "/v1/responses",
        '"text": {"format": {"type": "json_schema", "name": "a", "schema": %s}}',
        "response_format.json_schema.schema",
    ),
    "tokenize": (
        "/tokenize",
        f'"tools": [{FUNCTION}]' % '"parameters": %s',
        "tools[0].function.parameters",
    ),
    "ignored": (CHAT, '"metadata": {"a": %s}', None),
    "prompt": ("/v1/completions", '"prompt": %s', None),
}


def nested(depth: int) -> str:
    """Return a JSON schema of `depth` objects in each other, an odd number."""
    num = depth // 2
    return '{"type": "object", "properties": {"a": ' * num + '{"type": "string"}' + "}}" * num


def body_of(place: str, value: str) -> bytes:
    path, form, _ = PLACES[place]
    field = form.replace("%r", json.dumps(value)).replace("%s", value)
    rest = {
        "/v1/messages": f'"max_tokens": 4, "messages": {HI},',
        "/v1/responses": '"input": "hi",',
        "/v1/completions": "",
    }.get(path, f'"messages": {HI},')
    if '"messages"' in field:
        rest = ""
    return f'{{"model": "tiny", {rest} {field}}}'.encode()


@pytest.mark.parametrize("place", PLACES)
async def test_json_may_be_nested_but_not_without_end(place: str) -> None:
    path, _, param = PLACES[place]
    template = ChatTemplate({"default": TEMPLATE}, special_tokens={}, source="test")
    fake = FakeEngine(saying("ok"))
    async with gateway(fake, chat_template=template, max_request_tokens=10**6) as client:
        for depth in (1, MAX_DEPTH - 1, MAX_DEPTH + 1, 333, 495, 981, 3001, 100_001):
            answer = await client.post(
                path,
                content=body_of(place, nested(depth)),
                headers={"content-type": "application/json"},
            )
            shown = (depth, answer.text[:300])
            if depth < MAX_DEPTH and place != "prompt":
                assert answer.status_code == 200, shown
            elif param is None:
                assert answer.status_code in (200, 400, 413), shown
            else:
                assert answer.status_code in (400, 413), shown
                error = answer.json()["error"]
                if depth < 300 and path != "/v1/messages":
                    assert error["param"] == param, shown
                    assert "is nested too deeply" in error["message"], shown


def test_depth_counts_objects_and_lists() -> None:
    value: object = 1
    for idx in range(MAX_DEPTH):
        value = {"a": value, "b": 2} if idx % 2 else [3, value]
    check_depth(value, param="x")
    with pytest.raises(InvalidRequest, match="`x` is nested too deeply"):
        check_depth({"deeper": value}, param="x")
    check_depth([[]] * 1000, param="x")

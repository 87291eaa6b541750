"""JSON that is nested without end: an error of 4xx from every place that takes a client's JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.gateway.bodies.decoding import MAX_DEPTH, check_depth
from tests.server.gateway.calls import CHAT, JSON, PLAIN, USER
from tests.server.gateway.fakes import FakeEngine, gateway, saying, tool_template
from topspin.errors import InvalidRequest

# Where the nested value stands in a body: as it is, or as JSON text.
VALUE, TEXT = "@value", "@text"
FORMAT = {"type": "json_schema", "schema": VALUE}
NAMED = {"name": "a", "schema": VALUE}
CHATS = {"messages": [USER]}
SCHEMA = "response_format.json_schema.schema"


def function(**members: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **members}}


# The path, the body, and the field that an error names.
PLACES: dict[str, tuple[str, dict[str, object], str | None]] = {
    "schema": (CHAT, {"response_format": {"type": "json_schema", "json_schema": NAMED}}, SCHEMA),
    "text": (CHAT, {"structured_outputs": {"json": TEXT}}, "structured_outputs.json"),
    "tool": (CHAT, {"tools": [function(parameters=VALUE)]}, "tools[0].function.parameters"),
    "strict": (
        CHAT,
        {"tools": [function(parameters=VALUE, strict=True)]},
        "tools[0].function.parameters",
    ),
    "call": (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [function(arguments=TEXT)]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "anthropic": ("/v1/messages", {"output_format": FORMAT, "max_tokens": 4}, None),
    "response": ("/v1/responses", {"text": {"format": {**FORMAT, **NAMED}}, "input": "hi"}, SCHEMA),
    "tokenize": (
        "/tokenize",
        {"tools": [function(parameters=VALUE)]},
        "tools[0].function.parameters",
    ),
    "ignored": (CHAT, {"metadata": {"a": VALUE}}, None),
    "prompt": (PLAIN, {"prompt": VALUE}, None),
}


def nested(depth: int) -> str:
    """Return a JSON schema of `depth` objects in each other, an odd number."""
    num = depth // 2
    return '{"type": "object", "properties": {"a": ' * num + '{"type": "string"}' + "}}" * num


def body_of(place: str, value: str) -> bytes:
    path, fields, _ = PLACES[place]
    rest = {} if path in (PLAIN, "/v1/responses") else CHATS
    text = json.dumps({"model": "tiny", **rest, **fields})
    return text.replace(f'"{VALUE}"', value).replace(f'"{TEXT}"', json.dumps(value)).encode()


@pytest.mark.parametrize("place", PLACES)
async def test_json_may_be_nested_but_not_without_end(place: str) -> None:
    path, _, param = PLACES[place]
    fake = FakeEngine(saying("ok"))
    async with gateway(fake, template=tool_template(), max_request_tokens=10**6) as client:
        for depth in (1, MAX_DEPTH - 1, MAX_DEPTH + 1, 333, 495, 981, 3001, 100_001):
            content = body_of(place, nested(depth))
            answer = await client.post(path, content=content, headers=JSON)
            shown = (depth, answer.text[:300])
            if depth < MAX_DEPTH and place != "prompt":
                assert answer.status_code == 200, shown
            elif place in ("ignored", "prompt"):
                assert answer.status_code in (200, 400, 413), shown
            else:
                assert answer.status_code in (400, 413), shown
                if depth < 300 and param is not None:
                    error = answer.json()["error"]
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

"""The official anthropic client against the gateway, over loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.gateway.calls import prompt_of
from tests.server.gateway.dialects.test_tools import CALL
from tests.server.gateway.fakes import (
    EOS_ID,
    FakeEngine,
    ids,
    loopback,
    output,
    saying,
    tool_template,
)
from topspin.messages import AddRequest, RequestOutput

ADD: dict[str, Any] = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
ASK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "hi"}],
}


@asynccontextmanager
async def client_of(fake: FakeEngine) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        loopback(fake, template=tool_template(), max_request_tokens=2000) as port,
        anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0, timeout=10.0
        ) as client,
    ):
        yield client


def greeting(request: AddRequest) -> list[RequestOutput]:
    """Say `hello `, the prompt's first 4 tokens cached."""
    return [
        output(request, ids("hello"), num_cached_tokens=4),
        output(request, [*ids(" "), EOS_ID], index=1, finish_reason="stop", stop_token_id=EOS_ID),
    ]


async def test_a_message() -> None:
    fake = FakeEngine(greeting)
    async with client_of(fake) as client:
        answer = await client.messages.create(
            **ASK,
            system=[
                {"type": "text", "text": "x-anthropic-billing-header: cch=a81f;"},
                {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
            ],
            stop_sequences=["STOP"],
            metadata={"user_id": "u"},
            extra_body={"temperature": 0.5, "top_k": 3},
        )
    assert answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "tiny")
    assert [block.model_dump(include={"type", "text"}) for block in answer.content] == [
        {"type": "text", "text": "hello "}
    ]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    prompt = prompt_of(fake.added[0])
    assert prompt == "system: Be kind.user: hiassistant: "
    assert answer.usage.cache_read_input_tokens == 4
    assert answer.usage.input_tokens == len(ids(prompt)) - 4
    assert answer.usage.output_tokens == 3
    sampling = fake.added[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k) == (500, 0.5, 3)


async def test_a_message_with_reasoning_text_and_calls_streamed_and_whole() -> None:
    said = f"<think>\nhm</think>I add. {CALL}{CALL} So."
    fake = FakeEngine(saying(said, finish_reason="stop"))
    shown: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    async with client_of(fake) as client:
        kinds, thinking = [], ""
        async with client.messages.stream(**ASK, tools=[ADD], **shown) as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type == "thinking":
                    thinking += event.thinking
            final = await stream.get_final_message()
        whole = await client.messages.create(**ASK, tools=[ADD], **shown)
        hidden = await client.messages.create(**ASK, tools=[ADD])
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 5
    assert thinking == "hm"
    blocks = ["text", "tool_use", "tool_use", "text"]
    for answer in (final, whole):
        assert [block.type for block in answer.content] == ["thinking", *blocks]
        call = answer.content[2]
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("add", {"a": 1, "b": 2})
        assert answer.stop_reason == "tool_use"
        assert answer.usage.output_tokens == len(ids(said))
    assert [block.type for block in hidden.content] == blocks, "unless it is asked for"


async def test_results_of_tools_are_messages_of_the_prompt() -> None:
    fake = FakeEngine(saying("3", finish_reason="stop"))
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"b": 2, "a": 1}}
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    no = {"type": "text", "text": "no"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [no], "is_error": True}
    history: list[Any] = [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": [thinking, {"type": "text", "text": "I add."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "Go on. " * 500}]},
        {"role": "assistant", "content": "a"},
    ]
    async with client_of(fake) as client:
        await client.messages.create(**{**ASK, "messages": history[:2] + history[3:]})
        # Also the tokens of a prompt that is too long to be served are counted.
        count = await client.messages.count_tokens(model="tiny", messages=history[:3])
    begin = (
        "user: 1+2?assistant: I add.<think>hm</think>"
        '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
    )
    # An answer continues the assistant's last words.
    assert prompt_of(fake.added[0]) == f"{begin}assistant: a"
    last = f"tool: Error: no(t1)user: {'Go on. ' * 500}assistant: "
    assert count.input_tokens == len(ids(begin + last)) > 2000


@pytest.mark.parametrize(
    ("said", "finish", "reason", "sequence"),
    [
        ("a STOP b", "stop", "stop_sequence", "STOP"),
        ("ab", "length", "max_tokens", None),
        ("ab", "stop", "end_turn", None),
    ],
)
async def test_the_reason_of_the_end(
    said: str, finish: Any, reason: str, sequence: str | None
) -> None:
    fake = FakeEngine(saying(said, finish_reason=finish))
    async with client_of(fake) as client:
        answer = await client.messages.create(**ASK, stop_sequences=["STOP"])
        async with client.messages.stream(**ASK, stop_sequences=["STOP"]) as stream:
            streamed = await stream.get_final_message()
    for each in (answer, streamed):
        assert (each.stop_reason, each.stop_sequence) == (reason, sequence)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tool_choice": {"type": "tool"}, "tools": [ADD]}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "only"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
]


async def test_errors_have_anthropics_shape() -> None:
    fake = FakeEngine(saying("ok"))
    async with client_of(fake) as client:
        for fields, words in REFUSED:
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.post("/v1/messages", body={**ASK, **fields}, cast_to=httpx.Response)
            error = caught.value.body
            assert isinstance(error, dict)
            assert error["type"] == "error"
            assert error["error"]["type"] == "invalid_request_error"
            assert words in error["error"]["message"]
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.messages.create(**{**ASK, "model": "other"})
    assert fake.added == []

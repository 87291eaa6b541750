"""The official anthropic client against the gateway, over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import pytest

from tests.server.gateway.calls import prompt_of
from tests.server.gateway.dialects.test_tools import CALL, template_of
from tests.server.gateway.fakes import EOS_ID, FakeEngine, gateway, ids, loopback, output, saying
from topspin.errors import PeerLost
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
        loopback(fake, chat_template=template_of(), max_request_tokens=2000) as port,
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


async def test_a_streamed_message_with_reasoning_text_and_calls() -> None:
    said = f"<think>\nhm</think>I add. {CALL}{CALL}"
    fake = FakeEngine(saying(said, finish_reason="stop"))
    async with client_of(fake) as client:
        kinds, thinking = [], ""
        async with client.messages.stream(
            **ASK, tools=[ADD], thinking={"type": "enabled", "budget_tokens": 1024}
        ) as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type == "thinking":
                    thinking += event.thinking
            final = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert thinking == "hm"
    assert [block.type for block in final.content] == ["thinking", "text", *["tool_use"] * 2]
    call = final.content[2]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("add", {"a": 1, "b": 2})
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == len(ids(said))


async def test_whole_answers_have_the_same_blocks_and_hide_reasoning_unless_asked() -> None:
    fake = FakeEngine(saying(f"<think>hm</think>I add. {CALL}", finish_reason="stop"))
    async with client_of(fake) as client:
        hidden = await client.messages.create(**ASK, tools=[ADD])
        shown = await client.messages.create(**ASK, tools=[ADD], thinking={"type": "adaptive"})
    assert [block.type for block in hidden.content] == ["text", "tool_use"]
    assert [block.type for block in shown.content] == ["thinking", "text", "tool_use"]
    assert hidden.stop_reason == shown.stop_reason == "tool_use"


async def test_results_of_tools_are_messages_of_the_prompt() -> None:
    fake = FakeEngine(saying("3", finish_reason="stop"))
    history: list[Any] = [
        {"role": "user", "content": "1+2?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"b": 2, "a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    async with client_of(fake) as client:
        await client.messages.create(**{**ASK, "messages": history})
        count = await client.messages.count_tokens(model="tiny", messages=history)
    prompt = prompt_of(fake.added[0])
    assert prompt == (
        "user: 1+2?assistant: I add.<think>hm</think>"
        '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
        "tool: Error: no(t1)user: Go on.assistant: "
    )
    assert count.input_tokens == len(ids(prompt))


async def test_an_answer_continues_the_assistants_last_words() -> None:
    fake = FakeEngine(saying("b", finish_reason="stop"))
    messages: list[Any] = [*ASK["messages"], {"role": "assistant", "content": "a"}]
    async with client_of(fake) as client:
        await client.messages.create(**{**ASK, "messages": messages})
    assert prompt_of(fake.added[0]) == "user: hiassistant: a"


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
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tool_choice": {"type": "tool"}, "tools": [ADD]}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]}, "only"),
    ({"temperature": 1.5}, "temperature"),
    ({"frobnicate": 1}, "frobnicate"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"messages": []}, "messages"),
]


async def test_errors_have_anthropics_shape() -> None:
    fake = FakeEngine(saying("ok"))
    async with client_of(fake) as client:
        for fields, words in REFUSED:
            body = {key: value for key, value in {**ASK, **fields}.items() if value is not None}
            with pytest.raises(anthropic.BadRequestError) as caught:
                await client.post("/v1/messages", body=body, cast_to=httpx.Response)
            error = caught.value.body
            assert isinstance(error, dict)
            assert error["type"] == "error"
            assert error["error"]["type"] == "invalid_request_error"
            assert words in error["error"]["message"]
    assert fake.added == []


async def test_a_whole_answer_has_its_blocks_in_order() -> None:
    fake = FakeEngine(saying(f"A {CALL} B", finish_reason="stop"))
    async with client_of(fake) as client:
        whole = await client.messages.create(**ASK, tools=[ADD])
        async with client.messages.stream(**ASK, tools=[ADD]) as stream:
            streamed = await stream.get_final_message()
    for answer in (whole, streamed):
        assert [block.type for block in answer.content] == ["text", "tool_use", "text"]


async def test_a_prompt_of_any_length_is_counted() -> None:
    async with client_of(FakeEngine(saying("ok"))) as client:
        messages: list[Any] = [{"role": "user", "content": "hi " * 5000}]
        count = await client.messages.count_tokens(model="tiny", messages=messages)
    assert count.input_tokens > 10_000


async def test_other_failures_have_their_types() -> None:
    async with client_of(FakeEngine(saying("ok"))) as client:
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.messages.create(**{**ASK, "model": "other"})


async def test_a_failure_in_a_stream_is_an_error_event() -> None:
    def dying(request: AddRequest) -> list[RequestOutput]:
        return [output(request, ids("he"))]

    fake = FakeEngine(dying)
    async with gateway(fake) as client:
        body = {**ASK, "max_tokens": 50, "stream": True}
        waiting = asyncio.create_task(client.post("/v1/messages", json=body))
        while not fake.added:
            await asyncio.sleep(0)
        await fake.settle()
        fake.say(PeerLost("gone"))
        events = (await waiting).text.split("\n\n")
    assert events[-2].startswith("event: error\ndata: ")
    assert "overloaded_error" in events[-2] or "api_error" in events[-2]

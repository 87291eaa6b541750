"""POST /v1/responses by the official openai client, over loopback."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

import openai
import pytest

from server.gateway.dialects.chat.request import ChatMessage
from server.gateway.dialects.responses.store import ResponseStore, StoredResponse
from server.gateway.parsing.call_formats import HERMES
from server.gateway.parsing.message import AnswerMessage, MessageOptions
from tests.server.gateway.calls import answer_to, prompt_of, scored
from tests.server.gateway.dialects.test_openai_client import client_of as openai_client_of
from tests.server.gateway.dialects.test_tools import CALL
from tests.server.gateway.fakes import FakeEngine, gateway, ids, saying, tool_template
from topspin.errors import NotFound

ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "strict": False,
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def client_of(fake: FakeEngine) -> AbstractAsyncContextManager[openai.AsyncOpenAI]:
    return openai_client_of(fake, template=tool_template(), max_request_tokens=3000)


async def test_a_response() -> None:
    fake = FakeEngine(saying("hello", finish_reason="stop"))
    async with client_of(fake) as client:
        answer = await client.responses.create(
            model="tiny",
            instructions="Be kind.",
            input="hi",
            max_output_tokens=50,
            temperature=0.5,
            metadata={"run": "7"},
            extra_body={"seed": 3, "top_k": 2},
        )
        again = await client.responses.retrieve(answer.id)
        await client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
    assert answer.id.startswith("resp_")
    assert (answer.status, answer.output_text, answer.model) == ("completed", "hello", "tiny")
    assert (answer.temperature, answer.instructions) == (0.5, "Be kind.")
    assert answer.metadata == {"run": "7"}
    assert answer.usage is not None
    prompt = prompt_of(fake.added[0])
    assert prompt == "system: Be kind.user: hiassistant: "
    assert answer.usage.input_tokens == len(ids(prompt))
    assert answer.usage.total_tokens == len(ids(prompt)) + 1
    assert again == answer
    sampling = fake.added[0].sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_k) == (50, 3, 2)


async def test_a_conversation_goes_on_from_a_stored_response() -> None:
    fake = FakeEngine(saying("<think>hm</think>" + CALL, finish_reason="stop"))
    async with client_of(fake) as client:
        first = await client.responses.create(
            model="tiny", instructions="Be kind.", input="1+2?", tools=[ADD]
        )
        [thought, call] = first.output
        assert thought.type == "reasoning"
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        fake.script = saying("It is 3.", finish_reason="stop")
        second = await client.responses.create(
            model="tiny", previous_response_id=first.id, input=[result], tools=[ADD]
        )
        by_hand = await client.responses.create(
            model="tiny",
            input=[
                {"role": "user", "content": "1+2?"},
                *[item.model_dump(exclude_none=True) for item in first.output],
                result,
            ],
            tools=[ADD],
            store=False,
        )
        with pytest.raises(openai.NotFoundError, match="no longer"):
            await client.responses.create(model="tiny", previous_response_id=by_hand.id, input="x")
    assert second.output_text == by_hand.output_text == "It is 3."
    shown = prompt_of(fake.added[1]).partition("user: ")[2]
    assert shown == (
        "1+2?assistant: <think>hm</think>"
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        f"tool: 3({call.call_id})assistant: "
    )
    assert prompt_of(fake.added[2]) == prompt_of(fake.added[1])


async def test_a_stream_has_every_event_in_order() -> None:
    fake = FakeEngine(saying(f"<think>hm</think>I add. {CALL}", finish_reason="stop"))
    async with client_of(fake) as client:
        stream = await client.responses.create(model="tiny", input="hi", tools=[ADD], stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    begun, done = ("output_item.added", "content_part.added"), "content_part.done"
    call = "function_call_arguments"
    assert [kind for nth, kind in enumerate(kinds) if kind not in kinds[nth - 1 : nth]] == [
        *("created", "in_progress"),
        *(*begun, "reasoning_text.delta", "reasoning_text.done", done, "output_item.done"),
        *(*begun, "output_text.delta", "output_text.done", done, "output_item.done"),
        *("output_item.added", f"{call}.delta", f"{call}.done", "output_item.done"),
        "completed",
    ]
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["reasoning", "message", "function_call"]
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert items == last.response.output
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == last.response.output_text == "I add."


@pytest.mark.parametrize("text", ["hello w", "\u00e9!"])
async def test_the_sdks_stream_helper_and_log_probabilities(text: str) -> None:
    """Also those of half characters, which have no text of their own."""
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "top_logprobs": 1}
    asked |= {"max_output_tokens": 3, "include": ["message.output_text.logprobs"]}
    async with client_of(FakeEngine(scored(text))) as client:
        async with client.responses.stream(**asked) as stream:
            async for event in stream:
                last = event
            assert last.type == "response.incomplete"
        whole = await client.responses.create(**asked)
    for answer in (last.response, whole):
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        [item] = answer.output
        assert item.type == "message"
        assert item.status == "incomplete"
        [part] = item.content
        assert part.type == "output_text"
        tokens = [entry.bytes for entry in part.logprobs or []]
        assert b"".join(map(bytes, tokens)).decode() == text
        assert len(tokens) == 3


def test_a_response_that_is_not_stored_is_a_404() -> None:
    body = {"model": "tiny", "input": "hi", "previous_response_id": "resp_0"}
    missing = answer_to("/v1/responses", body)
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "previous_response_id"


def test_a_call_that_was_cut_is_not_in_the_conversation() -> None:
    messages = [ChatMessage(role="user", content="1+2?")]
    store, message = ResponseStore(), AnswerMessage(MessageOptions(calls=HERMES))
    message.push(f"{CALL} {CALL[:-20]}", is_last=True)
    store.keep("a", b"", message, messages=messages, items=(), num_bytes=0)
    [_, answer] = store.get("a").messages
    assert len(message.calls) == 2
    assert len(answer.tool_calls or ()) == 1


async def test_a_conversation_counts_all_that_it_keeps_alive() -> None:
    fake = FakeEngine(saying("ok", finish_reason="stop"))
    async with gateway(fake, max_request_tokens=30_000) as client:
        body: dict[str, Any] = {"model": "tiny", "input": "x" * 10_000}
        for _ in range(3):
            answer = (await client.post("/v1/responses", json=body)).json()
            body = {"model": "tiny", "input": "y", "previous_response_id": answer["id"]}
        transport: Any = client._transport
        [dialect] = [
            route.endpoint.keywords["dialect"]
            for route in transport.app._app.routes
            if route.path == "/v1/responses"
        ]
        assert dialect.stores[""].get(answer["id"]).num_bytes > 10_000


def test_the_store_is_bounded_by_number_and_by_bytes() -> None:
    store = ResponseStore(max_responses=2, max_bytes=100)
    for name, size in (("a", 10), ("b", 20), ("c", 30)):
        store.add(name, StoredResponse(b"", (), size))
    with pytest.raises(NotFound):
        store.get("a")
    store.add("d", StoredResponse(b"", (), 80))
    with pytest.raises(NotFound):
        store.get("c")
    store.remove("d")
    store.add("e", StoredResponse(b"", (), 100))
    assert store.get("e").num_bytes == 100

"""The rest of /v1/responses: stored input, counts, background, namespaces, built-in tools."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from server.gateway.bodies.generation import SamplingBody
from server.gateway.dialects.responses.input_items import page_of
from server.gateway.dialects.responses.request import ResponsesBody
from tests.server.gateway.calls import answer_to, post, prompt_of
from tests.server.gateway.dialects.test_openai_client import client_of
from tests.server.gateway.dialects.test_responses_api import ADD
from tests.server.gateway.fakes import FakeEngine, gateway, ids, saying, tool_template

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "hi"}


def test_sampling_is_asked_for_as_in_a_chat() -> None:
    fields: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {"3": 2.0},
        "stop_token_ids": [4],
        "min_tokens": 2,
        "seed": 7,
        "bad_words": ["he"],
        "allowed_token_ids": [1, 2],
    }
    fakes = [FakeEngine(saying("ok")), FakeEngine(saying("ok"))]
    post(PATH, {**BODY, **fields, "stop": "zz", "max_output_tokens": 9}, fakes[0])
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    post("/v1/chat/completions", {**chat, **fields}, fakes[1])
    assert fakes[0].added[0].sampling == fakes[1].added[0].sampling
    assert set(SamplingBody.__struct_fields__) <= set(ResponsesBody.__struct_fields__)


async def test_input_is_listed_page_by_page() -> None:
    fake = FakeEngine(saying("ok", finish_reason="stop"))
    given: Any = [{"role": "user", "content": str(number)} for number in range(5)]
    async with client_of(fake, max_request_tokens=1000) as client:
        answer = await client.responses.create(model="tiny", input=given)
        listed = [item async for item in client.responses.input_items.list(answer.id, limit=2)]
        first = await client.responses.input_items.list(answer.id, order="asc", limit=3)
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list("resp_0")
    texts = [item.content for item in listed if item.type == "message"]
    assert texts == list("43210")
    assert [item.content for item in first.data if item.type == "message"] == list("012")
    assert first.has_more


@pytest.mark.parametrize(
    ("query", "param"),
    [({"limit": "0"}, "limit"), ({"order": "up"}, "order"), ({"after": "x"}, "after")],
)
def test_a_wrong_page_is_refused_by_name(query: dict[str, str], param: str) -> None:
    with pytest.raises(Exception, match=f"`{param}`"):
        page_of((), query)


async def test_input_is_counted() -> None:
    fake = FakeEngine(saying("ok"))
    async with client_of(fake, max_request_tokens=20) as client:
        counted = await client.responses.input_tokens.count(model="tiny", input="hello " * 40)
    assert counted.input_tokens == len(ids("user: " + "hello " * 39 + "hello\nassistant: "))
    assert not fake.added


async def until(client: httpx.AsyncClient, response_id: str, status: str) -> dict[str, Any]:
    """Return a response once it has this status."""
    while True:
        found: dict[str, Any] = (await client.get(f"{PATH}/{response_id}")).json()
        if found["status"] == status:
            return found
        await asyncio.sleep(0)


async def test_a_response_in_the_background_is_found_when_it_is_whole() -> None:
    fake = FakeEngine()
    async with gateway(fake) as client:
        begun = (await client.post(PATH, json={**BODY, "background": True})).json()
        assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
        held = (await client.get(f"{PATH}/{begun['id']}")).json()
        assert held["status"] == "in_progress"
        early = {**BODY, "previous_response_id": begun["id"]}
        assert "not complete" in (await client.post(PATH, json=early)).json()["error"]["message"]
        fake.run(saying("ok", finish_reason="stop"))
        done = await until(client, begun["id"], "completed")
        assert done["output"][0]["content"][0]["text"] == "ok"
        late = await client.post(f"{PATH}/{begun['id']}/cancel")
        assert late.status_code == 400
        fake.script = saying("yes", finish_reason="stop")
        assert (await client.post(PATH, json=early)).json()["output"][0]["content"]
    assert prompt_of(fake.added[1]).startswith("user: hi\nassistant: ok\nuser: hi")


@pytest.mark.parametrize("by", ["cancel", "delete"])
async def test_a_response_in_the_background_is_ended(by: str) -> None:
    fake = FakeEngine()
    async with gateway(fake) as client:
        begun = (await client.post(PATH, json={**BODY, "background": True})).json()
        place = f"{PATH}/{begun['id']}"
        if by == "cancel":
            assert (await client.post(f"{place}/cancel")).json()["status"] == "cancelled"
            assert (await client.get(place)).json()["status"] == "cancelled"
        else:
            assert (await client.delete(place)).json()["deleted"]
        await fake.abort_came.wait()
        await fake.settle()
        assert ((await client.get(place)).status_code == 404) == (by == "delete")
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_a_failure_in_the_background_is_kept() -> None:
    fake = FakeEngine()
    async with gateway(fake) as client:
        begun = (await client.post(PATH, json={**BODY, "background": True})).json()
        fake.say(ConnectionResetError("gone"))
        failed = await until(client, begun["id"], "failed")
    assert failed["error"]["message"]


@pytest.mark.parametrize("field", [{"stream": True}, {"store": False}])
def test_background_needs_a_place_in_the_store(field: dict[str, bool]) -> None:
    refused = answer_to(PATH, {**BODY, "background": True, **field})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "background"


NAMESPACE = {"type": "namespace", "name": "calc", "description": "sums", "tools": [ADD]}
CALL = '<tool_call>{"name": "calc__add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_functions_of_a_namespace_are_called_by_both_names(stream: bool) -> None:
    fake = FakeEngine(saying(CALL, finish_reason="stop"))
    options: dict[str, Any] = {"template": tool_template(), "max_request_tokens": 3000}
    async with gateway(fake, **options) as client:
        body = {**BODY, "tools": [NAMESPACE], "stream": stream}
        answer = await client.post(PATH, json=body)
        if stream:
            assert '"namespace":"calc"' in answer.text
            return
        whole = answer.json()
        [call] = whole["output"]
        assert (call["namespace"], call["name"]) == ("calc", "add")
        assert whole["tools"] == [NAMESPACE]
        assert '"name": "calc__add"' in prompt_of(fake.added[0])
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
        history = [{"role": "user", "content": "hi"}, call, result]
        choice = {"type": "function", "name": "add", "namespace": "calc"}
        again = {**body, "input": history, "tool_choice": choice}
        assert (await client.post(PATH, json=again)).status_code == 200
    assert prompt_of(fake.added[1]).count("calc__add") == 2  # offered, and called
    assert "calc__add" in fake.added[1].sampling.grammar


def test_tools_of_other_servers_are_left_out_where_the_model_may_do_without() -> None:
    built_in = [
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "x"},
    ]
    options: dict[str, Any] = {"template": tool_template(), "max_request_tokens": 3000}
    body = {**BODY, "tools": [*built_in, ADD]}
    fake = FakeEngine(saying("ok"))
    answer = post(PATH, body, fake, **options)
    assert answer.headers["x-topspin-ignored"] == "tools.web_search, tools.custom"
    assert "add" in prompt_of(fake.added[0])
    refused = answer_to(PATH, {**body, "tool_choice": "required"}, **options)
    assert refused.json()["error"]["param"] == "tools[0].type"
    wrong = answer_to(PATH, {**body, "tools": [*built_in, {**ADD, "zip": 1}]}, **options)
    assert wrong.json()["error"]["param"] == "tools[2].zip"
    unheard = answer_to(PATH, {**BODY, "tools": [{"type": "teleport"}]}, **options)
    assert unheard.json()["error"]["param"] == "tools[0].type"
    assert post(PATH, {**BODY, "tools": built_in}, FakeEngine(saying("ok")), **options)


@pytest.mark.parametrize(("limit", "kept"), [(1000, "01234"), (65, "234"), (60, "34")])
def test_a_long_conversation_is_answered_by_its_latest_turns(limit: int, kept: str) -> None:
    turns = [{"role": "user", "content": f"<{number}>"} for number in range(5)]
    body = {**BODY, "instructions": "Hi.", "input": turns, "max_output_tokens": 10}
    fake = FakeEngine(saying("ok"))
    post(PATH, {**body, "truncation": "auto"}, fake, max_request_tokens=limit)
    prompt = prompt_of(fake.added[0])
    assert prompt.startswith("system: Hi.\n")
    assert "".join(number for number in "01234" if f"<{number}>" in prompt) == kept
    assert len(ids(prompt)) + 10 <= limit
    if kept != "01234":
        refused = answer_to(PATH, {**body, "truncation": "disabled"}, max_request_tokens=limit)
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_last_turn_that_is_too_long_is_refused() -> None:
    body = {**BODY, "input": "x" * 200, "truncation": "auto"}
    refused = answer_to(PATH, body)
    assert refused.json()["error"]["code"] == "context_length_exceeded"

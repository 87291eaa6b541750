"""Answers to the letter: events and bodies of both endpoints."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.server.gateway.calls import (
    CHAT,
    CHAT_BODY,
    PLAIN,
    PLAIN_BODY,
    PROMPT,
    chat_choice,
    events_of,
    post,
    scored,
    usage,
    without_head,
)
from tests.server.gateway.fakes import EOS_ID, FakeEngine, gateway, ids, output, saying
from topspin.messages import AddRequest, RequestOutput


def test_a_streamed_chat_is_role_contents_finish_usage_done() -> None:
    body = {**CHAT_BODY, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(post(CHAT, body, FakeEngine(saying("hello w\u00e9"))))
    heads = {(event["id"], event["created"], event["object"], event["model"]) for event in events}
    [(chat_id, _, *named)] = heads
    assert chat_id.startswith("chatcmpl-")
    assert named == ["chat.completion.chunk", "tiny"]
    assert [without_head(event) for event in events] == [
        chat_choice(0, {"role": "assistant", "content": ""}) | {"usage": None},
        *(
            chat_choice(0, {"content": text}) | {"usage": None}
            for text in ("hello", " ", "w", "\u00e9")
        ),
        chat_choice(0, {}, "length") | {"usage": None},
        {"choices": [], "usage": usage(len(ids(PROMPT)), 5)},
    ]


def test_a_streamed_completion_is_texts_finish_done() -> None:
    body = {**PLAIN_BODY, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(post(PLAIN, body, FakeEngine(saying("hello w"))))
    assert {event["object"] for event in events} == {"text_completion"}
    assert events[0]["id"].startswith("cmpl-")

    def piece(text: str, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return {"choices": [choice], "usage": None}

    assert [without_head(event) for event in events] == [
        *map(piece, ("hello", " ", "w")),
        piece("", "length"),
        {"choices": [], "usage": usage(2, 3)},
    ]


def test_choices_interleave_by_index_as_they_come() -> None:
    def lockstep(request: AddRequest) -> Iterable[RequestOutput]:
        # Both choices' steps are sent once the second has been added.
        if not request.request_id.endswith("-1"):
            return
        other = request.request_id[:-1] + "0"
        yield output(other, ids("a"))
        yield output(request, ids("x"))
        yield output(other, ids("b"), index=1, finish_reason="length")
        yield output(request, ids("y"), index=1)
        yield output(request, ids("z"), index=2, finish_reason="length")

    events = events_of(post(PLAIN, {**PLAIN_BODY, "n": 2, "stream": True}, FakeEngine(lockstep)))
    choices = [event["choices"][0] for event in events]
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices] == [
        *((0, "a", None), (1, "x", None), (0, "b", None), (0, "", "length")),
        *((1, "y", None), (1, "z", None), (1, "", "length")),
    ]


def test_a_whole_chat_answer() -> None:
    def script(request: AddRequest) -> Iterator[RequestOutput]:
        yield output(request, ids("hello"), num_cached_tokens=16)
        yield output(request, [EOS_ID], index=1, finish_reason="stop", stop_token_id=EOS_ID)

    answer = post(CHAT, {**CHAT_BODY, "return_token_ids": True}, FakeEngine(script)).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert without_head(answer) == {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "token_ids": [*ids("hello"), EOS_ID],
            }
        ],
        "usage": usage(len(ids(PROMPT)), 2, 16),
        "prompt_logprobs": None,
        "prompt_token_ids": ids(PROMPT),
    }


def test_a_whole_completion_of_two_prompts_with_two_choices() -> None:
    fake = FakeEngine(saying("ok"))
    body = {"model": "tiny", "prompt": [ids("hello"), [1, 2, 3]], "n": 2, "return_token_ids": True}
    answer = post(PLAIN, body, fake).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [ids("hello")] * 2 + [[1, 2, 3]] * 2
    assert {choice["text"] for choice in answer["choices"]} == {"ok"}
    assert answer["usage"] == usage(1 + 3, 4 * 2), "a prompt counts once"
    assert [request.sampling.choice for request in fake.added] == [0, 1, 0, 1]
    assert len({request.sampling.seed for request in fake.added}) == 1
    assert len({request.request_id for request in fake.added}) == 4


def test_token_ids_of_a_stream_come_with_their_chunks() -> None:
    asked = {"stream": True, "return_token_ids": True}
    events = events_of(post(CHAT, {**CHAT_BODY, **asked}, FakeEngine(saying("a\u00e9"))))
    assert events[0]["prompt_token_ids"] == ids(PROMPT)
    assert [event["choices"][0].get("token_ids") for event in events] == [
        None,
        *([token_id] for token_id in ids("a\u00e9")),
        None,
    ]
    plain = events_of(post(PLAIN, {**PLAIN_BODY, **asked}, FakeEngine(saying("ab"))))
    shown = [event["choices"][0].get("prompt_token_ids") for event in plain]
    assert shown == [ids("hi"), None, None]


@pytest.mark.parametrize("path", [CHAT, PLAIN])
def test_continuous_usage_counts_up_to_each_event(path: str) -> None:
    def script(request: AddRequest) -> Iterator[RequestOutput]:
        yield output(request, ids("a\u00e9")[:2], num_cached_tokens=1)
        yield output(request, ids("\u00e9b")[1:], index=2, finish_reason="length")

    body = {**(CHAT_BODY if path == CHAT else PLAIN_BODY), "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(post(path, {**body, "stream_options": options}, FakeEngine(script)))
    prompt = len(ids(PROMPT if path == CHAT else "hi"))
    counts = [0, 2, 4, 4, 4] if path == CHAT else [2, 4, 4, 4]
    assert [event["usage"] for event in events] == [usage(prompt, count, 1) for count in counts]
    # Without include_usage it has no effect, as in vLLM.
    options = {"continuous_usage_stats": True}
    events = events_of(post(path, {**body, "stream_options": options}, FakeEngine(script)))
    assert not any("usage" in event for event in events)


def chat_entry(text: str, token: bytes, num_top: int) -> dict[str, Any]:
    entry = {"token": text, "logprob": -0.5, "bytes": list(token)}
    top = [entry, {"token": "z", "logprob": -9999.0, "bytes": [0x7A]}]
    return {**entry, "top_logprobs": top[:num_top]}


@pytest.mark.parametrize("num_top", [0, 1, 2])
def test_chat_logprobs_streamed_and_whole(num_top: int) -> None:
    body = {**CHAT_BODY, "logprobs": True, "top_logprobs": num_top}
    fake = FakeEngine(scored("a\u00e9"))
    expected = [
        chat_entry("a", b"a", num_top),
        chat_entry("\ufffd", b"\xc3", num_top),
        chat_entry("\ufffd", b"\xa9", num_top),
    ]
    whole = post(CHAT, body, fake).json()
    assert whole["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    events = events_of(post(CHAT, {**body, "stream": True}, FakeEngine(scored("a\u00e9"))))
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [entry["content"][0] for entry in streamed if entry is not None] == expected
    assert fake.added[0].sampling.logprobs == num_top


def test_completion_logprobs_streamed_and_whole() -> None:
    body = {**PLAIN_BODY, "logprobs": 2}
    whole = post(PLAIN, body, FakeEngine(scored("hello w"))).json()["choices"][0]["logprobs"]
    assert whole == {
        "text_offset": [0, 5, 6],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "tokens": ["hello", " ", "w"],
        "top_logprobs": [{token: -0.5, "z": -9999.0} for token in ("hello", " ", "w")],
    }
    events = events_of(post(PLAIN, {**body, "stream": True}, FakeEngine(scored("hello w"))))
    parts = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert events[-1]["choices"][0]["logprobs"] is None
    for name, expected in whole.items():
        assert [value for part in parts for value in part[name]] == expected


async def test_a_stopped_choice_is_aborted_while_its_sibling_goes_on() -> None:
    fake = FakeEngine()
    async with gateway(fake) as client:
        body = {**PLAIN_BODY, "stop": ["wor", "nothing"], "n": 2}
        pending = asyncio.create_task(client.post(PLAIN, json=body))
        await fake.request_came.wait()
        first, second = fake.added
        # The engine generates more than the stop string and does not finish by itself.
        fake.emit(output(first, ids("hello worlds")), output(second, ids("x")))
        await fake.abort_came.wait()
        fake.emit(output(second, ids("y"), index=1, finish_reason="length"))
        answer = (await pending).json()
        assert [choice["text"] for choice in answer["choices"]] == ["hello ", "xy"]
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
        assert answer["usage"]["completion_tokens"] == len(ids("hello wor")) + 2
        assert fake.aborted == [first.request_id]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_output_that_cannot_be_shown_fails_and_frees_the_request(stream: bool) -> None:
    fake = FakeEngine()
    async with gateway(fake) as client:
        body = {**PLAIN_BODY, "logprobs": 1, "n": 2, "stream": stream}
        pending = asyncio.create_task(client.post(PLAIN, json=body))
        await fake.request_came.wait()
        fake.emit(output(fake.added[0], ids("a")))
        response = await pending
        assert response.status_code == (200 if stream else 500)
        [first, *_] = response.text.removeprefix("data: ").split("\n\n")
        assert json.loads(first)["error"]["code"] == "protocol_error"
        assert sorted(fake.aborted) == sorted(added.request_id for added in fake.added)

"""The official openai client against the gateway, over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.server.gateway.calls import prompt_score, scored
from tests.server.gateway.fakes import EOS_ID, FakeEngine, ids, loopback, output
from topspin.errors import PeerLost
from topspin.messages import AddRequest, RequestOutput, TokenLogprobs


@asynccontextmanager
async def client_of(fake: FakeEngine, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        loopback(fake, **options) as port,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=10.0
        ) as client,
    ):
        yield client


def greeting(request: AddRequest) -> Iterator[RequestOutput]:
    entry = TokenLogprobs(logprob=-0.25, top_ids=(5,), top_logprobs=(-0.25,))
    scores = (entry,) if request.sampling.logprobs is not None else ()
    yield output(request, ids("hello"), logprobs=scores)
    yield output(request, ids(" "), index=1, logprobs=scores)
    end = {"finish_reason": "stop", "stop_token_id": EOS_ID}
    yield output(request, [EOS_ID], index=2, logprobs=scores, **end)


async def test_chats_and_models() -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with client_of(FakeEngine(greeting)) as client:
        answer = await client.chat.completions.create(
            **asked, n=2, logprobs=True, top_logprobs=1, extra_body={"return_token_ids": True}
        )
        assert [choice.message.content for choice in answer.choices] == ["hello ", "hello "]
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
        scores = answer.choices[0].logprobs
        assert scores is not None
        assert [entry.logprob for entry in scores.content or ()] == [-0.25] * 3
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 6

        options: Any = {"include_usage": True}
        stream = await client.chat.completions.create(**asked, stream=True, stream_options=options)
        *chunks, last = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == "hello "
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert (last.choices, last.usage.completion_tokens) == ([], 3)

        names = [model.id async for model in client.models.list()]
        assert names == ["tiny", "org/alias"]
        assert (await client.models.retrieve("tiny")).owned_by == "topspin"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(**asked, temperature=3)
        assert bad.value.param == "temperature"


async def test_completions_and_scores_of_a_prompt() -> None:
    fake = FakeEngine(greeting)
    async with client_of(fake) as client:
        answer = await client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in answer.choices] == ["hello ", "hello "]
        scores = answer.choices[1].logprobs
        assert scores is not None
        assert scores.text_offset == [0, 5, 6]
        stream = await client.completions.create(model="tiny", prompt="a", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello "

        fake.script = scored("a")
        asked: Any = {"echo": True, "logprobs": 1, "max_tokens": 0}
        answer = await client.completions.create(
            model="tiny", prompt="hi", **asked, extra_body={"prompt_logprobs": 0}
        )
        (choice,) = answer.choices
        assert choice.text == "hi"
        score = prompt_score(ids("i")[0], 1, 1)
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [None, score.logprob]
        assert choice.model_extra is not None
        entry = {"logprob": score.logprob, "rank": 2, "decoded_token": "i"}
        assert choice.model_extra["prompt_logprobs"] == [None, {str(ids("i")[0]): entry}]


async def test_an_engine_lost_in_mid_stream_raises() -> None:
    fake = FakeEngine()
    async with client_of(fake) as client:
        opening = asyncio.create_task(
            client.completions.create(model="tiny", prompt="a", stream=True)
        )
        await fake.request_came.wait()
        fake.emit(output(fake.added[0], ids("hello")))
        stream = await opening
        assert (await anext(stream)).choices[0].text == "hello"
        fake.say(PeerLost("closed"))
        with pytest.raises(openai.APIError, match="a node that held the request was lost"):
            await anext(stream)
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(model="tiny", prompt="a")
        assert refused.value.status_code == 503

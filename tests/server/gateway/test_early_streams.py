"""Streams say that they have begun before their first token, and that they live until the next."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pytest
from starlette.types import Message, Send

from server.gateway.generation.streaming import EventStream
from tests.server.gateway.calls import CHAT_BODY, PLAIN_BODY, http_request
from tests.server.gateway.fakes import FakeEngine, ids, loopback, opened, output, refusing
from topspin.messages import RequestQueued

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT_BODY,
    "/v1/completions": PLAIN_BODY,
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/v1/messages": {**CHAT_BODY, "max_tokens": 9},
}
COMMENT, PING = b": keep-alive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'


def asked(path: str) -> bytes:
    return http_request({**PATHS[path], "stream": True}, path=path)


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_begins_when_its_request_is_queued(path: str) -> None:
    fake = FakeEngine()
    fake.queues = False
    async with opened(fake, keep_alive_s=0.01) as (reader, writer):
        writer.write(asked(path))
        await fake.request_came.wait()
        await fake.settle()
        head = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        await fake.settle()
        assert not head.done()
        fake.say(RequestQueued(request_ids=(fake.added[0].request_id,)))
        assert (await head).startswith(b"HTTP/1.1 200 ")
        # In chunks of their own, again and again, before the first token and after it.
        beat = PING if path == "/v1/messages" else COMMENT
        for _ in range(2):
            await reader.readuntil(beat)
        fake.emit(output(fake.added[0], ids("a")))
        await reader.readuntil(b'"a"')
        await reader.readuntil(beat)
        fake.emit(output(fake.added[0], ids("b"), index=1, finish_reason="length"))
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b'"b"' in rest
        assert beat not in rest.partition(b'"b"')[2]


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_after_that_is_an_event(path: str) -> None:
    fake = FakeEngine()
    async with opened(fake) as (reader, writer):
        writer.write(asked(path))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        fake.run(refusing("node_lost", 503, "secret"))
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert b"a node that held the request was lost" in rest
        assert b": keep-alive" not in rest, "0 is off"


async def test_a_client_that_leaves_before_the_first_token_frees_its_request() -> None:
    fake = FakeEngine()
    async with opened(fake, keep_alive_s=0.01) as (reader, writer):
        writer.write(asked("/v1/chat/completions"))
        await reader.readuntil(COMMENT)
        writer.close()
        await fake.abort_came.wait()
        assert fake.aborted == [fake.added[0].request_id]


async def test_the_clients_of_openai_and_anthropic_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    has_beaten = asyncio.Event()
    beat = EventStream._beat

    async def watched(stream: EventStream, send: Send, *others: Any) -> None:
        num_sent = 0

        async def counted(message: Message) -> None:
            nonlocal num_sent
            await send(message)
            num_sent += 1
            if num_sent == 2:
                has_beaten.set()

        await beat(stream, counted, *others)

    async def answered(fake: FakeEngine, opening: Any) -> list[Any]:
        """Return the events of a stream whose first token comes after some keep-alives."""
        has_beaten.clear()
        reading = asyncio.create_task(opening)
        await has_beaten.wait()
        fake.emit(output(fake.added[-1], ids("a"), finish_reason="length"))
        return [event async for event in await reading]

    monkeypatch.setattr(EventStream, "_beat", watched)
    fake = FakeEngine()
    async with loopback(fake, keep_alive_s=0.001) as port:
        url, key = f"http://127.0.0.1:{port}", "k"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
            chat = client.chat.completions.create(**CHAT_BODY, stream=True)
            events = await answered(fake, chat)
            assert "".join(each.choices[0].delta.content or "" for each in events) == "a"
            made = client.responses.create(model="tiny", input="hi", stream=True)
            assert (await answered(fake, made))[-1].type == "response.incomplete"
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key) as claude:
            said = claude.messages.create(**CHAT_BODY, max_tokens=9, stream=True)
            kinds = [event.type for event in await answered(fake, said)]
            assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")

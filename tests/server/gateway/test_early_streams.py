"""Streams say that they have begun before their first token, and that they live until the next."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pytest

from tests.server.gateway.calls import CHAT_BODY, PLAIN_BODY, http_request, post
from tests.server.gateway.fakes import FakeEngine, ids, opened, output, refusing, saying
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


ERROR = (
    b'data: {"error":{"message":"%b","type":"server_error","param":null,"code":"node_lost"}}\n\n'
)
FAILURES = {
    "/v1/chat/completions": ERROR + b"data: [DONE]\n\n",
    "/v1/completions": ERROR + b"data: [DONE]\n\n",
    "/v1/responses": b'"error":{"code":"node_lost","message":"%b"}',
    "/v1/messages": b"event: error\ndata: "
    b'{"type":"error","error":{"type":"overloaded_error","message":"%b"}}\n\n',
}


@pytest.mark.parametrize("path", PATHS)
async def test_an_error_after_that_is_an_event(path: str) -> None:
    fake = FakeEngine()
    async with opened(fake) as (reader, writer):
        writer.write(asked(path))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        fake.emit(output(fake.added[0], ids("a")))
        await reader.readuntil(b'"a"')
        fake.run(refusing("node_lost", 503, "secret"))
        rest = await reader.readuntil(b"0\r\n\r\n")
        assert FAILURES[path] % b"a node that held the request was lost" in rest
        assert (b"event: response.failed\n" in rest) == (path == "/v1/responses")
        assert b": keep-alive" not in rest, "0 is off"


async def test_a_client_that_leaves_before_the_first_token_frees_its_request() -> None:
    fake = FakeEngine()
    async with opened(fake, keep_alive_s=0.01) as (reader, writer):
        writer.write(asked("/v1/chat/completions"))
        await reader.readuntil(COMMENT)
        writer.close()
        await fake.abort_came.wait()
        assert fake.aborted == [fake.added[0].request_id]


def beaten(path: str) -> bytes:
    """Return our answer with a keep-alive behind each event."""
    answer = post(path, {**PATHS[path], "stream": True}, FakeEngine(saying("a")))
    beat = PING if path == "/v1/messages" else COMMENT
    return 2 * beat + answer.content.replace(b"\n\n", b"\n\n" + beat)


async def test_the_clients_of_openai_and_anthropic_read_on() -> None:
    content = {path: await asyncio.to_thread(beaten, path) for path in PATHS}

    async def replay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        writer.write(head + content[asked])
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(replay, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k") as client:
            stream = await client.chat.completions.create(**CHAT_BODY, stream=True)
            assert "".join([each.choices[0].delta.content or "" async for each in stream]) == "a"
            made = await client.responses.create(model="tiny", input="hi", stream=True)
            assert [event.type async for event in made][-1] == "response.incomplete"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="k") as claude:
            said = await claude.messages.create(**CHAT_BODY, max_tokens=9, stream=True)
            kinds = [event.type async for event in said]
            assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")

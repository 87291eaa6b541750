"""Clients that leave, send slowly or never read, over real sockets and at the ASGI seam."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from server.gateway.call import ClientGone
from server.gateway.generation.streaming import EventStream
from server.gateway.http.body import Bodies, read_body
from server.gateway.http.exchange import Exchanges
from tests.server.gateway.calls import head_of, http_request
from tests.server.gateway.fakes import DEADLINE_S, FakeEngine, ids, loopback, opened, output
from topspin.errors import Overloaded
from topspin.messages import FinishReason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_before", [0, 2])
async def test_a_client_that_leaves_frees_its_choices(stream: bool, num_before: int) -> None:
    fake = FakeEngine()
    async with loopback(fake) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http_request({"prompt": "hi", "n": 2, "stream": stream}))
        await fake.request_came.wait()
        for index in range(num_before):
            fake.emit(output(fake.added[0], ids("a"), index=index))
            if stream:
                await reader.readuntil(b'"text":"a"')
        writer.close()
        await writer.wait_closed()
        await fake.abort_came.wait()
        assert sorted(fake.aborted) == sorted(added.request_id for added in fake.added)
        async with httpx.AsyncClient() as client:
            metrics = await client.get(f"http://127.0.0.1:{port}/metrics")
        labels = 'finished_reason="abort",model_name="tiny"'
        assert f"topspin_request_success_total{{{labels}}} 2.0" in metrics.text


async def test_a_stream_comes_event_by_event_over_one_connection() -> None:
    fake = FakeEngine()
    async with opened(fake) as (reader, writer):
        for nth in range(2):
            fake.request_came.clear()
            writer.write(http_request({"prompt": "hi", "stream": True}))
            await fake.request_came.wait()
            request = fake.added[nth]
            for index, text in enumerate("abc"):
                finish: FinishReason | None = "length" if text == "c" else None
                fake.emit(output(request, ids(text), index=index, finish_reason=finish))
                # Each token is read before the next one exists.
                await reader.readuntil(f'"text":"{text}"'.encode())
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert fake.aborted == []


def request_of(messages: list[Message]) -> Request:
    """Return a request whose body comes as `messages` and then stalls."""

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def test_a_body_that_comes_byte_by_byte_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is absolute: bytes that come meanwhile do not move it."""
    monkeypatch.setattr("server.gateway.http.body.BODY_DEADLINE_S", 0.2)
    monkeypatch.setattr("server.gateway.http.protocol.HEAD_DEADLINE_S", 0.1)
    async with opened(FakeEngine()) as (reader, writer):
        writer.write(head_of(1000))

        async def drip() -> None:
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        # Who goes on sending to a closed connection may lose the answer.
        dripping.cancel()
        writer.write_eof()
        assert b'"request_timeout"' in await reader.read()  # then it is closed


async def test_bodies_that_are_held_have_room_together() -> None:
    bodies = Bodies(max_held_bytes=10)

    def reading(size_bytes: int) -> AbstractAsyncContextManager[bytes]:
        request = request_of([{"type": "http.request", "body": b"x" * size_bytes}])
        request.scope["headers"] = [(b"content-type", b"application/json")]
        return bodies.read_json(request)

    for _ in range(3):
        async with reading(6), reading(4):
            with pytest.raises(Overloaded, match="too many requests"):
                async with reading(1):
                    pass
        with pytest.raises(Overloaded):
            async with reading(11):
                pass
    async with reading(10) as data:
        assert data == b"x" * 10


async def test_a_client_that_leaves_in_its_body_is_gone() -> None:
    with pytest.raises(ClientGone):
        await read_body(request_of([{"type": "http.disconnect"}]))


async def test_a_client_that_never_reads_loses_its_stream() -> None:
    ended: list[str] = []

    async def blocks() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: {}\n\n"
        finally:
            ended.append("blocks")

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    stream = EventStream(blocks(), close=lambda: ended.append("close"), send_deadline_s=0.01)
    async with asyncio.timeout(DEADLINE_S):
        served = Exchanges(stream, access_log=False)
        await served({"type": "http", "path": "/", "headers": []}, receive, send)
    assert ended == ["blocks", "close"]

"""Clients that leave, send slowly or never read, over real sockets and at the ASGI seam."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message

from server.gateway.engine_client import ClientGone
from server.gateway.http.body import MAX_BODY_BYTES, BodyTimeout, read_body
from server.gateway.http.listener import MAX_HEADER_BYTES
from server.gateway.streaming import EventStream
from tests.server.gateway.fakes import DEADLINE_S, FakeEngine, ids, loopback, output, saying
from topspin.messages import FinishReason


def head_of(size_bytes: int, *, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    lines = (
        f"POST {path} HTTP/{version}",
        "Host: test",
        "Content-Type: application/json",
        f"Content-Length: {size_bytes}",
    )
    return "\r\n".join((*lines, "", "")).encode()


def http_request(body: dict[str, Any], *, version: str = "1.1") -> bytes:
    data = json.dumps({"model": "tiny", **body}).encode()
    return head_of(len(data), version=version) + data


@contextmanager
def no_traces_of_bugs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if something was logged as an error: uvicorn logs the exceptions of a protocol."""
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_before", [0, 2])
def test_a_client_that_leaves_frees_its_choices(stream: bool, num_before: int) -> None:
    async def test() -> None:
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

    asyncio.run(test())


def test_a_stream_comes_event_by_event_over_one_connection() -> None:
    async def test() -> None:
        fake = FakeEngine()
        async with loopback(fake) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
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
            writer.close()
            await writer.wait_closed()

    asyncio.run(test())


def test_a_body_that_is_too_large_is_answered_and_the_rest_discarded() -> None:
    async def test() -> None:
        async with loopback(FakeEngine(saying("ok"))) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            size_bytes = MAX_BODY_BYTES + 1
            writer.write(head_of(size_bytes) + b" " * size_bytes)
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
            writer.close()
            await writer.wait_closed()

    asyncio.run(test())


def test_headers_are_capped() -> None:
    async def test() -> None:
        async with loopback(FakeEngine()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            # No end of the headers in sight: only the cap can bring an answer.
            writer.write(b"GET /version HTTP/1.1\r\nX-Long: " + b"x" * (MAX_HEADER_BYTES + 1))
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 431 ")
            assert b"server: " not in answer.lower()
            assert error_in(answer)["code"] == "headers_too_large"
            writer.close()
            await writer.wait_closed()

    asyncio.run(test())


def error_in(answer: bytes) -> dict[str, Any]:
    """Return the error object of a whole HTTP answer after checking its shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\ncontent-type: application/json\r\n" in head.lower() + b"\r\n"
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"GET /version HTTP/1.1\r\n\r\n",  # no Host
        b"GET /version HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    ],
)
def test_what_is_no_http_is_answered_in_json(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with loopback(FakeEngine()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert error_in(answer)["code"] == "invalid_http"
            writer.close()
            await writer.wait_closed()

    with no_traces_of_bugs(caplog):
        asyncio.run(test())


def test_a_body_that_breaks_off_its_chunks_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with loopback(FakeEngine()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = head_of(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
            writer.write(head + b"5\r\nhello\r\nno size\r\n")
            assert error_in(await reader.read())["code"] == "invalid_http"
            writer.close()
            await writer.wait_closed()

    with no_traces_of_bugs(caplog):
        asyncio.run(test())


@pytest.mark.parametrize("sent", [b"", b"GET /ver"])
@pytest.mark.parametrize("before", [b"", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_connection_without_a_whole_request_ends(
    sent: bytes, before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.gateway.http.listener.KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr("server.gateway.http.protocol.HEAD_DEADLINE_S", 0.05)

    async def test() -> None:
        async with loopback(FakeEngine()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(before)
            if before:
                await reader.readuntil(b"}")
            for byte in sent:  # slowly, which must not start the deadline again
                writer.write(bytes([byte]))
                await writer.drain()
            answer = await reader.read()
            if sent:
                assert answer.startswith(b"HTTP/1.1 408 ")
                assert error_in(answer)["code"] == "request_timeout"
            else:
                assert answer == b""
            writer.close()
            await writer.wait_closed()

    asyncio.run(test())


def test_a_refused_body_that_never_ends_is_not_read_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.gateway.http.protocol.HEAD_DEADLINE_S", 0.05)

    async def test() -> None:
        async with loopback(FakeEngine()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head_of(MAX_BODY_BYTES + 1))
            assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
            await reader.readuntil(b"}}")
            writer.write(b" ")
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()

    asyncio.run(test())


def test_a_connection_lives_on_after_a_refused_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.gateway.http.protocol.HEAD_DEADLINE_S", 0.05)

    async def test() -> None:
        async with loopback(FakeEngine()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head_of(10).replace(b"application/json", b"text/plain"))
            await reader.readuntil(b"}}")
            writer.write(b" " * 5)
            await writer.drain()
            writer.write(b" " * 5)
            await asyncio.sleep(0.1)  # the deadline passes, and is none any more
            writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            await writer.wait_closed()

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_closed_its_side_gets_its_answer(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        fake = FakeEngine()
        async with loopback(fake) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(http_request({"prompt": "hi", "stream": stream}))
            writer.write_eof()
            await fake.request_came.wait()
            # Interim answers tell whether the client is there.
            for _ in range(2):
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            fake.emit(output(fake.added[0], ids("a")))
            fake.emit(output(fake.added[0], ids("b"), index=1, finish_reason="length"))
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert (b'"text":"b"' if stream else b'"text":"ab"') in answer
            assert fake.aborted == []
            writer.close()
            await writer.wait_closed()

    with no_traces_of_bugs(caplog):
        asyncio.run(test())


def test_pipelined_requests_of_a_half_closed_client_are_answered() -> None:
    async def test() -> None:
        async with loopback(FakeEngine()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
            writer.write_eof()
            assert (await reader.read()).count(b"HTTP/1.1 200 ") == 2
            writer.close()
            await writer.wait_closed()

    asyncio.run(test())


def test_an_old_client_that_closes_its_side_has_gone() -> None:
    async def test() -> None:
        fake = FakeEngine()
        async with loopback(fake) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(http_request({"prompt": "hi"}, version="1.0"))
            await fake.request_came.wait()
            writer.write_eof()
            await fake.abort_came.wait()
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()

    asyncio.run(test())


def request_of(messages: list[Message]) -> Request:
    """Return a request whose body comes as `messages`, and then nothing."""

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def test_a_body_that_does_not_arrive_is_a_timeout() -> None:
    async def test() -> None:
        request = request_of([{"type": "http.request", "body": b"{", "more_body": True}])
        with pytest.raises(BodyTimeout):
            await read_body(request, deadline_s=0.01)

    asyncio.run(test())


def test_a_client_that_leaves_in_its_body_is_gone() -> None:
    async def test() -> None:
        with pytest.raises(ClientGone):
            await read_body(request_of([{"type": "http.disconnect"}]))

    asyncio.run(test())


def test_a_client_that_never_reads_loses_its_stream() -> None:
    async def test() -> None:
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
            await stream({"type": "http"}, receive, send)
        assert ended == ["blocks", "close"]

    asyncio.run(test())

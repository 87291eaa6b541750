"""Connections without a request, with half of one, with bytes that are not HTTP, half-closed."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from server.gateway.http import protocol
from server.gateway.http.body import MAX_BODY_BYTES
from server.gateway.http.request_reader import MAX_HEADER_BYTES
from server.gateway.http.protocol import HttpProtocol
from tests.server.gateway.calls import head_of, http_request
from tests.server.gateway.fakes import FakeEngine, ids, loopback, output


@contextmanager
def no_traces_of_bugs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if something was logged as an error: uvicorn logs the exceptions of a protocol."""
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_headers_are_capped() -> None:
    async def test() -> None:
        async with loopback(FakeEngine()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            # The headers never end: only the cap can cause an answer.
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
            for byte in sent:  # slowly, which must not restart the deadline
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
            await asyncio.sleep(0.1)  # the deadline passes and no longer counts
            writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            await writer.wait_closed()

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_closed_its_side_gets_its_answer(
    stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "FIRST_PROBE_S", 0.01)
    probe = HttpProtocol._probe

    async def test() -> None:
        fake = FakeEngine()
        probed_the_closed = asyncio.Event()

        def watched(connection: HttpProtocol, delay_s: float) -> None:
            probe(connection, delay_s)
            if connection.transport.is_closing():
                probed_the_closed.set()

        monkeypatch.setattr(HttpProtocol, "_probe", watched)
        async with loopback(fake) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(http_request({"prompt": "hi", "stream": stream}))
            writer.write_eof()
            await fake.request_came.wait()
            # Interim answers show whether the client is still there.
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
            await probed_the_closed.wait()  # which disturbs nobody

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

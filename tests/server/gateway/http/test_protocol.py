"""Connections without a request, with half of one, with bytes that are not HTTP, half-closed."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from server.gateway.http import protocol
from server.gateway.http.auth import ApiKeys
from server.gateway.http.body import MAX_BODY_BYTES
from server.gateway.http.protocol import READ_AHEAD_BYTES, HttpProtocol
from server.gateway.http.request_reader import MAX_HEADER_BYTES
from tests.server.gateway.calls import head_of, http_request
from tests.server.gateway.fakes import FakeEngine, ids, loopback, opened, output, saying


@pytest.fixture
def _no_traces_of_bugs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if something was logged as an error: uvicorn logs the exceptions of a protocol."""
    yield
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_headers_are_capped() -> None:
    async with opened(FakeEngine()) as (reader, writer):
        # The headers never end: only the cap can cause an answer.
        writer.write(b"GET /version HTTP/1.1\r\nX-Long: " + b"x" * (MAX_HEADER_BYTES + 1))
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"server: " not in answer.lower()
        assert error_in(answer)["code"] == "headers_too_large"


def error_in(answer: bytes) -> dict[str, Any]:
    """Return the error object of a whole HTTP answer after checking its shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\ncontent-type: application/json\r\n" in head.lower() + b"\r\n"
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}", head.lower())
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = VERSION.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
KEYS = ApiKeys("sk-ours-0123456789", None)
CHUNKS = head_of(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")


@pytest.mark.usefixtures("_no_traces_of_bugs")
@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"GET /version HTTP/1.1\r\n\r\n",  # no Host
        VERSION.replace(b"Host", b"no colon\r\nHost"),
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        CHUNKS + b"5\r\nhello\r\nno size\r\n",
    ],
)
async def test_what_is_no_http_is_answered_in_json(sent: bytes) -> None:
    async with opened(FakeEngine()) as (reader, writer):
        writer.write(sent)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert error_in(answer)["code"] == "invalid_http"


@pytest.mark.parametrize("sent", [b"", b"GET /ver"])
@pytest.mark.parametrize("before", [b"", VERSION])
async def test_a_connection_without_a_whole_request_ends(
    sent: bytes, before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.gateway.http.listener.KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr("server.gateway.http.protocol.HEAD_DEADLINE_S", 0.05)
    async with opened(FakeEngine()) as (reader, writer):
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


async def test_a_refused_body_that_never_ends_is_not_read_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.gateway.http.protocol.DISCARD_DEADLINE_S", 0.05)
    async with opened(FakeEngine()) as (reader, writer):
        writer.write(head_of(MAX_BODY_BYTES + 1))
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
        await reader.readuntil(b"}}")
        writer.write(b" ")
        assert await reader.read() == b""


async def test_a_connection_lives_on_after_a_refused_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.gateway.http.protocol.DISCARD_DEADLINE_S", 0.05)
    async with opened(FakeEngine()) as (reader, writer):
        writer.write(head_of(10).replace(b"application/json", b"text/plain"))
        await reader.readuntil(b"}}")
        writer.write(b" " * 5)
        await writer.drain()
        writer.write(b" " * 5)
        await asyncio.sleep(0.1)  # the deadline passes and no longer counts
        writer.write(VERSION)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("_no_traces_of_bugs")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_closed_its_side_gets_its_answer(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "FIRST_PROBE_S", 0.01)
    probe, probed_the_closed = HttpProtocol._probe, asyncio.Event()

    def watched(connection: HttpProtocol, delay_s: float) -> None:
        probe(connection, delay_s)
        if connection.transport.is_closing():
            probed_the_closed.set()

    monkeypatch.setattr(HttpProtocol, "_probe", watched)
    fake = FakeEngine()
    fake.queues = False
    async with opened(fake) as (reader, writer):
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


async def test_pipelined_requests_of_a_half_closed_client_are_answered() -> None:
    async with opened(FakeEngine()) as (reader, writer):
        writer.write(VERSION * 2)
        writer.write_eof()
        assert (await reader.read()).count(b"HTTP/1.1 200 ") == 2


async def test_an_old_client_that_closes_its_side_has_gone() -> None:
    fake = FakeEngine()
    async with opened(fake) as (reader, writer):
        writer.write(http_request({"prompt": "hi"}, version="1.0"))
        await fake.request_came.wait()
        writer.write_eof()
        await fake.abort_came.wait()
        assert await reader.read() == b""


async def exchange(port: int, sent: bytes) -> bytes:
    """Send `sent`, and return all that comes until the server has closed its side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    answer = await reader.read()
    writer.close()
    return answer


def answers(sent: bytes, fake: FakeEngine | None = None, **options: Any) -> bytes:
    async def test() -> bytes:
        async with loopback(fake or FakeEngine(), **options) as port:
            return await exchange(port, sent)

    return asyncio.run(test())


@pytest.mark.parametrize(
    ("status", "sent"),
    [
        (b"400", CHUNKS.replace(b"Host", b"Content-Length: 4\r\nHost") + b"0\r\n\r\n"),
        (b"431", VERSION.replace(b"Host", b"A: " + b"a" * 100_000 + b"\r\nHost")),
        (b"431", VERSION.replace(b"Host", b"a:b\r\n" * 1000 + b"Host")),
        (b"505", VERSION.replace(b"1.1", b"9.9")),
        (b"400", CHUNKS + b"1\r\n \r\n" * 5000),
        (b"501", VERSION.replace(b"GET", b"BREW")),
    ],
)
def test_after_what_is_refused_nothing_is_answered(
    status: bytes, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    answer = answers(sent + VERSION)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert answer.count(b"content-length: ") == 1
    assert b"\r\nconnection: close\r\n" in answer
    error_in(answer)
    assert caplog.records == []


def test_a_url_as_the_target_is_served() -> None:
    answer = answers(LAST.replace(b"/version", b"http://y/version"))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"version"' in answer


def test_an_upgrade_is_ignored_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The body after it is read, and the next request too."""
    request = http_request({"prompt": "hi"})
    asks = b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    answer = answers(request.replace(b"\r\n\r\n", asks) + LAST, FakeEngine(saying("ok")))
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert b'"text":"ok"' in answer
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_requests_that_come_together_are_answered_one_after_the_other() -> None:
    fake, rest = FakeEngine(), b'el": "tiny", "prompt": "hi"}'
    async with opened(fake) as (reader, writer):
        body = b'5\r\n{"mod\r\n' + b"%x\r\n" % len(rest) + rest + b"\r\n0\r\nX-Late: a\r\n\r\n"
        writer.write((CHUNKS + body) * 2 + VERSION + LAST)
        for nth in range(2):
            await fake.request_came.wait()
            fake.request_came.clear()
            assert len(fake.added) == nth + 1  # the next one waits
            fake.emit(output(fake.added[nth], ids("a"), finish_reason="length"))
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200 ") == 4
        assert answer.count(b'"text":"a"') == 2


def test_many_pipelined_requests_all_have_an_answer() -> None:
    """More than are received ahead, and more than one turn takes."""
    num_requests = 2 * READ_AHEAD_BYTES // len(VERSION)
    answer = answers(VERSION * num_requests + LAST)
    assert answer.count(b"HTTP/1.1 200 ") == num_requests + 1


@pytest.mark.parametrize("ends", [False, True])
async def test_who_sends_all_before_reading_learns_why_it_was_refused(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the body nothing is kept; without an end it is not taken for ever."""
    if not ends:
        monkeypatch.setattr(protocol, "DISCARD_DEADLINE_S", 0.2)

    def send_all(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head_of(20_000_000 if ends else 10**12))
            with nullcontext() if ends else pytest.raises(OSError):
                for _ in range(20 if ends else 1000):
                    client.sendall(b" " * 1_000_000)
            return client.recv(100_000)

    async with loopback(FakeEngine(), keys=KEYS) as port:
        answer = await asyncio.to_thread(send_all, port)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"\r\nconnection: close\r\n" in answer


async def test_the_rest_of_refused_chunks_is_not_parsed() -> None:
    """What would be the next request is a part of the body."""
    async with opened(FakeEngine(), keys=KEYS) as (reader, writer):
        writer.write(CHUNKS)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b"\r\nconnection: close\r\n" in head
        writer.write(b"0\r\n\r\n" + VERSION)
        assert b"HTTP/1.1" not in await reader.read()


async def test_a_client_that_waits_to_send_its_body_is_told_to_or_refused() -> None:
    async with loopback(FakeEngine(saying("ok"))) as port:
        request = http_request({"prompt": "hi"})
        end = request.index(b"\r\n\r\n")
        head, body = request[:end] + b"\r\nExpect: 100-continue\r\n\r\n", request[end + 4 :]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        # It may now send the body or not, so nothing can follow.
        refused = await exchange(port, head.replace(b"application/json", b"text/plain"))
        assert refused.startswith(b"HTTP/1.1 415 ")
        assert b"\r\nconnection: close\r\n" in refused


@pytest.mark.parametrize("stream", [False, True])
def test_an_old_client_gets_no_chunks(stream: bool) -> None:
    """HTTP/1.0 has none: the end of the connection ends the answer."""
    sent = http_request({"prompt": "hi", "stream": stream}, version="1.0")
    head, _, body = answers(sent, FakeEngine(saying("ok"))).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"\r\nconnection: close" in head.lower()
    assert body.endswith(b"data: [DONE]\n\n" if stream else b"}")


def test_trailers_do_not_reach_the_application(caplog: pytest.LogCaptureFixture) -> None:
    """A trailer cannot name the request, or bring a key."""
    data = http_request({"prompt": "hi"}).partition(b"\r\n\r\n")[2]
    body = b"%x\r\n" % len(data) + data + b"\r\n0\r\nX-Request-Id: late\r\n\r\n"
    close = CHUNKS.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    answer = answers(close + body, FakeEngine(saying("ok")))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b": late" not in answer

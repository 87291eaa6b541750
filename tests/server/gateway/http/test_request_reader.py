"""Requests are read as RFC 9112 says and as h11 reads them, however their bytes are cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.gateway.http import request_reader
from server.gateway.http.request_reader import (
    MAX_FRAMING_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MIN_CHUNK_BYTES,
    MIN_COST_BYTES,
    PLAIN_SLICE_BYTES,
    SLICE_BYTES,
    Head,
    RequestReader,
)
from tests.mutations import damaged
from topspin.errors import RequestError

HOST = b"Host: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class Received:
    """The requests of one connection: head, parts of the body, and whether it is whole."""

    def __init__(self) -> None:
        self.requests: list[tuple[Head, list[bytes], bool]] = []

    def on_head(self, head: Head) -> None:
        self.requests.append((head, [], False))

    def on_content(self, data: bytes) -> None:
        self.requests[-1][1].append(data)

    def on_end(self) -> None:
        self.requests[-1] = (*self.requests[-1][:2], True)


def read(*pieces: bytes) -> tuple[list[tuple[Head, bytes, bool]], int | None]:
    """Return the requests in `pieces`, and the status of the error that ended them."""
    received, status = Received(), None
    reader = RequestReader(received)
    try:
        for piece in pieces:
            reader.feed(piece)
            while reader.can_advance:
                reader.advance()
    except RequestError as error:
        status = error.status
    return [(head, b"".join(body), whole) for head, body, whole in received.requests], status


def get(*headers: bytes, line: bytes = b"GET / HTTP/1.1", host: bytes = HOST) -> bytes:
    return line + b"\r\n" + host + b"".join(header + b"\r\n" for header in headers) + b"\r\n"


# Of each status: lines of requests, and headers beside Host, each with what follows the head.
LINES = {
    400: [
        *(b"GET  / HTTP/1.1", b"GET /\tHTTP/1.1", b"GET / HTTP/1", b"DESCRIBE / RTSP/1.0"),
        *(b"GET version HTTP/1.1", b"GET /a#b HTTP/1.1", b"GET /\xff HTTP/1.1", b"GET * HTTP/1.1"),
        *(b"GET ftp://x/ HTTP/1.1", b"GET http:///version HTTP/1.1", b"GET http://a@b/ HTTP/1.1"),
        *(b"CONNECT x:80 HTTP/1.1", b"\r\n\r\nGET / HTTP/1.1", b"\x16\x03\x01\x02"),
    ],
    501: [b"BREW / HTTP/1.1", b"get / HTTP/1.1"],
    505: [b"GET / HTTP/9.9", b"GET / HTTP/2.0", b"GET / HTTP/1.2", b"GET / HTTP/0.9"],
}
HEADERS = {
    400: [
        *(b"Host: x", b"no colon", b": no name", b"A: b\r\n folded", b"A: b\rc", b"A: b\0c"),
        b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0",
        b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n0",
        b"Content-Length: 1\r\nContent-Length: 2",
        *(b"Content-Length: 1, 2", b"Content-Length: -1", b"Content-Length: +1"),
        *(b"Content-Length: 0x1", b"Content-Length:", b"Content-Length: 99999999999999999999"),
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0",
        b"Transfer-Encoding: chunked, gzip\r\n\r\n0",
    ],
    501: [b"Transfer-Encoding: gzip, chunked\r\n\r\n0", b"Transfer-Encoding: gzip"],
}
HEADS = [
    *(b"GET /\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", get(host=b"")),
    *(get(host=b"Host: a b\r\n"), get(host=b"Host: a/b\r\n"), get(host=b"Host : x\r\n")),
    get(b"Host: y", line=b"GET / HTTP/1.0"),
    get(b"Transfer-Encoding: chunked", line=b"POST / HTTP/1.0") + b"0\r\n\r\n",
    *(b"GET / HTTP/1.1\nHost: x\n\n", b"GET / HTTP/1.1\r\nHost: x\n\r\n"),
]
CHUNKS = [
    *(b"5\nhello\r\n0\r\n\r\n", b"5 \r\nhello\r\n0\r\n\r\n", b"0x5\r\nhello\r\n0\r\n\r\n"),
    *(b"-1\r\n", b"5\r\nhello!\r\n0\r\n\r\n", b"5;a\rb\r\nhello\r\n0\r\n\r\n"),
    *(b"fffffffffffffffff\r\n", b"0\r\nGET / HTTP/1.1\r\n\r\n", b"0\r\nContent-Length: 3\r\n\r\n"),
]
FORBIDDEN = [
    *((status, get(line=line)) for status, lines in LINES.items() for line in lines),
    *((status, get(each)) for status, headers in HEADERS.items() for each in headers),
    *((505 if b"2.0" in head else 400, head) for head in HEADS),
    *((400, CHUNKED + chunk) for chunk in CHUNKS),
]


@pytest.mark.parametrize(("status", "sent"), FORBIDDEN)
def test_what_rfc_9112_forbids_is_refused(status: int, sent: bytes) -> None:
    for pieces in ([sent + get()], [bytes([byte]) for byte in sent + get()]):
        requests, found = read(*pieces)
        assert found == status
        assert not any(is_whole for _, _, is_whole in requests)


@pytest.mark.parametrize(
    ("target", "path", "query", "host"),
    [
        (b"/a%20b?c=d?e", b"/a%20b", b"c=d?e", b"x"),
        (b"//a", b"//a", b"", b"x"),
        (b"http://y:80/a?b", b"/a", b"b", b"y:80"),
        (b"HTTPS://[::1]/a", b"/a", b"", b"[::1]"),
        (b"http://y?b", b"/", b"b", b"y"),
        (b"http://y", b"/", b"", b"y"),
    ],
)
def test_targets(target: bytes, path: bytes, query: bytes, host: bytes) -> None:
    """A URL's host stands above the Host header (RFC 9112, 3.2.2)."""
    [(head, _, _)], error = read(get(b"A: b", line=b"GET " + target + b" HTTP/1.1"))
    assert error is None
    assert (head.raw_path, head.query) == (path, query)
    assert sorted(head.headers) == [(b"a", b"b"), (b"host", host)]


def test_the_server_as_a_whole_is_asked_for_its_options() -> None:
    [(head, _, _)], _ = read(get(line=b"OPTIONS * HTTP/1.1"))
    assert (head.method, head.raw_path) == ("OPTIONS", b"*")


@pytest.mark.parametrize("body", [b"", b"hello", b"5;a=b\r\nhello\r\n0\r\nX-Late: y\r\n\r\n"])
def test_an_upgrade_is_ignored_and_trailers_are_dropped(body: bytes) -> None:
    is_chunked = b"\r\n" in body
    length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    asks = (b"Connection: Upgrade, HTTP2-Settings", b"upgrade: h2c", b"HTTP2-Settings: AA", length)
    requests, error = read(get(*asks) + body + get())
    assert error is None
    assert [data for _, data, _ in requests] == [b"hello" if body else b"", b""]
    assert not any(name == b"x-late" for name, _ in requests[0][0].headers)
    assert len(requests[0][0].headers) == 5


def test_the_head_has_limits_to_the_byte() -> None:
    room = MAX_HEADER_BYTES - len(get(b"X: "))
    for extra, status in ((0, None), (1, 431), (100_000 - room, 431)):
        sent = get(b"X: " + b"x" * (room + extra))
        for pieces in ([sent], [sent[:-1], sent[-1:]], [sent[:1000], sent[1000:]]):
            assert read(*pieces)[1] == status
    assert read(get(b"X: ")[:-4] + b"x" * MAX_HEADER_BYTES)[1] == 431  # it never ends
    for extra, status in ((0, None), (1, 431)):
        assert read(get(*[b"a:"] * (MAX_HEADERS - 1 + extra)))[1] == status


@pytest.mark.parametrize("size_bytes", [1, MIN_CHUNK_BYTES - 1, MIN_CHUNK_BYTES])
def test_small_chunks_are_counted(size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 64
    monkeypatch.setattr(request_reader, "MAX_SMALL_CHUNKS", most)
    chunk = b"%x\r\n" % size_bytes + b" " * size_bytes + b"\r\n"
    for num_smaller, status in ((most - 2, None), (most + 2, 400)):
        # So many chunks of no size take as much of the allowance as these.
        num_chunks = num_smaller * MIN_CHUNK_BYTES // max(1, MIN_CHUNK_BYTES - size_bytes)
        requests, error = read(CHUNKED + chunk * num_chunks + b"0\r\n\r\n")
        assert error == (status if size_bytes < MIN_CHUNK_BYTES else None)
        assert requests[0][2] is (error is None)


def test_what_surrounds_chunks_is_bounded() -> None:
    extension = b";a=" + b"b" * (MAX_FRAMING_BYTES // 2)
    ends = (b"0\r\n\r\n", b"0\r\n" + b"a:b\r\n" * (MAX_FRAMING_BYTES // 10) + b"\r\n")
    for end, status in zip(ends, (None, 400), strict=True):
        requests, error = read(CHUNKED + b"1" + extension + b"\r\n \r\n" + end)
        assert (error, requests[0][2]) == (status, status is None)


@pytest.mark.parametrize(
    ("content", "max_bytes"),
    [
        (b"1\r\n \r\n" * 4000, SLICE_BYTES),
        (b"ffff\r\n" + b"\r\n" * 0x8000, SLICE_BYTES),
        (b"0\r\n" + b"a:b\r\n" * 10_000, SLICE_BYTES),
        (b" " * 500_000, PLAIN_SLICE_BYTES),
        (get() * 1000, len(get())),
    ],
)
def test_a_slice_is_read_in_one_go(content: bytes, max_bytes: int) -> None:
    """And its parts are few, since each of them costs time."""
    reader = RequestReader(Received())
    plain = get(b"Content-Length: 1000000")
    reader.feed({b"0": CHUNKED, b"1": CHUNKED, b"f": CHUNKED, b" ": plain}.get(content[:1], get()))
    reader.advance()
    reader.feed(content)
    num_fed = 0
    feed = reader._parser.feed_data

    class Counting:
        def feed_data(self, data: bytes) -> None:
            nonlocal num_fed
            num_fed += 1
            feed(data)

        should_keep_alive = reader._parser.should_keep_alive

    reader._parser = Counting()  # type: ignore[assignment]
    for _ in range(5):
        before, num_fed = reader.num_unread_bytes, 0
        reader.advance()
        assert 0 < before - reader.num_unread_bytes <= max_bytes
        assert num_fed <= SLICE_BYTES // MIN_COST_BYTES


Plain = tuple[bytes, bytes, list[tuple[bytes, bytes]], bytes]


def as_h11_reads(data: bytes) -> list[Plain] | None:
    """Return the whole requests in `data`, or None for an error."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=10 * MAX_HEADER_BYTES)
    connection.receive_data(data)
    requests: list[Plain] = []
    open_request: Plain | None = None
    try:
        while (event := connection.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Request):
                open_request = (event.method, event.target, list(event.headers), b"")
            elif isinstance(event, h11.Data):
                assert open_request is not None
                open_request = (*open_request[:3], open_request[3] + bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                assert open_request is not None
                requests.append(open_request)
                connection.send(h11.Response(status_code=204, headers=[]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    break
                connection.start_next_cycle()
            else:
                break
    except h11.RemoteProtocolError:
        return None
    return requests


tokens = st.text("abcXYZ-_.09", min_size=1, max_size=12).map(str.encode)
values = st.text('ab;,="/ \t\xe9~', max_size=20).map(lambda text: text.strip().encode("latin1"))
bodies = st.binary(max_size=40) | st.sampled_from([b"\r\n\r\n", b"0\r\n\r\n", b"a" * 5000])


@st.composite
def requests_on_the_wire(draw: st.DrawFn) -> bytes:
    """Return the bytes of a valid request."""
    names = draw(st.lists(tokens.map(lambda name: b"x-" + name), max_size=4))
    headers = [
        name + b":" + draw(st.sampled_from([b"", b" ", b"\t "])) + draw(values) for name in names
    ]
    target = draw(st.sampled_from([b"/", b"/a/b?c=d", b"/%e2%82%ac"]))
    line = draw(st.sampled_from([b"GET", b"POST", b"DELETE"])) + b" " + target + b" HTTP/1.1"
    body = draw(bodies)
    kind = draw(st.sampled_from(["none", "length", "chunks"]))
    if kind == "none":
        return get(*headers, line=line)
    if kind == "length":
        return get(*headers, b"Content-Length: %d" % len(body), line=line) + body
    cuts = sorted({0, len(body), *draw(st.lists(st.integers(0, len(body)), max_size=4))})
    chunks = b"".join(
        b"%X\r\n" % (end - start) + body[start:end] + b"\r\n"
        for start, end in itertools.pairwise(cuts)
    )
    trailers = draw(st.sampled_from([b"", b"X-Late: a\r\n"]))
    return (
        get(*headers, b"transfer-encoding: Chunked", line=line)
        + chunks
        + b"0\r\n"
        + trailers
        + b"\r\n"
    )


streams = st.lists(requests_on_the_wire(), min_size=1, max_size=4)


def plain(request: tuple[Head, bytes, bool]) -> Plain:
    head, body, _ = request
    target = head.raw_path + (b"?" + head.query if head.query else b"")
    return head.method.encode(), target, head.headers, body


def lowered(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers as h11 shows them: it writes a transfer coding small."""
    return [(n, v.lower() if n == b"transfer-encoding" else v) for n, v in headers]


@settings(max_examples=30)
@given(sent=streams, data=st.data())
def test_valid_requests_are_read_as_h11_reads_them_however_they_are_cut(
    sent: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(sent)
    oracle = as_h11_reads(whole)
    assert oracle is not None
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=20))})
    for pieces in (
        [whole],
        [whole[start:end] for start, end in itertools.pairwise(cuts)],
        [bytes([byte]) for byte in whole],
    ):
        requests, error = read(*pieces)
        assert error is None
        found = [plain(request) for request in requests]
        assert [(m, t, lowered(h), b) for m, t, h, b in found] == oracle
        assert all(is_whole for _, _, is_whole in requests)


SEEDS = [
    get(b"Content-Length: 5") + b"hello" + get(),
    CHUNKED + b"5;a=b\r\nhello\r\n4\r\n\r\n\r\n\r\n0\r\nX: y\r\n\r\n" + get(b"Connection: close"),
    get(b"Expect: 100-continue", b"Upgrade: h2c", b"Connection: upgrade", b"Content-Length: 1")
    + b"a",
]


@settings(max_examples=50)
@given(whole=damaged(SEEDS), data=st.data())
def test_damaged_requests_are_the_same_however_they_are_cut(
    whole: bytes, data: st.DataObject
) -> None:
    """And what h11 takes too, it takes for the same."""
    expected = read(whole)
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=9))})
    assert read(*(whole[start:end] for start, end in itertools.pairwise(cuts))) == expected
    assert read(*(bytes([byte]) for byte in whole)) == expected
    oracle = as_h11_reads(whole)
    if oracle is not None and expected[1] is None:
        ours = [plain(each) for each in expected[0] if each[2]]
        for (m, t, h, body), theirs in zip(ours, oracle, strict=False):
            known = [each for each in lowered(h) if each[0] != b"ignored"]
            assert (m, t, known, body) == (
                *theirs[:2],
                [each for each in theirs[2] if each[0] != b"upgrade"],
                theirs[3],
            )

"""One connection's bytes as HTTP/1 requests: RFC 9112's rules, and limits of heads and chunks.

Owns what a request may look like and how much of it is read in one go. The grammar of headers and
chunks is httptools'; it is given no byte beyond the request that it reads, since it would go on
with the next one, and no head that is not whole, since it keeps all that it has seen of one. Knows
no socket and no deadline; server.gateway.http.protocol calls it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Protocol

import httptools

from topspin.errors import RequestError

MAX_HEADER_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 256
SLICE_BYTES: Final = 4096
"""At most this much of chunks, which cost time each, is read in one go."""
PLAIN_SLICE_BYTES: Final = 64 * 1024
"""So for a body that is not in chunks."""
MIN_COST_BYTES: Final = 64
"""A smaller part costs as much."""
MAX_SMALL_CHUNKS: Final = 4096
MIN_CHUNK_BYTES: Final = 64
"""The mean size of the chunks beyond MAX_SMALL_CHUNKS."""
MAX_FRAMING_BYTES: Final = 2 * 2**20
"""Of a chunked body: all that is not content. The chunks that 8 MiB may have need half of it."""

_CHUNKS_END: Final = b"\r\n\r\n"
_EMPTY_LINE: Final = re.compile(rb"\n\r?\n")
_REQUEST_LINE: Final = re.compile(
    rb"(?:\r\n)?([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([!-~]+) HTTP/([0-9]\.[0-9])\r\n"
)
# Origin-form, absolute-form (its authority is the first group), or the server as a whole.
_TARGET: Final = re.compile(
    rb"(?:(?:https?://([^/?#]+))?(/[^?#]*)|https?://([^/?#]+))(?:\?([^#]*))?|\*", re.IGNORECASE
)
_HOST: Final = re.compile(rb"(?:\[[0-9A-Za-z:.]+\]|[\w.~!$&'()*+,;=%-]*)(?::[0-9]*)?")
# httptools would take what follows such a head for another protocol; we may ignore the header.
_UPGRADE: Final = re.compile(rb"\n(?i:upgrade)(?=:)")
_IGNORED: Final = b"\nignored"


class InvalidHttp(RequestError):
    """The received bytes are not a valid HTTP request."""

    code = "invalid_http"


class HeadTooLarge(RequestError):
    """The request's head is over the limit."""

    code = "headers_too_large"
    status = 431


class NotImplementedHere(RequestError):
    """The request's method or its transfer coding is none that is known here."""

    code = "not_implemented"
    status = 501


class UnsupportedVersion(RequestError):
    """The request is not HTTP/1.0 or HTTP/1.1."""

    code = "http_version_not_supported"
    status = 505


@dataclass(slots=True)
class Head:
    """A request's line and headers; names are lowercase.

    `authority` is the host in a target that is a URL; it is the Host header's too then.
    `content_length` is None for a body in chunks, 0 if there is none. `keeps_alive`: the client
    may send another request.
    """

    method: str
    raw_path: bytes
    query: bytes
    version: str
    authority: bytes | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    content_length: int | None = 0
    keeps_alive: bool = False
    expects_continue: bool = False


class Receiver(Protocol):
    """What is told of each request, in order; not of its trailers."""

    def on_head(self, head: Head) -> None:
        """Begin a request."""

    def on_content(self, data: bytes) -> None:
        """Take a part of its body."""

    def on_end(self) -> None:
        """Note that all of it has come."""


class RequestReader:
    """Reads the requests of one connection; of each the same, however its bytes are cut.

    After an error it is not to be used again. The methods on_header to on_message_complete are
    httptools'.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._parser = httptools.HttpRequestParser(self)
        self._unread = bytearray()
        # Of the unread bytes, those that have been looked at and are no whole head.
        self._num_seen_bytes = 0
        self._head = _NO_HEAD
        self._is_in_body = False
        self._last_bytes = b""
        self._num_content_bytes = self._num_framing_bytes = self._num_chunks = 0

    @property
    def num_unread_bytes(self) -> int:
        """How many bytes wait to be read."""
        return len(self._unread)

    @property
    def has_begun_head(self) -> bool:
        """Whether a part of a head has come; an empty line before it is none."""
        return not self._is_in_body and not b"\r\n".startswith(self._unread)

    @property
    def can_advance(self) -> bool:
        """Whether there are bytes that advance() has not seen."""
        return len(self._unread) > self._num_seen_bytes

    @property
    def num_missing_bytes(self) -> int | None:
        """How much of the body is unread; None: it is in chunks, so nobody knows."""
        if not self._is_in_body:
            return 0
        length = self._head.content_length
        return None if length is None else length - self._num_content_bytes

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        self._unread += data

    def clear(self) -> None:
        """Forget all bytes that are unread."""
        self._unread.clear()
        self._num_seen_bytes = 0

    def advance(self) -> None:
        """Read on: a head, or a slice of a body. Raises RequestError.

        Not both: the application may refuse a request by its head, and then nothing else is read.
        """
        try:
            if not self._is_in_body:
                self._read_head()
                return
            budget_bytes = SLICE_BYTES
            while self._is_in_body and self._unread and budget_bytes > 0:
                budget_bytes -= max(MIN_COST_BYTES, self._read_content())
        except httptools.HttpParserInvalidMethodError:
            raise NotImplementedHere("the request's method is not known here") from None
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None  # it was raised by one of our methods
        except httptools.HttpParserError as error:
            raise InvalidHttp(f"invalid HTTP request: {error}") from None

    def _read_head(self) -> None:
        """Read a head if it is whole."""
        if self._unread and self._unread[0] != 0x0D and not 0x21 <= self._unread[0] <= 0x7E:
            raise InvalidHttp("invalid HTTP request: it does not begin with a method")
        found = _EMPTY_LINE.search(self._unread, max(0, self._num_seen_bytes - 2), MAX_HEADER_BYTES)
        if found is None:
            if len(self._unread) >= MAX_HEADER_BYTES:
                raise HeadTooLarge(
                    f"the request's line and headers are longer than {MAX_HEADER_BYTES} bytes"
                )
            self._num_seen_bytes = len(self._unread)
            return
        data = self._take(found.end())
        self._num_seen_bytes = 0
        self._head = _head_of(data)
        self._last_bytes = b""
        self._num_content_bytes = self._num_framing_bytes = self._num_chunks = 0
        self._parser.feed_data(_UPGRADE.sub(_IGNORED, data))

    def _read_content(self) -> int:
        """Read a part of a body, nothing beyond its end; returns how many bytes."""
        num_missing = self.num_missing_bytes
        if num_missing is not None:
            data = self._take(min(num_missing, PLAIN_SLICE_BYTES))
            self._parser.feed_data(data)
            return len(data)
        # Whatever its trailers, a body in chunks ends with an empty line, of which a part may have
        # been read.
        seam = self._last_bytes + self._unread[:3]
        if (end := seam.find(_CHUNKS_END)) >= 0:
            num_bytes = end + len(_CHUNKS_END) - len(self._last_bytes)
        elif (end := self._unread.find(_CHUNKS_END, 0, SLICE_BYTES)) >= 0:
            num_bytes = end + len(_CHUNKS_END)
        else:
            num_bytes = SLICE_BYTES
        data = self._take(num_bytes)
        self._last_bytes = (self._last_bytes + data[-3:])[-3:]
        self._num_framing_bytes += len(data)
        self._parser.feed_data(data)
        self._check_framing()
        return len(data)

    def _take(self, num_bytes: int) -> bytes:
        data = bytes(self._unread[:num_bytes])
        del self._unread[:num_bytes]
        return data

    def _check_framing(self) -> None:
        if self._num_framing_bytes > MAX_FRAMING_BYTES:
            raise InvalidHttp(
                f"the sizes, extensions and trailers of the body's chunks take more than "
                f"{MAX_FRAMING_BYTES} bytes"
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers are dropped."""
        if self._is_in_body:
            return
        if len(self._head.headers) == MAX_HEADERS:
            raise HeadTooLarge(f"the request has more than {MAX_HEADERS} headers")
        self._head.headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Check what httptools does not, and begin the request."""
        head = self._head
        _check_headers(head)
        head.keeps_alive = head.version == "1.1" and self._parser.should_keep_alive()
        self._is_in_body = True
        self._receiver.on_head(head)

    def on_body(self, data: bytes) -> None:
        """Take a part of the body."""
        self._num_content_bytes += len(data)
        self._num_framing_bytes -= len(data)
        self._receiver.on_content(data)

    def on_chunk_complete(self) -> None:
        """Count a chunk."""
        self._num_chunks += 1
        if self._num_chunks > MAX_SMALL_CHUNKS + self._num_content_bytes // MIN_CHUNK_BYTES:
            raise InvalidHttp(
                f"the body has too many small chunks: {MAX_SMALL_CHUNKS} may be smaller than "
                f"{MIN_CHUNK_BYTES} bytes"
            )

    def on_message_complete(self) -> None:
        """End the request."""
        self._check_framing()
        self._is_in_body = False
        self._receiver.on_end()


def _head_of(data: bytes) -> Head:
    """Return what a request's line says. Raises RequestError."""
    line = _REQUEST_LINE.match(data)
    if line is None:
        raise InvalidHttp("invalid HTTP request: its first line is not METHOD TARGET HTTP/VERSION")
    method, target, version = line.groups()
    if version not in (b"1.0", b"1.1"):
        raise UnsupportedVersion("only HTTP/1.0 and HTTP/1.1 are served")
    found = _TARGET.fullmatch(target)
    if found is None or (target == b"*" and method != b"OPTIONS"):
        raise InvalidHttp("invalid HTTP request: its target is not the path or URL of a resource")
    with_path, path, without_path, query = found.groups()
    return Head(
        method=method.decode(),
        raw_path=path or (b"/" if without_path else b"*"),
        query=query or b"",
        version=version.decode(),
        authority=with_path or without_path,
    )


def _check_headers(head: Head) -> None:
    """Set what the headers say of the body; the target's host stands above theirs."""
    hosts = [value for name, value in head.headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and head.version == "1.1"):
        raise InvalidHttp("invalid HTTP request: it must have one Host header")
    if head.authority is not None:
        hosts = [head.authority]
        others = [each for each in head.headers if each[0] != b"host"]
        head.headers[:] = [(b"host", head.authority), *others]
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise InvalidHttp("invalid HTTP request: its host is not a name or an address")
    for name, value in head.headers:
        if name == b"content-length":
            head.content_length = int(value)
        elif name == b"transfer-encoding":
            if head.version == "1.0":
                raise InvalidHttp("invalid HTTP request: HTTP/1.0 has no Transfer-Encoding")
            if value.lower() != b"chunked":
                raise NotImplementedHere("of transfer codings, only `chunked` is known here")
            head.content_length = None
        elif name == b"expect" and head.version == "1.1":
            head.expects_continue = value.lower() == b"100-continue"


_NO_HEAD: Final = Head(method="", raw_path=b"", query=b"", version="1.1")

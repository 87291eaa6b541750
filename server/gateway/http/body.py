"""Reading a request's body: its type, its size, how long it may take, and all bodies together.

Owns these limits and their errors. Knows no JSON and no route; server.gateway.handler calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from email.message import Message

from starlette.requests import ClientDisconnect, Request

from server.gateway.call import ClientGone
from server.gateway.errors import truncated
from topspin.errors import Overloaded, RequestError

MAX_BODY_BYTES = 8 * 2**20
BODY_DEADLINE_S = 30.0
# Bodies that are being received or prepared, in bytes that have come. While one is decoded, in one
# of a few threads, it takes up to 25 times its size.
MAX_HELD_BYTES = 256 * 2**20


class BodyTooLarge(RequestError):
    """The request body is over the limit; it was not read further."""

    code = "request_too_large"
    status = 413


class BodyTimeout(RequestError):
    """The request body did not arrive in time."""

    code = "request_timeout"
    status = 408


class UnsupportedMediaType(RequestError):
    """The headers do not declare the request body as plain JSON."""

    code = "unsupported_media_type"
    status = 415


class Bodies:
    """The bodies of one gateway's requests, from their first byte until they are prepared."""

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._num_held_bytes = 0

    @asynccontextmanager
    async def read_json(
        self, request: Request, *, max_bytes: int = MAX_BODY_BYTES
    ) -> AsyncGenerator[bytes, None]:
        """Yield a body declared as JSON; it counts as held until the block ends.

        Raises as `check_media_type` and `read_body`; Overloaded if too much is held.
        """
        check_media_type(request)
        num_own_bytes = 0

        def count(num_bytes: int) -> None:
            nonlocal num_own_bytes
            if self._num_held_bytes + num_bytes > self._max_held_bytes:
                raise Overloaded("the bodies of too many requests are being received")
            num_own_bytes += num_bytes
            self._num_held_bytes += num_bytes

        try:
            yield await read_body(
                request, max_bytes=max_bytes, deadline_s=BODY_DEADLINE_S, count=count
            )
        finally:
            self._num_held_bytes -= num_own_bytes


def check_media_type(request: Request) -> None:
    """Raise UnsupportedMediaType unless the headers announce JSON in UTF-8, uncompressed.

    A browser lets any page post other types to any server without a preflight request, so
    a type that is missing or wrong is refused although the body may be JSON.
    """
    given = request.headers.get("content-type", "")
    if not _is_json(given):
        found = f"it is {truncated(given, 64)!r}" if given else "it is missing"
        raise UnsupportedMediaType(
            f"`Content-Type` must be application/json, in UTF-8; {found}", param="Content-Type"
        )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedMediaType(
            f"`Content-Encoding` {truncated(encoding, 64)!r} is not supported; send plain JSON",
            param="Content-Encoding",
        )


def _is_json(content_type: str) -> bool:
    if content_type == "application/json":
        return True
    header = Message()
    header["Content-Type"] = content_type
    charset = header.get_content_charset("utf-8")
    return header.get_content_type() == "application/json" and charset == "utf-8"


def announced_bytes(request: Request) -> int:
    """Return how long the body will be, as far as the head says; 0: it does not."""
    announced = request.headers.get("content-length", "")
    return int(announced) if announced.isascii() and announced.isdigit() else 0


async def read_body(
    request: Request,
    *,
    max_bytes: int = MAX_BODY_BYTES,
    deadline_s: float = BODY_DEADLINE_S,
    count: Callable[[int], None] = lambda _: None,
) -> bytes:
    """Return the body; raises BodyTooLarge, BodyTimeout or ClientGone.

    A Content-Length over the limit is refused before any of the body is read. `count` is called
    with the size of each piece before it is kept, and may raise.
    """
    if announced_bytes(request) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(deadline_s):
            async for piece in request.stream():
                if len(body) + len(piece) > max_bytes:
                    raise _too_large(max_bytes)
                count(len(piece))
                body += piece
    except TimeoutError:
        raise BodyTimeout(f"the request body did not arrive within {deadline_s:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {max_bytes} bytes")

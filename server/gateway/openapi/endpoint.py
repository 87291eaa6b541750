"""The description of one route, as clients see it.

Owns the type; each room describes its own routes, beside what serves them. server.gateway.app lists
them all, server.gateway.openapi.document turns them into OpenAPI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from server.gateway.errors import ErrorBody
from server.gateway.http.body import MAX_BODY_BYTES

EXAMPLE_MODEL: Final = "smollm2-moe"
# Statuses of refusals.
OF_BODIES: Final = (408, 413, 415, 429)
OF_GENERATION: Final = (404, *OF_BODIES, 503)
# Of streams that are made of one type.
CHUNKS: Final = "each `data: ` and a {}, the last one `data: [DONE]`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """A parameter of the URL."""

    name: str
    schema: dict[str, Any]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Endpoint:
    """One method of one path.

    `parts` are other types that it names: of lists in `body` which are decoded later, of events.
    `answer` is the type of a JSON answer, `events` a word on those of a stream, `media_type`
    another answer's. `refusals` are the statuses of failures beside 400 and
    500, which all have; `failure` is the type of the answer with 503 if it is not the usual one,
    `error` that of all failures. `max_bytes` bounds the body.
    """

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    parts: tuple[type[msgspec.Struct], ...] = ()
    max_bytes: int = MAX_BODY_BYTES
    answer: type[msgspec.Struct] | None = None
    events: str = ""
    media_type: str = "application/json"
    refusals: tuple[int, ...] = ()
    failure: type[msgspec.Struct] | None = None
    error: type[msgspec.Struct] = ErrorBody
    query: tuple[Query, ...] = ()
    path_text: str = ""
    example: dict[str, Any] | None = None

"""GET /v1/responses/{id}/input_items: what a stored response answers, page by page. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Raw

from server.gateway.errors import truncated
from server.gateway.openapi.endpoint import Endpoint, Query
from topspin.errors import InvalidRequest

MAX_ITEMS = 100
DEFAULT_ITEMS = 20


class InputItems(msgspec.Struct, frozen=True, kw_only=True):
    """A page of items; `has_more`: others follow behind `last_id`."""

    object: Literal["list"] = "list"
    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


INPUT_ITEMS = Endpoint(
    method="get",
    path="/v1/responses/{response_id}/input_items",
    summary="List what a stored response answers",
    answer=InputItems,
    refusals=(404,),
    path_text="the id of a response",
    query=(
        Query(
            name="limit",
            schema={"type": "integer", "minimum": 1, "maximum": MAX_ITEMS},
            text=f"how many ({DEFAULT_ITEMS})",
        ),
        Query(name="order", schema={"enum": ["asc", "desc"]}, text="desc: the last ones first"),
        Query(name="after", schema={"type": "string"}, text="the id of the item before"),
    ),
)


def with_id(item: Raw) -> Raw:
    """Return an item with an id, which clients may leave out."""
    members = msgspec.json.decode(item, type=dict[str, Raw])
    if bytes(members.get("id", b"null")) != b"null":
        return item
    made = Raw(msgspec.json.encode(f"item_{secrets.token_hex(12)}"))
    return Raw(msgspec.json.encode({**members, "id": made}))


def page_of(items: Sequence[Raw], query: Mapping[str, str]) -> InputItems:
    """Return the page that a query asks for; raises InvalidRequest naming the parameter."""
    order, limit = query.get("order", "desc"), query.get("limit", str(DEFAULT_ITEMS))
    if order not in ("asc", "desc"):
        raise InvalidRequest("`order` must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_ITEMS):
        raise InvalidRequest(f"`limit` must be 1 to {MAX_ITEMS}", param="limit")
    ordered = list(items) if order == "asc" else list(reversed(items))
    ids = [_id_of(item) for item in ordered]
    start, after = 0, query.get("after")
    if after is not None:
        if after not in ids:
            raise InvalidRequest(
                f"`after`: the response has no item `{truncated(after, 64)}`", param="after"
            )
        start = ids.index(after) + 1
    end = start + int(limit)
    shown = ids[start:end]
    return InputItems(
        data=ordered[start:end],
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
        has_more=end < len(ids),
    )


def _id_of(item: Raw) -> str:
    return str(msgspec.json.decode(item)["id"])

"""The OpenAPI 3.1 document, made of the table of routes and of the structs that requests and
answers are decoded from and encoded to.

Owns the document's form. Knows no route by name and no request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from server.gateway.bodies.fields import MAX_REQUEST_ID_CHARS, SCHEMA_REF, BodyFields, field_classes
from server.gateway.http.exchange import HEADER
from server.gateway.openapi.endpoint import Endpoint
from topspin import __version__

JSON = "application/json"
STATUSES = {
    200: "The answer",
    400: "The request is invalid; `error.param` names the field",
    404: "What the request names does not exist",
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    429: "There is no room for one more request now; try again later",
    500: "The server failed by a bug",
    503: "The engine does not serve now; try again later",
}
RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait", "schema": {"type": "integer"}}}

Json = dict[str, Any]


def document(endpoints: Collection[Endpoint]) -> bytes:
    """Return the document of these routes as JSON."""
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Topspin",
                "version": __version__,
                "description": "An OpenAI-compatible server of Mixture-of-Experts models. A field "
                "that is null counts as not given; an unknown one is refused.",
            },
            "paths": _paths(endpoints),
            "components": {"schemas": _schemas(endpoints)},
        }
    )


def _paths(endpoints: Iterable[Endpoint]) -> dict[str, Json]:
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        paths.setdefault(_path(endpoint), {})[endpoint.method] = _operation(endpoint)
    return paths


def _path(endpoint: Endpoint) -> str:
    return endpoint.path.replace(":path}", "}")


def _operation(endpoint: Endpoint) -> Json:
    operation: Json = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method}:{_path(endpoint)}",
        "parameters": list(_parameters(endpoint)),
        "responses": {
            str(status): _response(endpoint, status)
            for status in (200, 400, *endpoint.refusals, 500)
        },
    }
    if endpoint.body is not None:
        operation["requestBody"] = {
            "required": True,
            "description": f"At most {endpoint.max_bytes} bytes, in UTF-8, not compressed",
            "content": {JSON: {"schema": _ref(endpoint.body), "example": endpoint.example}},
        }
    return operation


def _parameters(endpoint: Endpoint) -> Iterable[Json]:
    if endpoint.path_text:
        name = _path(endpoint).partition("{")[2].partition("}")[0]
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "description": endpoint.path_text,
            "schema": {"type": "string", "minLength": 1},
        }
    for each in endpoint.query:
        yield {"name": each.name, "in": "query", "description": each.text, "schema": each.schema}
    yield {
        "name": HEADER,
        "in": "header",
        "description": "The request's id, in place of one made by the server",
        "schema": {"type": "string", "maxLength": MAX_REQUEST_ID_CHARS, "pattern": "^[ -~]*$"},
    }


def _response(endpoint: Endpoint, status: int) -> Json:
    headers: Json = {
        HEADER: {
            "description": "The request's id",
            "required": True,
            "schema": {"type": "string", "maxLength": MAX_REQUEST_ID_CHARS},
        }
    }
    answer = endpoint.error if status != 200 else endpoint.answer
    if status == 429:
        headers |= RETRY_AFTER
    elif status == 503:
        answer = endpoint.failure or endpoint.error
        headers |= RETRY_AFTER if endpoint.failure is None else {}
    media_type = JSON if status != 200 else endpoint.media_type
    content: Json = {media_type: {"schema": {} if answer is None else _ref(answer)}}
    if media_type != JSON:
        content = {media_type: {"schema": {"type": "string"}}}
    if status == 200 and endpoint.events:
        # Without a type: some readers take it for the whole stream's, some for each event's.
        shown = {"description": f"With `stream`: events, {endpoint.events}"}
        content["text/event-stream"] = {"schema": shown}
    return {"description": STATUSES[status], "headers": headers, "content": content}


def _ref(kind: type[msgspec.Struct]) -> Json:
    return {"$ref": SCHEMA_REF.format(name=kind.__name__)}


def _schemas(endpoints: Iterable[Endpoint]) -> dict[str, Json]:
    """Return the schemas of all bodies, answers and events, and of the structs inside them."""
    kinds: dict[type[msgspec.Struct], None] = {}
    for each in endpoints:
        named = (each.body, *each.parts, each.answer, each.failure, each.error)
        kinds |= {kind: None for kind in named if kind is not None}
    _, schemas = msgspec.json.schema_components(kinds, ref_template=SCHEMA_REF)
    for fields in _subclasses(BodyFields):
        if fields.__name__ in schemas:
            _describe(fields, schemas[fields.__name__]["properties"])
    return schemas


def _subclasses(kind: type[BodyFields]) -> Iterable[type[BodyFields]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _describe(kind: type[BodyFields], properties: dict[str, Json]) -> None:
    """Say of each field that is not implemented what is accepted."""
    classes = field_classes(kind)
    for name in classes.ignored:
        properties[name]["description"] = "Accepted, without effect."
    for name, neutral in classes.refused.items():
        properties[name] = {
            "enum": [None, *neutral],
            "description": "Not implemented: other values are refused.",
        }

"""The description of the API: complete, consistent, and without anything from elsewhere."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from starlette.routing import Route

from server.gateway.engine_client import EngineClient
from server.gateway.openapi.document import STATUSES
from tests.server.gateway.calls import answer_to
from tests.server.gateway.fakes import FakeEngine, gateway, make_app, saying


@cache
def described() -> dict[str, Any]:
    found: dict[str, Any] = answer_to("/openapi.json").json()
    return found


def refs(value: object) -> set[str]:
    """Return every schema that is referred to somewhere in `value`."""
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(refs, value.values()))
    return set().union(*map(refs, value)) if isinstance(value, list) else set()


def test_every_route_is_described_and_no_other() -> None:
    assert described()["openapi"].startswith("3.1")
    app: Any = make_app(EngineClient(FakeEngine()))
    served = set()
    for route in app._app.routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path}", "}")
        if path != "/v1/models/":  # the same as without a slash
            served |= {(method.lower(), path) for method in (route.methods or ()) - {"HEAD"}}
    schemas = described()["components"]["schemas"]
    assert {ref.rpartition("/")[2] for ref in refs(described())} <= set(schemas)
    paths = described()["paths"]
    assert served == {(method, path) for path in paths for method in paths[path]}


def test_every_refusal_is_described_as_the_error_object() -> None:
    for path, methods in described()["paths"].items():
        body = "AnthropicErrorBody" if path.startswith("/v1/messages") else "ErrorBody"
        for operation in methods.values():
            assert {"200", "400", "500"} <= set(operation["responses"])
            for status, response in operation["responses"].items():
                assert response["description"] == STATUSES[int(status)]
                assert "X-Request-Id" in response["headers"]
                if status not in ("200", "503"):
                    (media,) = response["content"].values()
                    assert media["schema"] == {"$ref": f"#/components/schemas/{body}"}


EXAMPLES = {
    path: methods["post"]["requestBody"]["content"]["application/json"]["example"]
    for path, methods in described()["paths"].items()
    if "requestBody" in methods.get("post", {})
}


async def test_the_examples_work() -> None:
    async with gateway(FakeEngine(saying("ok")), max_request_tokens=1000) as client:
        for path, example in EXAMPLES.items():
            known = {"model": "tiny", "tokens": [1, 2]}
            body = example | {name: known[name] for name in known.keys() & example.keys()}
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text


def test_the_page_of_the_api_needs_nothing_from_elsewhere() -> None:
    page = answer_to("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.findall(r"(?:https?:)?//[a-z]", page.text)
    assert "src=" not in page.text
    assert "openapi.json" in page.text

"""Schemathesis: requests made from our description get described answers, and never a 5xx."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import hypothesis
import msgspec
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.pairwise import slow_rows
from tests.server.gateway.calls import CHAT, scored
from tests.server.gateway.fakes import FakeEngine, loopback
from tests.server.gateway.openapi.test_document import EXAMPLES, described
from topspin.messages import AddRequest, RequestFailed, RequestOutput

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)
# Traces and the feed are the engine's, which is not here.
OPERATIONS = [
    (method, path)
    for path, methods in described()["paths"].items()
    for method in methods
    if path not in ("/trace", "/feed")
]


def script(request: AddRequest) -> Iterator[RequestOutput | RequestFailed]:
    """Say something, with log-probabilities where they are wanted."""
    for each in scored("hello")(request):
        is_bare = isinstance(each, RequestOutput) and request.sampling.logprobs is None
        yield msgspec.structs.replace(each, logprobs=()) if is_bare else each


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve the application over a socket, in a thread."""
    ports: list[int] = []
    started, stopping = threading.Event(), threading.Event()

    async def serve() -> None:
        async with loopback(FakeEngine(script), deadline_s=None, max_request_tokens=10_000) as port:
            ports.append(port)
            started.set()
            await asyncio.to_thread(stopping.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(20)
    yield f"http://127.0.0.1:{ports[0]}"
    stopping.set()
    thread.join()


def fill_in(case: schemathesis.Case, url: str) -> None:
    """Set what no description tells: names, ids, and which roles the model's template has."""
    places = case.path_parameters or {}
    if places.get("name", "z") < "m":
        is_file = case.operation.path.startswith("/page/")
        places["name"] = "main.js" if is_file else "org/alias"
    if places.get("response_id", "z") < "m":
        stored = httpx.post(f"{url}/v1/responses", json={"model": "tiny", "input": "hi"})
        places["response_id"] = stored.json()["id"]
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            message.pop("tool_calls", None)
            message["content"] = message.get("content") or "x"
            message["role"] = "user" if message.get("role") == "tool" else message.get("role")


def check(url: str, method: str, path: str, *, num_examples: int) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operation = schema[path][method.upper()]
    statuses: set[int] = set()

    @hypothesis.settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy())
    def call(case: schemathesis.Case) -> None:
        fill_in(case, url)
        response = case.call_and_validate(base_url=url, checks=CHECKS)
        statuses.add(response.status_code)

    call()
    if path in EXAMPLES:
        example = operation.Case(body=dict(EXAMPLES[path]), media_type="application/json")
        fill_in(example, url)
        statuses.add(example.call_and_validate(base_url=url, checks=CHECKS).status_code)
    # What could be cancelled is whole before that is asked for.
    assert 200 in statuses or path.endswith("/cancel"), "only refusals were checked"


LONG = (
    ("post", f"{CHAT}/batch"),
    ("post", "/v1/messages/count_tokens"),
    ("post", "/v1/responses/input_tokens"),
    ("post", "/v1/responses/{response_id}/cancel"),
    ("get", "/v1/responses/{response_id}/input_items"),
    ("delete", "/v1/responses/{response_id}"),
    ("get", "/ping"),
    ("post", "/v1/completions"),
)
"""What takes long by default; operations like them are among the others."""


@pytest.mark.parametrize(
    ("method", "path"),
    slow_rows(OPERATIONS, beside=[each for each in OPERATIONS if each not in LONG]),
)
def test_answers_are_as_described(url: str, method: str, path: str) -> None:
    check(url, method, path, num_examples=10)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), [each for each in OPERATIONS if each[0] == "post"])
def test_many_answers_are_as_described(url: str, method: str, path: str) -> None:
    check(url, method, path, num_examples=500)

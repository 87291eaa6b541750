"""The id of a request: where it comes from, and where it goes."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.server.gateway.calls import (
    CHAT,
    CHAT_BODY,
    PLAIN,
    PLAIN_BODY,
    answer_to,
    events_of,
    post,
)
from tests.server.gateway.fakes import FakeEngine, gateway, saying
from topspin.messages import client_id, engine_id

HEADER = "X-Request-Id"
MADE = re.compile("[0-9a-f]{32}")


@pytest.mark.parametrize(
    ("path", "body", "prefix"), [(CHAT, CHAT_BODY, "chatcmpl"), (PLAIN, PLAIN_BODY, "cmpl")]
)
@pytest.mark.parametrize(
    ("header", "field", "used"),
    [
        ("from a proxy: 7/a", None, "from a proxy: 7/a"),
        ("h" * 128, "in the body", "h" * 128),
        (None, "in the body", "in the body"),
        ("", "in the body", "in the body"),
    ],
)
def test_a_request_keeps_its_id(
    *, path: str, body: dict[str, Any], prefix: str, header: str | None, field: str, used: str
) -> None:
    fake = FakeEngine(saying("ok"))
    headers = {} if header is None else {HEADER: header}
    response = post(path, {**body, "request_id": field, "n": 2}, fake, headers=headers)
    assert response.headers[HEADER] == used
    assert response.json()["id"] == f"{prefix}-{used}"
    assert [client_id(added.request_id) for added in fake.added] == [used, used]


def test_a_stream_has_its_id_once() -> None:
    body = {**PLAIN_BODY, "stream": True}
    response = post(PLAIN, body, FakeEngine(saying("ok")), headers={HEADER: "s"})
    assert response.headers.get_list(HEADER) == ["s"]
    assert {event["id"] for event in events_of(response)} == {"cmpl-s"}


async def test_without_one_each_request_gets_an_id_of_its_own() -> None:
    fake = FakeEngine(saying("ok"))
    async with gateway(fake) as client:
        responses = [await client.post(PLAIN, json=PLAIN_BODY) for _ in range(2)]
    made = [response.headers[HEADER] for response in responses]
    assert all(map(MADE.fullmatch, made))
    assert made[0] != made[1]
    assert [client_id(added.request_id) for added in fake.added] == made


async def test_clients_may_use_the_same_id_at_the_same_time() -> None:
    fake = FakeEngine()
    async with gateway(fake) as client:
        headers = {HEADER: "same"}
        calls = [
            asyncio.create_task(client.post(PLAIN, json=PLAIN_BODY, headers=headers))
            for _ in range(2)
        ]
        while len(fake.added) < 2:
            await asyncio.sleep(0)
        first, second = fake.added
        assert first.request_id != second.request_id
        for added, text in ((second, "b"), (first, "a")):
            for each in saying(text)(added):
                fake.emit(each)
        answers = [(await each).json() for each in calls]
    assert [answer["choices"][0]["text"] for answer in answers] == ["a", "b"]
    assert {answer["id"] for answer in answers} == {"cmpl-same"}


def test_an_id_in_the_engine_names_the_clients() -> None:
    assert engine_id("a#b", 7, 0) != engine_id("a#b", 7, 1) != engine_id("a#b", 8, 1)
    assert client_id(engine_id("a#b", 7, 0)) == "a#b"


@pytest.mark.parametrize("given", ["x" * 129, "tab\there", "caf\u00e9", "nul\x00"])
def test_an_id_that_logs_could_not_show_is_refused_by_name(given: str) -> None:
    fake = FakeEngine(saying("ok"))
    response = answer_to(PLAIN, PLAIN_BODY, fake=fake, headers={HEADER: given})
    assert (response.status_code, response.json()["error"]["param"]) == (400, HEADER)
    assert MADE.fullmatch(response.headers[HEADER])
    assert fake.added == []
    response = answer_to(PLAIN, {**PLAIN_BODY, "request_id": given})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")


async def test_errors_have_the_id_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("server.gateway.http.body.check_media_type", broken)
    async with gateway(FakeEngine()) as client:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", CHAT, 405),
            ("POST", CHAT, 500),
        ):
            response = await client.request(method, path, headers={HEADER: "e"})
            assert (response.status_code, response.headers[HEADER]) == (status, "e")

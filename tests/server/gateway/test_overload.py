"""Answers of an overloaded engine, and the time that clients give their requests."""

from __future__ import annotations

import json

import httpx
import pytest

from server.gateway import engine_client
from server.gateway.http.auth import ApiKeys
from tests.server.gateway.calls import CHAT, CHAT_BODY, JSON, answer_to
from tests.server.gateway.fakes import FakeEngine, gateway, refusing, saying

BUSY = refusing("rate_limit_exceeded", 429, "too late", retry_after_s=3.2, wait_s=14.0)
MESSAGES = "/v1/messages"


async def ask(client: httpx.AsyncClient, **headers: str) -> httpx.Response:
    return await client.post(CHAT, content=json.dumps(CHAT_BODY), headers={**JSON, **headers})


@pytest.mark.parametrize("body", [CHAT_BODY, {**CHAT_BODY, "stream": True}])
def test_a_refusal_says_when_to_come_again(body: dict[str, object]) -> None:
    answer = answer_to(CHAT, body, fake=FakeEngine(BUSY))
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "4"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")


async def test_while_any_request_would_be_refused_none_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(engine_client.time, "monotonic", lambda: now)
    fake = FakeEngine(BUSY)
    async with gateway(fake) as client:
        assert (await ask(client)).status_code == 429
        fake.script = saying("ok")
        now = 100.5
        answer = await client.post(CHAT, content=b"not even JSON", headers=JSON)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "4"  # 13.5 s, where 10 are the bound
        assert len(fake.added) == 1
        # A long prompt may wait longer: the scheduler decides.
        long = {**CHAT_BODY, "messages": [{"role": "user", "content": "hi " * 6000}]}
        answer = await client.post(CHAT, content=json.dumps(long), headers=JSON)
        assert answer.json()["error"]["code"] != "rate_limit_exceeded"
        # Who waits longer is let through, and after a second the scheduler is asked again.
        assert (await ask(client, **{"X-Request-Timeout": "60"})).status_code == 200
        now = 101.1
        assert (await ask(client)).status_code == 200


async def test_a_refusal_of_one_tenant_is_none_of_another() -> None:
    keys = ApiKeys("k" * 32, None)
    fake = FakeEngine(BUSY)
    async with gateway(fake, keys=keys) as client:
        answer = await ask(client, authorization=f"Bearer {'k' * 32}")
        assert answer.status_code == 429
        assert fake.added[0].tenant.name == "default"


@pytest.mark.parametrize(
    ("flag_s", "header", "expected_s"),
    [(0.0, None, None), (0.0, "2.5", 2.5), (9.0, None, 9.0), (9.0, "2.5", 2.5), (9.0, "60", 9.0)],
)
def test_the_client_or_the_operator_limit_a_requests_time(
    flag_s: float, header: str | None, expected_s: float | None
) -> None:
    fake = FakeEngine(saying("ok"))
    headers = {} if header is None else {"x-request-timeout": header}
    answer = answer_to(CHAT, CHAT_BODY, fake=fake, headers=headers, request_timeout_s=flag_s)
    assert answer.status_code == 200
    given_s = fake.added[0].timeout_s
    if expected_s is None or given_s is None:
        assert given_s is expected_s
    else:
        assert 0.0 < given_s <= expected_s  # what has passed is taken off


@pytest.mark.parametrize("header", ["", "0", "-1", "nan", "inf", "1e9", "30s"])
def test_a_timeout_that_is_none(header: str) -> None:
    answer = answer_to(CHAT, CHAT_BODY, headers={"x-request-timeout": header})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "server_error"), (MESSAGES, "timeout_error")])
def test_a_request_whose_time_is_over(path: str, kind: str) -> None:
    fake = FakeEngine(refusing("request_timeout", 504, "the request's time is over"))
    answer = answer_to(path, {**CHAT_BODY, "max_tokens": 4}, fake=fake)
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert error["type"] == kind
    assert error["message"] == "the request's time is over"

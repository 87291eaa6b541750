"""The access log: a line per request, at its end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from tests.server.gateway.calls import CHAT, CHAT_BODY, PLAIN, PLAIN_BODY, PROMPT, answer_to, post
from tests.server.gateway.fakes import FakeEngine, gateway, ids, saying


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "access")


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if record.name == "access"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_is_logged_with_its_counts(
    caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    body = {**CHAT_BODY, "stream": stream, "n": 2}
    post(CHAT, body, FakeEngine(saying("hello w")), headers={"X-Request-Id": "r"})
    (fields,) = logged(caplog)
    ttft_s, duration_s = fields.pop("ttft_s"), fields.pop("duration_s")
    assert 0 < ttft_s <= duration_s
    assert fields == {
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "request_id": "r",
        "prompt_tokens": len(ids(PROMPT)),
        "output_tokens": 2 * len(ids("hello w")),
    }


async def test_other_requests_are_logged_without_counts_and_probes_not_at_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gateway(FakeEngine()) as client:
        for path in ("/health", "/metrics", "/v1/models?x=secret", "/a%0Ab" + "c" * 1000):
            await client.get(path)
        await client.post(PLAIN, json={**PLAIN_BODY, "n": 0})
    found = logged(caplog)
    assert [(each["path"][:8], each["status"]) for each in found] == [
        ("/v1/mode", 200),
        ("/a%0Abcc", 404),
        (PLAIN[:8], 400),
    ]
    assert found[0]["path"] == "/v1/models"
    assert len(found[1]["path"]) == 256
    assert not any("prompt_tokens" in each for each in found)


async def test_a_client_that_leaves_is_logged_with_what_it_got(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeEngine()
    async with gateway(fake) as client:
        pending = asyncio.create_task(client.post(PLAIN, json=PLAIN_BODY))
        await fake.request_came.wait()
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
    (fields,) = logged(caplog)
    assert "ttft_s" not in fields
    assert (fields["prompt_tokens"], fields["output_tokens"]) == (2, 0)


def test_the_access_log_can_be_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    answer_to("/v1/models", access_log=False)
    assert logged(caplog) == []

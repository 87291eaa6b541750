"""Every refusal: status, the four members of the error object, and the field it names."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from server.gateway.http.body import MAX_BODY_BYTES
from tests.server.gateway.bad_requests import GOOD, ROWS
from tests.server.gateway.calls import CHAT, JSON, PLAIN, USER, answer_to
from tests.server.gateway.fakes import FakeEngine, gateway, ids, saying
from topspin.messages import EngineState, RequestFailed
from topspin.plan.retrieval import RetrievalPolicy


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return the error object after checking its shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert len(response.content) < 1024
    return error


@pytest.mark.parametrize("path", GOOD)
async def test_a_broken_rule_is_named(path: str) -> None:
    fake = FakeEngine(saying("ok"))
    async with gateway(fake) as client:
        for row in (row for row in ROWS if row.path == path):
            response = await client.post(path, json={**GOOD[path], **row.fields})
            error = error_of(response, row.status)
            assert row.message in error["message"], row
            assert error["type"] == "invalid_request_error"
            assert (error["param"], error["code"]) == (row.param, row.code), row
    assert fake.added == []


NOT_JSON = "`Content-Type` must be application/json, in UTF-8; it is"
GZIP = {**JSON, "Content-Encoding": "gzip"}
LARGE = {**JSON, "Content-Length": str(2**20 + 1)}
LONG_ID = {"X-Request-Id": "i" * 129}
# Of each request without a body: method, path, headers; status, code, param; message.
OTHERS: list[tuple[str, str, dict[str, str], int, str | None, str | None, str]] = [
    ("GET", "/v1", {}, 404, "not_found", None, "`/v1` does not exist here"),
    ("POST", "/v1/nothing", JSON, 404, "not_found", None, "`/v1/nothing` does not exist here"),
    ("GET", CHAT, {}, 405, "method_not_allowed", None, f"`{CHAT}` takes POST, not GET"),
    ("POST", "/health", {}, 405, "method_not_allowed", None, "takes GET, HEAD, not POST"),
    ("PUT", "/v1/responses/x", {}, 405, "method_not_allowed", None, "takes DELETE, GET, HEAD, not"),
    ("GET", "/v1/models/other", {}, 404, "model_not_found", None, "`other` is not served here"),
    ("GET", "/metrics?per_expert=yes", {}, 400, None, "per_expert", "'yes': must be 0 or 1"),
    ("POST", CHAT, {}, 415, "unsupported_media_type", "Content-Type", f"{NOT_JSON} missing"),
    ("POST", PLAIN, GZIP, 415, "unsupported_media_type", "Content-Encoding", "'gzip' is not"),
    ("POST", "/detokenize", LARGE, 413, "request_too_large", None, "larger than 1048576 bytes"),
    ("GET", "/health", LONG_ID, 400, None, "X-Request-Id", "must have at most 128 characters"),
]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "code", "param", "message"), OTHERS
)
async def test_what_is_wrong_beside_a_body_has_the_same_shape(
    method: str,
    path: str,
    headers: dict[str, str],
    status: int,
    code: str | None,
    param: str | None,
    message: str,
) -> None:
    async with gateway(FakeEngine()) as client:
        response = await client.request(method, path, headers=headers)
    error = error_of(response, status)
    assert (error["param"], error["code"]) == (param, code)
    assert message in error["message"]
    assert ("allow" in response.headers) == (status == 405)


def test_no_more_keys_than_the_sinks_of_the_plan_are_too_few() -> None:
    body = {"model": "tiny", "prompt": "a", "kv_retrieval": {"tokens": 100}}
    policy = RetrievalPolicy(num_tokens=512, num_sinks=100)
    error = error_of(answer_to(PLAIN, body, retrieval=policy), 400)
    assert error["param"] == "kv_retrieval"
    assert "none to select beside 100 sinks and 25 recent ones" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": ' + b"[" * 100_000,
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "a", "response_format": ' + b"[" * 50_000,
        b'{"model": "tiny", "prompt": "a", "response_format": ' + b"[" * 30 + b"]" * 30 + b"}",
    ],
)
def test_a_body_that_is_no_request_is_a_400(body: bytes) -> None:
    error_of(answer_to(PLAIN, body), 400)


def test_a_huge_wrong_value_is_not_echoed() -> None:
    error_of(answer_to(PLAIN, {"model": "tiny", "prompt": "a", "x" * 10**6: 1}), 400)
    error_of(answer_to(PLAIN, {"model": "m" * 10**6, "prompt": "a"}), 404)
    role = {"role": "r" * 10**6, "content": "x"}
    error_of(answer_to(CHAT, {"model": "tiny", "messages": [role]}), 400)


def test_one_prompt_of_many_that_is_too_long_submits_none() -> None:
    fake = FakeEngine(saying("ok"))
    error_of(answer_to(PLAIN, {"model": "tiny", "prompt": [[1], [1] * 200]}, fake=fake), 400)
    assert fake.added == []


@pytest.mark.parametrize("prompt", ["text", "list", "messages"])
def test_text_that_cannot_fit_is_refused_without_tokenising_it(
    prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("was tokenised")

    monkeypatch.setattr("models.text.tokenizer.Tokenizer.encode", encode)
    # The longest token of the test's tokenizer has 12 bytes; 100 tokens are served.
    text = "a" * 1200
    fields: dict[str, object] = {"prompt": text if prompt == "text" else ["a", text]}
    if prompt == "messages":
        fields = {"messages": [{**USER, "content": text}]}
    path, param = (CHAT, "messages") if prompt == "messages" else (PLAIN, "prompt")
    error = error_of(answer_to(path, {"model": "tiny", **fields}), 400)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "at least 10" in error["message"]


@pytest.mark.parametrize("prompt", [[1] * 100, [[1], [1] * 100]])
def test_token_ids_that_cannot_fit_are_refused_without_decoding_them(
    prompt: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces(data: bytes, *_: object, **__: object) -> list[list[int]]:
        assert len(data) < 100, "was decoded"
        return [[1]]

    monkeypatch.setattr("server.gateway.dialects.completions.request.decode_pieces", pieces)
    error = error_of(answer_to(PLAIN, {"model": "tiny", "prompt": prompt}), 400)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "at least 100 tokens" in error["message"]


async def test_a_body_over_the_limit_is_a_413_announced_or_not() -> None:
    async def pieces() -> Any:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    async with gateway(FakeEngine()) as client:
        for content in (b" " * (MAX_BODY_BYTES + 1), pieces()):
            response = await client.post(CHAT, content=content, headers=JSON)
            assert error_of(response, 413)["code"] == "request_too_large"
        # At the limit it is read, and is no JSON.
        blank = await client.post(CHAT, content=b" " * MAX_BODY_BYTES, headers=JSON)
        assert blank.status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_not_ready_is_a_503_with_retry_after(stream: bool) -> None:
    async with gateway(FakeEngine(), ready=False) as client:
        body = {"model": "tiny", "prompt": "a", "stream": stream}
        response = await client.post(PLAIN, json=body)
        assert error_of(response, 503)["code"] == "engine_unavailable"
        assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("engine_unavailable", 503, "server_error"),
        ("rate_limit_exceeded", 429, "rate_limit_error"),
        ("invalid_request_error", 400, "invalid_request_error"),
    ],
)
async def test_a_refusal_by_the_scheduler_has_its_own_status(
    stream: bool, code: str, status: int, kind: str
) -> None:
    fake = FakeEngine()
    fake.queues = False
    async with gateway(fake) as client:
        body = {"model": "tiny", "prompt": "a", "stream": stream}
        pending = asyncio.create_task(client.post(PLAIN, json=body))
        await fake.request_came.wait()
        failed = RequestFailed(
            request_id=fake.added[0].request_id, code=code, status=status, message="queue full"
        )
        fake.say(failed)
        response = await pending
        error = error_of(response, status)
        assert (error["message"], error["type"]) == ("queue full", kind)
        assert error["code"] == (None if status == 400 else code)
        assert ("retry-after" in response.headers) == (status != 400)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("node_lost", 503, "a node that held the request was lost"),
        ("step_failed", 503, "a step that carried the request failed"),
        ("engine_error", 503, "the engine could not serve the request"),
        ("protocol_error", 500, "internal error"),
    ],
)
async def test_why_the_engine_failed_goes_to_the_log_only(
    stream: bool, code: str, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    fake = FakeEngine()
    fake.queues = False
    async with gateway(fake) as client:
        body = {"model": "tiny", "prompt": "a", "stream": stream}
        pending = asyncio.create_task(client.post(PLAIN, json=body))
        await fake.request_came.wait()
        secret = "expert 1 (pid 7): RuntimeError('a secret path')"
        fake.say(
            RequestFailed(
                request_id=fake.added[0].request_id, code=code, status=status, message=secret
            )
        )
        error = error_of(await pending, status)
        assert (error["code"], error["message"]) == (code, message)
        assert f"({code}): {secret}" in caplog.text


async def test_why_the_engine_has_failed_is_not_told_to_new_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeEngine()
    async with gateway(fake) as client:
        fake.say(EngineState(state="failed", detail="expert 1 (pid 7) died"))
        while (await client.get("/health")).json()["state"] != "failed":
            pass
        for path in ("/health", "/trace?seconds=1"):
            assert "pid" not in (await client.get(path)).text
        response = await client.post(PLAIN, json={"model": "tiny", "prompt": "a"})
        error = error_of(response, 503)
        assert error["message"] == "the engine is not ready (failed)"
        assert "expert 1 (pid 7) died" in caplog.text


def test_a_bug_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: object) -> Any:
        raise RuntimeError("a secret path")

    error = error_of(
        answer_to(PLAIN, {"model": "tiny", "prompt": ids("a")}, fake=FakeEngine(broken)), 500
    )
    assert error == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert "a secret path" in caplog.text


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({}, "Content-Type"),
        ({"Content-Type": "text/plain"}, "Content-Type"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, "Content-Type"),
        ({"Content-Type": "application/json, text/plain"}, "Content-Type"),
        ({"Content-Type": "application/json; charset=utf-16"}, "Content-Type"),
        ({**JSON, "Content-Encoding": "gzip"}, "Content-Encoding"),
    ],
)
async def test_a_body_that_is_not_said_to_be_json_is_a_415(
    headers: dict[str, str], param: str
) -> None:
    fake = FakeEngine(saying("ok"))
    async with gateway(fake) as client:
        content = b'{"model": "tiny", "prompt": "a"}'
        response = await client.post(PLAIN, content=content, headers=headers)
        error = error_of(response, 415)
        assert (error["param"], error["code"]) == (param, "unsupported_media_type")
        assert fake.added == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json; charset=UTF-8"},
        {"Content-Type": 'Application/JSON;charset="utf-8"'},
        {**JSON, "Content-Encoding": "identity"},
    ],
)
async def test_json_may_be_announced_in_full(headers: dict[str, str]) -> None:
    async with gateway(FakeEngine(saying("ok"))) as client:
        content = b'{"model": "tiny", "prompt": "a"}'
        response = await client.post(PLAIN, content=content, headers=headers)
        assert response.status_code == 200

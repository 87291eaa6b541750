"""Every refusal: status, the four members of the error object, and the field it names."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from server.gateway.http.body import MAX_BODY_BYTES
from tests.server.gateway.calls import CHAT, CHAT_BODY, JSON, PLAIN, PLAIN_BODY, USER, answer_to
from tests.server.gateway.fakes import FakeEngine, gateway, ids, refusing, saying
from topspin.messages import EngineState
from topspin.plan.retrieval import RetrievalPolicy

LONG, NO_MODEL = "context_length_exceeded", "model_not_found"
CONTINUED = {"messages": [{"role": "assistant", "content": "so"}], "continue_final_message": True}
FOUR = [[1] * 99] * 4
GOOD: dict[str, dict[str, object]] = {
    PLAIN: PLAIN_BODY,
    CHAT: CHAT_BODY,
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/tokenize": {},
    "/detokenize": {},
}
# Rules that no schema tells. Fields in place of a good body's; the error's `param`, a part of its
# message, and its `code`. The served model, `tiny`, takes 100 tokens.
BROKEN_RULES: dict[str, list[tuple[dict[str, object], str, str, str | None]]] = {
    PLAIN: [
        ({"prompt": ""}, "prompt", "a prompt is empty", None),
        ({"prompt": [[1], []]}, "prompt", "a prompt is empty", None),
        ({"prompt": ["a", 1]}, "prompt", "a list of only strings, token ids or lists", None),
        ({"prompt": [10**6]}, "prompt", "`prompt`: token id 1000000 is outside", None),
        ({"prompt": [[1], [2, -1]]}, "prompt[1][1]", "`prompt[1][1]`: Expected", None),
        ({"n": 128, "prompt": ["a"] * 3}, "n", "are 384 choices; at most 256", None),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "the key `-1` is no token id", None),
        ({"logit_bias": {"a": 1, "5": 1, "b": 1}}, "logit_bias.a", "keys `a`, `b` are no", None),
        ({"logit_bias": {"1000000": 1}}, "logit_bias", "outside the vocabulary of 265", None),
        ({"stop_token_ids": [10**6]}, "stop_token_ids", "outside the vocabulary", None),
        ({"min_tokens": 17}, "min_tokens", "17 is more than the 16 tokens", None),
        ({"kv_retrieval": {"tokens": 64}}, "kv_retrieval", "without --kv-retrieval-tokens", None),
        ({"kv_retrieval": {"enabled": False, "tokens": 64}}, "kv_retrieval", "no meaning", None),
        ({"stream_options": {}}, "stream_options", "needs `stream` to be true", None),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "not available in a", None),
        (
            {"prompt": FOUR, "prompt_logprobs": 20, "n": 64},
            *("prompt_logprobs", "`prompt_logprobs`: 396 prompt tokens, n = 64 and 20", None),
        ),
        ({"prompt": FOUR, "echo": True, "logprobs": 20, "n": 64}, "logprobs", " 532224 ", None),
        ({"f" * 1000: 1}, "f" * 61 + "...", "unknown or unsupported field `fff", None),
        ({"model": "other"}, "model", "the model `other` is not served here", NO_MODEL),
        ({"model": "m" * 99}, "model", "m" * 61 + "...`", NO_MODEL),
        ({"prompt": [1] * 101, "max_tokens": 0}, "prompt", "prompt and output together", LONG),
        ({"prompt": [1] * 60, "max_tokens": 41}, "prompt", "are 101 together; this server", LONG),
    ],
    CHAT: [
        ({"messages": [{**USER, "content": None}]}, "messages[0].content", "missing", None),
        (
            {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {}}]}]},
            *("messages[0].content[0].type", "content of type `image_url` is not", None),
        ),
        (
            {"messages": [{**USER, "content": [{"type": "text"}]}]},
            *("messages[0].content[0].text", "a text part needs `text`", None),
        ),
        ({"messages": [{**USER, "content": "hello " * 10_000}]}, "messages", "together", LONG),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "give one of them", None),
        ({"top_logprobs": 2}, "top_logprobs", "needs `logprobs` to be true", None),
        ({"continue_final_message": True}, "continue_final_message", "the assistant's", None),
        (
            {**CONTINUED, "add_generation_prompt": True},
            *("continue_final_message", "exclude each other", None),
        ),
        (
            {"report_prefix_cache": True, "truncate_prompt_tokens": 5},
            *("report_prefix_cache", "exclude each other", None),
        ),
        ({"tool_choice": "required"}, "tool_choice", "`tool_choice` needs `tools`", None),
        *(
            ({"chat_template_kwargs": {name: 1}}, "chat_template_kwargs", f"`{name}` may not", None)
            for name in ("messages", "tools", "bos_token", "_x", "not a name", "range")
        ),
    ],
    "/v1/responses": [
        ({"top_logprobs": 2}, "top_logprobs", 'needs "message.output_text.logprobs" in', None),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            *("text.format.schema", "`text.format` needs a `schema`", None),
        ),
    ],
    "/tokenize": [
        ({}, "prompt", "one of `prompt` and `messages` is needed", None),
        ({"prompt": "a", "messages": [USER]}, "messages", "does not go with `prompt`", None),
        ({"prompt": "a", "model": "other"}, "model", "`other` is not served", NO_MODEL),
    ],
    "/detokenize": [
        ({"tokens": [1] * (2**18 + 1)}, "tokens", "of length <= 262144", None),
        ({"tokens": [10**6]}, "tokens", "outside the vocabulary", None),
    ],
}


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


@pytest.mark.parametrize("path", BROKEN_RULES)
async def test_a_broken_rule_is_named(path: str) -> None:
    fake = FakeEngine(saying("ok"))
    async with gateway(fake) as client:
        for fields, param, message, code in BROKEN_RULES[path]:
            response = await client.post(path, json={**GOOD[path], **fields})
            error = error_of(response, 404 if code == NO_MODEL else 400)
            assert message in error["message"]
            assert error["type"] == "invalid_request_error"
            assert (error["param"], error["code"]) == (param, code)
    assert fake.added == []


# Of requests without a body: method, path and its headers; status, code, param; message.
OTHERS: list[tuple[str, str, dict[str, str], int, str | None, str | None, str]] = [
    ("POST", "/v1/nothing", JSON, 404, "not_found", None, "`/v1/nothing` does not exist here"),
    ("GET", CHAT, {}, 405, "method_not_allowed", None, f"`{CHAT}` takes POST, not GET"),
    ("PUT", "/v1/responses/x", {}, 405, "method_not_allowed", None, "takes DELETE, GET, HEAD, not"),
    ("GET", "/v1/models/other", {}, 404, NO_MODEL, None, "`other` is not served here"),
    ("GET", "/metrics?per_expert=yes", {}, 400, None, "per_expert", "'yes': must be 0 or 1"),
    (
        *("POST", "/detokenize", {**JSON, "Content-Length": str(2**20 + 1)}),
        *(413, "request_too_large", None, "larger than 1048576 bytes"),
    ),
    (
        *("GET", "/health", {"X-Request-Id": "i" * 129}),
        *(400, None, "X-Request-Id", "must have at most 128 characters"),
    ),
]


async def test_what_is_wrong_beside_a_body_has_the_same_shape() -> None:
    async with gateway(FakeEngine()) as client:
        for method, path, headers, status, code, param, message in OTHERS:
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


async def test_a_body_that_is_no_request_is_a_400_and_not_echoed() -> None:
    good = b'{"model": "tiny", "prompt": "a"'
    async with gateway(FakeEngine()) as client:
        for body in (
            *(b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'),
            *(good + b', "temperature": NaN}', good + b', "temperature": 1e999}'),
            *(b'{"prompt": ' + b"[" * 100_000, good + b', "response_format": ' + b"[" * 50_000),
            good + b', "response_format": ' + b"[" * 30 + b"]" * 30 + b"}",
            good + b', "' + b"x" * 10**6 + b'": 1}',
        ):
            error_of(await client.post(PLAIN, content=body, headers=JSON), 400)


def test_one_prompt_of_many_that_is_too_long_submits_none() -> None:
    fake = FakeEngine(saying("ok"))
    error_of(answer_to(PLAIN, {"model": "tiny", "prompt": [[1], [1] * 200]}, fake=fake), 400)
    assert fake.added == []


# The longest token of the test's tokenizer has 12 bytes.
WIDE = "a" * 1200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PLAIN, {"prompt": WIDE}, "prompt"),
        (PLAIN, {"prompt": ["a", WIDE]}, "prompt"),
        (CHAT, {"messages": [{**USER, "content": WIDE}]}, "messages"),
        (PLAIN, {"prompt": [1] * 100}, "prompt"),
        (PLAIN, {"prompt": [[1], [1] * 100]}, "prompt"),
    ],
)
def test_a_prompt_that_cannot_fit_is_refused_without_reading_it(
    path: str, fields: dict[str, object], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("was tokenised")

    def pieces(data: bytes, *_: object, **__: object) -> list[list[int]]:
        assert len(data) < 100, "was decoded"
        return [[1]]

    monkeypatch.setattr("models.text.tokenizer.Tokenizer.encode", encode)
    monkeypatch.setattr("server.gateway.dialects.completions.request.decode_pieces", pieces)
    error = error_of(answer_to(path, {"model": "tiny", **fields}), 400)
    assert (error["param"], error["code"]) == (param, LONG)
    assert "at least 10" in error["message"]


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
def test_an_engine_that_is_not_ready_is_a_503_with_retry_after(stream: bool) -> None:
    response = answer_to(PLAIN, {**PLAIN_BODY, "stream": stream}, ready=False)
    assert error_of(response, 503)["code"] == "engine_unavailable"
    assert response.headers["retry-after"] == "1"


SECRET = "expert 1 (pid 7): RuntimeError('a secret path')"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind", "message"),
    [
        ("engine_unavailable", 503, "server_error", SECRET),
        ("rate_limit_exceeded", 429, "rate_limit_error", SECRET),
        ("invalid_request_error", 400, "invalid_request_error", SECRET),
        # Why the engine failed goes to the log only.
        ("node_lost", 503, "server_error", "a node that held the request was lost"),
        (
            "poison",
            500,
            "server_error",
            "nodes were lost twice while they computed the request; do not send it again",
        ),
        ("step_failed", 503, "server_error", "a step that carried the request failed"),
        ("engine_error", 503, "server_error", "the engine could not serve the request"),
        ("protocol_error", 500, "server_error", "internal error"),
    ],
)
def test_a_refusal_by_the_scheduler_has_its_own_status(
    *,
    stream: bool,
    code: str,
    status: int,
    kind: str,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeEngine(refusing(code, status, SECRET))
    fake.queues = False
    response = answer_to(PLAIN, {**PLAIN_BODY, "stream": stream}, fake=fake)
    error = error_of(response, status)
    assert (error["message"], error["type"]) == (message, kind)
    assert error["code"] == (None if status == 400 else code)
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert (f"({code}): {SECRET}" in caplog.text) == (message != SECRET)


async def test_why_the_engine_has_failed_is_not_told_to_new_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeEngine()
    async with gateway(fake) as client:
        fake.say(EngineState(state="failed", detail="expert 1 (pid 7) died"))
        await fake.settle()
        for path in ("/health", "/trace?seconds=1"):
            assert "pid" not in (await client.get(path)).text
        error = error_of(await client.post(PLAIN, json=PLAIN_BODY), 503)
        assert error["message"] == "the engine is not ready (failed)"
        assert "expert 1 (pid 7) died" in caplog.text


def test_a_bug_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: object) -> Any:
        raise RuntimeError("a secret path")

    body = {"model": "tiny", "prompt": ids("a")}
    assert error_of(answer_to(PLAIN, body, fake=FakeEngine(broken)), 500) == {
        "message": "internal error",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }
    assert "a secret path" in caplog.text


async def test_a_body_must_be_said_to_be_json() -> None:
    fake = FakeEngine(saying("ok"))
    content = b'{"model": "tiny", "prompt": "a"}'
    async with gateway(fake) as client:
        for headers in (
            {"Content-Type": "application/json; charset=UTF-8"},
            {"Content-Type": 'Application/JSON;charset="utf-8"'},
            {**JSON, "Content-Encoding": "identity"},
        ):
            response = await client.post(PLAIN, content=content, headers=headers)
            assert response.status_code == 200
        for headers, param, message in (
            (
                {},
                "Content-Type",
                "`Content-Type` must be application/json, in UTF-8; it is missing",
            ),
            ({"Content-Type": "text/plain"}, "Content-Type", "'text/plain'"),
            ({"Content-Type": "application/json, text/plain"}, "Content-Type", "must be"),
            ({"Content-Type": "application/json; charset=utf-16"}, "Content-Type", "must be"),
            ({**JSON, "Content-Encoding": "gzip"}, "Content-Encoding", "'gzip' is not"),
        ):
            error = error_of(await client.post(PLAIN, content=content, headers=headers), 415)
            assert (error["param"], error["code"]) == (param, "unsupported_media_type")
            assert message in error["message"]
    assert len(fake.added) == 3

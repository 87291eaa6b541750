"""Every refusal: status, the four members of the error object, and the field it names."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from server.gateway.http.body import MAX_BODY_BYTES
from tests.server.gateway.fakes import FakeEngine, gateway, ids, saying
from topspin.messages import EngineState, RequestFailed
from topspin.retrieval import RetrievalPolicy

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
JSON = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "hi"}


def post(
    path: str, body: object, *, fake: FakeEngine | None = None, **options: Any
) -> httpx.Response:
    """Post to a ready gateway; `body` is JSON unless it is bytes, `options` are make_app's."""

    async def test() -> httpx.Response:
        async with gateway(fake or FakeEngine(saying("ok")), **options) as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.post(path, content=content, headers=JSON)

    return asyncio.run(test())


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


PLAIN_ERRORS: list[tuple[dict[str, object], str]] = [
    ({"model": None}, "model"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [10**6]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [None]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": None}, "prompt"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 128, "prompt": ["a", "b", "c"]}, "n"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 257}, "stop"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty"),
    ({"repetition_penalty": 0.0099}, "repetition_penalty"),
    ({"repetition_penalty": 100.1}, "repetition_penalty"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": list(range(257))}, "stop_token_ids"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"min_tokens": 1, "max_tokens": 0}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"kv_retrieval": {"tokens": 63}}, "kv_retrieval.tokens"),
    ({"kv_retrieval": {"budget": 64}}, "kv_retrieval.budget"),
    ({"kv_retrieval": {"tokens": 64}}, "kv_retrieval"),
    ({"kv_retrieval": {"enabled": True}}, "kv_retrieval"),
    ({"kv_retrieval": {"enabled": False, "tokens": 64}}, "kv_retrieval"),
    ({"cache_salt": "s" * 257}, "cache_salt"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"unheard": 1}}, "stream_options.unheard"),
    ({"stream": "yes"}, "stream"),
    ({"echo": 1}, "echo"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
    ({"prompt": [[1] * 99] * 4, "prompt_logprobs": 20, "n": 64}, "prompt_logprobs"),
    ({"prompt": [[1] * 99] * 4, "echo": True, "logprobs": 20, "n": 64}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"suffix": "end" * 10**5}, "suffix"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"guided_json": {}}, "guided_json"),
    ({"f" * 1000: 1}, "f" * 61 + "..."),
    ({"messages": [USER]}, "messages"),
]


@pytest.mark.parametrize(("fields", "param"), PLAIN_ERRORS)
def test_a_bad_completion_field_is_named(fields: dict[str, object], param: str) -> None:
    fake = FakeEngine(saying("ok"))
    body = {"model": "tiny", "prompt": "a", **fields}
    error = error_of(post(PLAIN, body, fake=fake), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["code"] is None
    assert fake.added == []


def test_no_more_keys_than_the_sinks_of_the_plan_are_too_few() -> None:
    body = {"model": "tiny", "prompt": "a", "kv_retrieval": {"tokens": 100}}
    policy = RetrievalPolicy(num_tokens=512, num_sinks=100)
    error = error_of(post(PLAIN, body, retrieval=policy), 400)
    assert error["param"] == "kv_retrieval"
    assert "none to select beside 100 sinks and 25 recent ones" in error["message"]


CHAT_ERRORS: list[tuple[dict[str, object], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{**USER, "content": None}]}, "messages[0].content"),
    ({"messages": [{**USER, "colour": "red"}]}, "messages[0].colour"),
    ({"messages": [{**USER, "tool_calls": [{"id": 1}]}]}, "messages[0].tool_calls[0].id"),
    (
        {"messages": [{**USER, "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
    ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"tools": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"_x": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"not a name": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {f"k{i}": i for i in range(33)}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    (
        {
            "messages": [{"role": "assistant", "content": "so"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "continue_final_message",
    ),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"prompt": "a"}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_ERRORS)
def test_a_bad_chat_field_is_named(fields: dict[str, object], param: str) -> None:
    fake = FakeEngine(saying("ok"))
    body = {"model": "tiny", "messages": [USER], **fields}
    error = error_of(post(CHAT, body, fake=fake), 400)
    assert error["param"] == param
    assert fake.added == []


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
    error_of(post(PLAIN, body), 400)


def test_a_huge_wrong_value_is_not_echoed() -> None:
    error_of(post(PLAIN, {"model": "tiny", "prompt": "a", "x" * 10**6: 1}), 400)
    error_of(post(PLAIN, {"model": "m" * 10**6, "prompt": "a"}), 404)
    role = {"role": "r" * 10**6, "content": "x"}
    error_of(post(CHAT, {"model": "tiny", "messages": [role]}), 400)


def test_an_unknown_model_is_a_404() -> None:
    for path, fields in ((PLAIN, {"prompt": "a"}), (CHAT, {"messages": [USER]})):
        error = error_of(post(path, {"model": "other", **fields}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"prompt": [1] * 100}, ("100",)),
        ({"prompt": [1] * 101, "max_tokens": 0}, ("101", "100")),
        ({"prompt": [1] * 5000}, ("5000", "100")),
        ({"prompt": [1] * 60, "max_tokens": 41}, ("60", "41", "101", "100")),
    ],
)
def test_what_does_not_fit_the_context_is_told_in_numbers(
    fields: dict[str, object], numbers: tuple[str, ...]
) -> None:
    error = error_of(post(PLAIN, {"model": "tiny", **fields}), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert all(number in error["message"] for number in numbers)


def test_one_prompt_of_many_that_is_too_long_submits_none() -> None:
    fake = FakeEngine(saying("ok"))
    error_of(post(PLAIN, {"model": "tiny", "prompt": [[1], [1] * 200]}, fake=fake), 400)
    assert fake.added == []


@pytest.mark.parametrize("prompt", ["text", "list", "messages"])
def test_text_that_cannot_fit_is_refused_without_tokenising_it(
    prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("was tokenised")

    monkeypatch.setattr("models.tokenizer.Tokenizer.encode", encode)
    # The longest token of the test's tokenizer has 12 bytes; 100 tokens are served.
    text = "a" * 1200
    fields: dict[str, object] = {"prompt": text if prompt == "text" else ["a", text]}
    if prompt == "messages":
        fields = {"messages": [{**USER, "content": text}]}
    path, param = (CHAT, "messages") if prompt == "messages" else (PLAIN, "prompt")
    error = error_of(post(path, {"model": "tiny", **fields}), 400)
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert "at least 10" in error["message"]


@pytest.mark.parametrize("prompt", [[1] * 100, [[1], [1] * 100]])
def test_token_ids_that_cannot_fit_are_refused_without_decoding_them(
    prompt: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pieces(data: bytes, *_: object, **__: object) -> list[list[int]]:
        assert len(data) < 100, "was decoded"
        return [[1]]

    monkeypatch.setattr("server.gateway.requests.prompts.decode_pieces", pieces)
    error = error_of(post(PLAIN, {"model": "tiny", "prompt": prompt}), 400)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "at least 100 tokens" in error["message"]


def test_a_long_chat_prompt_read_in_a_thread_is_refused_too() -> None:
    body = {"model": "tiny", "messages": [{**USER, "content": "hello " * 10_000}]}
    error = error_of(post(CHAT, body), 400)
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_a_body_over_the_limit_is_a_413_announced_or_not() -> None:
    async def pieces() -> Any:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    async def test() -> None:
        async with gateway(FakeEngine()) as client:
            for content in (b" " * (MAX_BODY_BYTES + 1), pieces()):
                response = await client.post(CHAT, content=content, headers=JSON)
                assert error_of(response, 413)["code"] == "request_too_large"
            # At the limit it is read, and is no JSON.
            blank = await client.post(CHAT, content=b" " * MAX_BODY_BYTES, headers=JSON)
            assert blank.status_code == 400

    asyncio.run(test())


def test_paths_and_methods_have_the_same_error_shape() -> None:
    async def test() -> None:
        async with gateway(FakeEngine()) as client:
            assert error_of(await client.get("/v1/nothing"), 404)["code"] == "not_found"
            wrong = await client.get(CHAT)
            assert error_of(wrong, 405)["code"] == "method_not_allowed"
            assert wrong.headers["allow"] == "POST"
            assert "takes POST, not GET" in wrong.json()["error"]["message"]
            error = error_of(await client.get("/v1/models/other"), 404)
            assert error["code"] == "model_not_found"

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_is_not_ready_is_a_503_with_retry_after(stream: bool) -> None:
    async def test() -> None:
        async with gateway(FakeEngine(), ready=False) as client:
            body = {"model": "tiny", "prompt": "a", "stream": stream}
            response = await client.post(PLAIN, json=body)
            assert error_of(response, 503)["code"] == "engine_unavailable"
            assert response.headers["retry-after"] == "1"

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"), [("engine_unavailable", 503), ("invalid_request_error", 400)]
)
def test_a_refusal_by_the_scheduler_has_its_own_status(
    stream: bool, code: str, status: int
) -> None:
    async def test() -> None:
        fake = FakeEngine()
        async with gateway(fake) as client:
            body = {"model": "tiny", "prompt": "a", "stream": stream}
            pending = asyncio.create_task(client.post(PLAIN, json=body))
            await fake.request_came.wait()
            failed = RequestFailed(
                request_id=fake.added[0].request_id, code=code, status=status, message="queue full"
            )
            fake.say(failed)
            response = await pending
            assert error_of(response, status)["message"] == "queue full"
            assert ("retry-after" in response.headers) == (status == 503)

    asyncio.run(test())


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
def test_why_the_engine_failed_goes_to_the_log_only(
    stream: bool, code: str, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        fake = FakeEngine()
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

    asyncio.run(test())


def test_why_the_engine_has_failed_is_not_told_to_new_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
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

    asyncio.run(test())


def test_a_bug_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: object) -> Any:
        raise RuntimeError("a secret path")

    error = error_of(
        post(PLAIN, {"model": "tiny", "prompt": ids("a")}, fake=FakeEngine(broken)), 500
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
def test_a_body_that_is_not_said_to_be_json_is_a_415(headers: dict[str, str], param: str) -> None:
    async def test() -> None:
        fake = FakeEngine(saying("ok"))
        async with gateway(fake) as client:
            content = b'{"model": "tiny", "prompt": "a"}'
            response = await client.post(PLAIN, content=content, headers=headers)
            error = error_of(response, 415)
            assert (error["param"], error["code"]) == (param, "unsupported_media_type")
            assert fake.added == []

    asyncio.run(test())


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "application/json; charset=UTF-8"},
        {"Content-Type": 'Application/JSON;charset="utf-8"'},
        {**JSON, "Content-Encoding": "identity"},
    ],
)
def test_json_may_be_announced_in_full(headers: dict[str, str]) -> None:
    async def test() -> None:
        async with gateway(FakeEngine(saying("ok"))) as client:
            content = b'{"model": "tiny", "prompt": "a"}'
            response = await client.post(PLAIN, content=content, headers=headers)
            assert response.status_code == 200

    asyncio.run(test())

"""One request at a time against a scripted server: right figures, and every error by its name."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.load.client.http import OWNED_FIELDS, request_body
from benchmarks.load.client.runner import run_load
from benchmarks.load.contracts import BenchRequest, LoadPattern, LoadRun, MeasuredRequest, Target
from benchmarks.load.figures.metrics import e2el_s, itls_s, tpot_s, ttft_s
from tests.benchmarks.load.scripted_server import (
    DONE,
    Disconnect,
    Received,
    Reply,
    ScriptedServer,
    event,
    stream_reply,
    text_event,
)
from topspin.errors import ConfigError

# Sleeps and clocks may be off by their resolution; a machine may be late by any amount.
EARLY_S = 0.002
Respond = Callable[[Received], Reply]

pytestmark = pytest.mark.usefixtures("without_collections")


def send(
    respond: Respond, *, count: int = 1, timeout_s: float = 60.0, **fields: Any
) -> tuple[LoadRun, list[Received]]:
    """Send `count` equal requests, one after the other, and return the records of both sides."""
    known: dict[str, Any] = {"max_tokens": 4, "prompt": [1, 2, 3]}
    request = BenchRequest(**(known | fields))
    backend = "openai" if request.messages is None else "openai-chat"
    with ScriptedServer(respond) as server:
        target = Target(server.base_url, "scripted", backend=backend)
        run = run_load(
            target, [request] * count, LoadPattern(max_concurrency=1, request_timeout_s=timeout_s)
        )
    return run, server.requests


def sent_one(respond: Respond, **fields: Any) -> MeasuredRequest:
    run, _ = send(respond, **fields)
    return run.records[0]


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": [1, 2, 3]},
        {"prompt": None, "messages": [{"role": "user", "content": "one two three"}]},
    ],
)
def test_times_are_those_of_the_server(prompt: dict[str, Any]) -> None:
    def respond(received: Received) -> Reply:
        return stream_reply(received, first_delay_s=0.08, delay_s=0.03)

    before = time.perf_counter()
    record = sent_one(respond, **prompt)
    wall_s = time.perf_counter() - before
    ttft, tpot, e2el = ttft_s(record), tpot_s(record), e2el_s(record)
    assert record.ok
    assert ttft is not None
    assert tpot is not None
    assert e2el is not None
    # A client that reads the first token late measures a longer TTFT and a shorter TPOT, so their
    # sum has a lower bound on any machine; the end is its upper bound.
    assert ttft >= 0.08 - EARLY_S
    assert 0.08 + 3 * 0.03 - EARLY_S <= ttft + 3 * tpot <= e2el + 1e-9
    assert e2el <= wall_s
    assert sum(itls_s(record)) == pytest.approx(3 * tpot)
    assert (record.prompt_tokens, record.output_tokens, record.tokens_from) == (3, 4, "usage")
    assert record.text == "w0 w1 w2 w3 "
    assert record.http_status == 200
    assert record.finish_reason == "length"


def test_tokens_are_counted_by_usage_or_else_by_events_and_said_to_be() -> None:
    texts = ["one two three four ", "five six seven eight "]
    record = sent_one(
        lambda received: stream_reply(received, texts, delay_s=0.02, completion_tokens=8)
    )
    assert (record.output_tokens, record.tokens_from, record.num_events) == (8, "usage", 2)
    assert sum(record.arrival_tokens) == 8
    assert not record.arrival_tokens_exact

    def without_usage(received: Received) -> Reply:
        return Reply([text_event(received, "a"), text_event(received, "b", "stop"), DONE])

    record = sent_one(without_usage, prompt_tokens=17)
    assert (record.output_tokens, record.tokens_from) == (2, "events")
    assert record.prompt_tokens == 17
    assert not record.arrival_tokens_exact


@pytest.mark.parametrize("status", [429, 302])
def test_an_http_error_is_counted_once_and_never_tried_again(status: int) -> None:
    def respond(received: Received) -> Reply:
        headers = {"retry-after": "0", "location": "/v1/completions"}
        return Reply([b'{"error": {"message": "too much"}}'], status=status, headers=headers)

    run, received = send(respond, count=2)
    assert len(received) == 2
    for record in run.records:
        assert record.error_kind == f"http_{status}"
        assert record.http_status == status
        assert "too much" in record.error
        assert record.first_token_s is None
        assert record.end_s is not None


def break_off(*ends: Any) -> Respond:
    return lambda received: Reply([text_event(received, "begun"), *ends])


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("respond", "kind", "text"),
    [
        (break_off(event({"error": {"message": "node lost"}}), DONE), "stream_error", "begun"),
        (break_off(), "truncated", "begun"),
        (break_off(Disconnect()), "disconnected", "begun"),
        (lambda received: Reply([Disconnect()]), "disconnected", ""),
        (lambda received: Reply([b'{"choices": []}'], headers=JSON), "bad_reply", ""),
    ],
)
def test_a_reply_that_breaks_off_or_is_no_stream_is_an_error(
    respond: Respond, kind: str, text: str
) -> None:
    record = sent_one(respond)
    assert record.error_kind == kind
    assert record.error
    assert record.http_status == 200
    assert record.text == text
    assert (record.first_token_s is not None) == bool(text)


def test_a_hang_ends_at_the_timeout() -> None:
    record = sent_one(break_off(600.0), timeout_s=0.3)
    assert record.error_kind == "timeout"
    assert record.sent_s is not None
    assert record.end_s is not None
    assert record.end_s - record.sent_s >= 0.3 - EARLY_S


@pytest.mark.slow
def test_a_body_left_open_after_done_is_a_success() -> None:
    record = sent_one(lambda received: Reply([*stream_reply(received).steps, 600.0]))
    assert record.ok
    assert record.output_tokens == 4


def test_nobody_listening() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    target = Target(f"http://127.0.0.1:{port}", "m")
    request = BenchRequest(max_tokens=1, prompt="a")
    run = run_load(target, [request], LoadPattern(max_concurrency=1))
    assert run.records[0].error_kind == "connect"


def test_what_is_sent() -> None:
    request = BenchRequest(max_tokens=3, prompt=[5, 6], extra_body={"seed": 2})
    with ScriptedServer() as server:
        target = Target(
            server.base_url,
            "scripted",
            headers={"x-team": "secret"},
            extra_body={"temperature": 0.0, "seed": 1},
        )
        run_load(target, [request], LoadPattern(max_concurrency=1))
    (received,) = server.requests
    assert received.path == "/v1/completions"
    assert received.headers["x-team"] == "secret"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    sampling = {"temperature": 0.0, "seed": 2}
    asked = {"model": "scripted", "prompt": [5, 6], "max_tokens": 3}
    assert received.body == asked | options | sampling
    assert "secret" not in repr(target)


@pytest.mark.parametrize("field", sorted(OWNED_FIELDS))
def test_fields_of_the_client_cannot_be_set(field: str) -> None:
    request = BenchRequest(max_tokens=1, prompt="a", extra_body={field: 2})
    with pytest.raises(ConfigError, match=f"'{field}'"):
        request_body(Target("http://h", "m"), request)


def test_a_request_must_fit_the_endpoint() -> None:
    chat = Target("http://h", "m", backend="openai-chat")
    with pytest.raises(ConfigError, match="token ids"):
        request_body(chat, BenchRequest(max_tokens=1, prompt=[1]))
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(ConfigError, match="--backend openai-chat"):
        request_body(Target("http://h", "m"), BenchRequest(max_tokens=1, messages=messages))
    assert b'"messages":[{"role":"user","content":"a"}]' in request_body(
        chat, BenchRequest(max_tokens=1, prompt="a")
    )

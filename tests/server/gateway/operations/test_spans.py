"""The spans of requests: which there are, their times and attributes, and the page that lists them.

Read back from OpenTelemetry's own in-memory exporter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from models.text.tokenizer import IncrementalDetokenizer
from server.gateway.dialects.completions.reply import CompletionReplies
from server.gateway.generation.choice import Choice, TextOptions
from server.gateway.generation.prompts import Prompt
from server.gateway.http.auth import ApiKeys
from server.gateway.operations.metrics import First
from server.gateway.operations.otlp import SpanSender
from server.gateway.operations.spans import RequestRecord, request_spans
from tests.server.gateway.calls import (
    CHAT,
    CHAT_BODY,
    PLAIN,
    PLAIN_BODY,
    PROMPT,
    answer_to,
    http_request,
)
from tests.server.gateway.fakes import (
    FakeEngine,
    gateway,
    ids,
    opened,
    output,
    refusing,
    saying,
    tokenizer,
)
from topspin.messages import AddRequest, RequestOutput

PAGE = Path(__file__).parents[4] / "docs" / "tracing.md"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
# In the requests and answers below; no span may have it.
SECRET = "hello secret"


class Spans:
    """A sender whose spans are kept here."""

    def __init__(self) -> None:
        self._kept = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._kept))
        self.sender = SpanSender(provider)

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._kept.get_finished_spans()

    @property
    def roots(self) -> list[ReadableSpan]:
        return [span for span in self.all if span.kind is SpanKind.SERVER]

    @property
    def phases(self) -> list[ReadableSpan]:
        return [span for span in self.all if span.kind is not SpanKind.SERVER]


def call(
    path: str, body: dict[str, object], fake: FakeEngine, **options: Any
) -> tuple[Spans, httpx.Response]:
    """Return the spans of one request and its answer. `options` are those of answer_to."""
    spans = Spans()
    return spans, answer_to(path, body, fake=fake, spans=spans.sender, **options)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def cached(request: AddRequest) -> Iterator[RequestOutput]:
    """Three tokens in two outputs; one token of the prompt was cached."""
    first = output(request, ids("a"), num_cached_tokens=1)
    yield msgspec.structs.replace(first, queue_s=1e-4, prefill_s=1e-4)
    yield output(request, ids("bc"), index=1, finish_reason="length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_has_one_span_with_its_choices_phases(stream: bool) -> None:
    options = {"n": 2, "max_tokens": 7, "temperature": 0.5, "top_p": 0.25}
    body = {**CHAT_BODY, **options, "stream": stream}
    spans, answer = call(CHAT, body, FakeEngine(cached), headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200
    [root] = spans.roots
    found = attributes(root)
    assert 0 < found.pop("gen_ai.latency.time_to_first_token") < 20
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "topspin",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.id": "mine",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": stream,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.response.id": "chatcmpl-mine",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.usage.input_tokens": len(ids(PROMPT)),
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
    }
    assert (root.name, root.parent, root.status.status_code) == (
        *("chat tiny", None),
        StatusCode.UNSET,
    )
    begun, ended = times(root)
    for index in range(2):
        phases = [
            each for each in spans.phases if attributes(each)["topspin.choice.index"] == index
        ]
        assert [each.name for each in phases] == ["queue", "prefill", "decode"]
        assert all(each.parent == root.context for each in phases)
        queue, prefill, decode = map(times, phases)
        assert begun <= queue[0] <= queue[1] == prefill[0] <= prefill[1] == decode[0]
        assert decode[0] < decode[1] <= ended
        assert attributes(phases[1])["topspin.choice.cached_tokens"] == 1
        assert attributes(phases[2])["topspin.choice.output_tokens"] == 3


@pytest.mark.parametrize(
    ("first", "last_at_s", "phases"),
    [
        (
            First(queue_s=0.5, prefill_s=0.25, at_s=11.0),
            13.0,
            [("queue", 10.25, 10.75), ("prefill", 10.75, 11.0), ("decode", 11.0, 13.0)],
        ),
        (First(0.5, 0.25, 11.0), 11.0, [("queue", 10.25, 10.75), ("prefill", 10.75, 11.0)]),
        # None begins before its request.
        (First(3.0, 0.5, 11.0), 11.0, [("queue", 10.0, 10.5), ("prefill", 10.5, 11.0)]),
        (First(1.0, 3.0, 11.0), 11.0, [("queue", 10.0, 10.0), ("prefill", 10.0, 11.0)]),
        (None, None, []),
    ],
)
def test_phases_are_laid_before_the_first_output(
    first: First | None, last_at_s: float | None, phases: list[tuple[str, float, float]]
) -> None:
    """Of a choice whose request began at 10 s."""
    choice = Choice(
        index=0,
        prompt=Prompt(ids=[1]),
        is_first=True,
        options=TextOptions(),
        detokenizer=IncrementalDetokenizer(tokenizer(), prompt_ids=(), skip_special_tokens=True),
    )
    choice.first, choice.last_output_at_s = first, last_at_s
    record = RequestRecord(PLAIN, 10.0, choices=[choice])
    root, *found = request_spans(record, request_id="r", status=200, ended_s=20.0)
    assert (root.start_s, root.end_s) == (10.0, 20.0)
    assert [(each.name, each.start_s, each.end_s) for each in found] == phases


ENDPOINTS: list[tuple[str, dict[str, object], str]] = [
    (CHAT, CHAT_BODY, "chat"),
    (PLAIN, PLAIN_BODY, "text_completion"),
    ("/v1/messages", {**CHAT_BODY, "max_tokens": 5}, "chat"),
    ("/v1/responses", {"model": "tiny", "input": "hi"}, "chat"),
]


@pytest.mark.parametrize(("path", "body", "operation"), ENDPOINTS)
def test_each_endpoint_names_its_answer(path: str, body: dict[str, object], operation: str) -> None:
    spans, answer = call(path, body, FakeEngine(saying("ok")))
    [root] = spans.roots
    found = attributes(root)
    assert root.name == f"{operation} tiny"
    assert (found["gen_ai.operation.name"], found["http.route"]) == (operation, path)
    assert found["gen_ai.response.id"] == answer.json()["id"]
    assert len(spans.phases) == 3


async def test_other_routes_have_no_spans() -> None:
    spans = Spans()
    async with gateway(FakeEngine(), spans=spans.sender) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get(CHAT)).status_code == 405
        assert (await client.post("/tokenize", json=PLAIN_BODY)).status_code == 200
    assert spans.all == ()


REFUSED: list[tuple[dict[str, object], dict[str, Any], int, str]] = [
    ({"n": 0}, {}, 400, "invalid_request_error"),
    ({"model": SECRET}, {}, 404, "model_not_found"),
    ({"max_tokens": 5000}, {}, 400, "context_length_exceeded"),
    ({}, {"keys": ApiKeys("k" * 32, None)}, 401, "401"),
    ({}, {"headers": {"X-Request-Id": "x" * 200}}, 400, "400"),
]


@pytest.mark.parametrize(("fields", "options", "status", "error_type"), REFUSED)
def test_a_refused_request_is_no_error_of_the_server(
    fields: dict[str, object], options: dict[str, Any], status: int, error_type: str
) -> None:
    spans, answer = call(PLAIN, {**PLAIN_BODY, **fields}, FakeEngine(), **options)
    [root] = spans.all
    found = attributes(root)
    assert answer.status_code == found["http.response.status_code"] == status
    assert found["error.type"] == error_type
    assert (root.status.status_code, root.name) == (StatusCode.UNSET, "text_completion")
    assert "gen_ai.usage.input_tokens" not in found


@pytest.mark.parametrize(
    ("num_before", "leaves", "status", "phases"),
    [
        (0, False, 200, []),
        (1, False, 200, ["queue", "prefill"]),
        (0, True, 499, []),
        (2, True, 200, ["queue", "prefill", "decode"]),
    ],
)
async def test_a_stream_that_breaks_off_is_an_error(
    num_before: int, leaves: bool, status: int, phases: list[str]
) -> None:
    """After some tokens the client leaves, or the engine fails."""
    spans, fake = Spans(), FakeEngine()
    fake.queues = num_before > 0
    async with opened(fake, spans=spans.sender) as (reader, writer):
        writer.write(http_request({"prompt": "hi", "stream": True}))
        await fake.request_came.wait()
        for index in range(num_before):
            fake.emit(output(fake.added[0], ids("a"), index=index))
            await reader.readuntil(b'"text":"a"')
        if leaves:
            writer.close()
            await fake.abort_came.wait()
        else:
            fake.emit(output(fake.added[0], [], index=num_before, finish_reason="abort"))
            await reader.readuntil(b"engine_unavailable")
    [root] = spans.roots
    found = attributes(root)
    assert found["http.response.status_code"] == status
    assert found["error.type"] == ("client_disconnected" if leaves else "engine_unavailable")
    assert found["gen_ai.usage.output_tokens"] == num_before
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, None)
    assert "gen_ai.response.finish_reasons" not in found
    assert [each.name for each in spans.phases] == phases


def test_an_engines_error_and_a_bug_have_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(SECRET)

    spans, _ = call(PLAIN, PLAIN_BODY, FakeEngine(refusing("node_lost", 503, SECRET)))
    assert [attributes(each)["error.type"] for each in spans.all] == ["node_lost"]
    monkeypatch.setattr(CompletionReplies, "end", broken)
    spans, answer = call(PLAIN, {**PLAIN_BODY, "stream": True}, FakeEngine(saying("ok")))
    [root] = spans.roots
    assert (answer.status_code, attributes(root)["error.type"]) == (200, "RuntimeError")
    monkeypatch.setattr("server.gateway.http.body.check_media_type", broken)
    spans, answer = call(PLAIN, PLAIN_BODY, FakeEngine())
    [root] = spans.all
    assert (answer.status_code, attributes(root)["error.type"]) == (500, "RuntimeError")
    assert (root.status.status_code, root.events) == (StatusCode.ERROR, ())


def test_the_parent_is_that_of_the_header() -> None:
    headers = [("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "a=1")]
    spans, _ = call(PLAIN, PLAIN_BODY, FakeEngine(saying("ok")), headers=headers)
    [root] = spans.roots
    assert root.parent is not None
    assert root.context is not None
    assert (f"{root.parent.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert root.parent.is_remote
    assert root.context.trace_state["a"] == "1"
    assert {each.context.trace_id for each in spans.all if each.context} == {int(TRACE, 16)}


def test_a_parent_that_is_not_recorded_has_no_child() -> None:
    headers = [("traceparent", f"00-{TRACE}-{PARENT}-00")]
    spans, answer = call(PLAIN, PLAIN_BODY, FakeEngine(saying("ok")), headers=headers)
    assert (answer.status_code, spans.all) == (200, ())


@pytest.mark.parametrize(
    "given",
    [
        [""],
        [f"00-{TRACE}-{PARENT}"],
        [f"00-{TRACE}-{PARENT}-01-more"],
        [f"00-{TRACE.upper()}-{PARENT}-01"],
        [f"00-{'0' * 32}-{PARENT}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"ff-{TRACE}-{PARENT}-01"],
        [f"00-{TRACE}-{PARENT}-01\u00e9"],
        [f"00-{TRACE}-{PARENT}-01"] * 2,
    ],
)
def test_a_malformed_parent_is_ignored(given: list[str]) -> None:
    headers = [("traceparent", each) for each in given]
    spans, answer = call(PLAIN, PLAIN_BODY, FakeEngine(saying("ok")), headers=headers)
    assert answer.status_code == 200
    [root] = spans.roots
    assert root.parent is None
    assert root.context is not None
    assert root.context.trace_id != int(TRACE, 16)


def test_spans_have_no_text_and_no_key() -> None:
    key = "k" * 32
    messages = [{"role": "user", "content": SECRET}]
    body = {**CHAT_BODY, "messages": messages, "stop": [f"{SECRET}!"]}
    headers = [("Authorization", f"Bearer {key}"), ("baggage", f"a={SECRET}")]
    fake = FakeEngine(saying(SECRET))
    spans, answer = call(CHAT, body, fake, headers=headers, keys=ApiKeys(key, None))
    assert (answer.status_code, SECRET in answer.text) == (200, True)
    shown = " ".join(span.to_json() for span in spans.all)
    assert "chat tiny" in shown
    assert SECRET not in shown
    assert key not in shown


def test_the_page_lists_every_span_and_attribute_by_the_names_of_the_conventions() -> None:
    whole, _ = call(CHAT, CHAT_BODY, FakeEngine(cached))
    refused, _ = call(CHAT, {}, FakeEngine())
    limited, _ = call(CHAT, {**CHAT_BODY, "max_tokens": 3}, FakeEngine(saying("ok")))
    roots = (*whole.roots, *refused.roots, *limited.roots)
    of_requests = {name for each in roots for name in attributes(each)}
    of_phases = {(each.name, name) for each in whole.phases for name in attributes(each)}
    text = PAGE.read_text()
    rows = re.findall(r"(?m)^\| `([\w.]+)` \| ([^|]*) \|", text)
    assert {name for name, _ in rows if "." in name} == of_requests
    assert {
        (phase, name)
        for phase, named in re.findall(r"(?m)^\| `(\w+)` \|[^|]*\|([^|]*)\|", text)
        for name in re.findall(r"`([\w.]+)`", named)
    } == of_phases
    named = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    ours = {name for name in of_requests if name.startswith("gen_ai.")}
    assert ours - named == {"gen_ai.request.id", "gen_ai.latency.time_to_first_token"}, "vLLM's"

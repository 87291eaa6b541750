"""Spans on their way to a collector: one that takes them, and some that do not."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Iterable

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from app.cli.main import main
from server.gateway.operations.otlp import check_endpoint, span_sender
from tests.server.gateway.calls import CHAT, CHAT_BODY, PLAIN, PLAIN_BODY
from tests.server.gateway.fakes import FakeEngine, gateway, saying
from tests.server.gateway.operations.collector import Collector, collector, values
from topspin.errors import ConfigError

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def ask(
    endpoint: str, requests: Iterable[tuple[str, dict[str, object]]], *, traceparent: str = ""
) -> list[int]:
    """Return the statuses of requests to a gateway, which then ends."""

    async def test() -> list[int]:
        headers = {"traceparent": traceparent} if traceparent else {}
        with span_sender(endpoint) as spans:
            async with gateway(FakeEngine(saying("ok")), spans=spans) as client:
                return [
                    (await client.post(path, json=body, headers=headers)).status_code
                    for path, body in requests
                ]

    return asyncio.run(test())


def test_a_collector_gets_what_is_queued_at_the_end() -> None:
    begun_ns = time.time_ns()
    requests = [(CHAT, {**CHAT_BODY, "n": 2}), (CHAT, {**CHAT_BODY, "stream": True}), (CHAT, {})]
    with collector() as found:
        parent = f"00-{TRACE}-{PARENT}-01"
        assert ask(found.url, requests, traceparent=parent) == [200, 200, 400]
        batch = found.receive()
        assert found.is_empty
    ended_ns = time.time_ns()
    assert batch.resource["service.name"] == "topspin"
    assert {span.trace_id.hex() for span in batch.spans} == {TRACE}
    roots = [span for span in batch.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert [span.name for span in roots] == ["chat tiny", "chat tiny", "chat"]
    assert {span.parent_span_id.hex() for span in roots} == {PARENT}
    whole, stream, refused = (values(span.attributes) for span in roots)
    assert whole["gen_ai.response.finish_reasons"] == ("length", "length")
    assert (whole["gen_ai.usage.output_tokens"], stream["gen_ai.usage.output_tokens"]) == (4, 2)
    assert refused["error.type"] == "invalid_request_error"
    assert all(span.status.code == Status.STATUS_CODE_UNSET for span in roots)
    for root, num_choices in zip(roots, (2, 1, 0), strict=True):
        phases = [span for span in batch.spans if span.parent_span_id == root.span_id]
        assert len(phases) == 3 * num_choices
        for span in phases:
            assert span.kind == Span.SPAN_KIND_INTERNAL
            assert root.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano
        assert begun_ns <= root.start_time_unix_nano <= root.end_time_unix_nano <= ended_ns


def test_the_sdks_variables_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-token=abc")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    with collector() as found:
        assert ask(found.url, [(PLAIN, PLAIN_BODY)]) == [200]
        batch = found.receive()
        assert batch.headers["x-token"] == "abc"
        named = ("service.name", "deployment.environment")
        assert [batch.resource[name] for name in named] == ["mine", "test"]
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with collector() as found:
        assert ask(found.url, [(PLAIN, PLAIN_BODY)]) == [200]
        assert found.is_empty
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint: max_export_batch_size"):
        ask("http://localhost:1", [])


def test_a_collector_that_is_away_costs_spans_and_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1/traces"
    begun_s = time.monotonic()
    assert ask(url, [(PLAIN, PLAIN_BODY)] * 5) == [200] * 5
    assert time.monotonic() - begun_s < 5
    assert "the last spans" not in caplog.text, "all were tried, and no thread is left"
    assert [each.levelno for each in caplog.records if each.name == EXPORTER] == [logging.ERROR]


def test_a_collector_that_does_not_answer_delays_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While it holds an export, requests are answered, the queue is full, and the gateway ends."""
    for name, value in (("SCHEDULE_DELAY", 1), ("MAX_EXPORT_BATCH_SIZE", 1), ("MAX_QUEUE_SIZE", 2)):
        monkeypatch.setenv(f"OTEL_BSP_{name}", str(value))
    monkeypatch.setattr("server.gateway.operations.otlp.FLUSH_S", 0.05)

    async def test(found: Collector) -> None:
        with span_sender(found.url) as spans:
            async with gateway(FakeEngine(saying("ok")), spans=spans) as client:
                assert (await client.post(PLAIN, json=PLAIN_BODY)).status_code == 200
                await asyncio.to_thread(found.receive)
                for _ in range(5):
                    assert (await client.post(PLAIN, json=PLAIN_BODY)).status_code == 200

    with collector() as found:
        found.answers.clear()
        asyncio.run(test(found))
        assert found.is_empty, "the first export is still held"
        assert "Queue full" in caplog.text
        assert "the last spans were not sent within 0.05 s" in caplog.text
        found.answers.set()
        # The exporter's thread ends with what the queue held.
        assert [len(found.receive().spans) for _ in range(2)] == [1, 1]


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost:4318", "grpc://c:4317", "http://", "http://c:port", "http://c:0"),
        *("http://[", "http://a b/"),
    ],
)
def test_what_is_no_url_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint .*must be a URL of HTTP"):
        check_endpoint(url)


@pytest.mark.parametrize("package", ["sdk", "exporter"])
def test_the_missing_extra_is_named_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    for name in list(sys.modules):
        if name.startswith(f"opentelemetry.{package}"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, f"opentelemetry.{package}", None)
    assert main(["serve", "none", "--otlp-traces-endpoint", "https://c:4318/v1/traces"]) == 2
    assert capsys.readouterr().err == (
        "topspin serve: error: --otlp-traces-endpoint: OpenTelemetry's packages are not installed; "
        "install them with pip install -e '.[otlp]'\n"
    )

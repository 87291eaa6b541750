"""Sends spans to an OpenTelemetry collector (`--otlp-traces-endpoint`).

Owns the SDK's objects and their end: a thread of the SDK's sends batches from a bounded queue, so
that a collector that is slow or away costs spans, and no request any time. The SDK's own variables
(OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS, OTEL_TRACES_SAMPLER, OTEL_BSP_MAX_QUEUE_SIZE ...)
hold. Knows no request; OpenTelemetry is imported only where there are traces.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from topspin import __version__
from topspin.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanKind

    from server.gateway.operations.spans import SpanData

FLAG = "--otlp-traces-endpoint"
# What is left at the end is sent for at most so long.
FLUSH_S = 1.0
# A collector that is away fails each batch, some times over.
LOG_PERIOD_S = 60.0
NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")

_log = logging.getLogger("gateway")


def check_endpoint(endpoint: str | None) -> None:
    """Raise ConfigError for an endpoint that is no URL of HTTP, or if a package is missing."""
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bad IPv6 address
        is_url = False
    if not is_url or any(each.isspace() for each in endpoint):
        raise ConfigError(
            f"{FLAG} {endpoint}: must be a URL of HTTP, for example http://localhost:4318/v1/traces"
        )
    if not all(_is_installed(name) for name in NEEDED):
        raise ConfigError(
            f"{FLAG}: OpenTelemetry's packages are not installed; install them with "
            "pip install -e '.[otlp]'"
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # of a parent; ValueError: it is barred
        return False


@contextmanager
def span_sender(endpoint: str | None) -> Iterator[SpanSender | None]:
    """Yield what sends spans to `endpoint`, None without one. Raises as check_endpoint()."""
    check_endpoint(endpoint)
    if endpoint is None:
        yield None
        return
    sender = SpanSender(_provider(endpoint))
    exporter_log, rarely = logging.getLogger(NEEDED[1]), _Rarely()
    exporter_log.addFilter(rarely)
    try:
        yield sender
    finally:
        sender.close()
        exporter_log.removeFilter(rarely)


def _provider(endpoint: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = OTELResourceDetector().detect().attributes
    resource = Resource.create({"service.name": "topspin", "service.version": __version__, **named})
    try:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except ValueError as error:  # the variables of a batch contradict each other
        raise ConfigError(f"{FLAG}: {error}") from error
    return provider


class SpanSender:
    """Makes the SDK's spans of requests that have ended, and gives them to a provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("topspin", __version__)

    def send(self, spans: Sequence[SpanData], headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Queue a request's span, a child of the one that its headers name, if any, and others."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        # Of the two clocks; a step of the system's time moves a whole request.
        offset_ns = time.time_ns() - time.monotonic_ns()
        own, *phases = spans
        root = self._start(own, _parent(headers), SpanKind.SERVER, offset_ns)
        if root.is_recording():
            inside = set_span_in_context(root)
            for phase in phases:
                span = self._start(phase, inside, SpanKind.INTERNAL, offset_ns)
                span.end(_to_ns(phase.end_s, offset_ns))
        root.end(_to_ns(own.end_s, offset_ns))

    def _start(self, data: SpanData, parent: Context, kind: SpanKind, offset_ns: int) -> Span:
        from opentelemetry.trace import StatusCode

        span = self._tracer.start_span(
            data.name,
            context=parent,
            kind=kind,
            attributes=data.attributes,
            start_time=_to_ns(data.start_s, offset_ns),
        )
        if data.is_error:
            span.set_status(StatusCode.ERROR)
        return span

    def close(self) -> None:
        """Send what is queued, for FLUSH_S at most; what is left then is lost."""
        # A daemon: the SDK may wait for an answer for 30 s, and nothing waits for this thread.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH_S)
        if closing.is_alive():
            _log.warning("gateway: the last spans were not sent within %g s", FLUSH_S)


def _to_ns(monotonic_s: float, offset_ns: int) -> int:
    return offset_ns + round(monotonic_s * 1e9)


def _parent(headers: Iterable[tuple[bytes, bytes]]) -> Context:
    """Return the context that W3C's `traceparent` and `tracestate` name; empty if it is invalid."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    given: dict[str, list[str]] = {}
    for name, value in headers:
        if name in (b"traceparent", b"tracestate"):
            given.setdefault(name.decode(), []).append(value.decode("latin-1"))
    if len(given.get("traceparent", ())) != 1:
        return Context()
    return TraceContextTextMapPropagator().extract(given, context=Context())


class _Rarely(logging.Filter):
    """Lets a record through every LOG_PERIOD_S."""

    _next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether `record` is written."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + LOG_PERIOD_S
        return True

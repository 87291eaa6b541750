"""A collector on loopback that decodes what it is sent, by OpenTelemetry's protobuf messages."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

DEADLINE_S = 20.0


class Batch(NamedTuple):
    """The spans of one export, the attributes of who sent them, and the HTTP headers."""

    spans: list[Span]
    resource: dict[str, object]
    headers: dict[str, str]


class Collector:
    """Where spans arrive. `url` is the endpoint; it answers only while `answers` is set."""

    def __init__(self, url: str, batches: queue.Queue[Batch], answers: threading.Event) -> None:
        self.url = url
        self.answers = answers
        self._batches = batches

    def receive(self) -> Batch:
        """Wait for the next export."""
        return self._batches.get(timeout=DEADLINE_S)

    @property
    def is_empty(self) -> bool:
        return self._batches.empty()


def values(attributes: Iterable[KeyValue]) -> dict[str, object]:
    """Return attributes by name; those that are lists as tuples."""
    found: dict[str, object] = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        if kind == "array_value":
            value = tuple(item.string_value for item in value.values)
        found[each.key] = value
    return found


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector."""
    batches: queue.Queue[Batch] = queue.Queue()
    answers = threading.Event()
    answers.set()

    class Handler(BaseHTTPRequestHandler):
        """Takes POST /v1/traces."""

        def do_POST(self) -> None:
            """Decode one export."""
            assert self.path == "/v1/traces"
            assert self.headers["Content-Type"] == "application/x-protobuf"
            data = self.rfile.read(int(self.headers["Content-Length"]))
            [received] = ExportTraceServiceRequest.FromString(data).resource_spans
            spans = [span for scope in received.scope_spans for span in scope.spans]
            headers = {name.lower(): value for name, value in self.headers.items()}
            batches.put(Batch(spans, values(received.resource.attributes), headers))
            assert answers.wait(DEADLINE_S)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
            yield Collector(url, batches, answers)
        finally:
            server.shutdown()
            thread.join()

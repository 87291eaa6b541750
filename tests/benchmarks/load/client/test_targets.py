"""Finding a server: its models, and whether it is ready or only listens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.load.client.targets import (
    ServedModel,
    ServerUnreachable,
    check_ready,
    first_model,
    served_model,
    served_models,
    wait_until_ready,
)

Answers = dict[str, list[tuple[int, bytes]]]
MODELS = b'{"data": [{"id": "one", "root": "/models/one", "vocab_size": 9}, {"id": "two"}]}'


@contextmanager
def answering(answers: Answers) -> Iterator[str]:
    """Serve each path's answers in turn, and the last one from then on; yields the base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            left = answers.get(self.path, [(404, b"")])
            status, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_models_are_those_that_the_server_lists() -> None:
    with answering({"/v1/models": [(200, MODELS)]}) as url:
        assert served_models(url) == [
            ServedModel("one", root="/models/one", vocab_size=9),
            ServedModel("two"),
        ]
        assert first_model(url + "/") == "one"
        assert served_model(url, "one").vocab_size == 9
        assert served_model(url, "three") == ServedModel("three")
    assert served_model("http://127.0.0.1:9", "one") == ServedModel("one")


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, b"who are you", "answers 401: who are you"),
        (200, b"<html>", "no list of models: <html>"),
        (200, b'{"models": []}', "no list of models"),
        (200, b'{"data": []}', "serves no model"),
    ],
)
def test_an_answer_that_is_no_list_is_an_error(status: int, body: bytes, said: str) -> None:
    with (
        answering({"/v1/models": [(status, body)]}) as url,
        pytest.raises(ServerUnreachable, match=said),
    ):
        first_model(url)


def test_a_server_that_still_loads_is_waited_for() -> None:
    health = [(503, b"loading"), (503, b"loading"), (200, b"")]
    with answering({"/health": health, "/v1/models": [(200, MODELS)]}) as url:
        with pytest.raises(ServerUnreachable, match="answers 503: loading"):
            check_ready(url)
        wait_until_ready(url, 60)
        assert health == [(200, b"")]


def test_a_server_without_health_is_ready_with_its_models() -> None:
    with answering({"/v1/models": [(200, MODELS)]}) as url:
        check_ready(url)


def test_the_wait_ends() -> None:
    with (
        answering({"/health": [(503, b"loading")]}) as url,
        pytest.raises(ServerUnreachable, match=r"not ready after 0.01 s: .*503: loading"),
    ):
        wait_until_ready(url, 0.01)

"""`topspin trace` against a small HTTP server: files, text, and clear errors."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from app.cli.main import main
from tests.app.cli.test_trace_report import play
from topspin.messages import Trace


@contextmanager
def serving(body: bytes, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Do not log."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def played() -> Trace:
    trace, _ = play(
        lambda name, layer, mb: 3_000_000 if name == "expert 1" else 1_000_000,
        num_attention=1,
        num_experts=2,
        layers=8,
        m=2,
        link_ns=0,
    )
    return trace


def test_it_writes_the_trace_and_says_what_it_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "t.json"
    with serving(msgspec.json.encode(played())) as (url, asked):
        assert main(["trace", "--url", url, "--seconds", "3", "-o", str(output)]) == 0
    assert asked == ["/trace?seconds=3.0"]
    assert json.loads(output.read_text())["traceEvents"]
    said = capsys.readouterr().out
    assert "m = 2, 8 MoE layers" in said
    assert "T_a 1.000 ms" in said
    assert "slowest peer: expert 1" in said


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs the extra plots")
def test_it_draws_the_gantt_chart(tmp_path: Path) -> None:
    png = tmp_path / "t.png"
    with serving(msgspec.json.encode(played())) as (url, _):
        flags = ["--url", url, "-o", str(tmp_path / "t.json"), "--png", str(png)]
        assert main(["trace", *flags]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs the extra plots")
def test_it_writes_what_the_files_name_says(tmp_path: Path) -> None:
    output = tmp_path / "t.svg"
    with serving(msgspec.json.encode(played())) as (url, _):
        assert main(["trace", "--base-url", url, "-o", str(output)]) == 0
    assert "<svg" in output.read_text()


def test_a_name_that_says_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "-o", "trace.txt"]) == 2
    assert "must end in .json, .png, .svg, .pdf" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "status", "exit_status", "text"),
    [
        (b"{}", 200, 2, "not a trace"),
        (b"gone", 404, 2, "404: gone"),
        (b"later", 503, 1, "503: later"),
    ],
)
def test_what_is_no_trace_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    body: bytes,
    status: int,
    exit_status: int,
    text: str,
) -> None:
    with serving(body, status) as (url, _):
        assert main(["trace", "--url", url, "-o", str(tmp_path / "t.json")]) == exit_status
    assert text in capsys.readouterr().err


def test_an_idle_engine_has_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(msgspec.json.encode(Trace(query_id=1, nodes=()))) as (url, _):
        assert main(["trace", "--url", url, "-o", str(tmp_path / "t.json")]) == 0
    assert "no whole step was recorded" in capsys.readouterr().out

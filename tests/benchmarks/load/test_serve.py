"""The whole `topspin bench serve`: flags in, requests out, a table, JSON and an exit status."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from benchmarks.load import serve
from benchmarks.load.client.http import Snapshot
from benchmarks.load.client.runner import Watch
from benchmarks.load.contracts import BenchRequest, LoadPattern, Target
from benchmarks.load.figures.view import progress, progress_line
from benchmarks.load.serve import warm_up
from tests.benchmarks.load.scripted_server import Received, Reply, ScriptedServer, stream_reply
from tests.benchmarks.load.words import write_byte_level

pytestmark = pytest.mark.usefixtures("without_collections")

SMALL = ("--vocab-size", "50", "--random-input-len", "6", "--random-output-len", "3")


def bench(server: ScriptedServer, *flags: str) -> int:
    return main(["bench", "serve", "--base-url", server.base_url, *SMALL, *flags])


def refuse(received: Received) -> Reply:
    return Reply([b"busy"], status=429, headers={"retry-after": "1"})


def test_a_run_prints_its_table_and_writes_its_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer() as server:
        flags = ["--num-prompts", "5", "--max-concurrency", "2", "--goodput", "e2el:100000"]
        saved = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
        assert bench(server, *flags, *saved, "--metric-percentiles", "50,99.9") == 0
    out = capsys.readouterr().out
    for expected in ("scripted at", "Successful requests", "Time to first token", "p99.9"):
        assert expected in out
    result: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    assert result["completed"] == 5
    assert result["total_input_tokens"] == 30
    assert result["total_output_tokens"] == 15
    assert result["topspin"]["good_completed"] == 5
    assert result["topspin"]["settings"]["dataset"] == "random"
    assert {len(received.body["prompt"]) for received in server.requests} == {6}
    for received in server.requests:
        assert received.body["ignore_eos"] is True
        assert received.body["temperature"] == 0


def test_a_server_that_tells_its_vocabulary_needs_no_tokenizer_flag() -> None:
    flags = ["--random-input-len", "40", "--random-output-len", "1", "--num-prompts", "8"]
    with ScriptedServer(card={"vocab_size": 5, "root": "/nowhere"}) as server:
        assert main(["bench", "serve", "--base-url", server.base_url, *flags]) == 0
    drawn = {idx for received in server.requests for idx in received.body["prompt"]}
    assert drawn == set(range(5))


def test_a_checkpoint_on_this_host_gives_its_tokenizer(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    flags = ["--backend", "openai-chat", "--random-input-len", "6", "--num-prompts", "2"]
    with ScriptedServer(card={"vocab_size": 1000, "root": str(tmp_path)}) as server:
        assert main(["bench", "serve", "--base-url", server.base_url, *flags]) == 0
    content = server.requests[0].body["messages"][0]["content"]
    assert len(content.split()) == 6


@pytest.mark.slow
def test_a_report_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with ScriptedServer() as server:
        page = tmp_path / "report.html"
        assert bench(server, "--num-prompts", "3", "--report", str(page)) == 0
    assert server.base_url in page.read_text()


def test_sampling_and_extra_fields_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    with ScriptedServer() as server:
        flags = ["--num-prompts", "1", "--no-ignore-eos", "--top-p", "0.5", "--temperature", "1"]
        extra = ["--extra-body", '{"seed": 3, "top_p": 0.25}', "--header", "x-a=b", "x-c=d"]
        assert bench(server, *flags, *extra, "--api-key", "key", "--model", "mine") == 0
        assert bench(server, "--num-prompts", "1") == 0
        assert bench(server, "--num-prompts", "1", "--seed", "2") == 0
    received, by_default, other = server.requests
    assert received.body["prompt"] == by_default.body["prompt"] != other.body["prompt"]
    expected = {"model": "mine", "seed": 3, "top_p": 0.25, "temperature": 1}
    assert received.body.items() >= expected.items()
    assert "ignore_eos" not in received.body
    assert (received.headers["x-a"], received.headers["x-c"]) == ("b", "d")
    assert received.headers["authorization"] == "Bearer key"
    assert by_default.headers["authorization"] == "Bearer from-the-environment"


def test_a_run_in_which_everything_fails_says_what_and_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with ScriptedServer(refuse) as server:
        assert bench(server, "--num-prompts", "3") == 1
    out = capsys.readouterr().out
    assert "3 x http_429, first: request 0: busy" in out
    assert len(server.requests) == 3


def test_a_warm_up_is_not_measured_and_fills_no_prefix_cache(tmp_path: Path) -> None:
    with ScriptedServer() as server:
        saved = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
        assert bench(server, "--num-prompts", "2", "--num-warmups", "3", *saved) == 0
    assert len(server.requests) == 5
    assert json.loads((tmp_path / "r.json").read_text())["completed"] == 2
    warm = [received.body["prompt"] for received in server.requests[:3]]
    measured = [received.body["prompt"] for received in server.requests[3:]]
    assert sorted(map(sorted, warm[:2])) == sorted(map(sorted, measured))
    assert all(prompt not in measured for prompt in warm)


def test_texts_and_messages_are_warmed_up_by_other_ones() -> None:
    messages = [{"role": "user", "content": "four five"}]
    asked = BenchRequest(max_tokens=1, prompt="one two")
    with ScriptedServer() as server:
        warm_up(Target(server.base_url, "m"), [asked], LoadPattern(), 1)
        chat = Target(server.base_url, "m", backend="openai-chat")
        warm_up(chat, [replace(asked, prompt=None, messages=messages)], LoadPattern(), 1)
    assert server.requests[0].body["prompt"] == "two one"
    assert server.requests[1].body["messages"] == [{"role": "user", "content": "five four"}]


def test_a_warm_up_that_fails_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(refuse) as server:
        assert bench(server, "--num-prompts", "5", "--num-warmups", "1") == 1
    assert "no warm-up request succeeded: http_429" in capsys.readouterr().err
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--request-rate", "0"), "--request-rate is 0"),
        (("--replay", "--request-rate", "3"), "--replay"),
        (("--replay",), "timestamps"),
        (("--port", "80"), "--url says where"),
        (("--goodput", "itl:5"), "'itl' is no goal"),
        (("--metric-percentiles", "99,101"), "101 is not within 0 to 100"),
        (("--metric-percentiles", "many"), "not numbers"),
        (("--percentile-metrics", "ttft,speed"), "'speed' is none of"),
        (("--save-detailed",), "--save-detailed needs --save-result"),
        (("--result-dir", "x"), "--result-dir needs --save-result"),
        (("--extra-body", '{"stream": false}'), "may not set 'stream'"),
        (("--header", "nonsense"), "expected KEY=VALUE"),
        (("--endpoint", "v1/completions"), "a path begins with /"),
        (("--report", "page.png"), "a report is a file named .html"),
        (("--num-warmups", "-1"), "--num-warmups is -1"),
        (("--num-prompts", "0"), "--num-prompts"),
        (("--tokenizer", "nowhere"), "--tokenizer nowhere"),
    ],
)
def test_mistakes_are_refused_before_anything_is_sent(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer() as server:
        assert bench(server, *flags) == 2
    assert server.requests == []
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:8000", "http://127.0.0.1:8000/v1/"])
def test_an_address_is_checked(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", url]) == 2
    assert "--url" in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer() as server:
        url = server.base_url
    assert main(["bench", "serve", "--base-url", url, "--ready-check-timeout-sec", "0.01"]) == 1
    assert "not ready after 0.01 s" in capsys.readouterr().err
    assert main(["bench", "serve", "--base-url", url]) == 1
    assert "/v1/models" in capsys.readouterr().err


@pytest.mark.usefixtures("terminal_signals")
def test_control_c_prints_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupting(*, quiet: bool) -> Iterator[Watch]:
        yield interrupt

    def interrupt(snapshot: Snapshot) -> None:
        if snapshot.num_completed == 2:
            signal.raise_signal(signal.SIGINT)

    def hang_at_the_third(received: Received) -> Reply:
        return stream_reply(received, first_delay_s=600.0 if len(server.requests) > 2 else 0.0)

    monkeypatch.setattr(serve, "progress", interrupting)
    with ScriptedServer(hang_at_the_third) as server:
        assert bench(server, "--num-prompts", "9", "--max-concurrency", "1") == 130
    out = capsys.readouterr().out
    assert "7 requests did not finish" in out
    assert "Time to first token" in out


def test_progress_says_what_is_happening(capsys: pytest.CaptureFixture[str]) -> None:
    before = Snapshot(1.0, 10, 4, 1, 1, 100)
    now = Snapshot(3.0, 10, 9, 5, 1, 500)
    assert progress_line(now, before) == "   3.0 s  5/10 done, 3 running, 1 failed, 200 events/s"
    with progress() as show:
        show(before)
        show(now)
    with progress(quiet=True) as show:
        show(now)
    # Not a terminal: one line at once, and the next only after a while.
    assert capsys.readouterr().err.count("done") == 1


@pytest.mark.slow
def test_the_client_needs_no_torch() -> None:
    code = "import sys, benchmarks.load.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

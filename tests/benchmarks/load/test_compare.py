"""topspin bench compare against scripted servers: turns, prompts, ratios, answers, starts."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from benchmarks.kernels import read_rate
from benchmarks.kernels.byte_floor import step_weight_bytes
from benchmarks.load import compare
from benchmarks.load.started_server import free_port
from models.description.config import load_model_config
from tests.benchmarks.load.scripted_server import Received, Reply, ScriptedServer, stream_reply
from topspin.errors import ConfigError, EngineUnavailable
from topspin.plan.precision import rules_of

ROOT = Path(__file__).parents[3]
SMALL = (
    *("--vocab-size", "1000", "--random-input-len", "6", "--random-output-len", "3"),
    *("--num-prompts", "4", "--num-warmups", "1", "--quiet"),
)
SHORT = ("--check-tokens", "2")
TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
}


pytestmark = pytest.mark.usefixtures("without_collections")


Servers = tuple[ScriptedServer, ScriptedServer]


@pytest.fixture
def servers() -> Iterator[Servers]:
    with ScriptedServer() as first, ScriptedServer() as second:
        yield first, second


def _flags(servers: Servers, folder: Path, *more: str) -> list[str]:
    urls = zip("ab", servers, strict=True)
    targets = [word for name, each in urls for word in ("--target", f"{name}={each.base_url}")]
    return [*targets, "--result-dir", str(folder), *SMALL, *more]


def _result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    return found


def _measured(server: ScriptedServer) -> list[Received]:
    """Return the requests after the questions, which are texts."""
    return [received for received in server.requests if isinstance(received.body["prompt"], list)]


def test_targets_get_the_same_prompts_in_turn_and_new_ones_each_round(
    servers: Servers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--rounds", "2", "--concurrencies", "2", "--seed", "5", *SHORT)
    assert main(["bench", "compare", *_flags(servers, tmp_path, *flags)]) == 0
    sent = [[tuple(r.body["prompt"]) for r in _measured(server)] for server in servers]
    assert sorted(sent[0]) == sorted(sent[1])
    # Rounds x (prefill and whole) x (a warm-up and 4 prompts), no prompt sent twice.
    assert len(sent[0]) == 2 * 2 * (1 + 4)
    assert len(set(sent[0])) == len(sent[0])
    times = sorted((r.at_s, idx) for idx, server in enumerate(servers) for r in _measured(server))
    assert [who for who, _ in groupby(who for _, who in times)] == [0, 1, 0, 1]
    lengths = [r.body["max_tokens"] for r in _measured(servers[0])]
    assert lengths == ([1] * 5 + [3] * 5) * 2
    assert all(r.body["ignore_eos"] is True for r in _measured(servers[0]))
    result = _result(tmp_path)
    assert (result["rounds_measured"], result["seed"], result["error"]) == (2, 5, None)
    assert [target["model"] for target in result["targets"]] == ["scripted", "scripted"]
    a, b = (result["concurrencies"]["2"][name] for name in ("a", "b"))
    assert len(a["output_throughput"]["rounds"]) == 2
    for figure in ("output_throughput", "median_ttft_ms", "prefill_throughput"):
        assert len(b[figure]["ratio"]["rounds"]) == 2
    output = capsys.readouterr().out
    assert "2 at once" in output
    assert "Greedy answers of b that are the same: 100% of 8" in output


@pytest.mark.slow
def test_the_byte_floor_of_one_request_is_shown_and_written(
    servers: Servers,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = iter([[10e6, 20e6], [20e6, 20e6]])
    monkeypatch.setattr(read_rate, "read_rates", lambda: next(rates))
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    flags = _flags(servers, tmp_path, "--rounds", "2", "--concurrencies", "1,2", *SHORT)
    flags += ["--floor-model", str(tmp_path), "--floor-quantization", "int8"]
    assert compare.main(flags) == 0
    floor = _result(tmp_path)["byte_floor"]
    # Measured in each round; one slow read of four is not the limit.
    assert (next(rates, None), floor["read_bytes_per_s"]) == (None, 20e6)
    assert floor["weight_bytes"] == step_weight_bytes(load_model_config(tmp_path), rules_of("int8"))
    assert floor["ms_per_token"] == pytest.approx(floor["weight_bytes"] / 20e3)
    assert capsys.readouterr().out.count("TPOT / byte floor") == 1


@pytest.mark.slow
def test_questions_are_asked_greedily_one_at_a_time(servers: Servers, tmp_path: Path) -> None:
    flags = ("--rounds", "1", "--concurrencies", "1", "--check-tokens", "5", "--temperature", "1")
    assert compare.main(_flags(servers, tmp_path, *flags)) == 0
    for server in servers:
        asked = [r.body for r in server.requests if isinstance(r.body["prompt"], str)]
        assert [body["prompt"] for body in asked] == list(compare.QUESTIONS)
        assert {(body["max_tokens"], body["temperature"]) for body in asked} == {(5, 0.0)}
        assert all("ignore_eos" not in body for body in asked)
        assert {r.body["temperature"] for r in _measured(server)} == {1.0}


def test_other_answers_are_said_and_fail_only_if_asked(servers: Servers, tmp_path: Path) -> None:
    servers[1].respond = lambda received: stream_reply(received, ["w0 ", "w1 ", "other"])
    once = ("--rounds", "1", "--concurrencies", "1", "--check-tokens", "3")
    assert compare.main(_flags(servers, tmp_path, *once)) == 0
    agreed = _result(tmp_path)["agreement"]["b"]
    assert (agreed["num_prompts"], agreed["identical"]) == (8, 0.0)
    assert agreed["common_prefix_characters"] == len("w0 w1 ")
    assert "other" in agreed["first_difference"]
    before = len(servers[0].requests)
    with pytest.raises(compare.NotEqual, match="b answers otherwise than a"):
        compare.main(_flags(servers, tmp_path, *once, "--require-equal"))
    assert len(servers[0].requests) == before + 8


def test_another_model_is_refused_unless_it_is_named(
    tmp_path: Path,
) -> None:
    once = ("--rounds", "1", "--concurrencies", "1", "--check-tokens", "0")
    with ScriptedServer() as first, ScriptedServer(model="/path/other") as second:
        with pytest.raises(ConfigError, match=r"--target b=http.*=/path/other"):
            compare.main(_flags((first, second), tmp_path, *once))
        assert first.requests == second.requests == []
        named = _flags((first, second), tmp_path, *once)
        named[named.index(f"b={second.base_url}")] += "=/path/other"
        assert compare.main(named) == 0
        assert {r.body["model"] for r in first.requests} == {"scripted"}
        assert {r.body["model"] for r in second.requests} == {"/path/other"}


def _fail_from(server: ScriptedServer, num_ok: int) -> None:
    def respond(received: Received) -> Reply:
        ok = len(server.requests) <= num_ok
        return stream_reply(received) if ok else Reply([b"no"], status=500)

    server.respond = respond


# A round's first measured run comes after 10 requests of the round before and a warm-up.
@pytest.mark.parametrize(("which", "num_ok", "num_rounds"), [(0, 11, 1), (1, 1, 0)])
def test_the_first_target_or_one_that_never_served_ends_it_and_complete_rounds_are_kept(
    servers: Servers, tmp_path: Path, which: int, num_ok: int, num_rounds: int
) -> None:
    _fail_from(servers[which], num_ok)
    flags = _flags(servers, tmp_path, "--concurrencies", "1", "--check-tokens", "0")
    with pytest.raises(EngineUnavailable, match="failed 4 of 4 requests, the first by http_500"):
        compare.main(flags)
    if num_rounds:
        result = _result(tmp_path)
        assert (result["rounds_asked"], result["rounds_measured"]) == (3, num_rounds)
        assert "http_500" in result["error"]


def test_a_later_failure_of_another_target_costs_its_own_figures(
    servers: Servers, tmp_path: Path
) -> None:
    _fail_from(servers[1], 11)
    assert not compare.main(
        _flags(servers, tmp_path, "--concurrencies", "1", "--check-tokens", "0")
    )
    result = _result(tmp_path)
    assert result["rounds_measured"] == 3
    assert "round 2/3, b, 1 at once: b failed 4 of 4 requests" in result["warnings"][0]
    figures = result["concurrencies"]["1"]
    assert [len(figures[name]["output_throughput"]["rounds"]) for name in "ab"] == [3, 1]


def _command(name: str, port: int, journal: Path, *more: str) -> str:
    module = "tests.benchmarks.load.scripted_main"
    words = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", module, name, str(port)]
    return shlex.join([*words, str(journal), *more])


@pytest.fixture
def ports() -> list[int]:
    return [free_port(), free_port()]


def _started(ports: list[int], folder: Path, *more: str) -> list[str]:
    flags = ["--concurrencies", "1", "--result-dir", str(folder), *SMALL, *SHORT]
    for name, port in zip("ab", ports, strict=True):
        flags += ["--target", f"{name}=http://127.0.0.1:{port}"]
    return [*flags, *more]


@pytest.mark.slow
def test_started_targets_never_run_at_the_same_time(ports: list[int], tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    starts = []
    for name, port in zip("ab", ports, strict=True):
        starts += ["--start", f"{name}={_command(name, port, journal)}"]
    assert compare.main(_started(ports, tmp_path, *starts, "--rounds", "1")) == 0
    # Once for the questions, once for the round.
    turns = ["start a", "stop a", "start b", "stop b"]
    assert journal.read_text().splitlines() == turns * 2
    assert (tmp_path / "a.log").read_text().startswith("$ env PYTHONPATH")
    result = _result(tmp_path)
    assert result["rounds_measured"] == 1
    command = shlex.split(result["targets"][1]["command"])
    assert Path(sys.executable).name in command
    assert not [word for word in command if word.startswith("/")]


@pytest.mark.slow
def test_a_started_target_that_dies_is_reported_with_its_log(
    ports: list[int], tmp_path: Path
) -> None:
    journal = tmp_path / "journal"
    flags = _started(ports, tmp_path, "--start", f"b={_command('b', ports[1], journal, '2')}")
    with (
        ScriptedServer(port=ports[0]),
        pytest.raises(EngineUnavailable, match=r"ended with status 7(.|\n)*out of memory"),
    ):
        compare.main(flags)


# Connects back to the test, so that it sees this process start and end; never ready.
_CALLER = """
import socket, sys, time
line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
time.sleep(600)
"""


@pytest.mark.slow
def test_an_ended_comparison_leaves_no_server_behind(ports: list[int], tmp_path: Path) -> None:
    """It runs under nohup: losing its terminal does not end it, SIGTERM does."""
    script = "import sys; from benchmarks.load.compare import main; sys.exit(main(sys.argv[1:]))"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        back = str(listener.getsockname()[1])
        start = f"a={shlex.join([sys.executable, '-c', _CALLER, back])}"
        flags = _started(ports, tmp_path, "--start", start)
        words = ["nohup", sys.executable, "-c", script, *flags]
        nowhere = subprocess.DEVNULL
        with subprocess.Popen(words, cwd=ROOT, stdout=nowhere, stderr=nowhere) as process:
            line, _ = listener.accept()
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 128 + signal.SIGTERM
        with line:
            line.settimeout(60)
            assert line.recv(1) == b""


PAIR = ("--target", "a=http://x", "--target", "b=http://y")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--target", "a=http://x"), "two targets"),
        (("--target", "a"), "expected NAME=URL"),
        (("--target", "../a=http://x"), "a name has letters"),
        (("--target", "a=http://x", "--target", "a=http://y"), "names a twice"),
        (("--target", "a=http://x", "--target", "b=ftp://y"), "begins with http"),
        ((*PAIR, "--start", "c=true"), "--start c"),
        ((*PAIR, "--start", "a=1", "--start", "a=2"), "--start names a target twice"),
        ((*PAIR, "--rounds", "0"), "--rounds is 0"),
        ((*PAIR, "--concurrencies", "0"), "--concurrencies 0"),
        ((*PAIR, "--require-equal", "--check-tokens", "0"), "--require-equal needs"),
        ((*PAIR, "--request-timeout", "0"), "--request-timeout is 0"),
        ((*PAIR, "--floor-model", "no/model"), "no/model/config.json: no such file"),
    ],
)
def test_bad_flags_are_refused_by_name(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compare.main([*flags, *SMALL])

"""topspin bench sweep against a scripted server: its points, failures and JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from benchmarks.load import serve, sweep
from benchmarks.load.contracts import LoadRun
from benchmarks.load.figures import page
from tests.benchmarks.load.scripted_server import Received, Reply, ScriptedServer, stream_reply
from topspin.errors import ConfigError

pytestmark = pytest.mark.usefixtures("without_collections")
DATASET = ("--vocab-size", "1000", "--random-input-len", "6", "--random-output-len", "3")


def _flags(server: ScriptedServer, folder: Path, *more: str) -> list[str]:
    return ["--base-url", server.base_url, "--result-dir", str(folder), *DATASET, *more]


def _result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return found


def test_every_concurrency_is_measured_with_prompts_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--concurrencies", "4,1", "--num-prompts", "8", "--num-warmups", "1")
    with ScriptedServer() as server:
        asked = _flags(server, tmp_path / "new", *flags)
        assert main(["bench", "sweep", *asked]) == 0
        prompts = [tuple(received.body["prompt"]) for received in server.requests]
    assert len(prompts) == 2 * (1 + 8)
    assert len(set(prompts)) == len(prompts)
    result = _result(tmp_path / "new")
    points = result["points"]
    assert [point["load"] for point in points] == [1, 4]
    assert [point["result"]["completed"] for point in points] == [8, 8]
    assert [point["result"]["total_output_tokens"] for point in points] == [24, 24]
    assert [point["result"]["max_concurrency"] for point in points] == [1, 4]
    assert points[0]["result"]["max_concurrent_requests"] == 1
    assert result["knee"]["load"] is None
    assert result["load_name"] == "concurrency"
    assert {"commit", "machine", "versions", "date"} <= set(result)
    captured = capsys.readouterr()
    assert "[2/2] concurrency 4" in captured.err
    assert "Knee: none" in captured.out


def test_a_point_that_fails_is_reported_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def respond(received: Received) -> Reply:
        # Request 4 is the second point's warm-up, and 11 belongs to the last point.
        bad = len(server.requests) - 1 in (4, 11)
        return Reply([b"overloaded"], status=503) if bad else stream_reply(received)

    flags = ("--request-rates", "500,1000,2000,4000", "--num-prompts", "3", "--num-warmups", "1")
    with ScriptedServer(respond) as server:
        status = sweep.main(_flags(server, tmp_path, *flags, "--goodput", "ttft:600000"))
    assert status == 0
    result = _result(tmp_path)
    assert [point["error"] is None for point in result["points"]] == [True, False, True, True]
    assert "503" in result["points"][1]["error"]
    assert result["points"][3]["result"]["failed"] == 1
    # A load with an error is none that the server can carry, so the highest one is not the knee.
    assert result["knee"]["load"] == 2000
    assert 1000 not in result["pareto"]["median_ttft_ms"]
    output = capsys.readouterr().out
    assert "request rate 1000 was not measured" in output
    assert "request rate 4000: failed requests by kind: {'http_503': 1}" in output


@pytest.mark.slow
def test_factors_of_the_capacity_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def respond(received: Received) -> Reply:
        number = len(server.requests) - 1
        is_refused = number >= 64 and number % 2 == 1
        return Reply([b"full"], status=429) if is_refused else stream_reply(received)

    flags = ("--capacity-factors", "0.5,1", "--num-prompts", "64", "--num-warmups", "0")
    with ScriptedServer(respond) as server:
        asked = _flags(server, tmp_path, *flags, "--goodput", "ttft:10000")
        assert main(["bench", "sweep", *asked]) == 0
    result = _result(tmp_path)
    first, second = result["points"]
    assert second["load"] == result["capacity"] == 2 * first["load"]
    for point in (first, second):
        figures = point["result"]
        assert figures["topspin"]["refused"] == figures["failed"] == 32
        assert figures["topspin"]["p99_refusal_ms"] >= figures["topspin"]["median_refusal_ms"] > 0
        assert figures["request_goodput"] == figures["request_throughput"]
    assert "the capacity is" in capsys.readouterr().out


def test_a_server_that_answers_nothing_fails_the_sweep(tmp_path: Path) -> None:
    with ScriptedServer(lambda received: Reply(status=500)) as server:
        flags = ("--concurrencies", "1,2", "--num-prompts", "2", "--num-warmups", "0")
        assert sweep.main(_flags(server, tmp_path, *flags)) == 1
    assert [p["result"]["completed"] for p in _result(tmp_path)["points"]] == [0, 0]


def test_an_interrupted_sweep_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = serve.run_load

    def interrupted_at_two(*args: Any, **more: Any) -> LoadRun:
        run = measured(*args, **more)
        return dataclasses.replace(
            run, interrupted=args[2].max_concurrency == 2 and "watch" in more
        )

    monkeypatch.setattr(serve, "run_load", interrupted_at_two)
    with ScriptedServer() as server:
        flags = ("--concurrencies", "1,2,4", "--num-prompts", "2")
        assert sweep.main(_flags(server, tmp_path, *flags)) == 130
    assert [point["load"] for point in _result(tmp_path)["points"]] == [1, 2]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--concurrencies", "1", "--request-rate", "3"), "--request-rate does not go"),
        (("--concurrencies", "1", "--max-concurrency", "3"), "--max-concurrency does not go"),
        (("--request-rates", "1", "--replay"), "--replay does not go"),
        (("--concurrencies", "1,x"), "--concurrencies 1,x: not numbers"),
        (("--concurrencies", "1.5"), "1.5 is no whole number"),
        (("--concurrencies", "1", "--burstiness", "2"), "--burstiness needs"),
        (("--concurrencies", "1", "--goodput", "x:1"), "--goodput x:1"),
        (("--concurrencies", "1", "--num-warmups", "-1"), "--num-warmups is -1"),
        (("--concurrencies", "1", "--report", "r.pdf"), "a report is a file named"),
    ],
)
def test_bad_flags_are_refused_by_name(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        sweep.read_flags(["--base-url", "http://127.0.0.1:1", *flags])


def test_a_report_that_cannot_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "can_draw", lambda: False)
    flags = ["--base-url", "http://127.0.0.1:1", "--concurrencies", "1", "--report", "r.html"]
    with pytest.raises(ConfigError, match="needs matplotlib"):
        sweep.read_flags(flags)


def test_the_number_of_requests_follows_the_load() -> None:
    flags = ["--base-url", "http://127.0.0.1:1", *DATASET]
    rates = sweep.read_flags([*flags, "--request-rates", "0.1,2", "--burstiness", "2"])
    assert [rates.num_prompts_at(value) for value in rates.loads] == [16, 60]
    assert [rates.load_at(value).request_rate for value in rates.loads] == [0.1, 2]
    places = sweep.read_flags([*flags, "--concurrencies", "1,32"])
    assert [places.num_prompts_at(value) for value in places.loads] == [16, 256]
    assert [places.load_at(value).max_concurrency for value in places.loads] == [1, 32]

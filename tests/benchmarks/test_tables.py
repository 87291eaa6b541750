"""The README's tables: how they are replaced, and that they match the results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.cli.bench import BENCHMARKS
from benchmarks import report, tables
from benchmarks.experiment import (
    Experiment,
    Result,
    TextTable,
    can_draw,
    number,
    rounds_in_turn,
    settings_of,
    table,
)
from benchmarks.load.comparison import RoundFigures, byte_floor, summarise
from benchmarks.tables import GPU, MODULES, NOT_MEASURED, block, experiment_of, render
from topspin.errors import ConfigError

ROOT = Path(__file__).parents[2]
ENVELOPE = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": "abc1234",
    "machine": {"cpu": "A CPU", "cores": 2, "memory_gib": 23.5},
    "versions": {"torch": "2.13.0"},
}
OVERHEAD = {
    **ENVELOPE,
    "rows": [
        {
            "num_running": 256,
            "micro_batches": 2,
            "schedule_ms_p50": 0.1234,
            "update_ms_p50": 1.5,
            "total_ms_p50": 12.34,
            "total_ms_p99": 123.4,
        }
    ],
}


def _write(folder: Path, name: str, result: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(result))


def test_figures_have_about_three_digits() -> None:
    written = [number(value) for value in (1234.5, 99.96, 12.34, 1.234, 0.01234, 0, None)]
    assert written == ["1234", "100.0", "12.3", "1.23", "0.0123", "0", "-"]
    shown = table(
        {"a": "{x}", "b": "{y[z]:.1f} of {n}"}, [{"x": 0.12345, "y": {"z": 2}, "n": None}]
    )
    assert shown.markdown() == "| a | b |\n| --- | ---: |\n| 0.123 | 2.0 of - |"


def test_a_table_is_made_from_its_result_and_the_rest_stays(tmp_path: Path) -> None:
    _write(tmp_path, "scheduler_overhead", OVERHEAD)
    text = (
        "# Before\n<!-- table: scheduler_overhead -->\nold\n<!-- end -->\nbetween\n"
        "<!-- table: m2n --><!-- end -->\nafter\n"
    )
    once = render(text, tmp_path)
    assert "| 256 | 2 | 0.123 | 1.50 | 12.3 | 123 |" in once
    assert "*2026-01-02, commit abc1234, A CPU, 2 cores, 23.5 GiB, torch 2.13.0:" in once
    assert "old" not in once
    assert f"<!-- table: m2n -->\n\n{NOT_MEASURED}\n\n<!-- end -->\nafter\n" in once
    assert once.startswith("# Before\n<!-- table: scheduler_overhead -->\n\n| running")
    assert render(once, tmp_path) == once
    assert "![" not in once
    (tmp_path / "scheduler_overhead.png").write_bytes(b"")
    assert "![scheduler_overhead](results/scheduler_overhead.png)" in render(once, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: unheard-of --><!-- end -->", "no layout for table unheard-of"),
        ("<!-- table: m2n -->", "table m2n has no"),
        ("<!-- table: m2n --><!-- table: payload --><!-- end -->", "payload begins inside"),
        ("<!-- table: payload --><!-- end -->", r"payload\.json is not JSON"),
        ("<!-- table: startup --><!-- end -->", r"startup\.json is not a result .*'model'"),
    ],
)
def test_what_cannot_be_rendered_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "payload.json").write_text("{")
    _write(tmp_path, "startup", {**ENVELOPE, "weights_mb": 1.0, "seconds": {}, "pss_mb": {}})
    with pytest.raises(ConfigError, match=message):
        render(text, tmp_path)


def test_a_comparison_shows_what_was_not_measured_and_the_floor_of_one_request() -> None:
    rounds = [
        {"topspin": RoundFigures(100.0, 50.0, 9.0), "peer": RoundFigures(80.0, 60.0, None)},
        {"topspin": RoundFigures(110.0, 50.0, 9.0), "peer": RoundFigures(55.0, 40.0, None)},
    ]
    result = {
        "rounds_measured": 2,
        "agreement": {},
        "warnings": ["peer: the client was saturated."],
        "byte_floor": byte_floor(90_000_000, 20e9),
        "concurrencies": {"1": summarise(rounds), "16": summarise(rounds[:1])},
    }
    shown = experiment_of("peers-smollm2-moe").markdown(result)
    assert "| median TPOT (ms) | 9.00 | - |" in shown
    assert shown.count("| median TPOT / byte floor, 4.50 ms | 2.00x | - |") == 1
    assert shown.index("byte floor, 4.50 ms") < shown.index("16 at once")
    assert "Byte floor: 90 MB of weights a step, read at 20.0 GB/s." in shown
    assert shown.endswith("Warning: peer: the client was saturated.")


def test_the_first_page_has_a_line_for_each_comparison_and_load(tmp_path: Path) -> None:
    rounds = [{"topspin": RoundFigures(100.0, 50.0, 9.0), "vllm": RoundFigures(80.0, 60.0)}]
    loads = {"1": summarise(rounds), "16": summarise(rounds)}
    own = {"dataset": {"random_input_len": 128}, "rounds_measured": 3, "concurrencies": loads}
    result = {**ENVELOPE, **own}
    for name in ("peers-smollm2-moe", "peers-gpt-oss-3"):
        _write(tmp_path, name, result)
    # Of another day are a comparison that is older and, alone on its day, one that is newer.
    for name, day in (("deepseek-v2-lite-4", "2020-01-01"), ("qwen3-moe-686m-32k", "2090-01-01")):
        _write(tmp_path, f"peers-{name}", {**result, "date": f"{day}T00:00:00"})
    shown = block("peers", tmp_path).splitlines()
    assert shown[0] == (
        "| tokens/s (TPOT, ms) | topspin | topspin-one-process | llama.cpp | ik_llama.cpp | vllm "
        "| rounds |"
    )
    assert shown[2:6] == [
        f"| {name}, {users} | 100 (9.00) |  |  |  | 80.0 | 3 |"
        for name in ("gpt-oss-3", "smollm2-moe")
        for users in ("1 user", "16 users")
    ]
    assert len(shown) == 8  # both have one origin
    assert shown[7].endswith("torch 2.13.0*")


def test_of_long_prompts_the_first_page_shows_the_time_of_the_prompt(tmp_path: Path) -> None:
    figures = RoundFigures(100.0, 50.0, 9.0, prefill_throughput=2000.0, decode_throughput=None)
    result = {
        **ENVELOPE,
        "dataset": {"random_input_len": 8192},
        "rounds_measured": 1,
        "concurrencies": {"1": summarise([{"topspin": figures}])},
    }
    _write(tmp_path, "peers-qwen3-moe-686m-8k", result)
    title, _, line, *_ = block("peers", tmp_path).splitlines()
    assert title.startswith("| prompt tokens/s (TTFT, ms) | topspin |")
    assert line == "| qwen3-moe-686m-8k, 1 user | 2000 (50.0) |  |  |  |  | 1 |"


def test_the_command_writes_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: scheduler_overhead -->\n<!-- end -->\n")
    monkeypatch.setattr(tables, "README", readme)
    monkeypatch.setattr(tables, "FIRST_README", readme)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.main(["--check"]) == 1
    assert "run python -m benchmarks.tables" in capsys.readouterr().out
    assert tables.main([]) == 0
    assert tables.main(["--check"]) == 0
    _write(tmp_path, "scheduler_overhead", OVERHEAD)
    assert tables.main(["--check"]) == 1
    readme.write_text("<!-- table: nothing --><!-- end -->")
    assert tables.main([]) == 2
    assert "no layout for table nothing" in capsys.readouterr().err


@pytest.fixture
def tracked(tmp_path: Path) -> Path:
    """Return a copy of the tracked benchmarks/README.md and results/.

    Untracked results of later measurements do not count. Outside of a git checkout it is a copy of
    the files as they are.
    """
    command = ["git", "ls-files", "-z", "benchmarks/README.md", "benchmarks/results"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False).stdout
    if listed:
        copy = ["git", "checkout-index", "-z", "--stdin", f"--prefix={tmp_path}/"]
        subprocess.run(copy, cwd=ROOT, input=listed, check=True)
    else:
        shutil.copytree(report.RESULTS, tmp_path / "benchmarks" / "results")
        shutil.copy(tables.README, tmp_path / "benchmarks")
    return tmp_path / "benchmarks"


def test_the_readme_shows_the_results_that_are_tracked(tracked: Path) -> None:
    text = (tracked / "README.md").read_text(encoding="utf-8")
    assert render(text, tracked / "results") == text, "run python -m benchmarks.tables"
    assert set(re.findall(r"<!-- table: (\S+) -->", text)) == {*GPU, *MODULES}


def test_the_readme_names_every_benchmark() -> None:
    text = tables.README.read_text(encoding="utf-8")
    for name in BENCHMARKS:
        assert f"topspin bench {name}" in text, name


def test_who_is_first_in_a_round_is_last_in_the_next_and_warm_ups_do_not_count() -> None:
    asked: list[str] = []

    def measure(name: str, turn: int) -> int:
        asked.append(f"{name}{turn}")
        return turn

    things = {"a": "a", "b": "b"}
    assert rounds_in_turn(things, measure, rounds=2) == [{"a": 0, "b": 0}, {"a": 1, "b": 1}]
    assert asked == ["a-1", "b-1", "b0", "a0", "a1", "b1"]


@pytest.mark.parametrize("writes", [True, False])
def test_a_result_is_shown_written_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], writes: bool
) -> None:
    def layout(result: Result) -> list[TextTable | str]:
        return ["Speeds:", table({"name": "{name}", "tokens/s": "{speed}"}, result["rows"])]

    def draw(result: Result, figure: Any) -> None:
        figure.subplots().plot([row["speed"] for row in result["rows"]])

    experiment = Experiment("some_speed", "What is the speed?", layout, draw)
    parser = experiment.parser(rounds=3)
    assert parser.prog == "topspin bench some-speed"
    flags = ["--result-dir", str(tmp_path), "--name", "mine", *([] if writes else ["--no-write"])]
    args = parser.parse_args([*flags, "--rounds", "2"])
    assert settings_of(args, more=1) == {"rounds": 2, "more": 1}
    assert experiment.finish(args, {"rows": [{"name": "a", "speed": 12.345}]}) == 0
    assert "12.3" in capsys.readouterr().out
    assert (tmp_path / "mine.json").exists() == writes
    assert (tmp_path / "mine.png").exists() == (writes and can_draw())
    if writes:
        written = json.loads((tmp_path / "mine.json").read_text())
        assert {"benchmark", "date", "commit", "machine", "versions", "rows"} == set(written)

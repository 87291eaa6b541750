"""What figures amount to: verdicts, tables, the result and its place in the README."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, report, tables
from benchmarks.gpu_report import best, ceilings, judge
from benchmarks.gpu_report import tables as result_tables
from benchmarks.gpu_run import Outcome
from benchmarks.table_layouts import LAYOUTS
from topspin.errors import ConfigError


def kernel(op: str, **fields: Any) -> dict[str, Any]:
    return {
        "of": "kernel",
        "op": op,
        "shape": "a shape",
        "us": 20.0,
        "bytes_per_s": 3.5e12,
        "flops_per_s": 1e12,
        "bound": "memory",
        "fraction": 0.5,
        "goal": None,
        "beyond_us": 10.0,
        "goal_beyond_us": None,
        **fields,
    }


def decode(engine: str, variant: str, batch: int, rate: float, **fields: Any) -> dict[str, Any]:
    return {
        "of": "decode",
        "engine": engine,
        "variant": variant,
        "batch": batch,
        "context": 2048,
        "step_ms": 1e3 * batch / rate,
        "tokens_per_s": rate,
        **fields,
    }


def ours(variant: str, batch: int, rate: float, fraction: float) -> dict[str, Any]:
    asked = {"fraction": fraction, "gate": 0.65, "goal": 0.75}
    return decode("topspin", variant, batch, rate, **asked)


FIGURES = [
    {"of": "ceiling", "name": "copy", "per_s": 4.1e12, "unit": "B/s"},
    {"of": "ceiling", "name": "bf16", "per_s": 780e12, "unit": "FLOP/s"},
    kernel("attention", fraction=0.81, goal=0.8),
    kernel("experts", fraction=0.6, goal=0.75),
    kernel("m2n", goal_beyond_us=25.0),
    kernel("slow m2n", beyond_us=26.0, goal_beyond_us=25.0),
    kernel("norm"),
    ours("graphs", 32, 4000.0, 0.7),
    ours("no graphs", 32, 1000.0, 0.2),
    ours("graphs", 128, 9000.0, 0.6),
    decode("transformers", "eager", 32, 500.0),
    decode("transformers", "grouped_mm", 32, 1000.0),
    decode("transformers", "grouped_mm", 128, 4500.0),
    {"of": "prefill", "engine": "topspin", "variant": "graphs", "tokens": 8192, "ms": 100.0}
    | {"tokens_per_s": 81920.0},
    {"of": "tests", "collected": 9, "passed": 7, "failed": 1, "skipped": 1, "seconds": 5.0},
]


def test_verdicts() -> None:
    found = {v.what: (v.reached, v.word) for v in judge(FIGURES)}
    assert found == {
        "attention: a shape": (0.81, "reached"),
        "experts: a shape": (0.6, "short of the goal"),
        "m2n: a shape": (10.0, "reached"),
        "slow m2n: a shape": (26.0, "short of the goal"),
        # The best variant counts, for both engines.
        "decode, batch 32, context 2048 (graphs)": (0.7, "short of the goal"),
        "decode, batch 128, context 2048 (graphs)": (0.6, "below the gate"),
        "decode, batch 32, against transformers (grouped_mm)": (4.0, "reached"),
        "decode, batch 128, against transformers (grouped_mm)": (2.0, "short of the goal"),
    }


def test_nothing_is_asked_of_tiny_sizes() -> None:
    asked = {"fraction": 1e-6, "gate": None, "goal": None}
    figures = [decode("topspin", "graphs", 1, 3.0, **asked), decode("transformers", "e", 1, 9.0)]
    assert judge(figures) == []
    assert best(figures, "decode", "topspin")[1]["tokens_per_s"] == 3.0


def result(**fields: Any) -> dict[str, Any]:
    return {
        "date": "2026-01-02",
        "commit": "abc1234",
        "machine": {"cpu": "A CPU", "cores": 16, "memory_gib": 128.0},
        "versions": {"torch": "2.11.0"},
        "device": {"name": "NVIDIA H200"},
        "interpreted": False,
        "quick": False,
        "figures": FIGURES,
        **fields,
    }


def test_the_readme_has_the_newest_result_of_a_gpu(tmp_path: Path) -> None:
    text = "<!-- table: gpu --><!-- end -->"
    assert tables.NOT_MEASURED in tables.render(text, tmp_path)
    newest = tmp_path / "gpu-nvidia-h200-2026-11-21.json"
    newest.write_text(json.dumps(result()))
    (tmp_path / "gpu-z-2026-11-20.json").write_text(json.dumps(result(commit="older")))
    shown = tables.render(text, tmp_path)
    assert "commit abc1234, NVIDIA H200, A CPU" in shown
    assert "Copy 4.10 TB/s (read and written), bf16 product 780 TFLOP/s." in shown
    assert "Tests: 7 passed, 1 failed, 1 skipped." in shown
    assert "| attention: a shape | 81% | - | 80% | reached |" in shown
    assert "| slow m2n: a shape | 26.0 us | - | 25.0 us | short of the goal |" in shown
    assert "| topspin | no graphs | 32 | 32.00 | 1000 | 20% |" in shown
    assert "| transformers | eager | 32 | 64.00 | 500 | - |" in shown
    assert "| topspin | graphs | 8192 | 100.0 | 81920 |" in shown


@pytest.mark.parametrize("what", ["interpreted", "quick"])
def test_what_holds_no_speed_is_no_result(what: str) -> None:
    with pytest.raises(ConfigError, match="holds no speeds"):
        LAYOUTS["gpu"](result(**{what: True}))


def test_empty_tables_are_left_out() -> None:
    assert [title for title, *_ in result_tables({"figures": FIGURES[:2]})] == []
    assert ceilings([]) == ""


def test_a_runs_result_and_why_it_failed() -> None:
    good = Outcome(0, 12.0, [{"kind": "figure", **FIGURES[0]}], ["a line"])
    late = {"kind": "skipped", "what": "norm", "why": "the time was up"}
    bad = Outcome(1, 3.0, [{"kind": "problem", "what": "test_x", "why": "no"}, late], ["trace"])
    stopped = Outcome(None, 9.0)
    found = gpu.result_of(
        {"name": "NVIDIA H200"},
        {"rooflines": good, "tests": bad, "decode": stopped},
        {"transformers": "transformers is missing"},
        None,
        interpreted=False,
        quick=False,
    )
    assert found["seconds"] == 24.0
    assert found["figures"] == [{"part": "rooflines", **FIGURES[0]}]
    assert found["parts"]["tests"]["skipped"] == ["norm: the time was up"]
    assert found["parts"]["tests"]["tail"] == ["trace"]
    assert found["parts"]["rooflines"]["tail"] == []
    assert gpu.failures(found) == [
        "tests: test_x: no",
        "decode: stopped after 9 s: its time was over",
        "transformers: not run: transformers is missing",
    ]
    below = {"verdicts": [{"what": "decode", "word": "below the gate"}], "parts": {}}
    assert gpu.failures(below) == ["below its gate: decode"]
    assert gpu.failures({"verdicts": [{"what": "x", "word": "reached"}], "parts": {}}) == []
    assert gpu.complaints("tests", Outcome(-11, 1.0)) == ["tests: ended with status -11"]


def test_a_result_is_named_after_its_device_and_date() -> None:
    date = datetime.date(2026, 11, 20)
    assert gpu.file_name("NVIDIA H200", date) == "gpu-nvidia-h200-2026-11-20"
    assert tables.result_path("gpu", Path("/nowhere")) is None


def test_a_tree_that_was_copied_without_its_history_may_say_its_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOPSPIN_COMMIT", "abc1234")
    monkeypatch.setenv("PATH", "")
    assert report.commit() == "abc1234"
    monkeypatch.delenv("TOPSPIN_COMMIT")
    assert report.commit() == "unknown"

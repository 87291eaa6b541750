"""The ping-pong benchmark runs real nodes, and its columns have the stated meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.transport import pingpong


@pytest.mark.slow
def test_the_grid_is_whole_and_consistent(tmp_path: Path) -> None:
    shape = pingpong.Shape(num_layers=2, hidden_size=128, expert_size=64, rows=2, context=16)
    result = pingpong.run(shape, num_steps=1, rounds=1, png=tmp_path / "rally.png")
    rows = result["constant_rows"]
    assert [(row["tc_over_tf"], row["m"]) for row in rows] == [
        (ratio, m) for ratio in pingpong.RATIOS for m in (1, 2, 3, 4)
    ]
    for row in rows:
        # The file has rounded times, and some are short.
        of_formula = row["formula_ms"] / row["measured_ms"]
        assert row["of_formula"] == pytest.approx(of_formula, rel=0.02, abs=0.01)
        # The formula assumes full overlap, so the pipeline model never predicts less.
        assert row["pipeline_ms"] >= row["formula_ms"] - 0.01
    for row in result["constant_batch"]:
        assert row["step_ms"][str(row["best_m"])] == min(row["step_ms"].values())
        assert row["auto_over_best"] >= 1.0
    assert result["trace_on_over_off"] > 0

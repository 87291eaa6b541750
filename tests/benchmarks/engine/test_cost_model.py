"""The comparison of the cost model with steps: its arithmetic, without timing anything."""

from __future__ import annotations

import pytest

from benchmarks.engine import cost_model


def test_errors_are_relative_to_what_was_measured() -> None:
    rows = [{"predicted": 1.0 + each / 100, "measured": 1.0} for each in (-20, 0, 5, 10)]
    found = cost_model.summary(rows)
    assert found["points"] == 4
    assert found["median_percent"] == pytest.approx(7.5)
    assert found["worst_percent"] == pytest.approx(20.0)


def test_held_out_points_are_on_no_grid() -> None:
    grid, held = cost_model.anchors(), cost_model.HELD_OUT
    for name in ("rows", "keys", "touched", "pairs"):
        assert not set(getattr(grid, name)) & set(getattr(held, name)), name
        assert max(getattr(held, name)) < max(getattr(grid, name)), name

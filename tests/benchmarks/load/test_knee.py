"""Knee and Pareto front of hand-made curves."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.load.arguments import numbers
from benchmarks.load.knee import Point, find_knee, pareto
from topspin.errors import ConfigError


def _point(load: float, throughput: float, latency_ms: float, **more: Any) -> Point:
    figures = {
        "completed": 5,
        "failed": 0,
        "output_throughput": throughput,
        "median_e2el_ms": latency_ms,
        "median_tpot_ms": latency_ms,
        "p99_ttft_ms": latency_ms,
        "p99_tpot_ms": latency_ms / 10,
    }
    return Point(load, {**figures, **more})


CURVE = [
    _point(1, 100, 10),
    _point(2, 190, 11),
    _point(4, 350, 13),
    _point(8, 400, 40),
    _point(16, 410, 90),
]


def test_without_bounds_the_knee_is_where_the_curve_bends() -> None:
    knee = find_knee(list(reversed(CURVE)), {})
    assert knee.load == 4
    assert "bend" in knee.rule


@pytest.mark.parametrize(
    ("bounds", "load"),
    [({"ttft": 40}, 8), ({"ttft": 39.9}, 4), ({"ttft": 90, "tpot": 1.1}, 2), ({"tpot": 0.5}, None)],
)
def test_with_bounds_the_knee_is_the_highest_load_that_keeps_them(
    bounds: dict[str, float], load: float | None
) -> None:
    knee = find_knee(CURVE, bounds)
    assert knee.load == load
    assert all(name in knee.rule for name in bounds)


def test_a_load_with_failures_is_no_knee_and_an_unmeasured_one_is_skipped() -> None:
    points = [*CURVE[:3], _point(8, 400, 20, failed=1), Point(16, error="refused")]
    assert find_knee(points, {"ttft": 100}).load == 4
    assert find_knee([*points[:2], Point(16, error="refused")], {}).load is None
    nothing = _point(32, 0, 0, completed=0, median_e2el_ms=None)
    assert find_knee([*CURVE, nothing], {}).load == 4


def test_a_straight_or_flat_curve_has_no_knee() -> None:
    straight = [_point(load, 100 * load, 10 * load) for load in (1, 2, 3)]
    assert find_knee(straight, {}).load is None
    assert find_knee([_point(load, 100, 10) for load in (1, 2, 3)], {}).load is None
    noise = [_point(1, 100, 10), _point(2, 200, 10.1), _point(4, 400, 11)]
    knee = find_knee(noise, {})
    assert knee.load is None
    assert "hardly risen" in knee.rule


def test_the_front_holds_what_no_other_point_beats() -> None:
    beaten = _point(3, 150, 12)
    equal = _point(5, 350, 13)
    points = [*CURVE, beaten, equal, _point(32, 390, 200), Point(64, error="refused")]
    assert [p.load for p in pareto(points, "median_tpot_ms")] == [1, 2, 4, 8, 16]
    assert pareto([], "median_tpot_ms") == []


def test_loads_are_sorted_numbers() -> None:
    assert numbers("--x", "4,1,0.5", whole=False) == (0.5, 1, 4)
    assert numbers("--x", "16,1", whole=True) == (1, 16)


@pytest.mark.parametrize("text", ["", "1,,2", "0", "-1", "inf", "nan", "x", "2,2", "1.5"])
def test_other_loads_are_refused_by_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--x"):
        numbers("--x", text, whole=True)

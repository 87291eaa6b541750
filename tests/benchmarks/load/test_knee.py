"""Knee and Pareto front of hand-made curves."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.experiment import Result
from benchmarks.load.arguments import numbers
from benchmarks.load.knee import find_knee, pareto
from topspin.errors import ConfigError

REFUSED = {"load": 64, "error": "refused", "result": None}


def _point(load: float, throughput: float, latency_ms: float, **more: Any) -> Result:
    latencies = dict.fromkeys(("median_e2el_ms", "median_tpot_ms", "p99_ttft_ms"), latency_ms)
    figures = {"completed": 5, "failed": 0, "output_throughput": throughput, **latencies}
    figures |= {"p99_tpot_ms": latency_ms / 10, **more}
    return {"load": load, "error": None, "result": figures}


SIZES = ((1, 100, 10), (2, 190, 11), (4, 350, 13), (8, 400, 40), (16, 410, 90))
CURVE = [_point(*each) for each in SIZES]
NOTHING = _point(32, 0, 0, completed=0, median_e2el_ms=None)
FAILING = _point(8, 400, 20, failed=1)


@pytest.mark.parametrize(
    ("points", "bounds", "load", "said"),
    [
        (CURVE[::-1], {}, 4, "bend"),
        ([*CURVE, NOTHING, REFUSED], {}, 4, "bend"),
        ([*CURVE[:2], REFUSED], {}, None, "needs three measured loads, there are 2"),
        ([_point(load, 100 * load, 10 * load) for load in (1, 2, 3)], {}, None, "does not bend"),
        ([_point(1, 100, 10), _point(2, 200, 10.1), CURVE[1]], {}, None, "hardly risen"),
        (CURVE, {"ttft": 40}, 8, "ttft 40 ms"),
        (CURVE, {"ttft": 39.9}, 4, "ttft"),
        (CURVE, {"ttft": 90, "tpot": 1.1}, 2, "tpot 1.1 ms"),
        (CURVE, {"tpot": 0.5}, None, "no load did"),
        ([*CURVE[:3], FAILING, REFUSED], {"ttft": 100}, 4, "without failures"),
    ],
)
def test_the_knee_is_the_bend_or_the_highest_load_that_keeps_the_bounds(
    points: list[Result], bounds: dict[str, float], load: float | None, said: str
) -> None:
    knee = find_knee(points, bounds)
    assert knee.load == load
    assert said in knee.rule


def test_the_front_holds_what_no_other_point_beats() -> None:
    beaten, equal, slow = _point(3, 150, 12), _point(5, 350, 13), _point(32, 390, 200)
    points = [*CURVE, beaten, equal, slow, REFUSED]
    assert pareto(points, "median_tpot_ms") == [1, 2, 4, 8, 16]
    assert pareto([], "median_tpot_ms") == []


def test_loads_are_sorted_numbers() -> None:
    assert numbers("--x", "4,1,0.5", whole=False) == (0.5, 1, 4)
    assert numbers("--x", "16,1", whole=True) == (1, 16)
    for text in ("", "1,,2", "0", "inf", "nan", "2,2", "1.5"):
        with pytest.raises(ConfigError, match="--x"):
            numbers("--x", text, whole=True)

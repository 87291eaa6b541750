"""Many loads on one server: its knee and its Pareto-optimal points.

Owns the rules, on figures only; sends nothing. Called by benchmarks.load.sweep with the points of
its JSON: the load, its figures (`result`), and `error` if it could not be measured at all.

The knee, when latency bounds are given (--goodput): the highest load at which no request failed and
the p99 of every bounded latency is within its bound. Otherwise, over the points in order of load,
with output throughput x and median end-to-end latency y both scaled to 0..1 from their least to
their greatest: the point with the largest x - y, which is the one farthest below the chord of the
curve (Kneedle, Satopaa et al. 2011). At least three points are needed. There is no knee if no point
lies below the chord, or if the greatest latency is less than 1.5 times the least: the load was too
low.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.experiment import Result

# Without bounds, a latency that rises by a smaller factor shows only noise, not a knee.
_LEAST_RISE = 1.5


class Knee(NamedTuple):
    """The chosen load, or None, and the rule in one sentence."""

    load: float | None
    rule: str


def find_knee(points: Sequence[Result], bounds_ms: Mapping[str, float]) -> Knee:
    """Return the knee by the rules above; `bounds_ms` is --goodput, keys ttft, tpot and e2el."""
    measured = sorted(filter(is_measured, points), key=lambda point: point["load"])
    if bounds_ms:
        text = ", ".join(f"{name} {bound:g} ms" for name, bound in bounds_ms.items())
        rule = f"the highest load without failures whose p99 keeps {text}"
        kept = [point["load"] for point in measured if _keeps(point["result"], bounds_ms)]
        return Knee(max(kept), rule) if kept else Knee(None, f"{rule}: no load did")
    rule = "the largest bend of median end-to-end latency over output throughput"
    if len(measured) < 3:
        return Knee(None, f"{rule}: needs three measured loads, there are {len(measured)}")
    latencies = [point["result"]["median_e2el_ms"] for point in measured]
    if max(latencies) < _LEAST_RISE * min(latencies):
        return Knee(None, f"{rule}: the latency has hardly risen, try higher loads")
    throughputs = [point["result"]["output_throughput"] for point in measured]
    scaled = zip(_scaled(throughputs), _scaled(latencies), strict=True)
    gains = [x - y for x, y in scaled]
    best = max(range(len(gains)), key=lambda idx: gains[idx])
    if gains[best] <= max(gains[0], gains[-1]) + 1e-9:
        return Knee(None, f"{rule}: the curve does not bend")
    return Knee(measured[best]["load"], rule)


def is_measured(point: Result) -> bool:
    """Return whether at least one request of a load was answered."""
    return point["error"] is None and point["result"]["completed"] > 0


def _keeps(figures: Result, bounds_ms: Mapping[str, float]) -> bool:
    return figures["failed"] == 0 and all(
        # Requests for one token have no TPOT, so it cannot exceed a bound.
        (figures[f"p99_{name}_ms"] or 0.0) <= bound
        for name, bound in bounds_ms.items()
    )


def _scaled(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def pareto(points: Sequence[Result], latency: str) -> list[float]:
    """Return the loads that no other beats in both throughput and `latency`.

    `latency` is a key of the figures, e.g. median_tpot_ms. Ordered by latency; of equal
    points the one with the lower load is kept.
    """
    ranked = sorted(
        (point["result"][latency], -point["result"]["output_throughput"], point["load"])
        for point in filter(is_measured, points)
        if point["result"][latency] is not None
    )
    front: list[float] = []
    best = 0.0
    for _, throughput, load in ranked:
        if throughput < best or not front:
            best = throughput
            front.append(load)
    return front

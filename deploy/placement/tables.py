"""Times from a device's measured tables.

Owns the interpolation: linear between the points of each axis, so exact on them and monotone where
the table is; constant below the first, along the last two beyond the last. Pure. Called by cost.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from deploy.placement.devices import DeviceProfile, Operation, Rally, Table
from topspin.plan.precision import Format


class RallyFactors(NamedTuple):
    """See devices.Rally."""

    attention: float = 1.0
    experts: float = 1.0
    step: float = 1.0


def find_table(
    device: DeviceProfile,
    operation: Operation,
    shape: tuple[int, ...],
    weight_format: Format,
    threads: int,
) -> Table | None:
    """Return the table for `threads`, or else the nearest number of them (fewer first).

    None: this shape was not measured in this format.
    """
    found = [
        table
        for table in device.tables
        if table.operation == operation and table.shape == shape and table.format == weight_format
    ]
    if not found:
        return None
    return min(found, key=lambda table: (table.threads > threads, abs(table.threads - threads)))


def seconds_at(table: Table, point: Sequence[float]) -> float:
    """Return the seconds at a point, by multilinear interpolation.

    Beyond the table at least those of the nearest point in it: more work does not take less time,
    even where noise says so.
    """
    found_s = _at_point(table, point)
    ends = [min(value, axis[-1]) for value, axis in zip(point, table.axes, strict=True)]
    return found_s if ends == list(point) else max(found_s, _at_point(table, ends))


def _at_point(table: Table, point: Sequence[float]) -> float:
    spans = [_span(axis, value) for axis, value in zip(table.axes, point, strict=True)]
    total_s = 0.0
    for corner in product((0, 1), repeat=len(spans)):
        weight, index = 1.0, 0
        for (low, high, share), end, axis in zip(spans, corner, table.axes, strict=True):
            weight *= share if end else 1.0 - share
            index = index * len(axis) + (high if end else low)
        if weight:
            total_s += weight * table.seconds[index]
    return total_s


def rally_factors(
    device: DeviceProfile,
    shape: tuple[int, ...],
    *,
    shares_cores: bool,
    micro_batches: int,
    rows: float,
) -> RallyFactors:
    """Return by how much attention, experts and step take longer in a rally; 1 if not measured.

    Those of experts of this `shape`, or else the file's first. `rows` of a micro-batch; beyond the
    measured rows the nearest factor holds.
    """
    rallies = [
        rally
        for rally in device.rallies
        if rally.shares_cores == shares_cores and rally.micro_batches == micro_batches
    ]
    if not rallies:
        return RallyFactors()
    rally = next((each for each in rallies if each.shape == shape), rallies[0])
    kinds = (rally.attention, rally.experts, rally.step)
    return RallyFactors(*(_at(rally, factors, rows) for factors in kinds))


def _at(rally: Rally, factors: Sequence[float], rows: float) -> float:
    low, high, share = _span(rally.rows, min(rows, rally.rows[-1]))
    return (1.0 - share) * factors[low] + share * factors[high]


def _span(axis: Sequence[float], value: float) -> tuple[int, int, float]:
    """Return the two points around a value (the last two beyond them), and its place between."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0, 0.0
    high = min(bisect_right(axis, value), len(axis) - 1)
    low = high - 1
    return low, high, (value - axis[low]) / (axis[high] - axis[low])

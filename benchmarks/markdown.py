"""Figures and tables as the README shows them. Knows no benchmark; called by layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]


def number(value: float | None) -> str:
    """Return a figure with about three digits; "-" for None."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def percent(share: float) -> str:
    """Return a share as a percentage."""
    return f"{share:.0%}"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a markdown table: the first column left-aligned, the others right-aligned."""
    lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)

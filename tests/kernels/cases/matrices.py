"""Matrices of the kernels' tests: each value in a few rows by default, each pair of values slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.pairwise import cover_pairs, cover_values


def slow_rows(rows: Iterable[tuple[Any, ...]], *, beside: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the rows `beside`, and those of `rows` that are not among them marked slow."""
    others = (row for row in rows if row not in beside)
    return [*beside, *(pytest.param(*row, marks=pytest.mark.slow) for row in others)]


def values_then_pairs(*factors: Sequence[Any]) -> list[Any]:
    """Return rows in which each value occurs, and marked slow the rows of all pairs of values."""
    return slow_rows(cover_pairs(*factors), beside=cover_values(*factors))

"""Matrices of the kernels' tests: each value in a few rows by default, each pair of values slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.pairwise import cover_pairs, cover_values, slow_rows


def values_then_pairs(*factors: Sequence[Any]) -> list[Any]:
    """Return rows in which each value occurs, and marked slow the rows of all pairs of values."""
    return slow_rows(cover_pairs(*factors), beside=cover_values(*factors))

"""Runs work that kernels yield in pieces."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")


def finish(pieces: Generator[None, None, Result]) -> Result:
    """Run all pieces and return the result."""
    while True:
        try:
            next(pieces)
        except StopIteration as stop:
            result: Result = stop.value
            return result

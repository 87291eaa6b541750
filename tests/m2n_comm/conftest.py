"""Nodes are threads of one process here; a spinning one must not starve the others."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

SWITCH_INTERVAL_S = 1e-5


@pytest.fixture(autouse=True)
def _fair_threads() -> Iterator[None]:
    """Let threads take turns often.

    A wait that spins holds the interpreter's lock for a switch interval, 5 ms by default, and each
    torch call of another thread must acquire it again: a step would take half a minute.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    yield
    sys.setswitchinterval(before)

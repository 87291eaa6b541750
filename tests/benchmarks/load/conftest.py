"""Load tests without what they do for the sake of exact times alone."""

from __future__ import annotations

import contextlib

import pytest

from benchmarks.load import runner


@pytest.fixture
def without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect no garbage before each measurement: in a test process it takes 0.1 s or more."""
    monkeypatch.setattr(runner, "_quiet_collector", contextlib.nullcontext)

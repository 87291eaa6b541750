"""Load tests without the steps that serve only exact timing."""

from __future__ import annotations

import contextlib

import pytest

from benchmarks.load.client import runner


@pytest.fixture
def without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the garbage collection before each measurement: in a test process it takes 0.1 s."""
    monkeypatch.setattr(runner, "_quiet_collector", contextlib.nullcontext)

"""Figures of streams while a long prompt enters, from the arrivals of a run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.engine import long_prompt
from benchmarks.load.contracts import (
    BenchRequest,
    ClientHealth,
    LoadPattern,
    LoadRun,
    MeasuredRequest,
    Target,
)

TARGET = Target("http://unused", "model")


def test_only_gaps_while_the_prompt_enters_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream has a token every 0.1 s, and none between 5 and 7 s: the prompt's 2.05 s begin."""

    def run_load(target: Target, requests: Sequence[BenchRequest], load: LoadPattern) -> LoadRun:
        assert load.replay
        assert [each.arrival_s for each in requests] == [0.0, 5.0]
        assert [len(each.prompt or "") for each in requests] == [32, 1000]
        times = [idx / 10 for idx in range(1, 51)] + [7 + idx / 10 for idx in range(20)]
        stream = MeasuredRequest(
            0, 0.0, first_token_s=0.1, arrival_times_s=tuple(times), max_tokens=400
        )
        entered = MeasuredRequest(1, 5.0, first_token_s=7.05, arrival_times_s=(7.05,), max_tokens=2)
        health = ClientHealth(0.1, 0, 0, 0, 0, 0, 0)
        return LoadRun(target, load, (entered, stream), health, 9.0, "now", 2)

    monkeypatch.setattr(long_prompt, "run_load", run_load)
    row = long_prompt.beside(TARGET, 1, 1000, 500)
    assert row["ttft_s"] == pytest.approx(2.05)
    assert row["before_ms"] == pytest.approx(100)
    # 2 s, and the gap in which the prompt's first token came.
    assert row["meanwhile_ms"] == pytest.approx(1050)
    assert row["longest_ms"] == pytest.approx(2000)

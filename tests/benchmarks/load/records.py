"""Records and runs with known times, for tests of the code that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.load.contracts import ClientHealth, LoadPattern, LoadRun, MeasuredRequest, Target


def record(
    index: int, sent_s: float | None, arrivals: Sequence[tuple[float, int]], **more: Any
) -> MeasuredRequest:
    """Return a request sent at `sent_s` with the given number of tokens at each time."""
    times = tuple(time_s for time_s, _ in arrivals)
    tokens = tuple(count for _, count in arrivals)
    fields: dict[str, Any] = {
        "index": index,
        "intended_s": sent_s or 0.0,
        "admitted_s": sent_s,
        "sent_s": sent_s,
        "first_token_s": times[0] if times else None,
        "last_token_s": times[-1] if times else None,
        "end_s": times[-1] if times else sent_s,
        "arrival_times_s": times,
        "arrival_tokens": tokens,
        "prompt_tokens": 10,
        "output_tokens": sum(tokens),
        "max_tokens": sum(tokens) or 1,
        "http_status": 200,
    }
    return MeasuredRequest(**{**fields, **more})


def run_of(records: Sequence[MeasuredRequest], *, duration_s: float, **more: Any) -> LoadRun:
    """Return a run of these records by a client that kept up."""
    fields: dict[str, Any] = {
        "target": Target("http://127.0.0.1:1", "scripted"),
        "load": LoadPattern(max_concurrency=2),
        "health": ClientHealth(0.1, 0.001, 0.002, 0.003, 0.0, 0.0, 0.0),
        "started_at": "2026-01-01T00:00:00+00:00",
        "num_requested": len(records),
    }
    return LoadRun(records=tuple(records), duration_s=duration_s, **{**fields, **more})

"""Figures by hand: each definition on records whose answer is plain arithmetic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.load.contracts import ClientHealth, Load, RequestRecord, Run, Target
from benchmarks.load.figures.metrics import (
    e2el_s,
    itls_s,
    measure_run,
    meets_goals,
    parse_goodput,
    queue_s,
    tpot_s,
    ttft_s,
)
from topspin.errors import ConfigError


def record(index: int = 0, **fields: Any) -> RequestRecord:
    """Return a request due at 1 s, sent at 2 s, with 5 tokens in 3 arrivals from 4 s to 7 s."""
    known: dict[str, Any] = {
        "intended_s": 1.0,
        "admitted_s": 1.5,
        "sent_s": 2.0,
        "first_token_s": 4.0,
        "last_token_s": 7.0,
        "end_s": 7.5,
        "arrival_times_s": (4.0, 6.0, 7.0),
        "arrival_tokens": (1, 3, 1),
        "num_events": 3,
        "prompt_tokens": 10,
        "output_tokens": 5,
    }
    return RequestRecord(index=index, **(known | fields))


def failure(index: int, kind: str) -> RequestRecord:
    return RequestRecord(
        index=index, intended_s=0.0, sent_s=0.0, end_s=9.0, error_kind=kind, error="no"
    )


def run_of(*records: RequestRecord, **fields: Any) -> Run:
    known: dict[str, Any] = {"num_requested": len(records), "duration_s": 10.0} | fields
    return Run(
        target=Target("http://127.0.0.1:1", "m"),
        load=Load(),
        records=records,
        health=ClientHealth(0, 0, 0, 0, 0, 0, 0),
        started_at="2026-01-02T03:04:05+00:00",
        **known,
    )


def test_latencies_count_from_the_intended_send_time() -> None:
    one = record()
    assert ttft_s(one) == 3.0
    assert e2el_s(one) == 6.5
    assert queue_s(one) == 1.0


def test_tpot_goes_by_tokens_and_itl_by_arrivals() -> None:
    assert tpot_s(record()) == 3.0 / 4
    assert itls_s(record()) == [2.0, 1.0]
    assert tpot_s(record(output_tokens=1, last_token_s=4.0)) is None
    assert itls_s(record(arrival_times_s=(4.0,))) == []


def test_bundling_tokens_changes_no_tpot_and_improves_no_itl_percentile() -> None:
    single = record(arrival_times_s=tuple(range(4, 13)), output_tokens=9, last_token_s=12.0)
    bundled = record(arrival_times_s=(4, 8, 12), output_tokens=9, last_token_s=12.0)
    assert tpot_s(single) == tpot_s(bundled) == 1.0
    for percentile in (1, 50, 99):
        assert np.percentile(itls_s(bundled), percentile) >= np.percentile(
            itls_s(single), percentile
        )


def test_totals_and_rates() -> None:
    metrics = measure_run(run_of(record(0), record(1), failure(2, "timeout")))
    assert (metrics["completed"], metrics["failed"]) == (2, 1)
    assert metrics["topspin"]["unfinished"] == 0
    assert (metrics["total_input_tokens"], metrics["total_output_tokens"]) == (20, 10)
    assert metrics["request_throughput"] == 0.2
    assert metrics["output_throughput"] == 1.0
    assert metrics["total_token_throughput"] == 3.0
    # Both bring three tokens in the second from 6 to 7.
    assert metrics["max_output_tokens_per_s"] == 6
    assert metrics["max_concurrent_requests"] == 3
    assert metrics["topspin"]["tokens_per_arrival"] == 10 / 6
    assert metrics["topspin"]["requests_without_usage"] == 0
    assert metrics["request_goodput"] is None


def test_failures_are_counted_by_kind_and_have_no_latency() -> None:
    kinds = ("http_429", "timeout", "http_429")
    metrics = measure_run(run_of(*(failure(i, kind) for i, kind in enumerate(kinds)), record(3)))
    assert metrics["topspin"]["errors_by_kind"] == {"http_429": 2, "timeout": 1}
    assert list(metrics["topspin"]["errors_by_kind"]) == ["http_429", "timeout"]
    assert metrics["mean_e2el_ms"] == 6500


def test_an_interrupted_request_has_not_failed() -> None:
    metrics = measure_run(run_of(record(0), failure(1, "interrupted"), num_requested=5))
    assert (metrics["completed"], metrics["failed"]) == (1, 0)
    assert metrics["topspin"]["unfinished"] == 4
    assert metrics["topspin"]["errors_by_kind"] == {}


def test_nothing_measured_is_nothing_and_not_zero() -> None:
    metrics = measure_run(run_of(failure(0, "connect")))
    assert metrics["mean_ttft_ms"] is None
    assert metrics["p99_ttft_ms"] is None
    assert metrics["topspin"]["tokens_per_arrival"] is None
    assert metrics["output_throughput"] == 0


def test_statistics_are_numpys() -> None:
    source = random.Random(1)
    values = [source.expovariate(1) for _ in range(101)]
    records = [
        record(index, intended_s=0.0, first_token_s=value) for index, value in enumerate(values)
    ]
    found = measure_run(run_of(*records), percentiles=(50, 90, 99.9))
    expected = {"mean": np.mean(values), "median": np.median(values), "std": np.std(values)}
    expected |= {f"p{p:g}": np.percentile(values, p) for p in (50, 90, 99.9)}
    for statistic, value in expected.items():
        assert found[f"{statistic}_ttft_ms"] == pytest.approx(1000 * value)


def test_goodput_counts_requests_that_keep_every_goal() -> None:
    # TTFT 3 s, TPOT 0.75 s, E2EL 6.5 s.
    assert meets_goals(record(), {"ttft": 3.0, "tpot": 0.75, "e2el": 6.5})
    for name, goal in (("ttft", 2.9), ("tpot", 0.74), ("e2el", 6.4)):
        assert not meets_goals(record(), {"ttft": 3.0, "tpot": 0.75, "e2el": 6.5} | {name: goal})
    assert meets_goals(record(output_tokens=1), {"tpot": 0.001})
    records = (record(0), record(1, first_token_s=9.0), failure(2, "timeout"))
    metrics = measure_run(run_of(*records), goodput_s={"ttft": 3.5})
    assert metrics["topspin"]["good_completed"] == 1
    assert metrics["request_goodput"] == 0.1


def test_goals_are_read_in_milliseconds() -> None:
    assert parse_goodput(["ttft:200", "tpot:12.5"]) == {"ttft": 0.2, "tpot": 0.0125}
    for bad in ("itl:5", "ttft", "ttft:fast", "ttft:-1", "ttft:nan"):
        with pytest.raises(ConfigError, match=bad):
            parse_goodput([bad])
    with pytest.raises(ConfigError, match="twice"):
        parse_goodput(["ttft:1", "ttft:2"])


def peak(records: Sequence[RequestRecord]) -> int:
    found: int = measure_run(run_of(*records))["max_concurrent_requests"]
    return found


def test_peak_concurrency_is_brute_forces() -> None:
    source = random.Random(2)
    spans = [(a, a + source.randint(1, 9)) for a in (source.randint(0, 30) for _ in range(60))]
    records = [record(i, sent_s=float(a), end_s=float(b)) for i, (a, b) in enumerate(spans)]
    most = max(sum(a <= second < b for a, b in spans) for second in range(40))
    assert peak(records) == most
    assert peak([]) == 0
    back_to_back = [record(0, sent_s=0.0, end_s=1.0), record(1, sent_s=1.0, end_s=2.0)]
    assert peak(back_to_back) == 1

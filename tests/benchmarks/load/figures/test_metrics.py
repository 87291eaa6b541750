"""Figures by hand: each definition on records whose answer is plain arithmetic, and vLLM's keys."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest

from benchmarks.load.contracts import ClientHealth, LoadPattern, LoadRun, MeasuredRequest, Target
from benchmarks.load.figures.metrics import (
    e2el_s,
    itls_s,
    lists_of,
    measure_run,
    meets_goals,
    parse_goodput,
    queue_s,
    tpot_s,
    ttft_s,
)
from benchmarks.load.serve import result_filename
from tests.benchmarks.load.records import record, run_of
from topspin.errors import ConfigError

# The keys that `vllm bench serve --save-result` writes for a generative model, version 0.32.
VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    "max_concurrent_requests",
    *(
        f"{statistic}_{name}_ms"
        for statistic in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el", "client_queue_time")
    ),
}
VLLM_DETAILS = {
    *("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"),
    *("latencies", "queue_times"),
}


def one(index: int = 0, **fields: Any) -> MeasuredRequest:
    """Return a request due at 1 s, sent at 2 s, with 5 tokens in 3 arrivals from 4 s to 7 s."""
    known: dict[str, Any] = {"intended_s": 1.0, "admitted_s": 1.5, "sent_s": 2.0, "end_s": 7.5}
    return record(index, **(known | fields), arrivals=[(4.0, 1), (6.0, 3), (7.0, 1)])


def failure(index: int, kind: str) -> MeasuredRequest:
    return record(index, 0.0, [], end_s=9.0, error_kind=kind, error="no")


def figures_of(*records: MeasuredRequest, **fields: Any) -> dict[str, Any]:
    """Return the figures of a run of 10 s after a trip through strict JSON."""
    found = measure_run(run_of(records, **({"duration_s": 10.0} | fields)), percentiles=(99, 99.9))
    loaded: dict[str, Any] = json.loads(json.dumps(found, allow_nan=False))
    return loaded


def test_latencies_count_from_the_intended_send_time() -> None:
    assert (ttft_s(one()), e2el_s(one()), queue_s(one())) == (3.0, 6.5, 1.0)


def test_tpot_goes_by_tokens_and_itl_by_arrivals() -> None:
    assert tpot_s(one()) == 3.0 / 4
    assert itls_s(one()) == [2.0, 1.0]
    assert tpot_s(one(output_tokens=1, last_token_s=4.0)) is None
    assert itls_s(one(arrival_times_s=(4.0,))) == []


def test_bundling_tokens_changes_no_tpot_and_improves_no_itl_percentile() -> None:
    single = one(arrival_times_s=tuple(range(4, 13)), output_tokens=9, last_token_s=12.0)
    bundled = one(arrival_times_s=(4, 8, 12), output_tokens=9, last_token_s=12.0)
    assert tpot_s(single) == tpot_s(bundled) == 1.0
    for percentile in (1, 50, 99):
        waits = [np.percentile(itls_s(each), percentile) for each in (bundled, single)]
        assert waits[0] >= waits[1]


def test_totals_rates_and_units_have_vllms_keys_and_one_of_ours() -> None:
    found = figures_of(one(0), one(1), failure(2, "timeout"))
    given = {"label", "tokenizer_id"}  # by the command
    assert {key for key in found if "p99.9_" not in key} | given == {*VLLM_KEYS, "topspin"}
    expected = {
        "model_id": "scripted",
        "date": "20260101-000000",
        "num_prompts": 3,
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 20,
        "total_output_tokens": 10,
        "request_throughput": 0.2,
        "output_throughput": 1.0,
        "total_token_throughput": 3.0,
        # Both bring three tokens in the second from 6 to 7.
        "max_output_tokens_per_s": 6,
        "max_concurrent_requests": 3,
        "request_goodput": None,
        "mean_ttft_ms": 3000,
        "mean_e2el_ms": 6500,
        "mean_tpot_ms": 750,
        "mean_itl_ms": 1500,
        "median_client_queue_time_ms": 1000,
        "request_rate": "inf",
        "max_concurrency": 2,
    }
    assert {key: found[key] for key in expected} == expected
    ours = found["topspin"]
    assert (ours["unfinished"], ours["errors_by_kind"]) == (0, {"timeout": 1})
    assert (ours["tokens_per_arrival"], ours["requests_without_usage"]) == (10 / 6, 0)
    assert not ours["client"]["saturated"]


def test_failures_are_counted_by_kind_and_an_interrupted_request_has_not_failed() -> None:
    kinds = ("http_429", "timeout", "http_429", "interrupted")
    failures = [failure(idx, kind) for idx, kind in enumerate(kinds)]
    found = figures_of(*failures, one(4), num_requested=9)
    assert (found["completed"], found["failed"]) == (1, 3)
    assert found["topspin"]["unfinished"] == 5
    assert list(found["topspin"]["errors_by_kind"].items()) == [("http_429", 2), ("timeout", 1)]
    assert found["mean_e2el_ms"] == 6500


def test_nothing_measured_is_nothing_and_not_zero() -> None:
    found = figures_of(failure(0, "connect"))
    assert found["mean_ttft_ms"] is found["p99_ttft_ms"] is None
    assert found["topspin"]["tokens_per_arrival"] is None
    assert (found["completed"], found["output_throughput"]) == (0, 0)


def test_statistics_are_numpys() -> None:
    source = random.Random(1)
    values = [source.expovariate(1) for _ in range(101)]
    found = figures_of(*(one(i, intended_s=0.0, first_token_s=v) for i, v in enumerate(values)))
    expected = {"mean": np.mean(values), "median": np.median(values), "std": np.std(values)}
    expected |= {f"p{p:g}": np.percentile(values, p) for p in (99, 99.9)}
    for statistic, value in expected.items():
        assert found[f"{statistic}_ttft_ms"] == pytest.approx(1000 * value)


def test_goodput_counts_requests_that_keep_every_goal() -> None:
    goals = {"ttft": 3.0, "tpot": 0.75, "e2el": 6.5}
    assert meets_goals(one(), goals)
    for name, goal in (("ttft", 2.9), ("tpot", 0.74), ("e2el", 6.4)):
        assert not meets_goals(one(), goals | {name: goal})
    assert meets_goals(one(output_tokens=1), {"tpot": 0.001})
    run = run_of([one(0), one(1, first_token_s=9.0), failure(2, "timeout")], duration_s=10.0)
    found = measure_run(run, goodput_s={"ttft": 3.5})
    assert (found["topspin"]["good_completed"], found["request_goodput"]) == (1, 0.1)


def test_goals_are_read_in_milliseconds() -> None:
    assert parse_goodput(["ttft:200", "tpot:12.5"]) == {"ttft": 0.2, "tpot": 0.0125}
    for bad in ("itl:5", "ttft:fast", "ttft:nan"):
        with pytest.raises(ConfigError, match=bad):
            parse_goodput([bad])
    with pytest.raises(ConfigError, match="twice"):
        parse_goodput(["ttft:1", "ttft:2"])


def test_peak_concurrency_is_brute_forces() -> None:
    source = random.Random(2)
    spans = [(a, a + source.randint(1, 9)) for a in (source.randint(0, 30) for _ in range(60))]
    spans += [(40, 41), (41, 42)]
    records = [one(i, sent_s=float(a), end_s=float(b)) for i, (a, b) in enumerate(spans)]
    most = max(sum(a <= second < b for a, b in spans) for second in range(40))
    assert figures_of(*records)["max_concurrent_requests"] == most
    assert figures_of(*records[-2:])["max_concurrent_requests"] == 1
    assert figures_of()["max_concurrent_requests"] == 0


def test_details_have_an_entry_for_every_request() -> None:
    found = lists_of(run_of([one(0, text="abc"), failure(1, "timeout")], duration_s=9.0))
    assert set(found) == VLLM_DETAILS
    assert all(len(found[key]) == 2 for key in VLLM_DETAILS)
    assert (found["ttfts"], found["itls"]) == ([3.0, 0.0], [[2.0, 1.0], []])
    assert (found["output_lens"], found["start_times"]) == ([5, 0], [1.0, 0.0])
    assert (found["generated_texts"][0], found["errors"]) == ("abc", ["", "no"])
    # A timeline drawn from start, TTFT and ITLs ends where the last output came.
    assert found["start_times"][0] + found["ttfts"][0] + sum(found["itls"][0]) == 7.0


def test_ours_says_whether_the_client_kept_up() -> None:
    health = ClientHealth(0.99, 0.1, 0.2, 0.3, 0.0, 0.0, 0.0, reasons=("It did not.",))
    client = figures_of(one(), health=health)["topspin"]["client"]
    assert (client["saturated"], client["cpu_share"]) == (True, 0.99)
    assert client["reasons"] == ["It did not."]


def test_secrets_are_not_written() -> None:
    target = Target("http://h", "m", headers={"Authorization": "Bearer sesame"})
    assert "sesame" not in json.dumps(figures_of(one(), target=target))


def test_the_load_is_written_and_names_the_file_as_vllm_does() -> None:
    def named(model: str, label: str | None, load: LoadPattern) -> tuple[str, dict[str, Any]]:
        run: LoadRun = run_of([one()], duration_s=1.0, load=load, target=Target("http://h", model))
        return result_filename(run, measure_run(run), label), measure_run(run)

    name, _ = named("org/model", None, LoadPattern(max_concurrency=3))
    assert name == "openai-infqps-concurrency3-model-20260101-000000.json"
    name, _ = named("m", None, LoadPattern(request_rate=2, burstiness=math.inf))
    assert name == "openai-2qps-m-20260101-000000.json"
    ramp = LoadPattern(
        ramp_up="linear", ramp_up_start_rps=1, ramp_up_end_rps=5, burstiness=math.inf
    )
    name, found = named("m", "a", ramp)
    assert name == "a-ramp-up-linear-1qps-5qps-m-20260101-000000.json"
    assert (found["ramp_up_strategy"], found["ramp_up_end_rps"]) == ("linear", 5)
    assert found["burstiness"] == found["topspin"]["load"]["burstiness"] == "inf"

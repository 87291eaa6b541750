"""The JSON has vLLM's keys and units for every kind of run, and is valid JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from benchmarks.load.contracts import ClientHealth, Load, Run, Target
from benchmarks.load.figures.metrics import lists_of, measure_run
from benchmarks.load.serve import result_filename
from tests.benchmarks.load.records import record, run_of

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


def example(**fields: Any) -> Run:
    records = [
        record(0, 0.5, [(1.0, 1), (1.5, 2)], intended_s=0.25, text="abc"),
        record(1, 0.5, [(2.0, 1)], intended_s=0.5),
        record(2, 0.5, [], error_kind="timeout", error="no end", end_s=4.0),
    ]
    return run_of(records, duration_s=4.0, **({"load": Load(max_concurrency=3)} | fields))


def as_json(run: Run) -> dict[str, Any]:
    """Return the result after a trip through strict JSON."""
    result = measure_run(run, percentiles=(99, 99.9))
    loaded: dict[str, Any] = json.loads(json.dumps(result, allow_nan=False))
    return loaded


def test_the_keys_are_vllms_and_one_of_ours() -> None:
    result = as_json(example())
    given = {"label", "tokenizer_id"}  # by the command
    assert {key for key in result if not key.startswith("p99.9_")} | given == {
        *VLLM_KEYS,
        "topspin",
    }
    assert "p99.9_ttft_ms" in result
    assert set(lists_of(example())) == VLLM_DETAILS


def test_values_and_units() -> None:
    result = as_json(example())
    assert result["model_id"] == "scripted"
    assert result["date"] == "20260101-000000"
    assert (result["completed"], result["failed"], result["num_prompts"]) == (2, 1, 3)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 4)
    assert result["output_throughput"] == 1.0
    assert result["mean_ttft_ms"] == pytest.approx((750 + 1500) / 2)
    assert result["p99_ttft_ms"] == pytest.approx(np.percentile([750, 1500], 99))
    assert result["mean_tpot_ms"] == pytest.approx(250)
    assert result["mean_itl_ms"] == pytest.approx(500)
    assert result["median_client_queue_time_ms"] == pytest.approx(125)
    assert result["request_rate"] == "inf"
    assert result["max_concurrency"] == 3
    assert result["request_goodput"] is None


def test_details_have_an_entry_for_every_request() -> None:
    result = lists_of(example())
    assert all(len(result[key]) == 3 for key in VLLM_DETAILS)
    assert result["ttfts"] == [0.75, 1.5, 0.0]
    assert result["itls"] == [[0.5], [], []]
    assert result["output_lens"] == [3, 1, 0]
    assert result["start_times"] == [0.25, 0.5, 0.5]
    assert result["generated_texts"][0] == "abc"
    assert result["errors"] == ["", "", "no end"]
    # A timeline drawn from start, TTFT and ITLs ends where the last output came.
    assert result["start_times"][0] + result["ttfts"][0] + sum(result["itls"][0]) == 1.5


def test_ours_says_whether_the_client_kept_up() -> None:
    health = ClientHealth(0.99, 0.1, 0.2, 0.3, 0.0, 0.0, 0.0, reasons=("It did not.",))
    ours = as_json(example(health=health))["topspin"]
    assert ours["client"]["saturated"]
    assert ours["client"]["cpu_share"] == 0.99
    assert ours["client"]["reasons"] == ["It did not."]
    assert ours["errors_by_kind"] == {"timeout": 1}
    assert not as_json(example())["topspin"]["client"]["saturated"]


def test_secrets_are_not_written() -> None:
    target = Target("http://h", "m", api_key="sesame", headers={"Authorization": "Bearer sesame"})
    assert "sesame" not in json.dumps(as_json(example(target=target)))


def test_a_run_of_nothing_but_failures_is_still_json() -> None:
    run = run_of([record(0, 0.0, [], error_kind="connect", error="x")], duration_s=1.0)
    result = as_json(run)
    assert result["mean_ttft_ms"] is None
    assert result["completed"] == 0


def test_infinity_is_written_as_a_word() -> None:
    load = Load(request_rate=2, burstiness=math.inf)
    result = as_json(example(load=load))
    assert (result["request_rate"], result["burstiness"]) == (2, "inf")
    assert result["topspin"]["load"]["burstiness"] == "inf"


def test_file_names_are_those_of_vllm() -> None:
    run = example(target=Target("http://h", "org/model"))
    assert (
        result_filename(run, measure_run(run), None)
        == "openai-infqps-concurrency3-model-20260101-000000.json"
    )
    ramp = Load(ramp_up="linear", ramp_up_start_rps=1, ramp_up_end_rps=5)
    run = example(load=ramp, target=Target("http://h", "m"))
    assert (
        result_filename(run, measure_run(run), "a")
        == "a-ramp-up-linear-1qps-5qps-m-20260101-000000.json"
    )
    result = as_json(run)
    assert (result["ramp_up_strategy"], result["ramp_up_end_rps"]) == ("linear", 5)

"""The JSON of a load test: the keys of `vllm bench serve --save-result`, others under "topspin".

Owns the keys, the units (ms where the name says so) and the file's name, so that tools which read
vLLM's results read these. Differences of meaning are those of benchmarks.load.metrics: latencies
count from the intended send time, and `start_times` are those times, in seconds from the run's
start; all four latencies are always written; a statistic without values is null.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.load.contracts import Load, RequestRecord, Run
from benchmarks.load.metrics import Metrics, Summary, e2el_s, itls_s, queue_s, ttft_s

LATENCIES = ("ttft", "tpot", "itl", "e2el")


def result_json(
    run: Run,
    metrics: Metrics,
    *,
    tokenizer_id: str | None = None,
    label: str | None = None,
    metadata: Mapping[str, str] | None = None,
    detailed: bool = False,
) -> dict[str, Any]:
    """Return the result of `run`; `detailed` adds a list entry per request to it."""
    load = run.load
    result: dict[str, Any] = {
        "date": _date(run),
        "endpoint_type": run.target.backend,
        "backend": run.target.backend,
        "label": label,
        "model_id": run.target.model,
        "tokenizer_id": tokenizer_id,
        "num_prompts": run.num_requested,
        **(metadata or {}),
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": "inf" if math.isinf(load.burstiness) else load.burstiness,
        "max_concurrency": load.users if load.users is not None else load.max_concurrency,
    }
    if load.ramp_up is not None:
        result["ramp_up_strategy"] = load.ramp_up
        result["ramp_up_start_rps"] = load.ramp_up_start_rps
        result["ramp_up_end_rps"] = load.ramp_up_end_rps
    result |= _figures(metrics)
    if detailed:
        result |= _lists(run.records)
    result["topspin"] = _ours(run, metrics, detailed=detailed)
    return result


def _figures(metrics: Metrics) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "duration": metrics.duration_s,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input_tokens,
        "total_output_tokens": metrics.total_output_tokens,
        "request_throughput": metrics.request_throughput,
        "request_goodput": metrics.request_goodput,
        "output_throughput": metrics.output_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
        "max_concurrent_requests": metrics.max_concurrent_requests,
    }
    for name in LATENCIES:
        figures |= _statistics(name, getattr(metrics, name))
    return figures | _statistics("client_queue_time", metrics.queue)


def _statistics(name: str, summary: Summary) -> dict[str, float | None]:
    statistics = {
        f"mean_{name}_ms": _ms(summary.mean),
        f"median_{name}_ms": _ms(summary.median),
        f"std_{name}_ms": _ms(summary.std),
    }
    for percentile, value in (summary.percentiles or {}).items():
        statistics[f"p{percentile:g}_{name}_ms"] = _ms(value)
    return statistics


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _lists(records: tuple[RequestRecord, ...]) -> dict[str, Any]:
    """Return vLLM's lists with an entry per request; 0 for points that a failed one missed."""
    return {
        "input_lens": [record.prompt_tokens or 0 for record in records],
        "output_lens": [record.output_tokens if record.ok else 0 for record in records],
        "ttfts": [ttft_s(record) or 0.0 for record in records],
        "itls": [itls_s(record) for record in records],
        "latencies": [e2el_s(record) or 0.0 for record in records],
        "start_times": [record.intended_s for record in records],
        "queue_times": [queue_s(record) or 0.0 for record in records],
        "generated_texts": [record.text for record in records],
        "errors": [record.error for record in records],
    }


def _ours(run: Run, metrics: Metrics, *, detailed: bool) -> dict[str, Any]:
    ours: dict[str, Any] = {
        "started_at": run.started_at,
        "commit": report.commit(),
        "machine": report.machine(),
        "url": run.target.url,
        "interrupted": run.interrupted,
        "unfinished": metrics.unfinished,
        "errors_by_kind": dict(metrics.errors),
        "good_completed": metrics.good_completed,
        "tokens_per_arrival": metrics.tokens_per_arrival,
        "requests_without_usage": metrics.num_without_usage,
        "client": {"saturated": run.health.saturated, **dataclasses.asdict(run.health)},
        "load": _finite(run.load),
        "extra_body": run.target.extra_body,
        "settings": run.settings,
    }
    if detailed:
        ours["requests"] = [_request(record) for record in run.records]
    return ours


def _finite(load: Load) -> dict[str, Any]:
    """Return the fields of `load`, with "inf" for infinity, which JSON does not have."""
    return {
        name: "inf" if isinstance(value, float) and math.isinf(value) else value
        for name, value in dataclasses.asdict(load).items()
    }


def _request(record: RequestRecord) -> dict[str, Any]:
    """Return a request's data that vLLM's lists lack."""
    fields = dataclasses.asdict(record)
    for elsewhere in ("text", "error"):
        del fields[elsewhere]
    return fields


def _date(run: Run) -> str:
    return datetime.fromisoformat(run.started_at).strftime("%Y%m%d-%H%M%S")


def result_filename(run: Run, label: str | None) -> str:
    """Return the name that `vllm bench serve` would give: label, load, model and date."""
    load = run.load
    if load.ramp_up is not None:
        rate = f"ramp-up-{load.ramp_up}-{load.ramp_up_start_rps}qps-{load.ramp_up_end_rps}qps"
    else:
        rate = f"{load.request_rate}qps"
    limit = load.users if load.users is not None else load.max_concurrency
    concurrency = "" if limit is None else f"-concurrency{limit}"
    model = run.target.model.rstrip("/").rsplit("/", 1)[-1]
    return f"{label or run.target.backend}-{rate}{concurrency}-{model}-{_date(run)}.json"


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write `result` to `path`, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, allow_nan=False) + "\n", encoding="utf-8")

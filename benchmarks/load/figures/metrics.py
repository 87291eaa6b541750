"""The figures of a load test, under the keys of `vllm bench serve --save-result`.

Owns the figures' definitions and keys, so that tools which read vLLM's results read these; our own
are under "topspin". Pure. Latencies are in ms; a statistic without values is null:

TTFT   first output minus the intended send time
E2EL   end of the reply minus the intended send time
queue  sent minus intended: waiting for a place, and the client's own lateness; part of
       TTFT and E2EL, and reported apart so that it can be taken off
TPOT   (last output minus first) / (output tokens - 1), the tokens counted by the server's
       usage; a request of one token has none
ITL    the wait between two successive arrivals of output at the client, one value per wait

ITL counts arrivals, not tokens. A chunk of k tokens is one wait: adding k-1 zeros, or k values of
1/k of the wait, would make a server that bundles tokens look smoother than it is for its user. So
bundling never improves an ITL percentile, at the cost that mean ITL is mean TPOT times the tokens
per arrival, which is also reported. `vllm bench serve` does the same, except that it counts events
in one read separately; here they are one arrival. `start_times` are intended send times, in seconds
from the run's start.

Latencies are those of successful requests only; failures are counted by kind. `refusal` is the time
from sending to a 429.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.load.contracts import LoadRun, MeasuredRequest
from benchmarks.load.figures.series import concurrency
from topspin.errors import ConfigError

GOODPUT_NAMES = ("ttft", "tpot", "e2el")
LATENCIES = ("ttft", "tpot", "itl", "e2el")
QUEUE = "client_queue_time"
REFUSAL = "refusal"
REFUSED = "http_429"


def ttft_s(record: MeasuredRequest) -> float | None:
    """Return the time to the first token from the intended send time."""
    if record.first_token_s is None:
        return None
    return record.first_token_s - record.intended_s


def e2el_s(record: MeasuredRequest) -> float | None:
    """Return the time to the end of the reply from the intended send time."""
    return None if record.end_s is None else record.end_s - record.intended_s


def queue_s(record: MeasuredRequest) -> float | None:
    """Return the request's waiting time in the client."""
    return None if record.sent_s is None else record.sent_s - record.intended_s


def tpot_s(record: MeasuredRequest) -> float | None:
    """Return the mean time per token after the first; None below two tokens."""
    if record.output_tokens < 2 or record.first_token_s is None or record.last_token_s is None:
        return None
    return (record.last_token_s - record.first_token_s) / (record.output_tokens - 1)


def itls_s(record: MeasuredRequest) -> list[float]:
    """Return the waits between successive arrivals of output."""
    return [after - before for before, after in pairwise(record.arrival_times_s)]


def latencies_ms(run: LoadRun) -> dict[str, list[float]]:
    """Return the latencies of the successful requests, and the waits between arrivals."""
    good = [record for record in run.records if record.ok]
    of_request = {"ttft": ttft_s, "tpot": tpot_s, "e2el": e2el_s, QUEUE: queue_s}
    found = {
        name: [value * 1000 for record in good if (value := latency(record)) is not None]
        for name, latency in of_request.items()
    }
    return found | {"itl": [wait * 1000 for record in good for wait in itls_s(record)]}


def measure_run(
    run: LoadRun,
    *,
    percentiles: Sequence[float] = (99.0,),
    goodput_s: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the figures of `run`; `goodput_s` maps names of GOODPUT_NAMES to limits in seconds."""
    good = [record for record in run.records if record.ok]
    failed = [r for r in run.records if not r.ok and r.error_kind != "interrupted"]
    input_tokens = sum(record.prompt_tokens or 0 for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    duration_s = max(run.duration_s, 1e-9)
    kept = sum(meets_goals(record, goodput_s) for record in good) if goodput_s else None
    num_arrivals = sum(len(record.arrival_times_s) for record in good)
    latencies = latencies_ms(run)
    refused = [record for record in failed if record.error_kind == REFUSED]
    refusals_ms = [
        1000 * (each.end_s - each.sent_s) for each in refused if each.end_s and each.sent_s
    ]
    statistics: dict[str, float | None] = {}
    for name in (*LATENCIES, QUEUE):
        statistics |= _statistics(name, latencies[name], percentiles)
    load = run.load
    ramp = {
        "ramp_up_strategy": load.ramp_up,
        "ramp_up_start_rps": load.ramp_up_start_rps,
        "ramp_up_end_rps": load.ramp_up_end_rps,
    }
    return {
        "date": datetime.fromisoformat(run.started_at).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": run.target.backend,
        "backend": run.target.backend,
        "model_id": run.target.model,
        "num_prompts": run.num_requested,
        "request_rate": _finite(load.request_rate),
        "burstiness": _finite(load.burstiness),
        "max_concurrency": load.max_concurrency,
        **(ramp if load.ramp_up else {}),
        "duration": run.duration_s,
        "completed": len(good),
        "failed": len(failed),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(good) / duration_s,
        # Requests/s that met every goal; None without goals.
        "request_goodput": None if kept is None else kept / duration_s,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
        # The best second, in seconds from the start.
        "max_output_tokens_per_s": _best_second(good),
        # The most requests at the server at one time, including failed ones.
        "max_concurrent_requests": int(concurrency(run.records).values.max()),
        **statistics,
        "topspin": {
            "started_at": run.started_at,
            "commit": report.commit(),
            "machine": report.machine(),
            "url": run.target.url,
            "interrupted": run.interrupted,
            # Planned, but neither ended nor failed, because the run was interrupted.
            "unfinished": run.num_requested - len(good) - len(failed),
            "errors_by_kind": dict(
                Counter(record.error_kind or "" for record in failed).most_common()
            ),
            "good_completed": kept,
            "refused": len(refused),
            **_statistics(REFUSAL, refusals_ms, percentiles),
            # Output tokens per arrival; 1 means token by token.
            "tokens_per_arrival": output_tokens / num_arrivals if num_arrivals else None,
            # The server sent no usage: their tokens are counted by events, a lower bound.
            "requests_without_usage": sum(record.tokens_from == "events" for record in good),
            "client": {"saturated": run.health.saturated, **dataclasses.asdict(run.health)},
            "load": {name: _finite(value) for name, value in dataclasses.asdict(load).items()},
            "extra_body": run.target.extra_body,
            "settings": run.settings,
        },
    }


def _statistics(
    name: str, values_ms: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float | None]:
    """Return mean, median, std of the population and interpolated percentiles."""
    array = np.asarray(values_ms or [math.nan])
    found = {"mean": array.mean(), "median": np.median(array), "std": array.std()}
    found |= {f"p{p:g}": np.percentile(array, p) for p in percentiles}
    return {
        f"{statistic}_{name}_ms": float(value) if values_ms else None
        for statistic, value in found.items()
    }


def _finite(value: Any) -> Any:
    """Return `value`, or "inf" for infinity, which JSON does not have."""
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def lists_of(run: LoadRun) -> dict[str, Any]:
    """Return vLLM's lists with an entry per request; 0 for points that a failed one missed."""
    records = run.records
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


def meets_goals(record: MeasuredRequest, goals_s: Mapping[str, float]) -> bool:
    """Return whether a successful request met every goal; TPOT is 0 for a single token."""
    found = {"ttft": ttft_s(record), "tpot": tpot_s(record) or 0.0, "e2el": e2el_s(record)}
    values = [(found[name], goal) for name, goal in goals_s.items()]
    return all(value is not None and value <= goal for value, goal in values)


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Return {"ttft": 0.2} (seconds) for ["ttft:200"] (milliseconds).

    Raises ConfigError for an unknown name, one given twice, or an invalid time.
    """
    goals: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        if name not in GOODPUT_NAMES:
            known = ", ".join(GOODPUT_NAMES)
            raise ConfigError(f"--goodput {pair}: {name!r} is no goal; goals: {known}")
        if name in goals:
            raise ConfigError(f"--goodput gives {name} twice")
        try:
            goals[name] = float(text) / 1000
        except ValueError:
            raise ConfigError(f"--goodput {pair}: {text!r} is no number of ms") from None
        if not goals[name] >= 0:
            raise ConfigError(f"--goodput {pair}: a goal is 0 ms or more")
    return goals


def _best_second(records: Sequence[MeasuredRequest]) -> float:
    tokens: Counter[int] = Counter()
    for record in records:
        for time_s, count in zip(record.arrival_times_s, record.arrival_tokens, strict=True):
            tokens[int(time_s)] += count
    return float(max(tokens.values(), default=0))

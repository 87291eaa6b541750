"""The metrics of a run's records: latencies, throughput, goodput, errors. Pure.

Owns the definitions, in seconds (result and view turn them into ms):

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
in one read separately; here they are one arrival.

Latencies are those of successful requests only; failures are counted by kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.load.contracts import RequestRecord, Run
from topspin.errors import ConfigError

GOODPUT_NAMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Summary:
    """Statistics of one latency, in seconds; all None or empty if nothing was measured."""

    count: int = 0
    mean: float | None = None
    median: float | None = None
    std: float | None = None
    percentiles: Mapping[float, float | None] | None = None

    @classmethod
    def of(cls, values: Sequence[float], percentiles: Sequence[float]) -> Summary:
        """Summarise `values`; percentiles by linear interpolation, std of the population."""
        if not values:
            return cls(percentiles=dict.fromkeys(percentiles))
        array = np.asarray(values)
        return cls(
            count=len(values),
            mean=float(array.mean()),
            median=float(np.median(array)),
            std=float(array.std()),
            percentiles={p: float(np.percentile(array, p)) for p in percentiles},
        )


@dataclass(frozen=True)
class Metrics:
    """All figures of a run. Rates are per second of the run's duration."""

    duration_s: float
    completed: int
    failed: int
    # Planned, but neither ended nor failed, because the run was interrupted.
    unfinished: int
    errors: Mapping[str, int]
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    # Requests/s that met every goal; None without goals.
    request_goodput: float | None
    good_completed: int | None
    output_throughput: float
    total_token_throughput: float
    # The best second, in seconds from the start.
    max_output_tokens_per_s: float
    # The most requests at the server at one time, including failed ones.
    max_concurrent_requests: int
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2el: Summary
    queue: Summary
    # Output tokens per arrival; 1 means token by token.
    tokens_per_arrival: float | None
    # Requests whose server sent no usage: their tokens are counted by events, a lower bound.
    num_without_usage: int


def ttft_s(record: RequestRecord) -> float | None:
    """Return the time to the first token from the intended send time."""
    if record.first_token_s is None:
        return None
    return record.first_token_s - record.intended_s


def e2el_s(record: RequestRecord) -> float | None:
    """Return the time to the end of the reply from the intended send time."""
    return None if record.end_s is None else record.end_s - record.intended_s


def queue_s(record: RequestRecord) -> float | None:
    """Return the request's waiting time in the client."""
    return None if record.sent_s is None else record.sent_s - record.intended_s


def tpot_s(record: RequestRecord) -> float | None:
    """Return the mean time per token after the first; None below two tokens."""
    if record.output_tokens < 2 or record.first_token_s is None or record.last_token_s is None:
        return None
    return (record.last_token_s - record.first_token_s) / (record.output_tokens - 1)


def itls_s(record: RequestRecord) -> list[float]:
    """Return the waits between successive arrivals of output."""
    return [after - before for before, after in pairwise(record.arrival_times_s)]


def measure_run(
    run: Run,
    *,
    percentiles: Sequence[float] = (99.0,),
    goodput_s: Mapping[str, float] | None = None,
) -> Metrics:
    """Return the figures of `run`; `goodput_s` maps names of GOODPUT_NAMES to limits in seconds."""
    good = [record for record in run.records if record.ok]
    failed = [r for r in run.records if not r.ok and r.error_kind != "interrupted"]
    input_tokens = sum(record.prompt_tokens or 0 for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    duration_s = max(run.duration_s, 1e-9)
    kept = None
    if goodput_s:
        kept = sum(meets_goals(record, goodput_s) for record in good)
    num_arrivals = sum(len(record.arrival_times_s) for record in good)

    def summary(values: Sequence[float | None]) -> Summary:
        return Summary.of([value for value in values if value is not None], percentiles)

    return Metrics(
        duration_s=run.duration_s,
        completed=len(good),
        failed=len(failed),
        unfinished=run.num_requested - len(good) - len(failed),
        errors=dict(Counter(record.error_kind or "" for record in failed).most_common()),
        total_input_tokens=input_tokens,
        total_output_tokens=output_tokens,
        request_throughput=len(good) / duration_s,
        request_goodput=None if kept is None else kept / duration_s,
        good_completed=kept,
        output_throughput=output_tokens / duration_s,
        total_token_throughput=(input_tokens + output_tokens) / duration_s,
        max_output_tokens_per_s=_best_second(good),
        max_concurrent_requests=peak_concurrency(run.records),
        ttft=summary([ttft_s(record) for record in good]),
        tpot=summary([tpot_s(record) for record in good]),
        itl=summary([itl for record in good for itl in itls_s(record)]),
        e2el=summary([e2el_s(record) for record in good]),
        queue=summary([queue_s(record) for record in good]),
        tokens_per_arrival=output_tokens / num_arrivals if num_arrivals else None,
        num_without_usage=sum(record.tokens_from == "events" for record in good),
    )


def meets_goals(record: RequestRecord, goals_s: Mapping[str, float]) -> bool:
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


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return the most requests that were sent and not ended at one time.

    A reply that ends at the time when the next is sent does not overlap it.
    """
    changes: list[tuple[float, int]] = []
    for record in records:
        if record.sent_s is not None and record.end_s is not None:
            changes += [(record.sent_s, 1), (record.end_s, -1)]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    return peak


def _best_second(records: Sequence[RequestRecord]) -> float:
    tokens: Counter[int] = Counter()
    for record in records:
        for time_s, count in zip(record.arrival_times_s, record.arrival_tokens, strict=True):
            tokens[int(time_s)] += count
    return float(max(tokens.values(), default=0))

"""What /metrics shows: this gateway's own counts and, fetched at a scrape, the engine's.

Owns the Prometheus registry of one gateway and the names, which follow vLLM's meanings under
the prefix `topspin_`. Knows no HTTP and no request's content.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from topspin.messages import STEP_BUCKETS_S, Stats, StepHistogram

FINISHED_REASONS = ("stop", "length", "abort", "error")

_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0,
)  # fmt: skip
_E2E_BUCKETS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0,
    15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip


class EngineCollector(Collector):
    """The engine's counters as of the scheduler's last answer; nothing but `up` 0 without."""

    def __init__(self) -> None:
        self.stats: Stats | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield the families of one scrape."""
        stats = self.stats
        yield _gauge("engine_up", "1 if the scheduler answered this scrape", int(stats is not None))
        if stats is None:
            return
        yield _gauge("num_requests_running", "Requests in running batches", stats.num_running)
        yield _gauge("num_requests_waiting", "Requests waiting to be admitted", stats.num_waiting)
        yield _gauge("kv_cache_usage_perc", "Used share of KV blocks, 0 to 1", stats.kv_cache_usage)
        yield _counter("num_preemptions", "Preemptions by recompute", stats.num_preemptions)
        yield _counter("num_replays", "Requests replayed after a loss", stats.num_replays)
        yield _counter(
            "prefix_cache_queries", "Prompt tokens looked up", stats.prefix_cache_queries
        )
        yield _counter("prefix_cache_hits", "Prompt tokens found cached", stats.prefix_cache_hits)
        yield _counter("engine_steps", "Engine steps finished", stats.num_steps)
        yield _counter("engine_step_seconds", "Time spent in steps", stats.step_seconds)
        yield _gauge("micro_batches", "Micro-batches of the last step", stats.num_micro_batches)
        for phase, histogram in stats.step_phases.items():
            yield _phase(phase, histogram)
        experts = CounterMetricFamily(
            "topspin_expert_tokens",
            "(token, expert) pairs routed to a logical expert of a MoE layer",
            labels=("layer", "expert"),
        )
        for layer, counts in enumerate(stats.expert_tokens):
            for expert, count in enumerate(counts):
                experts.add_metric((str(layer), str(expert)), count)
        yield experts
        yield _gauge(
            "expert_table_version", "Version of the expert table", stats.expert_table_version
        )
        yield _counter("expert_migrations", "Experts read for new tables", stats.expert_migrations)
        balance = GaugeMetricFamily(
            "topspin_expert_balance",
            "Routed pairs per expert node, max/mean: lately, and when the last table was left",
            labels=("table",),
        )
        balance.add_metric(("current",), stats.expert_balance)
        balance.add_metric(("previous",), stats.expert_balance_before)
        yield balance


class GatewayMetrics:
    """Counters and histograms of the requests that went through this gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = EngineCollector()
        self._registry.register(self._engine)
        registry = self._registry
        self.prompt_tokens = Counter(
            "topspin_prompt_tokens", "Prompt tokens of answered requests", registry=registry
        )
        self.generation_tokens = Counter(
            "topspin_generation_tokens", "Output tokens delivered or counted", registry=registry
        )
        self.time_to_first_token = Histogram(
            "topspin_time_to_first_token_seconds",
            "From the arrival of a request to the first token of a choice",
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self.inter_token_latency = Histogram(
            "topspin_inter_token_latency_seconds",
            "Time per token between two outputs of a choice",
            buckets=_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self.e2e_latency = Histogram(
            "topspin_e2e_request_latency_seconds",
            "From the arrival of a request to the end of a choice",
            buckets=_E2E_BUCKETS_S,
            registry=registry,
        )
        finished = Counter(
            "topspin_request_success",
            "Choices that ended, by reason",
            labelnames=("finished_reason",),
            registry=registry,
        )
        self.finished = {reason: finished.labels(reason) for reason in FINISHED_REASONS}

    def render(self, stats: Stats | None) -> bytes:
        """Return the text of one scrape; `stats` None if the scheduler did not answer."""
        self._engine.stats = stats
        return generate_latest(self._registry)


_PHASE_TEXTS = {
    "prepare": "Per step and attention node: turning the plan into inputs",
    "attention": "Per step and attention node: its own computing in all layers",
    "expert": "Per step: computing of the busiest expert node",
    "wait": "Per step and attention node: waiting for the experts",
    "link": "Mean one-way time between attention and experts, where it could be told",
    "sample": "Per step and attention node: logits and sampling",
}


def _phase(phase: str, histogram: StepHistogram) -> HistogramMetricFamily:
    name = "topspin_scheduler_gap_seconds"
    text = "How long an attention node with work to come had no plan"
    if phase != "scheduler_gap":
        name, text = f"topspin_step_{phase}_seconds", _PHASE_TEXTS.get(phase, phase)
    bounds = [*(f"{bound:g}" for bound in STEP_BUCKETS_S), "+Inf"]
    buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.sum_s)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"topspin_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"topspin_{name}", text, value=value)

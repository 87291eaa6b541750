"""The content of /metrics: this gateway's counts, and the engine's, fetched at each scrape.

Owns the Prometheus registry of one gateway and the names, which follow vLLM's meanings under
the prefix `topspin_`. Knows no HTTP and no request's content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from topspin.messages import ITERATION_BUCKETS, STEP_BUCKETS_S, Stats, StepHistogram

MODEL_LABEL = "model_name"
FINISHED_REASONS = ("stop", "length", "abort", "error")

TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
)  # fmt: skip
_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0,
)  # fmt: skip
# Of requests' lengths, in tokens.
_LENGTH_BUCKETS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
# Of the time that a request spends in a phase.
_PHASE_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0,
    15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
_E2E_BUCKETS_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0,
    15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip

# How many experts have a line of their own by default.
TOP_EXPERTS = 8
REST = "rest"

_PHASE_TEXTS = {
    "prepare": "Per step and attention node: turning the plan into inputs",
    "draft": "Per step and attention node: making drafts, or waiting for a draft node's",
    "attention": "Per step and attention node: its own computing in all layers",
    "expert": "Per step: computing of the busiest expert node",
    "wait": "Per step and attention node: waiting for the experts",
    "link": "Mean one-way time between attention and experts, where it could be told",
    "sample": "Per step and attention node: logits and sampling",
}


# Of the engine's metrics, those of one number each: the name, a text, and the field of Stats.
_GAUGES = (
    ("num_requests_running", "Requests in running batches", "num_running"),
    ("num_requests_waiting", "Requests waiting to be admitted", "num_waiting"),
    ("max_queued_requests", "As many may wait; 0 while starting", "max_queued_requests"),
    (
        "predicted_time_to_first_token_seconds",
        "Of one more short request, behind all that wait",
        "first_token_s",
    ),
    ("kv_cache_usage_perc", "Used share of KV blocks, 0 to 1", "kv_cache_usage"),
    (
        "kv_spill_memory_usage_perc",
        "Share of the KV blocks in memory that running sequences need there, beside a spill",
        "kv_frames_usage",
    ),
    ("local_layers", "MoE layers without a hop", "num_local_layers"),
    ("micro_batches", "Micro-batches of the last step", "num_micro_batches"),
    ("expert_table_version", "Version of the expert table", "expert_table_version"),
)
_COUNTERS = (
    ("num_preemptions", "Preemptions by recompute", "num_preemptions"),
    ("num_replays", "Requests replayed after a loss", "num_replays"),
    ("grammars_compiled", "Grammars compiled", "num_grammars_compiled"),
    ("grammars_found", "Grammars found compiled", "num_grammars_found"),
    ("prefix_cache_queries", "Prompt tokens looked up", "prefix_cache_queries"),
    ("prefix_cache_hits", "Prompt tokens found cached", "prefix_cache_hits"),
    ("engine_steps", "Engine steps finished", "num_steps"),
    ("engine_step_seconds", "Time spent in steps", "step_seconds"),
    ("spec_decode_num_drafts", "Drafts that were verified", "num_drafts"),
    ("spec_decode_num_draft_tokens", "Tokens of drafts", "num_draft_tokens"),
    ("spec_decode_root_hits", "Verified tokens that a draft node's tree had", "num_root_hits"),
    ("spec_decode_root_misses", "Verified tokens that ended such a tree", "num_root_misses"),
    ("spec_decode_draft_passes", "Passes of draft nodes' models", "num_draft_passes"),
    (
        "spec_decode_overlapped_draft_passes",
        "Of these, passes for which no attention node waited",
        "num_overlapped_passes",
    ),
    ("spec_decode_draft_pass_seconds", "Time of these passes", "draft_pass_seconds"),
    (
        "kv_retrieval_selected_rows",
        "Decoded rows, by layer, that attended to a selection of their keys",
        "kv.num_selected_rows",
    ),
    (
        "kv_retrieval_coded_segments",
        "Segments of 1024 keys whose codebooks were learnt",
        "kv.num_coded_segments",
    ),
    ("kv_spill_saved_blocks", "Cache blocks written to the spill's file", "kv.num_saved_blocks"),
    (
        "kv_spill_loaded_blocks",
        "Cache blocks read from the spill's file whole",
        "kv.num_loaded_blocks",
    ),
    (
        "kv_spill_hot_keys",
        "Selected keys of spilled blocks, by layer and head, that had a copy in memory",
        "kv.num_hot_keys",
    ),
    (
        "kv_spill_read_keys",
        "Selected keys of spilled blocks, by layer and head, that were read from the file",
        "kv.num_read_keys",
    ),
    (
        "expert_activations",
        "Experts that a batch had tokens for, summed over batches",
        "expert_activations",
    ),
    (
        "expert_batches",
        "Batches with tokens: what one expert node computes at once, in one layer",
        "expert_batches",
    ),
    ("expert_migrations", "Experts read for new tables", "expert_migrations"),
)


Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


class EngineCollector(Collector):
    """The engine's counters in the scheduler's last answer; without one, only engine_up = 0.

    `per_expert`: report the routed pairs of each expert, not only the busiest ones'.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.stats: Stats | None = None
        self.per_expert = False

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of one scrape."""
        stats = self.stats
        is_up = stats is not None
        yield self._number(
            GaugeMetricFamily, "engine_up", "1 if the scheduler answered this scrape", is_up
        )
        if stats is None:
            return
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text, field in rows:
                yield self._number(kind, name, text, attrgetter(field)(stats))
        values = [((each.role, str(each.optional).lower()), each) for each in stats.nodes]
        yield self._labelled(
            GaugeMetricFamily,
            "nodes",
            "Nodes that take part, or wait to do so",
            {labels: each.present for labels, each in values},
            ("role", "optional"),
        )
        yield self._labelled(
            GaugeMetricFamily,
            "nodes_planned",
            "Nodes that the plan has",
            {labels: each.planned for labels, each in values},
            ("role", "optional"),
        )
        yield self._labelled(
            GaugeMetricFamily,
            "node_resident_bytes",
            "Memory of each node's process",
            {(each.role, str(each.index)): each.resident_bytes for each in stats.memory},
            ("role", "index"),
        )
        yield self._labelled(
            GaugeMetricFamily,
            "slow_nodes",
            "Nodes that are 3 times slower than their peers: how many times",
            {(each.role, str(each.index)): each.times for each in stats.slow_nodes},
            ("role", "index"),
        )
        yield self._labelled(
            GaugeMetricFamily,
            "kv_positions",
            "Positions of running sequences that have keys, in layers of each window, 0: none",
            {(str(window),): count for window, count in stats.kv_positions.items()},
            ("window",),
        )
        yield self._labelled(
            CounterMetricFamily,
            "requests_refused",
            "Choices that got 429, by cause",
            {(cause,): count for cause, count in stats.num_refused.items()},
            ("cause",),
        )
        accepted = stats.num_accepted_tokens
        text = "Tokens of drafts that were accepted"
        name = "spec_decode_num_accepted_tokens"
        yield self._number(CounterMetricFamily, name, text, sum(accepted))
        yield self._labelled(
            CounterMetricFamily,
            f"{name}_per_pos",
            f"{text}, by their place in the draft from 0",
            {(str(position),): count for position, count in enumerate(accepted)},
            ("position",),
        )
        recall = SummaryMetricFamily(
            "topspin_kv_retrieval_recall",
            "Of the keys with the greatest products, the share selected; a few rows are looked at",
            labels=(MODEL_LABEL,),
        )
        recall.add_metric((self._model_name,), stats.kv.num_recalls, stats.kv.recall_sum)
        yield recall
        for phase, histogram in stats.step_phases.items():
            yield self._phase(phase, histogram)
        yield self._histogram(
            "iteration_tokens_total",
            "Tokens computed per engine step, of prompts and of outputs",
            ITERATION_BUCKETS,
            stats.iteration_tokens,
            stats.iteration_tokens_sum,
        )
        yield from self._expert_tokens(stats.expert_tokens)
        yield self._labelled(
            GaugeMetricFamily,
            "expert_balance",
            "Expert nodes' time for routed pairs, max/mean: lately, and when the last table ended",
            {("current",): stats.expert_balance, ("previous",): stats.expert_balance_before},
            ("table",),
        )

    def _number(self, kind: Family, name: str, text: str, value: float) -> Metric:
        return self._labelled(kind, name, text, {(): value})

    def _labelled(
        self,
        kind: Family,
        name: str,
        text: str,
        values: Mapping[tuple[str, ...], float],
        labels: tuple[str, ...] = (),
    ) -> Metric:
        """Return a metric with a value for each tuple of its `labels`."""
        family = kind(f"topspin_{name}", text, labels=(MODEL_LABEL, *labels))
        for of_labels, value in values.items():
            family.add_metric((self._model_name, *of_labels), value)
        return family

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> Metric:
        family = HistogramMetricFamily(f"topspin_{name}", text, labels=(MODEL_LABEL,))
        shown = [*(f"{bound:g}" for bound in bounds), "+Inf"]
        buckets = list(zip(shown, accumulate(counts), strict=True))
        family.add_metric((self._model_name,), buckets, sum_value=total)
        return family

    def _expert_tokens(self, layers: Sequence[Sequence[int]]) -> Iterator[Metric]:
        """Yield the routed pairs: their sum, and the busiest experts' beside that of the rest.

        If `per_expert`: a line for each expert. Otherwise the experts' lines are gauges, as one may
        take another's place, and their number is bounded.
        """
        text, names = "(token, expert) pairs routed", (MODEL_LABEL, "layer", "expert")
        each = [
            (count, str(layer), str(expert))
            for layer, counts in enumerate(layers)
            for expert, count in enumerate(counts)
        ]
        if self.per_expert:
            family: Metric = CounterMetricFamily("topspin_expert_tokens", text, labels=names)
        else:
            total = sum(count for count, _, _ in each)
            yield self._number(CounterMetricFamily, "expert_tokens", text, total)
            each = nlargest(TOP_EXPERTS, each)
            each.append((total - sum(count for count, _, _ in each), REST, REST))
            family = GaugeMetricFamily(
                "topspin_expert_tokens_top",
                f"{text}, since the start: the {TOP_EXPERTS} busiest experts, and all others",
                labels=names,
            )
        for count, layer, expert in each:
            family.add_sample(
                f"{family.name}_total" if self.per_expert else family.name,
                {MODEL_LABEL: self._model_name, "layer": layer, "expert": expert},
                count,
            )
        yield family

    def _phase(self, phase: str, histogram: StepHistogram) -> Metric:
        name = "scheduler_gap_seconds"
        text = "How long an attention node with work to come had no plan"
        if phase != "scheduler_gap":
            name, text = f"step_{phase}_seconds", _PHASE_TEXTS.get(phase, phase)
        return self._histogram(name, text, STEP_BUCKETS_S, histogram.counts, histogram.sum_s)


class First(NamedTuple):
    """When a choice's first output came, and what had taken until then in the engine."""

    queue_s: float
    prefill_s: float
    at_s: float


class GatewayMetrics:
    """Counters and histograms of the requests that went through this gateway."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._engine = EngineCollector(model_name)
        self._registry.register(self._engine)
        self._model_name = model_name
        counter, seconds, tokens = self._counter, self._seconds, self._lengths
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered requests")
        self.generation_tokens = counter("generation_tokens", "Output tokens delivered or counted")
        self.time_to_first_token = seconds(
            "time_to_first_token",
            "From the arrival of a request to the first token of a choice",
            TTFT_BUCKETS_S,
        )
        self.inter_token_latency = seconds(
            "inter_token_latency",
            "Time per token between two outputs of a choice",
            _TOKEN_BUCKETS_S,
        )
        self.e2e_latency = seconds(
            "e2e_request_latency",
            "From the arrival of a request to the end of a choice",
            _E2E_BUCKETS_S,
        )
        self._queue_time = seconds(
            "request_queue_time", "From a choice's arrival in the scheduler to its first admission"
        )
        self._prefill_time = seconds(
            "request_prefill_time", "From the first admission of a choice to its first token"
        )
        self._decode_time = seconds(
            "request_decode_time", "From the first token of a choice to its last"
        )
        self._inference_time = seconds(
            "request_inference_time", "From the first admission of a choice to its last token"
        )
        self._time_per_output_token = seconds(
            "request_time_per_output_token",
            "Mean time per token of a choice after its first",
            _TOKEN_BUCKETS_S,
        )
        self._request_prompt_tokens = tokens("request_prompt_tokens", "Prompt tokens of a choice")
        self._request_generation_tokens = tokens(
            "request_generation_tokens", "Output tokens of a choice"
        )
        self.max_tokens = tokens(
            "request_params_max_tokens", "The most output tokens that a choice may have"
        )
        self.num_choices = tokens("request_params_n", "Choices asked for, `n`", _COUNT_BUCKETS)
        finished = Counter(
            "topspin_request_success",
            "Choices that ended, by reason",
            (MODEL_LABEL, "finished_reason"),
            registry=self._registry,
        )
        self.finished = {reason: finished.labels(model_name, reason) for reason in FINISHED_REASONS}
        self._answers = Counter(
            "topspin_http_responses",
            "HTTP requests that ended, by route and status",
            (MODEL_LABEL, "endpoint", "code"),
            registry=self._registry,
        )

    def observe_answer(self, endpoint: str, status: int) -> None:
        """Count an HTTP request that ended. `endpoint` is one of few: clients choose paths."""
        self._answers.labels(self._model_name, endpoint, str(status)).inc()

    def observe_finished(
        self, first: First, *, last_at_s: float, num_prompt: int, num_output: int
    ) -> None:
        """Count a choice that ended by itself, with its numbers of tokens."""
        decode_s = last_at_s - first.at_s
        self._queue_time.observe(first.queue_s)
        self._prefill_time.observe(first.prefill_s)
        self._decode_time.observe(decode_s)
        self._inference_time.observe(first.prefill_s + decode_s)
        if num_output > 1:
            self._time_per_output_token.observe(decode_s / (num_output - 1))
        self._request_prompt_tokens.observe(num_prompt)
        self._request_generation_tokens.observe(num_output)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"topspin_{name}", text, (MODEL_LABEL,), registry=self._registry).labels(
            self._model_name
        )

    def _seconds(
        self, name: str, text: str, buckets: Sequence[float] = _PHASE_BUCKETS_S
    ) -> Histogram:
        return self._lengths(f"{name}_seconds", text, buckets)

    def _lengths(
        self, name: str, text: str, buckets: Sequence[float] = _LENGTH_BUCKETS
    ) -> Histogram:
        return Histogram(
            f"topspin_{name}", text, (MODEL_LABEL,), buckets=buckets, registry=self._registry
        ).labels(self._model_name)

    def render(self, stats: Stats | None, *, per_expert: bool = False) -> bytes:
        """Return the text of one scrape; `stats` None if the scheduler did not answer."""
        self._engine.stats = stats
        self._engine.per_expert = per_expert
        return generate_latest(self._registry)

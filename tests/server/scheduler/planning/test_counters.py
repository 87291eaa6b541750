"""The time of steps, by phase, as in /metrics."""

from __future__ import annotations

from server.gateway.operations.metrics import GatewayMetrics
from server.scheduler.planning.counters import Counters, Histogram
from topspin.messages import STEP_BUCKETS_S, Stats, StepTimings

TIMINGS = StepTimings(
    total_s=0.1,
    attention_s=0.02,
    wait_s=0.03,
    sample_s=0.04,
    prepare_s=0.01,
    expert_s=0.025,
    gap_s=0.003,
)


def test_a_duration_is_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram()
    for bound in STEP_BUCKETS_S:
        histogram.observe(bound)
        histogram.observe(bound * 1.0001)
    assert histogram.counts == [1, *[2] * (len(STEP_BUCKETS_S) - 1), 1]


def test_the_first_step_after_idleness_has_no_gap() -> None:
    counters = Counters()
    counters.observe(TIMINGS, after_idle=True)
    counters.observe(TIMINGS, after_idle=False)
    assert sum(counters.phases["scheduler_gap"].counts) == 1
    assert counters.phases["scheduler_gap"].sum_s == TIMINGS.gap_s
    assert sum(counters.phases["attention"].counts) == 2
    assert sum(counters.phases["link"].counts) == 0  # it is not known


def test_metrics_show_every_phase_as_a_histogram() -> None:
    counters = Counters()
    counters.observe(TIMINGS, after_idle=False)
    stats = Stats(
        query_id=1,
        num_waiting=0,
        num_running=0,
        kv_cache_usage=0.0,
        num_blocks=1,
        num_micro_batches=3,
        **counters.for_stats(),
    )
    text = GatewayMetrics("tiny").render(stats).decode()
    assert 'topspin_micro_batches{model_name="tiny"} 3.0' in text
    assert 'topspin_step_attention_seconds_bucket{le="0.01",model_name="tiny"} 0.0' in text
    assert 'topspin_step_attention_seconds_bucket{le="0.025",model_name="tiny"} 1.0' in text
    assert 'topspin_step_attention_seconds_bucket{le="+Inf",model_name="tiny"} 1.0' in text
    assert 'topspin_step_attention_seconds_sum{model_name="tiny"} 0.02' in text
    assert 'topspin_scheduler_gap_seconds_count{model_name="tiny"} 1.0' in text
    assert 'topspin_step_link_seconds_count{model_name="tiny"} 0.0' in text

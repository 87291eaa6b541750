"""The policy's notes about single requests, and the time of steps by phase, as in /metrics."""

from __future__ import annotations

import json
import logging

import pytest

from server.gateway.operations.metrics import GatewayMetrics
from server.scheduler.command import request_log
from server.scheduler.planning.policy import MAX_REPLAYS
from server.scheduler.planning.telemetry import Counters, Histogram
from tests.server.scheduler.engine import Engine, make_config, make_request
from topspin.logs import REQUESTS, JsonLines
from topspin.messages import STEP_BUCKETS_S, Stats, StepTimings, engine_id

Entry = tuple[str, str, dict[str, object], bool]


class Entries(list[Entry]):
    """Takes the policy's notes."""

    def __call__(
        self, what: str, request_id: str, fields: dict[str, object], *, is_bad: bool = False
    ) -> None:
        self.append((what, request_id, fields, is_bad))

    def of(self, request_id: str) -> list[str]:
        return [what for what, of, _, _ in self if of == request_id]


def test_a_request_is_admitted_and_finished() -> None:
    notes = Entries()
    engine = Engine(make_config(max_num_seqs=1), note=notes)
    for number in range(2):
        engine.add(make_request(f"r{number}", [1, 2, 3], max_tokens=4, seed=number))
    engine.finish()
    assert [(what, of) for what, of, _, _ in notes] == [
        ("admitted", "r0"),
        ("finished", "r0"),
        ("admitted", "r1"),
        ("finished", "r1"),
    ]
    first, last = notes[0][2], notes[1][2]
    assert first == {"node": 0, "prompt_tokens": 3, "cached_tokens": 0, "queue_s": 0.0}
    assert last == {"reason": "length", "output_tokens": 4}
    waited_s = notes[2][2]["queue_s"]
    assert isinstance(waited_s, float)
    assert waited_s >= 0.04, "four steps of 10 ms"


def test_preemptions_are_told() -> None:
    notes = Entries()
    config = make_config(block_size=2, max_num_seqs=2, max_model_len=24)
    engine = Engine(config, num_blocks=12, note=notes)
    for number in range(2):
        engine.add(make_request(f"r{number}", [number] * 5, max_tokens=16, seed=number))
    engine.finish()
    told = [what for what, _, _, _ in notes]
    assert told.count("preempted") == engine.policy.stats(0, (), engine.now).num_preemptions > 0
    assert told.count("admitted") == 2 + told.count("preempted")
    assert told.count("finished") == 2


def test_what_kills_every_generation_is_replayed_and_fails_and_the_others_do_not() -> None:
    notes = Entries()
    engine = Engine(make_config(max_num_seqs=1), note=notes)
    engine.add(make_request("r", [1, 2, 3], max_tokens=4))
    engine.add(make_request("waits", [3], max_tokens=9, seed=1))
    for _ in range(MAX_REPLAYS + 1):
        assert engine.schedule()
        engine.halt()
        engine.resume()
    failure = engine.clients["r"].failure
    assert failure is not None
    assert (failure.code, failure.status) == ("node_lost", 503)
    rounds = ["admitted", "replayed"] * (MAX_REPLAYS + 1)
    assert notes.of("r") == [*rounds, "failed"]
    _, _, fields, is_bad = notes[-1]
    assert is_bad
    assert fields["code"] == "node_lost"
    assert [each[2]["replays"] for each in notes if each[0] == "replayed"][-1] == MAX_REPLAYS + 1
    engine.finish()
    assert engine.clients["waits"].failure is None


def test_an_abort_and_a_failure_on_a_node_are_told() -> None:
    notes = Entries()
    engine = Engine(make_config(), note=notes, fails=lambda seq_id: seq_id == 2)
    engine.add(make_request("left", [1, 2, 3], max_tokens=50))
    engine.add(make_request("failed", [4, 5, 6], max_tokens=50, seed=1))
    while not engine.clients["failed"].ended:
        engine.turn()
    engine.abort("left")
    assert notes.of("failed")[-1] == "failed"
    assert notes.of("left")[-1] == "aborted"


def test_an_entry_is_logged_under_the_clients_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, REQUESTS)
    note = request_log()
    note("admitted", engine_id("from-client", 7, 1), {"node": 0})
    note("failed", engine_id("from-client", 7, 1), {"code": "x"}, is_bad=True)
    admitted, failed = (json.loads(JsonLines("scheduler").format(each)) for each in caplog.records)
    assert admitted["request_id"] == failed["request_id"] == "from-client"
    assert (admitted["choice"], admitted["node"]) == ("1", 0)
    assert (admitted["level"], failed["level"]) == ("info", "warning")
    assert admitted["message"] == "scheduler: request admitted"


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

"""The order of a run: open and closed loops, places, conversations, stalls and interruptions."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.load.client.runner import (
    Places,
    Snapshot,
    _quiet_collector,
    measure,
    run_load,
)
from benchmarks.load.contracts import BenchRequest, LoadPattern, Target
from benchmarks.load.figures.metrics import measure_run, queue_s, ttft_s
from tests.benchmarks.load.scripted_server import (
    Received,
    Reply,
    ScriptedServer,
    Step,
    stream_reply,
)
from topspin.errors import ConfigError

EARLY_S = 0.002

pytestmark = pytest.mark.usefixtures("without_collections")


def requests(count: int, **fields: Any) -> list[BenchRequest]:
    known: dict[str, Any] = {"max_tokens": 2, "prompt": [1, 2]}
    return [BenchRequest(**(known | fields)) for _ in range(count)]


def slow(received: Received) -> Reply:
    return stream_reply(received, first_delay_s=0.03)


def held(received: Received, released: Callable[[], bool]) -> Reply:
    """Return a good reply that begins once `released()` is true."""

    def steps() -> Iterator[Step]:
        while not released():
            yield 0.01
        yield from stream_reply(received).steps

    return Reply(steps())


def target_at(server: ScriptedServer, **fields: Any) -> Target:
    return Target(server.base_url, "scripted", **fields)


def test_no_long_collection_happens_in_a_run() -> None:
    before = gc.get_threshold()
    with _quiet_collector():
        assert gc.get_threshold() == (*before[:2], 2**30)
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_a_closed_loop_sends_every_request_once_and_takes_places_at_once() -> None:
    with ScriptedServer(slow) as server:
        asked = [BenchRequest(max_tokens=1, prompt=[index]) for index in range(24)]
        run = run_load(target_at(server), asked, LoadPattern(max_concurrency=6))
    assert sorted(received.body["prompt"][0] for received in server.requests) == list(range(24))
    assert [record.index for record in run.records] == list(range(24))
    assert all(record.ok for record in run.records)
    assert (run.num_requested, run.interrupted) == (24, False)
    assert measure_run(run)["max_concurrent_requests"] <= 6
    # Each later request is timed from the end of an earlier one.
    starts = [record.intended_s for record in run.records]
    assert starts.count(0.0) == 6
    assert {start for start in starts if start} <= {record.end_s for record in run.records}


def test_an_open_loop_does_not_wait_for_replies() -> None:
    # No reply begins before all 20 requests have come.
    server = ScriptedServer(lambda received: held(received, lambda: len(server.requests) == 20))
    with server:
        run = run_load(target_at(server), requests(20), LoadPattern(request_rate=200, seed=5))
    assert all(record.ok for record in run.records)
    assert measure_run(run)["max_concurrent_requests"] == 20
    times = [record.intended_s for record in run.records]
    assert max(times) == pytest.approx(0.1)
    for record in run.records:
        assert record.sent_s is not None
        assert record.sent_s >= record.intended_s - EARLY_S
        assert record.admitted_s == record.intended_s


def test_waiting_for_a_place_is_queueing_from_the_intended_time() -> None:
    with ScriptedServer(slow) as server:
        load = LoadPattern(request_rate=1000, max_concurrency=1)
        run = run_load(target_at(server), requests(5), load)
    assert measure_run(run)["max_concurrent_requests"] == 1
    order = sorted(run.records, key=lambda record: record.intended_s)
    for before, record in pairwise(order):
        assert record.admitted_s is not None
        assert record.admitted_s >= (before.end_s or 0.0)
    # The last one waited for four replies of 30 ms, which its TTFT includes and its queue time
    # shows.
    assert (queue_s(order[-1]) or 0) >= 4 * 0.03 - 0.01
    assert (ttft_s(order[-1]) or 0) >= 5 * 0.03 - 0.01


def test_replayed_requests_are_due_at_their_timestamps() -> None:
    asked = [BenchRequest(max_tokens=1, prompt="a", arrival_s=t) for t in (0.1, 0.0, 0.05)]
    with ScriptedServer() as server:
        run = run_load(target_at(server), asked, LoadPattern(replay=True, time_scale=2))
    assert [record.intended_s for record in run.records] == [0.2, 0.0, 0.1]
    assert run.duration_s >= 0.2


@pytest.mark.slow
def test_a_stalled_client_says_so_and_counts_from_the_intended_time() -> None:
    def stall(snapshot: Snapshot) -> None:
        time.sleep(0.6)

    with ScriptedServer() as server:
        load = LoadPattern(request_rate=50, burstiness=10)
        run = run_load(target_at(server), requests(50), load, watch=stall)
    assert all(record.ok for record in run.records)
    latest = max(run.records, key=lambda record: (record.sent_s or 0) - record.intended_s)
    assert (latest.sent_s or 0) - latest.intended_s >= 0.4
    assert (ttft_s(latest) or 0) >= 0.4
    assert run.health.loop_lag_max_s >= 0.4
    assert run.health.send_lateness_max_s >= 0.4
    assert run.health.saturated
    assert measure_run(run)["mean_client_queue_time_ms"] > 0


def test_nothing_is_sent_if_anything_is_wrong() -> None:
    with ScriptedServer() as server:
        target = target_at(server)
        bad = [*requests(2), BenchRequest(max_tokens=1, messages=[{"role": "user"}])]
        with pytest.raises(ConfigError):
            run_load(target, bad, LoadPattern(max_concurrency=1))
        with pytest.raises(ConfigError):
            run_load(target, requests(2), LoadPattern(replay=True, request_rate=1))
        with pytest.raises(ConfigError, match="timestamps"):
            run_load(target, requests(2), LoadPattern(replay=True))
    assert server.requests == []


def hang_but_for_the_first(received: Received) -> Reply:
    if received.body["prompt"] == [0]:
        return stream_reply(received)
    return stream_reply(received, first_delay_s=600.0)


@pytest.mark.usefixtures("terminal_signals")
def test_control_c_ends_the_run_and_keeps_what_there_is() -> None:
    seen: list[Snapshot] = []

    def interrupt(snapshot: Snapshot) -> None:
        seen.append(snapshot)
        if snapshot.num_completed == 1 and snapshot.num_running == 2:
            signal.raise_signal(signal.SIGINT)

    asked = [BenchRequest(max_tokens=2, prompt=[index]) for index in range(9)]
    with ScriptedServer(hang_but_for_the_first) as server:
        run = run_load(target_at(server), asked, LoadPattern(max_concurrency=2), watch=interrupt)
    assert run.interrupted
    assert {each.num_requests for each in seen} == {9}
    assert 0 < seen[-1].elapsed_s <= run.duration_s
    assert [record.error_kind for record in run.records] == [None, "interrupted", "interrupted"]
    metrics = measure_run(run)
    assert (metrics["completed"], metrics["failed"]) == (1, 0)
    assert metrics["topspin"]["unfinished"] == 8


def test_a_cancelled_run_returns_what_there_is() -> None:
    async def cancelled() -> int:
        asked = [BenchRequest(max_tokens=2, prompt=[index]) for index in range(3)]

        def stop(snapshot: Snapshot) -> None:
            if snapshot.num_completed == 1:
                task.cancel()

        task = asyncio.create_task(
            measure(target, asked, LoadPattern(request_rate=100, max_concurrency=2), watch=stop)
        )
        return len((await task).records)

    with ScriptedServer(hang_but_for_the_first) as server:
        target = target_at(server)
        assert asyncio.run(cancelled()) in (2, 3)


def test_places_are_given_in_order_at_the_time_when_they_became_free() -> None:
    async def run() -> None:
        places = Places(2)
        assert await places.take(1.0) == 1.0
        assert await places.take(2.0) == 2.0
        waiting = [asyncio.create_task(places.take(time_s)) for time_s in (3.0, 4.0, 9.0)]
        await asyncio.sleep(0)
        places.leave(5.0)
        assert await waiting[0] == 5.0
        waiting[1].cancel()
        await asyncio.sleep(0)
        places.leave(6.0)
        assert await waiting[2] == 9.0
        places.leave(10.0)
        # Free since 10, noticed late: a request due at 8 could have had it at 10.
        assert await places.take(8.0) == 10.0

    asyncio.run(run())

"""One load test: sends every request at its time and measures it.

Owns the sequence: the open loop (arrival times), the closed loop (a limit of requests at once), and
the end, also by Ctrl-C. Knows neither HTTP (benchmarks.load.client.http) nor the evaluation.
`run_load` is the entry: called by the commands, and by sweep and compare once for each point.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import heapq
import math
import resource
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.load.client.arrivals import arrival_times, check_load, replayed_times
from benchmarks.load.client.health import Monitor
from benchmarks.load.client.http import Client, Snapshot, request_body
from benchmarks.load.contracts import BenchRequest, LoadPattern, LoadRun, MeasuredRequest, Target
from topspin.errors import EngineUnavailable

WATCH_PERIOD_S = 0.25
# Files that a process needs besides its connections.
SPARE_FILES = 64


Watch = Callable[[Snapshot], None]


class SendPlan(NamedTuple):
    """A run before it begins: start times (None in a closed loop) and bodies."""

    starts_s: list[float] | None
    bodies: list[bytes]


def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    load: LoadPattern,
    *,
    settings: dict[str, Any] | None = None,
    watch: Watch | None = None,
) -> LoadRun:
    """Send all `requests` to `target` by `load` and return the measurements.

    `watch` is called about four times a second, in the event loop, so it must be quick. The
    first Ctrl-C ends the run early: requests still running are recorded as "interrupted".
    Raises ConfigError, before anything is sent, if the load or a request makes no sense.
    """
    return asyncio.run(measure(target, requests, load, settings=settings, watch=watch))


async def measure(
    target: Target,
    requests: Sequence[BenchRequest],
    load: LoadPattern,
    *,
    settings: dict[str, Any] | None = None,
    watch: Watch | None = None,
) -> LoadRun:
    """Do what run_load does, in the running event loop; a cancellation ends the run early."""
    plan = prepare(target, requests, load)
    _allow_open_files(len(requests), load)
    interrupted = False
    async with Client(target, timeout_s=load.request_timeout_s) as client:
        play = _Play(client, requests, plan.bodies, load)
        monitor = Monitor()
        with _quiet_collector():
            started_at = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            monitor.start()
            client.begin()
            try:
                async with asyncio.TaskGroup() as group:
                    watcher = group.create_task(_watching(client, len(requests), watch))
                    await play.all(plan.starts_s)
                    watcher.cancel()
            except asyncio.CancelledError:
                interrupted = True
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
            duration_s = client.now()
            health = monitor.stop(play.records)
    return LoadRun(
        target=target,
        load=load,
        records=tuple(sorted(play.records, key=lambda record: record.index)),
        health=health,
        duration_s=duration_s,
        started_at=started_at,
        num_requested=len(requests),
        interrupted=interrupted,
        settings=settings or {},
    )


def check_complete(run: LoadRun, name: str) -> None:
    """Raise unless every request succeeded: a ratio of runs with failed requests means nothing.

    KeyboardInterrupt if the run was ended early, else EngineUnavailable, naming `name`'s first
    failure.
    """
    if run.interrupted:
        raise KeyboardInterrupt
    failed = [record for record in run.records if not record.ok]
    if failed:
        raise EngineUnavailable(
            f"{name} failed {len(failed)} of {len(run.records)} requests, the first by "
            f"{failed[0].error_kind}: {failed[0].error}"
        )


def prepare(target: Target, requests: Sequence[BenchRequest], load: LoadPattern) -> SendPlan:
    """Return the plan of a run; raises ConfigError if the load or a request makes no sense."""
    check_load(load)
    return SendPlan(
        _starts(requests, load), bodies=[request_body(target, each) for each in requests]
    )


def _starts(requests: Sequence[BenchRequest], load: LoadPattern) -> list[float] | None:
    """Return the start time of each request, or None in a closed loop."""
    if load.replay:
        return replayed_times(requests, load.time_scale)
    return None if _is_closed(load) else arrival_times(len(requests), load)


def _is_closed(load: LoadPattern) -> bool:
    """Return whether the load is a closed loop: an infinite rate under a limit of concurrency.

    There every request is due at once, so times can only count from when a place became free.
    """
    open_loop = load.replay or load.ramp_up is not None or not math.isinf(load.request_rate)
    return not open_loop and load.max_concurrency is not None


class Places:
    """The places of a concurrency limit, given in FIFO order, and when each became free."""

    def __init__(self, number: int) -> None:
        self._free_since = [0.0] * number
        self._waiting: deque[asyncio.Future[float]] = deque()

    async def take(self, intended_s: float) -> float:
        """Wait for a place; return when it became available, `intended_s` at the earliest.

        This is a time of the schedule, not of the client's clock: if the client comes late to a
        free place, the delay is its own and does not count as queueing.
        """
        if self._free_since:
            return max(intended_s, heapq.heappop(self._free_since))
        waiter: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        return max(intended_s, await waiter)

    def leave(self, time_s: float) -> None:
        """Give a place back, free since `time_s`."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(time_s)
                return
        heapq.heappush(self._free_since, time_s)


class _Play:
    """Plays requests against one client; `records` grows as requests end."""

    def __init__(
        self,
        client: Client,
        requests: Sequence[BenchRequest],
        bodies: Sequence[bytes],
        load: LoadPattern,
    ) -> None:
        self.records: list[MeasuredRequest] = []
        self._client = client
        self._requests = requests
        self._bodies = bodies
        self._num_places = load.max_concurrency
        self._places: Places | None = None

    async def all(self, starts: Sequence[float] | None) -> None:
        """Play all requests: at `starts`, or each as soon as a place is free."""
        if starts is None:
            waiting = deque(range(len(self._requests)))
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._num_places or 0, len(waiting))):
                    group.create_task(self._one_after_another(waiting))
            return
        if self._num_places is not None:
            self._places = Places(self._num_places)
        async with asyncio.TaskGroup() as group:
            for start_s, index in sorted(zip(starts, range(len(starts)), strict=True)):
                delay_s = start_s - self._client.now()
                if delay_s > 0:
                    await asyncio.sleep(delay_s)
                group.create_task(self._request(index, start_s))

    async def _one_after_another(self, waiting: deque[int]) -> None:
        intended_s = 0.0
        while waiting:
            record = await self._request(waiting.popleft(), intended_s)
            intended_s = self._client.now() if record.end_s is None else record.end_s

    async def _request(self, index: int, intended_s: float) -> MeasuredRequest:
        request = self._requests[index]
        admitted_s = intended_s
        if self._places is not None:
            admitted_s = await self._places.take(intended_s)
        planned = MeasuredRequest(
            index=index,
            intended_s=intended_s,
            admitted_s=admitted_s,
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
        )
        record = await self._client.send(self._bodies[index], planned)
        self.records.append(record)
        if record.error_kind == "interrupted":
            raise asyncio.CancelledError
        if self._places is not None:
            self._places.leave(self._client.now() if record.end_s is None else record.end_s)
        return record


async def _watching(client: Client, num_requests: int, watch: Watch | None) -> None:
    while watch is not None:
        await asyncio.sleep(WATCH_PERIOD_S)
        watch(replace(client.state, elapsed_s=client.now(), num_requests=num_requests))


def _allow_open_files(num_requests: int, load: LoadPattern) -> None:
    """Raise this process's limit of open files as far as allowed: every connection is one.

    A run that may need more still starts: only overlapping connections need a file each, and a
    request that gets none is recorded as the client's failure.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(load.max_concurrency or num_requests, num_requests) + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep the garbage collector's long passes out of the measurement.

    Existing objects are excluded from collection, and so are objects that survive two passes,
    until the end. At 2,000 streams full passes made the event loop 33 to 75 ms late at p99,
    against 4 to 16 ms without them. Only long-lived cycles stay uncollected.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(thresholds[0], thresholds[1], 2**30)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()

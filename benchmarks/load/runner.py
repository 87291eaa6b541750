"""One load test: sends every request at its time, sessions turn by turn, and measures them.

Owns the sequence: the open loop (arrival times), the closed loop (users), the limit of
concurrency, conversations that grow by real replies, and the end, also by Ctrl-C. Knows
neither HTTP (client) nor the evaluation (metrics). `run_load` is the entry: called by
benchmarks.serve, and by sweep and compare, once for each point.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from benchmarks.load.arrivals import arrival_times, check_load, replayed_times
from benchmarks.load.client import Client, request_body
from benchmarks.load.contracts import BenchRequest, Load, Message, RequestRecord, Run, Target
from benchmarks.load.files import allow_open_files
from benchmarks.load.health import Monitor
from topspin.errors import ConfigError, EngineUnavailable

WATCH_PERIOD_S = 0.25


@dataclass(frozen=True)
class Snapshot:
    """The state of a run, for the progress view; `num_events` counts events with output."""

    elapsed_s: float
    num_requests: int
    num_sent: int
    num_completed: int
    num_failed: int
    num_events: int

    @property
    def num_running(self) -> int:
        """The number of requests at the server."""
        return self.num_sent - self.num_completed - self.num_failed


Watch = Callable[[Snapshot], None]
# A single request, or a session's turns in order; each with its index among all requests.
Unit = list[tuple[int, BenchRequest]]


class Plan(NamedTuple):
    """A run before it begins: the units, their start times, and the bodies.

    `starts_s` is None in a closed loop, where units start when a user is free. `bodies` has an
    entry per request, empty if the conversation is not known yet.
    """

    units: list[Unit]
    starts_s: list[float] | None
    bodies: list[bytes]


def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    load: Load,
    *,
    settings: dict[str, Any] | None = None,
    watch: Watch | None = None,
) -> Run:
    """Send all `requests` to `target` by `load` and return the measurements.

    `watch` is called about four times a second, in the event loop, so it must be quick. The
    first Ctrl-C ends the run early: requests still running are recorded as "interrupted".
    Raises ConfigError, before anything is sent, if the load or a request makes no sense.
    """
    return asyncio.run(measure(target, requests, load, settings=settings, watch=watch))


async def measure(
    target: Target,
    requests: Sequence[BenchRequest],
    load: Load,
    *,
    settings: dict[str, Any] | None = None,
    watch: Watch | None = None,
) -> Run:
    """Do what run_load does, in the running event loop; a cancellation ends the run early."""
    plan = prepare(target, requests, load)
    allow_open_files(_most_connections(len(plan.units), load))
    interrupted = False
    async with Client(target, timeout_s=load.request_timeout_s) as client:
        play = _Play(client, target, load, plan.bodies)
        monitor = Monitor()
        with _quiet_collector():
            started_at = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            monitor.start()
            client.begin()
            try:
                async with asyncio.TaskGroup() as group:
                    watcher = group.create_task(_watching(client, len(requests), watch))
                    await play.all(plan.units, plan.starts_s)
                    watcher.cancel()
            except asyncio.CancelledError:
                interrupted = True
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
            duration_s = client.now()
            health = monitor.stop(play.records)
    return Run(
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


def check_complete(run: Run, name: str) -> None:
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


def prepare(target: Target, requests: Sequence[BenchRequest], load: Load) -> Plan:
    """Return the plan of a run; raises ConfigError if the load or a request makes no sense."""
    check_load(load)
    units = sessions_of(requests)
    bodies = [b"" if request.turn else request_body(target, request) for request in requests]
    return Plan(units, _unit_starts(units, load), bodies)


def sessions_of(requests: Sequence[BenchRequest]) -> list[Unit]:
    """Group the turns of each session, in the order in which units first appear.

    Raises ConfigError if a session has not exactly the turns 0, 1, ... or a turn is no message.
    """
    units: list[Unit] = []
    sessions: dict[int, Unit] = {}
    for index, request in enumerate(requests):
        if request.session is None:
            units.append([(index, request)])
        elif request.session in sessions:
            sessions[request.session].append((index, request))
        else:
            sessions[request.session] = [(index, request)]
            units.append(sessions[request.session])
    for session, unit in sessions.items():
        unit.sort(key=lambda turn: turn[1].turn)
        turns = [request.turn for _, request in unit]
        if turns != list(range(len(turns))):
            raise ConfigError(f"session {session} has the turns {turns}, not 0 to {len(turns) - 1}")
        if len(unit) > 1 and any(request.messages is None for _, request in unit):
            raise ConfigError(f"session {session} has a turn without messages")
    return units


def _unit_starts(units: Sequence[Unit], load: Load) -> list[float] | None:
    """Return the start time of each unit, or None in a closed loop."""
    if load.replay:
        return replayed_times([unit[0][1] for unit in units], load.time_scale)
    if _num_users(load) is not None:
        return None
    return arrival_times(len(units), load)


def _num_users(load: Load) -> int | None:
    """Return the size of the closed loop, or None if the load is an open one.

    An infinite rate under a limit of concurrency is a closed loop: every request is due at once, so
    times can only count from when a place became free.
    """
    if load.users is not None:
        return load.users
    open_loop = load.replay or load.ramp_up is not None or not math.isinf(load.request_rate)
    return None if open_loop else load.max_concurrency


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
    """Plays units against one client; `records` grows as requests end."""

    def __init__(self, client: Client, target: Target, load: Load, bodies: Sequence[bytes]) -> None:
        self.records: list[RequestRecord] = []
        self._client = client
        self._target = target
        self._load = load
        self._bodies = bodies
        limited = load.max_concurrency is not None and _num_users(load) is None
        self._places = Places(load.max_concurrency or 0) if limited else None

    async def all(self, units: Sequence[Unit], starts: Sequence[float] | None) -> None:
        """Play all units: at `starts`, or each as soon as a user is free."""
        if starts is None:
            waiting = deque(units)
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_num_users(self._load) or 0, len(units))):
                    group.create_task(self._user(waiting))
            return
        async with asyncio.TaskGroup() as group:
            for start_s, unit in sorted(zip(starts, units, strict=True), key=lambda pair: pair[0]):
                await self._until(start_s)
                group.create_task(self._unit(unit, start_s))

    async def _user(self, waiting: deque[Unit]) -> None:
        intended_s = 0.0
        while waiting:
            end_s = await self._unit(waiting.popleft(), intended_s)
            intended_s = end_s + self._load.think_time_s
            if waiting:
                await self._until(intended_s)

    async def _unit(self, unit: Unit, intended_s: float) -> float:
        """Play a request, or a session turn by turn; return when it ended."""
        conversation: list[Message] = []
        for position, (index, request) in enumerate(unit):
            if position:
                intended_s = self._next_turn(request, intended_s)
                await self._until(intended_s)
            record = await self._request(index, request, intended_s, conversation)
            intended_s = record.intended_s if record.end_s is None else record.end_s
            if not record.ok:
                self._skip(unit[position + 1 :], intended_s)
                break
            if len(unit) > 1:
                answer = {"role": "assistant", "content": record.text}
                conversation += [*(request.messages or ()), answer]
        return intended_s

    def _next_turn(self, request: BenchRequest, end_s: float) -> float:
        due_s = end_s + self._load.think_time_s
        if self._load.replay and request.arrival_s is not None:
            due_s = max(due_s, request.arrival_s * self._load.time_scale)
        return due_s

    async def _request(
        self, index: int, request: BenchRequest, intended_s: float, conversation: list[Message]
    ) -> RequestRecord:
        planned = _planned(index, request, intended_s)
        body = self._bodies[index] or request_body(self._target, request, conversation)
        admitted_s = intended_s
        if self._places is not None:
            admitted_s = await self._places.take(intended_s)
        record = await self._client.send(body, replace(planned, admitted_s=admitted_s))
        self.records.append(record)
        if record.error_kind == "interrupted":
            raise asyncio.CancelledError
        if self._places is not None:
            self._places.leave(self._client.now() if record.end_s is None else record.end_s)
        return record

    def _skip(self, turns: Unit, time_s: float) -> None:
        """Record the turns that cannot be sent because the previous turn failed."""
        for index, request in turns:
            planned = _planned(index, request, time_s)
            reason = "the turn before it failed"
            skipped = replace(planned, end_s=time_s, error_kind="turn_skipped", error=reason)
            self.records.append(skipped)
            self._client.counters.num_sent += 1
            self._client.counters.num_failed += 1

    async def _until(self, time_s: float) -> None:
        delay_s = time_s - self._client.now()
        if delay_s > 0:
            await asyncio.sleep(delay_s)


def _planned(index: int, request: BenchRequest, intended_s: float) -> RequestRecord:
    return RequestRecord(
        index=index,
        intended_s=intended_s,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        session=request.session,
        turn=request.turn,
    )


async def _watching(client: Client, num_requests: int, watch: Watch | None) -> None:
    while watch is not None:
        await asyncio.sleep(WATCH_PERIOD_S)
        counters = client.counters
        watch(
            Snapshot(
                elapsed_s=client.now(),
                num_requests=num_requests,
                num_sent=counters.num_sent,
                num_completed=counters.num_completed,
                num_failed=counters.num_failed,
                num_events=counters.num_events,
            )
        )


def _most_connections(num_units: int, load: Load) -> int:
    limit = load.users if load.users is not None else load.max_concurrency
    return num_units if limit is None else min(limit, num_units)


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

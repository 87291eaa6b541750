"""The gateway's side of the control connection: sends requests and delivers their outputs.

Owns the table of requests in flight, the reading of the connection (`run`; after it returns,
the caller may set another `connection` and call it again), and the guarantee
that every request submitted here ends exactly once: finished, cancelled, or with a typed
error. Where an engine goes on without lost nodes, its requests also outlive their scheduler: the
next one gets them with the outputs that have come. Knows no HTTP, no text and no socket (a
ControlConnection is passed in).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from server.gateway.call import Call
from topspin.errors import (
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    NodeLost,
    NotFound,
    Overloaded,
    PeerLost,
    Poison,
    ProtocolError,
    RequestTimeout,
    StepUnfinished,
    TopspinError,
    VersionMismatch,
)
from topspin.messages import (
    AbortRequest,
    AddRequest,
    AnyMessage,
    EngineState,
    Feed,
    FeedRequest,
    Message,
    Outputs,
    Refused,
    RequestFailed,
    RequestOutput,
    RequestQueued,
    Stats,
    StatsQuery,
    Trace,
    TraceRequest,
    pack_ints,
)
from topspin.plan.settings import SchedulingPolicy

# So long is a scheduler's prediction used: work may end earlier than it thought.
WAIT_KNOWN_S = 1.0
# A request that loses so many schedulers without an output between may be their end's cause.
MAX_REPLAYS = 5

_Query = StatsQuery | TraceRequest | FeedRequest
_Answer = TypeVar("_Answer", Stats, Trace, Feed)
_log = logging.getLogger("gateway")


class ControlConnection(Protocol):
    """The methods used of topspin.processes.channel.AsyncControlClient."""

    async def recv(self) -> AnyMessage:
        """Return the next message; raises PeerLost when the scheduler is gone."""

    def send(self, message: Message) -> None:
        """Queue a message for the scheduler."""

    def close(self) -> None:
        """Release the connection."""


@dataclass(slots=True)
class _InFlight:
    """One request in flight, and the output that has come.

    `is_taken`: a scheduler got it, be it one that is gone.
    """

    call: Call
    request: AddRequest
    is_taken: bool
    output: array[int] = field(default_factory=lambda: array("i"))
    num_scored: int = 0
    num_replays: int = 0

    def rest(self) -> AddRequest:
        """Return the request for what has not come yet."""
        return msgspec.structs.replace(
            self.request,
            replayed=self.is_taken,
            output=pack_ints(self.output),
            num_scored=self.num_scored,
        )


@dataclass(slots=True)
class EngineClient:
    """All requests of this gateway; `run` must be running for anything to arrive.

    `replay_deadline_s`: how long requests wait for another scheduler when theirs is lost; None:
    they end with it. Then new ones wait, too, while there are less than may be queued. `limits` are
    the scheduler's.
    """

    connection: ControlConnection
    replay_deadline_s: float | None = None
    limits: SchedulingPolicy = field(default_factory=SchedulingPolicy)
    state: EngineState = field(default_factory=lambda: EngineState(state="starting"))
    _requests: dict[str, _InFlight] = field(default_factory=dict)
    _queries: dict[int, asyncio.Future[Stats | Trace | Feed]] = field(default_factory=dict)
    _query_ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    # By tenant: how long any request of theirs would have waited, and when that was.
    _waits: dict[str, tuple[float, float]] = field(default_factory=dict)
    _draining: bool = False
    # Runs while requests wait for another scheduler.
    _deadline: asyncio.TimerHandle | None = None

    def next_number(self) -> int:
        """Return a number that makes ids of requests unique: clients may send the same id twice."""
        return next(self._numbers)

    @property
    def num_in_flight(self) -> int:
        """Number of choices that the engine still works on for this gateway."""
        return len(self._requests)

    @property
    def is_waiting(self) -> bool:
        """Say whether requests wait for another scheduler."""
        return self._deadline is not None

    @property
    def condition(self) -> str:
        """The engine's state, or `stopping` while this gateway drains."""
        return "stopping" if self._draining else self.state.state

    @property
    def accepts(self) -> bool:
        """Say whether the engine takes requests, be it that they wait until it is whole."""
        return self.state.state in ("ready", "recovering")

    def check_ready(self) -> None:
        """Raise EngineUnavailable unless a new request can be accepted."""
        if self._draining:
            raise EngineUnavailable("the server is shutting down")
        if not self.accepts:
            # A failure's detail may name processes and exceptions: it is only logged.
            is_told = self.state.detail and self.state.state != "failed"
            detail = f": {self.state.detail}" if is_told else ""
            raise EngineUnavailable(f"the engine is not ready ({self.state.state}){detail}")

    def check_wait(self, tenant: str, timeout_s: float | None) -> None:
        """Raise Overloaded if the scheduler would refuse any request of the tenant now.

        It has said so a moment ago, and for how long that holds. The request has not been read yet.
        """
        if tenant not in self._waits:
            return
        wait_s, at_s = self._waits[tenant]
        passed_s = time.monotonic() - at_s
        late_s = wait_s - passed_s - self.limits.first_token_bound_s(timeout_s)
        if passed_s > WAIT_KNOWN_S:
            del self._waits[tenant]
        elif late_s > 0:
            raise Overloaded(
                f"the first token would come in {wait_s - passed_s:.1f} s, which is too late",
                retry_after_s=late_s,
            )

    def submit(self, requests: Sequence[AddRequest], *, grammar_field: str = "") -> Call:
        """Send `requests`, the choices of one call in order; raises EngineUnavailable.

        `grammar_field` is named in errors about their grammar.
        """
        self.check_ready()
        if self.is_waiting and self.num_in_flight >= self.limits.max_num_queued_reqs:
            raise EngineUnavailable(f"{self.num_in_flight} requests wait for another scheduler")
        call = Call(self._release, self._abort, grammar_field=grammar_field)
        for request in requests:
            assert request.request_id not in self._requests, "request ids are unique"
            call.request_ids.append(request.request_id)
            in_flight = _InFlight(call, request, is_taken=not self.is_waiting)
            self._requests[request.request_id] = in_flight
        if not self.is_waiting:
            for request in requests:
                self.connection.send(request)
        return call

    async def stats(self, deadline_s: float) -> Stats:
        """Ask the scheduler for its counters; raises EngineUnavailable past the deadline."""
        return await self._ask(StatsQuery(query_id=next(self._query_ids)), Stats, deadline_s)

    async def trace(self, seconds: float, deadline_s: float) -> Trace:
        """Ask all nodes for their stamps of the last `seconds`; raises as stats()."""
        query = TraceRequest(query_id=next(self._query_ids), seconds=seconds)
        return await self._ask(query, Trace, deadline_s)

    async def feed(self, after: int, *, experts: bool, deadline_s: float) -> Feed:
        """Ask the scheduler what is newer than the cursor `after`; raises as stats()."""
        query = FeedRequest(query_id=next(self._query_ids), after=after, experts=experts)
        return await self._ask(query, Feed, deadline_s)

    async def _ask(self, query: _Query, kind: type[_Answer], deadline_s: float) -> _Answer:
        if self.state.state == "failed":
            raise EngineUnavailable("the engine has failed")
        if self.is_waiting:
            raise EngineUnavailable(self.state.detail)
        loop = asyncio.get_running_loop()
        coming: asyncio.Future[Stats | Trace | Feed] = loop.create_future()
        self._queries[query.query_id] = coming
        try:
            self.connection.send(query)
            async with asyncio.timeout(deadline_s):
                answer = await coming
        except TimeoutError:
            late = f"the scheduler did not answer within {deadline_s:g} s"
            raise EngineUnavailable(late) from None
        finally:
            del self._queries[query.query_id]
        assert isinstance(answer, kind)
        return answer

    def drain(self) -> None:
        """Refuse new requests from now on; those in flight continue."""
        self._draining = True

    def fail_all(self, error: TopspinError) -> None:
        """End every call and query in flight with `error`; aborts their requests in the engine."""
        for in_flight in list(self._requests.values()):
            in_flight.call.fail(error)
        self._fail_queries(error)

    def _fail_queries(self, error: TopspinError) -> None:
        for query in self._queries.values():
            if not query.done():
                query.set_exception(error)

    async def run(self) -> None:
        """Read the connection until the scheduler is gone.

        Every call then ends with NodeLost, or waits for another scheduler until
        `replay_deadline_s` has passed. Raises VersionMismatch if the scheduler refuses this
        gateway; every call in flight then ends with an error, as after any other exception.
        """
        try:
            while True:
                await self._read_one()
        except PeerLost:
            self._scheduler_lost()
        except VersionMismatch as refusal:
            self._engine_failed(refusal)
            raise
        except BaseException:
            self._engine_failed(EngineUnavailable("the gateway no longer reads from the scheduler"))
            raise

    async def _read_one(self) -> None:
        try:
            message = await self.connection.recv()
        except ProtocolError as error:
            # It may have held an output of any call, so all calls fail.
            self.fail_all(error)
            return
        if isinstance(message, Refused):
            raise VersionMismatch(f"the scheduler refused this gateway: {message.reason}")
        self._handle(message)

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._deliver(output)
        elif isinstance(message, RequestQueued):
            for request_id in message.request_ids:
                if in_flight := self._requests.get(request_id):
                    in_flight.call.note_queued(request_id)
        elif isinstance(message, RequestFailed):
            # A scheduler that stops fails all requests; the next one gets them.
            if not self.is_waiting:
                in_flight = self._requests.pop(message.request_id, None)
                if in_flight is not None:
                    if message.wait_s:
                        tenant = in_flight.request.tenant.name
                        self._waits[tenant] = message.wait_s, time.monotonic()
                    call = in_flight.call
                    call.fail(_typed_error(message, call.grammar_field))
        elif isinstance(message, Stats | Trace | Feed):
            query = self._queries.get(message.query_id)
            if query is not None and not query.done():
                query.set_result(message)
        elif isinstance(message, EngineState):
            self._state_changed(message)
        else:
            self.fail_all(ProtocolError(f"the scheduler sent {type(message).__name__}"))

    def _deliver(self, output: RequestOutput) -> None:
        in_flight = self._requests.get(output.request_id)
        if in_flight is None:
            return  # it was aborted, and this output was already on its way
        if output.index != len(in_flight.output):
            expected = len(in_flight.output)
            error = ProtocolError(f"output {output.index} came where {expected} was expected")
            in_flight.call.fail(error)
            return
        in_flight.output.extend(output.token_ids)
        in_flight.num_scored += len(output.prompt_logprobs)
        in_flight.num_replays = 0
        if output.finish_reason is not None:
            del self._requests[output.request_id]
        in_flight.call.deliver(output)

    def _abort(self, request_id: str) -> None:
        was_there = self._requests.pop(request_id, None) is not None
        if was_there and self.state.state != "failed" and not self.is_waiting:
            self.connection.send(AbortRequest(request_id=request_id))

    def _release(self, call: Call) -> None:
        for request_id in call.request_ids:
            self._abort(request_id)

    # Losing a scheduler.

    def _state_changed(self, message: EngineState) -> None:
        if message.state == "stopping" and self._can_wait:
            self._scheduler_lost()
        elif self.is_waiting and message.state not in ("ready", "recovering"):
            # One that fails at its start is restarted, too.
            self.state = msgspec.structs.replace(self.state, detail=message.detail)
        else:
            was_waiting = self._stop_waiting()
            self.state = message
            if message.state == "failed":
                _log.error("gateway: the engine failed: %s", message.detail)
                self.fail_all(EngineUnavailable("the engine has failed"))
            elif was_waiting:
                self._replay()

    @property
    def _can_wait(self) -> bool:
        return self.replay_deadline_s is not None and self.accepts

    def _scheduler_lost(self) -> None:
        """Have calls wait for another scheduler, or end them."""
        if self.is_waiting:
            return
        error = NodeLost("the connection to the scheduler was lost")
        if not self._can_wait:
            if self.state.state != "failed":  # else it has been said
                _log.error("gateway: %s; connecting again", error)
            self._engine_failed(error)
            return
        assert self.replay_deadline_s is not None
        _log.warning("gateway: %s; %d requests wait for another", error, self.num_in_flight)
        self._fail_queries(error)
        detail = "waiting for another scheduler"
        self.state = msgspec.structs.replace(self.state, state="recovering", detail=detail)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self.replay_deadline_s, self._give_up)

    def _stop_waiting(self) -> bool:
        """Have calls wait no longer for another scheduler; returns whether they did."""
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            deadline.cancel()
        return deadline is not None

    def _give_up(self) -> None:
        limit_s = self.replay_deadline_s
        self._engine_failed(NodeLost(f"no scheduler came back within {limit_s:g} s"))

    def _replay(self) -> None:
        """Send every request in flight to the scheduler that has come."""
        _log.warning("gateway: %d requests go on with another scheduler", self.num_in_flight)
        for in_flight in list(self._requests.values()):
            in_flight.num_replays += 1
            if in_flight.num_replays > MAX_REPLAYS:
                error = NodeLost(f"{in_flight.num_replays} schedulers were lost")
                in_flight.call.fail(error)  # and with it the call's other requests
        for in_flight in self._requests.values():
            self.connection.send(in_flight.rest())
            in_flight.is_taken = True

    def _engine_failed(self, error: TopspinError) -> None:
        self._stop_waiting()
        self.state = EngineState(state="failed", detail=str(error))
        self.fail_all(error)


def _typed_error(failed: RequestFailed, grammar_field: str) -> TopspinError:
    """Return the error that a RequestFailed stands for, in terms of the client's fields."""
    if failed.code == Overloaded.code:
        return Overloaded(failed.message, retry_after_s=failed.retry_after_s)
    if failed.status != 400:
        for kind in (
            NotFound,
            EngineUnavailable,
            RequestTimeout,
            NodeLost,
            Poison,
            StepUnfinished,
            ProtocolError,
        ):
            if (kind.code, kind.status) == (failed.code, failed.status):
                return kind(failed.message)
        return EngineError(failed.message)
    if failed.param == "grammar" and grammar_field:
        return InvalidRequest(f"`{grammar_field}`: {failed.message}", param=grammar_field)
    return InvalidRequest(failed.message, param=failed.param or None)

"""Requests in flight end exactly once, for any messages of the control connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import pytest

from server.gateway.call import MAX_UNREAD, Call, ClientGone
from server.gateway.engine_client import MAX_REPLAYS, EngineClient
from tests.server.gateway.fakes import FakeEngine, output, reading
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
    StepUnfinished,
    TopspinError,
    VersionMismatch,
)
from topspin.messages import (
    AddRequest,
    AnyMessage,
    EngineState,
    Refused,
    RequestFailed,
    RequestQueued,
    SamplingParams,
    Stop,
    TokenLogprobs,
    unpack_ints,
)
from topspin.plan.settings import SchedulingPolicy


def request(request_id: str) -> AddRequest:
    return AddRequest(
        request_id=request_id, prompt=b"", sampling=SamplingParams(max_tokens=4, seed=1)
    )


class Connected(NamedTuple):
    fake: FakeEngine
    engine: EngineClient
    reader: asyncio.Task[None]


@asynccontextmanager
async def connected(replay_deadline_s: float | None = None) -> AsyncIterator[Connected]:
    fake = FakeEngine()
    engine = EngineClient(fake, replay_deadline_s)
    async with reading(engine) as reader:
        fake.become_ready()
        await fake.settle()
        yield Connected(fake, engine, reader)


async def outcome(call: Call) -> TopspinError:
    """Return the error that ends a call without outputs left."""
    with pytest.raises(TopspinError) as caught:
        await call.next()
    return caught.value


async def test_outputs_reach_their_choice_in_order() -> None:
    async with connected() as (fake, engine, _):
        one = engine.submit([request("a-0"), request("a-1")])
        other = engine.submit([request("b-0")])
        assert [added.request_id for added in fake.added] == ["a-0", "a-1", "b-0"]
        fake.emit(output("a-1", [5]), output("b-0", [6]), output("a-0", [7]))
        fake.emit(output("a-1", [8, 9], index=1, finish_reason="stop"))
        await fake.settle()
        assert [(item.request_id, item.token_ids) for item in await one.next()] == [
            ("a-1", (5,)),
            ("a-0", (7,)),
            ("a-1", (8, 9)),
        ]
        assert [item.token_ids for item in await other.next()] == [(6,)]
        assert engine.num_in_flight == 2, "a-1 has finished"


async def test_a_client_that_reads_too_slowly_loses_its_request() -> None:
    async with connected() as (fake, engine, _):
        slow, other = engine.submit([request("a-0")]), engine.submit([request("b-0")])
        half = [1] * (MAX_UNREAD // 2)
        fake.emit(output("a-0", half))
        await fake.settle()
        assert len(await slow.next()) == 1
        for index in (1, 2, 3):
            fake.emit(output("a-0", half, index=index * len(half)))
        await fake.settle()
        with pytest.raises(ClientGone):
            await slow.next()
        assert fake.aborted == ["a-0"]
        fake.emit(output("b-0", [1]))
        assert len(await other.next()) == 1


async def test_log_probabilities_of_a_long_prompt_may_come_at_once() -> None:
    async with connected() as (fake, engine, _):
        call = engine.submit([request("a-0")])
        ids = tuple(range(20))
        score = TokenLogprobs(logprob=-1.0, top_ids=ids, top_logprobs=(-1.0,) * 20)
        fake.emit(output("a-0", [], prompt_logprobs=(score,) * (MAX_UNREAD // 16)))
        fake.emit(output("a-0", [1]))
        await fake.settle()
        assert len(await call.next()) == 2


async def test_a_call_is_queued_when_all_its_choices_are() -> None:
    async with connected(replay_deadline_s=9.0) as connection:
        fake, engine, _ = connection
        fake.queues = False
        call = engine.submit([request("a-0"), request("a-1")])
        waiting = asyncio.create_task(call.queued())
        fake.say(RequestQueued(request_ids=("a-0", "unknown")))
        await fake.settle()
        assert not waiting.done()
        # Another scheduler queues both; the first one said so before.
        await lose(connection)
        async with reconnected(engine, is_ready=False) as new:
            new.queues = False
            new.become_ready()
            new.say(RequestQueued(request_ids=("a-0",)))
            await new.settle()
            assert not waiting.done()
            new.say(RequestQueued(request_ids=("a-1",)))
            new.say(RequestQueued(request_ids=("a-1",)))
            await waiting
            new.emit(output("a-1", [5]))
            assert len(await call.next()) == 1


async def test_a_refusal_comes_before_it_counts_that_others_are_queued() -> None:
    async with connected() as (fake, engine, _):
        fake.queues = False
        call = engine.submit([request("a-0"), request("a-1")])
        fake.say(RequestQueued(request_ids=("a-0",)))
        full = {"code": "rate_limit_exceeded", "status": 429, "message": "full"}
        fake.say(RequestFailed(request_id="a-1", **full))
        with pytest.raises(Overloaded, match="full"):
            await call.queued()


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (PeerLost("closed"), NodeLost),
        (ProtocolError("rubbish"), ProtocolError),
        (EngineState(state="failed", detail="attention 0 died"), EngineUnavailable),
        (Stop(reason="a message for nodes"), ProtocolError),
    ],
)
async def test_what_hits_the_engine_ends_every_call_once(
    message: AnyMessage | Exception, kind: type[TopspinError]
) -> None:
    async with connected() as (fake, engine, _):
        calls = [engine.submit([request(f"{name}-0"), request(f"{name}-1")]) for name in "ab"]
        fake.emit(output("a-0", [1]))
        fake.say(message)
        assert [item.token_ids for item in await calls[0].next()] == [(1,)]
        for call in calls:
            assert type(await outcome(call)) is kind
        assert engine.num_in_flight == 0


async def test_a_lost_scheduler_is_said_to_new_requests_and_gets_no_aborts() -> None:
    async with connected() as connection:
        fake, engine, _ = connection
        call = engine.submit([request("a-0")])
        await lose(connection)
        await outcome(call)
        assert fake.aborted == []
        with pytest.raises(EngineUnavailable, match=r"not ready \(failed\)"):
            engine.submit([request("b-0")])
        with pytest.raises(EngineUnavailable):
            await engine.stats(1.0)


async def test_a_refused_gateway_says_why_and_ends() -> None:
    async with connected() as (fake, engine, reader):
        fake.say(Refused(reason="revision 0.0.9"))
        with pytest.raises(VersionMismatch, match=r"revision 0\.0\.9"):
            await reader
        assert engine.condition == "failed"


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("not_found", 404, NotFound),
        ("node_lost", 503, NodeLost),
        ("poison", 500, Poison),
        ("step_failed", 503, StepUnfinished),
        ("something_new", 503, EngineError),
        ("something_new", 400, InvalidRequest),
    ],
)
async def test_a_failed_choice_fails_its_call_and_frees_its_siblings(
    code: str, status: int, kind: type[TopspinError]
) -> None:
    async with connected() as (fake, engine, _):
        call = engine.submit([request("a-0"), request("a-1")])
        other = engine.submit([request("b-0")])
        fake.say(RequestFailed(request_id="a-1", code=code, status=status, message="why"))
        error = await outcome(call)
        assert type(error) is kind
        assert str(error) == "why"
        assert error.status == status
        assert fake.aborted == ["a-0"]
        fake.emit(output("b-0", [3], finish_reason="length"))
        assert len(await other.next()) == 1


@pytest.mark.parametrize("index", [0, 1, 3])
async def test_an_output_that_repeats_or_skips_fails_its_request_only(index: int) -> None:
    async with connected() as (fake, engine, _):
        call = engine.submit([request("a-0")])
        other = engine.submit([request("b-0")])
        fake.emit(output("a-0", [1, 2]), output("b-0", [1]))
        fake.emit(output("a-0", [9], index=index))
        assert len(await call.next()) == 1
        assert isinstance(await outcome(call), ProtocolError)
        assert fake.aborted == ["a-0"]
        fake.emit(output("b-0", [2], index=1))
        assert len(await other.next()) >= 1


async def test_a_cancelled_call_is_aborted_and_late_outputs_are_dropped() -> None:
    async with connected() as (fake, engine, _):
        call = engine.submit([request("a-0"), request("a-1")])
        fake.emit(output("a-0", [1], finish_reason="length"))
        await call.next()
        call.cancel()
        call.cancel()
        assert fake.aborted == ["a-1"], "what has finished needs no abort"
        fake.emit(output("a-1", [1]))
        with pytest.raises(ClientGone):
            await call.next()
        assert engine.num_in_flight == 0


async def test_stopping_one_choice_leaves_the_others() -> None:
    async with connected() as (fake, engine, _):
        call = engine.submit([request("a-0"), request("a-1")])
        call.stop("a-0")
        assert fake.aborted == ["a-0"]
        fake.emit(output("a-0", [4]), output("a-1", [5]))
        assert [item.request_id for item in await call.next()] == ["a-1"]


async def test_a_bug_in_reading_leaves_nobody_waiting() -> None:
    async with connected() as (fake, engine, reader):
        call = engine.submit([request("a-0")])
        fake.say(RuntimeError("a bug"))
        with pytest.raises(RuntimeError):
            await reader
        assert isinstance(await outcome(call), EngineUnavailable)
        with pytest.raises(EngineUnavailable):
            engine.submit([request("b-0")])


async def test_stats_answer_or_a_deadline() -> None:
    async with connected() as (fake, engine, _):
        assert (await engine.stats(5.0)).num_blocks == 8
        fake.answers_stats = False
        with pytest.raises(EngineUnavailable, match="did not answer within"):
            await engine.stats(0.01)
        # An answer that comes too late has no receiver.
        fake.say(fake.stats)
        waiting = asyncio.create_task(engine.stats(5.0))
        await asyncio.sleep(0)
        fake.say(PeerLost("closed"))
        with pytest.raises(NodeLost):
            await waiting


async def test_nothing_is_accepted_before_the_engine_is_ready_or_while_draining() -> None:
    engine = EngineClient(FakeEngine())
    with pytest.raises(EngineUnavailable, match="not ready"):
        engine.submit([request("a-0")])
    async with connected() as (_, ready, _reader):
        ready.drain()
        assert ready.condition == "stopping"
        with pytest.raises(EngineUnavailable, match="shutting down"):
            ready.submit([request("a-0")])


# Other schedulers.


@asynccontextmanager
async def reconnected(engine: EngineClient, *, is_ready: bool = True) -> AsyncIterator[FakeEngine]:
    """Have the gateway read from another scheduler."""
    engine.connection = fake = FakeEngine()
    async with reading(engine):
        if is_ready:
            fake.become_ready()
            await fake.settle()
        yield fake


async def lose(connection: Connected, calls: Sequence[str] = ()) -> None:
    """Have the scheduler vanish; with `calls` it ends in order, and fails them first."""
    fake, _, reader = connection
    if calls:
        fake.say(EngineState(state="stopping", detail="SIGTERM"))
        for each in calls:
            fake.say(
                RequestFailed(request_id=each, code="engine_unavailable", status=503, message="")
            )
    fake.say(PeerLost("closed"))
    await reader


@pytest.mark.parametrize("failed", [("a-0", "b-0"), ()])
async def test_the_next_scheduler_gets_what_is_left_of_each_request(failed: Sequence[str]) -> None:
    async with connected(replay_deadline_s=60.0) as connection:
        old, engine, _ = connection
        begun, waits = engine.submit([request("a-0")]), engine.submit([request("b-0")])
        scores = (TokenLogprobs(logprob=-1.0), TokenLogprobs(logprob=-2.0))
        old.emit(output("a-0", [], prompt_logprobs=scores))
        old.emit(output("a-0", [5, 6]))
        await lose(connection, failed)
        assert engine.condition == "recovering"
        late = engine.submit([request("c-0"), request("c-1")])
        late.stop("c-1")
        assert len(old.added) == 2
        with pytest.raises(EngineUnavailable, match="waiting for another scheduler"):
            await engine.stats(1.0)
        async with reconnected(engine, is_ready=False) as new:
            new.say(EngineState(state="failed", detail="a node was lost at its start"))
            new.say(EngineState(state="starting", detail="loading: expert 0"))
            await new.settle()
            assert (engine.condition, engine.state.detail) == ("recovering", "loading: expert 0")
            assert new.added == []
            new.become_ready()
            await new.settle()
            assert [
                (each.request_id, each.replayed, list(unpack_ints(each.output)), each.num_scored)
                for each in new.added
            ] == [("a-0", True, [5, 6], 2), ("b-0", True, [], 0), ("c-0", False, [], 0)]
            assert new.aborted == []
            new.emit(output("a-0", [7], index=2, finish_reason="length"))
            new.emit(output("b-0", [8], finish_reason="length"))
            await new.settle()
            arrived = [item.token_ids for item in await begun.next()]
            assert arrived == [(), (5, 6), (7,)]
            assert [item.token_ids for item in await waits.next()] == [(8,)]
            assert (await engine.stats(5.0)).num_blocks == 8


async def test_requests_do_not_wait_for_ever() -> None:
    async with connected(replay_deadline_s=0.01) as connection:
        _, engine, _ = connection
        call = engine.submit([request("a-0")])
        await lose(connection)
        error = await outcome(call)
        assert isinstance(error, NodeLost)
        assert "no scheduler came back within 0.01 s" in str(error)
        with pytest.raises(EngineUnavailable, match=r"not ready \(failed\)"):
            engine.submit([request("b-0")])
        async with reconnected(engine) as new:
            assert new.added == []
            engine.submit([request("b-0")])
            assert len(new.added) == 1


@pytest.mark.parametrize("drains_first", [True, False])
async def test_a_gateway_that_ends_waits_too(drains_first: bool) -> None:
    """Its own deadline then ends what is left."""
    async with connected(replay_deadline_s=60.0) as connection:
        _, engine, _ = connection
        engine.submit([request("a-0")])
        if drains_first:
            engine.drain()
        await lose(connection)
        engine.drain()
        assert engine.condition == "stopping"
        async with reconnected(engine) as new:
            assert [each.request_id for each in new.added] == ["a-0"]


async def test_only_so_many_requests_wait() -> None:
    async with connected(replay_deadline_s=60.0) as connection:
        _, engine, _ = connection
        engine.limits = SchedulingPolicy(max_num_queued_reqs=3)
        engine.submit([request("a-0"), request("a-1")])
        await lose(connection)
        engine.submit([request("b-0")])
        with pytest.raises(EngineUnavailable, match="3 requests wait for another scheduler"):
            engine.submit([request("c-0")])


async def test_a_request_that_ends_one_scheduler_after_the_other_fails() -> None:
    async with connected(replay_deadline_s=60.0) as connection:
        _, engine, _ = connection
        call = engine.submit([request("poison-0"), request("poison-1")])
        engine.submit([request("fine-0")])  # it gets on with each of them
        await lose(connection)
        for index in range(MAX_REPLAYS):
            async with reconnected(engine) as new:
                ids = [each.request_id for each in new.added]
                assert ids == ["poison-0", "poison-1", "fine-0"]
                new.emit(output("poison-1", [9], index=index), output("fine-0", [9], index=index))
                new.say(PeerLost("closed"))
                await new.settle()
        async with reconnected(engine) as last:
            assert len(await call.next()) == MAX_REPLAYS
            assert isinstance(await outcome(call), NodeLost)
            assert [each.request_id for each in last.added] == ["fine-0"]

"""The loop on a scripted channel: causes that end the engine or a node, and the messages then."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.server.scheduler.engine import make_request
from tests.server.scheduler.fake_nodes import TIMINGS
from tests.server.scheduler.scripted_world import GATEWAY, World
from topspin.messages import (
    EngineState,
    ExpertCounts,
    Goodbye,
    Message,
    NodeMemory,
    Progress,
    StatsQuery,
    StepFailed,
    StepPlan,
    StepResult,
    Stop,
    TablePrepared,
    Welcome,
)
from topspin.processes.channel import Event, Malformed, PeerGone, Received


def started(*, num_requests: int = 1) -> World:
    """Return the script of an engine that starts and gets requests on different nodes."""
    world = World()
    world.start()
    for number in range(num_requests):
        request = make_request(f"r{number}", [number] * 3, max_tokens=40, seed=number)
        world.say("gateway", request)
    return world


def left(role: Literal["attention", "expert"], index: int, code: str, message: str) -> Received:
    """Return a node's Goodbye."""
    goodbye = Goodbye(role=role, index=index, code=code, message=message)
    return Received(f"{role} {index}".encode(), goodbye)


def failed(index: int, code: str, message: str) -> Received:
    """Return an attention node's report of a failed step."""
    report = StepFailed(
        step=3, generation=1, role="attention", index=index, code=code, message=message
    )
    return Received(f"attention {index}".encode(), report)


@pytest.mark.parametrize(
    ("event", "code", "reason"),
    [
        (PeerGone(b"expert 1"), "node_lost", "expert 1 (pid 7) closed its connection"),
        (PeerGone(b"attention 0"), "node_lost", "attention 0 (pid 7) closed its connection"),
        (
            left("expert", 0, "frame_error", "bad row"),
            "node_lost",
            "expert 0 left: bad row (frame_error)",
        ),
        (
            left("attention", 0, "peer_lost", "expert 1 is gone"),  # it is there all the same
            "node_lost",
            "attention 0 left: expert 1 is gone (peer_lost)",
        ),
        (
            failed(1, "deadline_exceeded", "expert 0 is late"),
            "step_failed",
            "step 3 failed on attention 1: expert 0 is late (deadline_exceeded)",
        ),
        (Malformed(b"expert 0", "3 frames"), "step_failed", "expert 0: 3 frames"),
        (
            Received(b"expert 0", StatsQuery(query_id=1)),
            "step_failed",
            "expert 0 sent StatsQuery",
        ),
        *(
            (Received(b"expert 0", message), "step_failed", "expert 0 speaks for expert 1")
            for message in (
                ExpertCounts(index=1, table_version=1, counts=()),
                Progress(step=1, generation=1, role="expert", index=1),
                NodeMemory(role="expert", index=1, resident_bytes=1),
                TablePrepared(role="expert", index=1, version=2),
            )
        ),
        (
            Received(
                b"attention 1",
                StepResult(step=1, generation=1, index=0, seq_ids=b"", tokens=b"", timings=TIMINGS),
            ),
            "step_failed",
            "attention 1 speaks for attention 0",
        ),
    ],
)
def test_what_ends_the_engine_ends_every_request_once(
    event: Event, code: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = started(num_requests=2)
    world.answer(2)
    world.poll(event)
    world.poll()
    assert world.service.run() == 1
    for number in range(2):
        failure = world.failure(f"r{number}")
        assert (failure.code, failure.status, failure.message) == (code, 503, reason)
    assert world.states() == ["starting", "ready", "failed"]
    assert world.channel.to(GATEWAY, EngineState)[-1].detail == reason
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [f"scheduler: the engine has failed: {reason}"]


def test_the_lost_node_is_named_and_not_the_one_that_noticed() -> None:
    world = started()
    late = Received(GATEWAY, make_request("late", [1], seed=3))
    world.answer(1)
    world.poll(failed(0, "peer_lost", "expert 1 closed its socket"))
    world.poll(late, PeerGone(b"attention 0"), PeerGone(b"expert 1"))
    assert world.service.run() == 1
    assert world.failure("r0").message == "expert 1 (pid 7) closed its connection"
    assert world.failure("late").code == "engine_unavailable"


@pytest.mark.parametrize(("code", "status"), [("invalid_config", 2), ("internal_error", 1)])
def test_a_node_that_cannot_be_what_it_was_configured_as_is_said_by_the_status(
    code: str, status: int
) -> None:
    world = World()
    for index in range(2):
        world.hello("expert", index)
        world.hello("attention", index)
    world.poll(left("expert", 1, code, "device cuda:1: there is none"))
    assert world.service.run() == status


def test_a_node_that_cannot_be_sent_a_plan_is_lost() -> None:
    world = World()
    world.start()
    world.channel.script.append(lambda: world.channel.dead.add(b"expert 1"))
    world.say("gateway", make_request("r", [1], max_tokens=40))
    assert world.service.run() == 1
    assert world.failure("r").message == "expert 1 cannot be sent its part of a step"


def test_a_long_step_is_fine_while_its_nodes_speak_and_a_silent_one_is_named() -> None:
    """Step 1 runs for 70 s; expert 0 has done its part, expert 1 works, and then hangs."""
    world = started()
    waits = Progress(step=1, generation=1, role="attention", index=0, state="waiting")
    works = Progress(step=1, generation=1, role="expert", index=1)
    world.say("expert 0", Progress(step=1, generation=1, role="expert", index=0, state="done"))
    for _ in range(5):
        for _ in range(12):  # a second each
            world.poll()
        world.say("attention 0", waits)
        world.say("expert 1", works)
    for _ in range(13):
        world.say("attention 0", waits)
        world.poll()
    assert world.service.run() == 1
    assert 0 < len(world.channel.script) < 6  # 20 s after the last report
    failure = world.failure("r0")
    assert failure.code == "node_lost"
    assert failure.message.startswith("expert 1: it has not got on with step 1")
    assert failure.message.endswith("it is connected (failover.progress_deadline_s 20)")


def test_stop_ends_requests_and_refuses_new_ones() -> None:
    world = started(num_requests=2)
    world.answer(1)
    world.channel.script.append(lambda: world.service.request_stop("SIGTERM"))
    world.say("gateway", make_request("late", [1]))
    world.poll(*(PeerGone(f"{r} {i}".encode()) for r in ("attention", "expert") for i in range(2)))
    world.poll(PeerGone(b"never polled"))
    assert world.service.run() == 0
    for request_id in ("r0", "r1", "late"):
        failure = world.failure(request_id)
        assert (failure.code, failure.status) == ("engine_unavailable", 503)
    assert "SIGTERM" in world.failure("r0").message
    assert "stopping" in world.failure("late").message
    assert len(world.channel.script) == 1  # all nodes had left, so it did not wait


@pytest.mark.parametrize("told_first", [True, False])
def test_a_node_that_leaves_while_the_engine_is_told_to_stop_is_no_loss(told_first: bool) -> None:
    world = started()
    gone: list[Event] = [PeerGone(b"attention 0")]

    def told() -> list[Event]:
        world.service.request_stop("SIGTERM")
        return gone if told_first else []

    world.channel.script.append(told)
    if not told_first:
        world.poll(*gone)
    world.poll(*(PeerGone(p) for p in (b"attention 1", b"expert 0", b"expert 1")))
    world.poll(PeerGone(b"never polled"))
    assert world.service.run() == 0
    assert world.states() == ["starting", "ready", "stopping"]
    assert world.failure("r0").code == "engine_unavailable"
    assert len(world.channel.script) == 1


def test_an_error_after_the_request_to_stop_is_no_failure() -> None:
    world = started()
    send = world.channel.send

    def stop_while_sending(peer: bytes, message: Message) -> bool:
        if isinstance(message, StepPlan):
            world.service.request_stop("SIGTERM")
            world.channel.dead.add(peer)
        return send(peer, message)

    world.channel.send = stop_while_sending  # type: ignore[method-assign]
    assert world.service.run() == 0
    assert world.states() == ["starting", "ready", "stopping"]
    assert world.failure("r0").code == "engine_unavailable"


def test_nodes_that_are_not_to_end_wait_for_another_scheduler() -> None:
    world = World()
    world.start()
    world.channel.at_end = lambda: world.service.request_stop("SIGTERM", ends_nodes=False)
    assert world.service.run() == 0
    assert world.states() == ["starting", "ready", "stopping"]
    assert not any(isinstance(message, Stop) for _, message in world.channel.sent)


def test_the_first_generation_comes_after_those_of_earlier_schedulers() -> None:
    """Nodes that kept their weights were in them, and hold sequences of that time."""
    world = World()
    world.hello("gateway", 0, generation=2**53)  # it is believed in nothing
    for index, (expert, attention) in enumerate(((6, 0), (0, 4))):
        world.hello("expert", index, generation=expert)
        world.hello("attention", index, generation=attention)
    world.poll()
    assert world.service.run() == 0
    welcomes = [each for _, each in world.channel.sent if isinstance(each, Welcome)]
    assert [each.topology.generation for each in welcomes] == [7] * 4


def test_stop_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.start()
    assert world.service.run() == 0
    late = [record.message for record in caplog.records if "has not left" in record.message]
    assert len(late) == 4


def test_a_node_whose_results_are_not_numbers_is_lost() -> None:
    world = World()
    world.start()
    for number in range(8):
        world.say("gateway", make_request(f"r{number}", [number, 3], seed=number))
    for node in world.nodes:
        node.fails = lambda seq_id: True
    world.answer(12)
    assert world.service.run() == 1
    ended = world.channel.to(GATEWAY, EngineState)[-1]
    assert (ended.state, ended.detail) == (
        "failed",
        "expert 0: rows of 3 steps in a row are not numbers",
    )

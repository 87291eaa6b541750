"""The loop on a scripted channel: causes that end the engine or a node, and the messages then."""

from __future__ import annotations

import pytest

from tests.server.scheduler.engine import make_request
from tests.server.scheduler.scripted_world import GATEWAY, World
from tests.structs import changed
from topspin.messages import (
    AddRequest,
    EngineState,
    ExpertCounts,
    Goodbye,
    Message,
    Progress,
    StatsQuery,
    StepFailed,
    StepPlan,
    Stop,
    TablePrepared,
    Welcome,
    unpack_ints,
)
from topspin.plan.network import NetworkSpec
from topspin.plan.settings import FailoverPolicy
from topspin.plan.spec import EnginePlan
from topspin.processes.channel import Event, Malformed, PeerGone, Received


def run_with_two_requests(world: World, *last: Event) -> int:
    """Run an engine with a request on each attention node, then deliver `last`."""
    world.start()
    for number in range(2):
        request = make_request(f"r{number}", [number] * 3, max_tokens=40, seed=number)
        world.say("gateway", request)
    world.answer(2)
    world.poll(*last)
    return world.service.run()


@pytest.mark.parametrize(
    ("event", "code", "reason"),
    [
        (PeerGone(b"expert 1"), "node_lost", "expert 1 (pid 7) closed its connection"),
        (PeerGone(b"attention 0"), "node_lost", "attention 0 (pid 7) closed its connection"),
        (
            Received(
                b"expert 0", Goodbye(role="expert", index=0, code="frame_error", message="bad row")
            ),
            "node_lost",
            "expert 0 left: bad row (frame_error)",
        ),
        (
            Received(
                b"attention 1",
                StepFailed(
                    step=3,
                    generation=1,
                    role="attention",
                    index=1,
                    code="deadline_exceeded",
                    message="expert 0 is late",
                ),
            ),
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
                TablePrepared(role="expert", index=1, version=2),
            )
        ),
    ],
)
def test_what_ends_the_engine_ends_every_request_once(
    event: Event, code: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    assert run_with_two_requests(world, event) == 1
    for number in range(2):
        failed = world.failure(f"r{number}")
        assert (failed.code, failed.status, failed.message) == (code, 503, reason)
    assert world.states() == ["starting", "ready", "failed"]
    assert world.channel.to(GATEWAY, EngineState)[-1].detail == reason
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [f"scheduler: the engine has failed: {reason}"]


def test_requests_that_come_with_the_failure_are_answered() -> None:
    world = World()
    late = Received(GATEWAY, make_request("late", [1], seed=3))
    assert run_with_two_requests(world, PeerGone(b"expert 1"), late) == 1
    assert world.failure("late").code == "engine_unavailable"


def test_the_lost_node_is_named_and_not_the_one_that_noticed() -> None:
    world = World()
    complaint = StepFailed(
        step=3,
        generation=1,
        role="attention",
        index=0,
        code="peer_lost",
        message="expert 1 closed its socket",
    )
    late = Received(GATEWAY, make_request("late", [1], seed=3))
    world.channel.script.clear()
    world.start()
    world.say("gateway", make_request("r", [1], max_tokens=40))
    world.answer(1)
    world.say("attention 0", complaint)
    world.poll(late, PeerGone(b"attention 0"), PeerGone(b"expert 1"))
    assert world.service.run() == 1
    assert world.failure("r").message == "expert 1 (pid 7) closed its connection"
    assert world.failure("late").status == 503


def test_a_complaint_without_a_loss_is_reported_as_it_is() -> None:
    world = World()
    world.start()
    complaint = Goodbye(role="attention", index=0, code="peer_lost", message="expert 1 is gone")
    world.say("attention 0", complaint)
    world.poll()
    assert world.service.run() == 1
    detail = world.channel.to(GATEWAY, EngineState)[-1].detail
    assert detail == "attention 0 left: expert 1 is gone (peer_lost)"


@pytest.mark.parametrize(("code", "status"), [("invalid_config", 2), ("internal_error", 1)])
def test_a_node_that_cannot_be_what_it_was_configured_as_is_said_by_the_status(
    code: str, status: int
) -> None:
    world = World()
    for index in range(2):
        world.hello("expert", index)
        world.hello("attention", index)
    reason = Goodbye(role="expert", index=1, code=code, message="device cuda:1: there is none")
    world.say("expert 1", reason)
    assert world.service.run() == status


def test_a_node_that_cannot_be_sent_a_plan_is_lost() -> None:
    world = World()
    world.start()
    world.channel.script.append(lambda: world.channel.dead.add(b"expert 1"))
    world.say("gateway", make_request("r", [1], max_tokens=40))
    assert world.service.run() == 1
    assert world.failure("r").message == "expert 1 cannot be sent its part of a step"


def test_a_silent_node_ends_the_engine_and_is_named() -> None:
    world = World()
    world.start()
    for number in range(2):
        world.say("gateway", make_request(f"r{number}", [number] * 3, max_tokens=40, seed=number))
    for _ in range(40):  # a second each; the limit is 20 s
        world.poll()
    started_polls = len(world.channel.script)
    assert world.service.run() == 1
    assert 20 <= started_polls - len(world.channel.script) < 35
    failed = world.failure("r0")
    assert (failed.code, failed.status) == ("node_lost", 503)
    assert failed.message == (
        "attention 0: it has not got on with step 1 for 21.0 s, although it is connected "
        "(failover.progress_deadline_s 20)"
    )


def test_a_long_step_is_fine_while_its_nodes_speak() -> None:
    """Step 1 runs for 70 s; expert 0 has done its part, expert 1 works, and then hangs."""
    world = World()
    world.start()
    world.say("gateway", make_request("r", [1] * 3, max_tokens=40))
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
    assert world.failure("r").message.startswith("expert 1: it has not got on with step 1")


def test_stop_ends_requests_and_refuses_new_ones() -> None:
    world = World()
    world.start()
    for number in range(2):
        world.say("gateway", make_request(f"r{number}", [number] * 3, max_tokens=40, seed=number))
    world.answer(1)
    world.channel.script.append(lambda: world.service.request_stop("SIGTERM"))
    world.say("gateway", make_request("late", [1]))
    world.poll(*(PeerGone(f"{r} {i}".encode()) for r in ("attention", "expert") for i in range(2)))
    world.poll(PeerGone(b"never polled"))
    assert world.service.run() == 0
    for request_id in ("r0", "r1", "late"):
        failed = world.failure(request_id)
        assert (failed.code, failed.status) == ("engine_unavailable", 503)
    assert "SIGTERM" in world.failure("r0").message
    assert "stopping" in world.failure("late").message
    assert len(world.channel.script) == 1  # all nodes had left, so it did not wait


@pytest.mark.parametrize("told_first", [True, False])
def test_a_node_that_leaves_while_the_engine_is_told_to_stop_is_no_loss(told_first: bool) -> None:
    world = World()
    world.start()
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=40))
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
    assert world.failure("r").code == "engine_unavailable"
    assert len(world.channel.script) == 1


def test_an_error_after_the_request_to_stop_is_no_failure() -> None:
    world = World()
    world.start()
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=40))
    send = world.channel.send

    def stop_while_sending(peer: bytes, message: Message) -> bool:
        if isinstance(message, StepPlan):
            world.service.request_stop("SIGTERM")
            world.channel.dead.add(peer)
        return send(peer, message)

    world.channel.send = stop_while_sending  # type: ignore[method-assign]
    assert world.service.run() == 0
    assert world.states() == ["starting", "ready", "stopping"]
    assert world.failure("r").code == "engine_unavailable"


def test_nodes_of_several_hosts_wait_for_another_scheduler() -> None:
    def on_hosts(plan: EnginePlan) -> EnginePlan:
        network = NetworkSpec(control="tcp://10.0.0.1:7000")
        return changed(plan, {"network": network, "failover": FailoverPolicy(restart=True)})

    world = World(change=on_hosts)
    world.start()
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


def test_results_only_from_their_own_node() -> None:
    world = World()
    world.start()
    request: AddRequest = make_request("r", [1, 2, 3], max_tokens=4)
    world.say("gateway", request)

    def forged() -> list[Event]:
        (event,) = world._execute()[:1]
        assert isinstance(event, Received)
        return [Received(b"attention 1", event.message)]

    world.channel.script.append(forged)
    assert world.service.run() == 1
    assert "attention 1 speaks for attention 0" in world.failure("r").message
    assert unpack_ints(request.prompt)[0] == 1

"""Spare nodes on a scripted channel: who becomes one, and when one takes its place."""

from __future__ import annotations

import pytest

from tests.server.scheduler.engine import make_request
from tests.server.scheduler.scripted_world import NUM_BLOCKS, World
from tests.structs import changed
from topspin.messages import (
    AnyMessage,
    CompileGrammar,
    Goodbye,
    Halt,
    Halted,
    Leaving,
    Loaded,
    NodeMemory,
    Ready,
    Reform,
    Refused,
    StepPlan,
    Stop,
    Welcome,
)
from topspin.plan.settings import FailoverPolicy
from topspin.plan.spec import EnginePlan
from topspin.processes.channel import PeerGone, Received

SPARE = b"spare"


def with_spares(plan: EnginePlan) -> EnginePlan:
    return changed(plan, {"failover": FailoverPolicy(restart=True, standby="weights")})


def world_of_spares() -> World:
    """Return a world that serves."""
    world = World(change=with_spares)
    world.start()
    return world


def spare_hello(world: World, peer: bytes = SPARE, **changes: object) -> None:
    """Script the Hello of a second attention node 0."""
    world.hello("attention", 0, **{"incarnation": 9, "pid": 9, **changes})
    say_hello = world.channel.script.pop()
    world.channel.script.append(
        lambda: [Received(peer, event.message) for event in say_hello() or [] if event]
    )


def loaded(num_blocks: int = NUM_BLOCKS) -> Loaded:
    return Loaded(role="attention", index=0, num_blocks=num_blocks)


def others_halt(world: World, generation: int) -> None:
    for role, index in (("attention", 1), ("expert", 0), ("expert", 1)):
        world.say(f"{role} {index}", Halted(role=role, index=index, generation=generation))


def test_a_second_node_loads_takes_part_in_nothing_and_is_stopped_with_the_engine() -> None:
    world = world_of_spares()
    spare_hello(world)
    world.say("spare", loaded())
    world.say("spare", NodeMemory(role="attention", index=0, resident_bytes=1))
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=3))
    world.answer(8)
    assert world.service.run() == 0
    assert len(world.tokens()) == 3
    (welcome,) = world.channel.to(SPARE, Welcome)
    assert welcome.joins_late
    assert welcome.config == world.channel.to(b"attention 0", Welcome)[0].config
    for kind in (StepPlan, CompileGrammar, Halt, Reform, Refused):
        assert world.channel.to(SPARE, kind) == []
    assert len(world.channel.to(SPARE, Stop)) == 1


@pytest.mark.parametrize("has_loaded", [True, False])
def test_it_takes_the_place_of_a_node_that_is_gone(has_loaded: bool) -> None:
    world = world_of_spares()
    spare_hello(world)
    messages: list[AnyMessage] = [loaded()]
    if has_loaded:
        world.say("spare", messages.pop())
    world.poll(PeerGone(b"attention 0"))
    for message in messages:
        world.say("spare", message)
    others_halt(world, generation=2)
    world.poll()
    assert world.service.run() == 0
    # The node is in the next generation at once, without another Welcome.
    (reform,) = world.channel.to(SPARE, Reform)
    assert reform.topology.generation == 2
    assert reform.topology.attention_incarnations == (9, 2)
    assert len(world.channel.to(SPARE, Welcome)) == 1
    assert world.channel.to(SPARE, Halt) == []


def test_the_lost_one_is_killed_and_may_come_back_as_a_spare() -> None:
    killed: list[int] = []
    world = world_of_spares()
    world.service._report_dead = killed.append
    spare_hello(world)
    world.say("spare", loaded())
    world.poll(PeerGone(b"attention 0"))
    spare_hello(world, b"again", incarnation=11, pid=11)
    world.poll()
    assert world.service.run() == 0
    assert world.channel.to(b"again", Welcome)[0].joins_late
    assert world.channel.to(b"again", Refused) == []


def test_one_that_leaves_gives_its_place_to_the_spare() -> None:
    world = world_of_spares()
    spare_hello(world)
    world.say("spare", loaded())
    world.say("attention 0", Leaving(role="attention", index=0))
    others_halt(world, generation=2)
    # The next topology is formed without it.
    world.say("attention 1", Ready(role="attention", index=1, num_blocks=NUM_BLOCKS, generation=2))
    for index in range(2):
        world.say(f"expert {index}", Ready(role="expert", index=index, generation=2))
    world.poll(PeerGone(b"attention 0"))
    others_halt(world, generation=3)
    world.say("spare", Halted(role="attention", index=0, generation=3))
    world.poll()
    assert world.service.run() == 0
    assert world.channel.to(SPARE, Reform)[-1].topology.attention_incarnations == (9, 2)


def test_those_that_come_before_the_engine_serves_wait_for_it() -> None:
    world = World(change=with_spares)
    world.hello("attention", 0)
    spare_hello(world)
    world.hello("attention", 1)
    world.hello("gateway", 0)
    for index in range(2):
        world.hello("expert", index)
    for index in range(2):
        world.say(f"expert {index}", Ready(role="expert", index=index))
        world.say(f"attention {index}", Ready(role="attention", index=index, num_blocks=NUM_BLOCKS))
    world.poll()
    assert world.service.run() == 0
    assert world.states() == ["starting", "ready", "stopping"]
    assert world.channel.to(SPARE, Welcome)[0].joins_late


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        (loaded(NUM_BLOCKS + 1), "it had 16"),
        (Loaded(role="expert", index=0), "speaks for expert 0"),
    ],
)
def test_one_that_could_not_take_the_place_is_refused(message: Loaded, refusal: str) -> None:
    world = world_of_spares()
    spare_hello(world)
    world.say("spare", message)
    world.poll(PeerGone(b"attention 0"))
    others_halt(world, generation=2)
    world.poll()
    assert world.service.run() == 0
    (refused,) = world.channel.to(SPARE, Refused)
    assert refusal in refused.reason
    assert world.channel.to(SPARE, Reform) == []


def test_it_may_end_as_it_likes() -> None:
    world = world_of_spares()
    spare_hello(world)
    world.say("spare", Goodbye(role="attention", index=0, code="internal_error", message="no"))
    world.poll(PeerGone(SPARE))
    spare_hello(world, b"another")
    world.say("another", Leaving(role="attention", index=0))
    world.poll(PeerGone(b"another"))
    world.poll(PeerGone(b"attention 0"))
    world.poll()
    assert world.service.run() == 0
    assert world.states() == ["starting", "ready", "recovering", "stopping"]
    (stop,) = world.channel.to(b"another", Stop)
    assert stop.reason == "it was asked to end"


def test_one_that_leaves_takes_no_place() -> None:
    world = world_of_spares()
    spare_hello(world)
    world.say("spare", loaded())
    world.say("spare", Leaving(role="attention", index=0))
    world.poll(PeerGone(b"attention 0"))
    others_halt(world, generation=2)
    world.poll(PeerGone(SPARE))
    assert world.service.run() == 0
    assert len(world.channel.to(SPARE, Stop)) == 1
    assert world.channel.to(SPARE, Reform) == []


def test_other_weights_a_third_node_and_plans_without_spares_are_refused() -> None:
    world = world_of_spares()
    spare_hello(world, b"wrong", fingerprint="other")
    spare_hello(world)
    spare_hello(world, b"third")
    world.poll()
    assert world.service.run() == 0
    assert "serves checkpoint" in world.channel.to(b"wrong", Refused)[0].reason
    assert "is there already" in world.channel.to(b"third", Refused)[0].reason
    assert world.channel.to(SPARE, Refused) == []

    plain = World()
    plain.start()
    spare_hello(plain)
    plain.poll()
    assert plain.service.run() == 0
    assert "is there already" in plain.channel.to(SPARE, Refused)[0].reason

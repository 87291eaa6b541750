"""Optional nodes on a scripted channel: before the engine is ready, and afterwards."""

from __future__ import annotations

from tests.server.scheduler.engine import make_request
from tests.server.scheduler.scripted_world import GATEWAY, NUM_BLOCKS, World
from tests.structs import changed
from topspin.messages import (
    EngineState,
    Leaving,
    Ready,
    Refused,
    StatsQuery,
    StepTicket,
    Stop,
    Welcome,
)
from topspin.plan.settings import FailoverPolicy
from topspin.plan.spec import EnginePlan
from topspin.processes.channel import PeerGone


def optional_ones(plan: EnginePlan) -> EnginePlan:
    """Return `plan` with optional second nodes; the first expert node holds all four experts."""
    nodes = tuple(changed(node, {"optional": node.index == 1}) for node in plan.nodes)
    nodes = tuple(
        changed(node, {"experts": 4}) if (node.role, node.index) == ("expert", 0) else node
        for node in nodes
    )
    return changed(plan, {"nodes": nodes, "failover": FailoverPolicy(restart=True)})


def ready(world: World) -> None:
    """Script the start of the nodes that must be there."""
    world.hello("attention", 0)
    world.hello("expert", 0)
    world.say("expert 0", Ready(role="expert", index=0))
    world.say("attention 0", Ready(role="attention", index=0, num_blocks=NUM_BLOCKS))


def test_those_that_are_early_are_welcomed_once_the_engine_serves() -> None:
    world = World(change=optional_ones)
    world.hello("gateway", 0)
    world.hello("attention", 1)
    world.hello("expert", 1, fingerprint="other")
    ready(world)
    world.say("gateway", StatsQuery(query_id=1))
    assert world.service.run() == 0
    assert world.states() == ["starting", "ready", "stopping"]
    first, *others = [p for p, m in world.channel.sent if isinstance(m, EngineState | Welcome)]
    assert first == GATEWAY
    assert others[-3:] == [GATEWAY, b"attention 1", GATEWAY]  # ready, Welcome, stopping
    (welcome,) = world.channel.to(b"expert 0", Welcome)
    assert not welcome.joins_late
    assert welcome.table.slots == (((0, 1, 2, 3), ()),) * 2
    assert welcome.topology.attention_incarnations == (1, None)
    (late,) = world.channel.to(b"attention 1", Welcome)
    assert late.joins_late
    assert late.table.slots == (((0, 1, 2, 3), (0, 1)),) * 2
    # Another checkpoint's is refused, and ends nothing.
    assert len(world.channel.to(b"expert 1", Refused)) == 1
    assert world.channel.to(b"expert 1", Welcome) == []
    stats = world.stats()
    assert stats.max_queued_requests == 1024
    assert {(n.role, n.optional): (n.present, n.planned) for n in stats.nodes} == {
        ("attention", False): (1, 1),
        ("attention", True): (1, 1),
        ("expert", False): (1, 1),
        ("expert", True): (0, 1),
    }


def test_those_that_are_early_may_go_and_are_stopped_with_the_engine() -> None:
    world = World(change=optional_ones)
    world.hello("attention", 1)
    world.hello("expert", 1)
    world.poll(PeerGone(b"attention 1"))
    assert world.service.run() == 0
    assert len(world.channel.to(b"expert 1", Stop)) == 1
    assert world.channel.to(b"attention 1", Stop) == []


def test_a_node_that_leaves_while_the_engine_starts_ends_the_start() -> None:
    world = World(change=optional_ones)
    world.hello("gateway", 0)
    world.hello("attention", 0)
    world.hello("expert", 0)
    world.say("expert 0", Ready(role="expert", index=0))
    world.say("expert 0", Leaving(role="expert", index=0))
    assert world.service.run() == 1
    assert "expert 0 leaves" in world.channel.to(GATEWAY, EngineState)[-1].detail


def test_a_node_that_leaves_is_stopped_and_the_engine_goes_on() -> None:
    world = World(change=optional_ones)
    world.hello("gateway", 0)
    ready(world)
    world.say("expert 0", Leaving(role="expert", index=0))
    world.poll()
    world.poll(PeerGone(b"expert 0"))
    assert world.service.run() == 0
    assert [stop.reason for stop in world.channel.to(b"expert 0", Stop)] == ["it was asked to end"]
    assert [stop.reason for stop in world.channel.to(b"attention 0", Stop)] == ["test over"]


def test_steps_are_not_kept_up_by_a_node_that_takes_no_part() -> None:
    """It has joined and loads, or leaves; that its connection is gone is noticed apart."""
    world = World(change=optional_ones)
    world.hello("gateway", 0)
    ready(world)
    world.hello("expert", 1)
    world.poll()
    world.channel.script.append(lambda: world.channel.dead.add(b"expert 1"))
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=4))
    world.answer(8)
    assert world.service.run() == 0
    assert world.channel.to(b"expert 1", Welcome)[0].joins_late
    assert world.channel.to(b"expert 1", StepTicket) == []
    assert len(world.channel.to(b"expert 0", StepTicket)) >= 4
    assert len(world.tokens()) == 4

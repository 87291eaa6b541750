"""Recoveries: chaos over every kind of engine, and the rules that have numbers, one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from server.scheduler.nodes.roster import Member
from tests.pairwise import few
from tests.server.scheduler.engine import make_request
from tests.server.scheduler.nodes.failover_world import (
    A0,
    A1,
    E0,
    E1,
    NUM_BLOCKS,
    REDUNDANT,
    SINGLE,
    World,
)
from topspin.errors import NodeGivenUp, NodeLost, NodeSilent, Poison, ProtocolError, StepUnfinished
from topspin.messages import Halt, Halted, Loaded, Message, Ready, Reform, Stop, Welcome

ENGINES: list[dict[str, Any]] = [
    {},
    {"table": SINGLE},
    {"table": SINGLE, "may_be_local": (0,)},
    {"optional": [A1, E1]},
    {"stages": [0, 0]},
    {"stages": [1], "table": SINGLE},
]


@pytest.mark.parametrize("settings", ENGINES)
@pytest.mark.parametrize("seed", few(range(12), *range(4)))
def test_any_losses_and_returns_end_in_a_whole_engine(settings: dict[str, Any], seed: int) -> None:
    """After each event a generation that serves is one, and every request gets its tokens."""
    rng = random.Random(seed)
    world = World(**settings)
    number = num_generations = 0
    for _ in range(250):
        generation, num_under_way = world.formation.generation, world.policy.num_steps_in_flight
        action = rng.choice(("add", "react", "react", "react", "plan", "plan", "answer", "event"))
        is_orderly = True
        if action == "add" and number < 20:
            prompt = [rng.randrange(9) for _ in range(rng.randrange(1, 6))]
            world.engine.add(make_request(f"r{number}", prompt, max_tokens=12, seed=number))
            number += 1
        elif action == "react":
            waiting = [member for member, node in world.lives.items() if node.inbox]
            if waiting:
                world.react(rng.choice(waiting))
        elif action == "plan":
            world.engine.now += 0.1
            if world.schedule():
                planned = {Member("attention", idx) for idx in world.engine.steps[-1].plans}
                assert planned <= set(world.failover.nodes)
        elif action == "answer":
            world.engine.answer(rng.randrange(2))
        elif action == "event" and rng.random() < 0.5:
            is_orderly = disturb(world, rng)
        has_begun = world.formation.generation > generation
        num_generations += has_begun
        assert not (has_begun and is_orderly and num_under_way), "a step was given up for nothing"
        world.check()
    assert num_generations > 1
    for _ in range(20):
        world.react_all()
        for member in world.absent:
            world.come(member)
        while any(world.engine.answer(index) for index in range(2)):
            pass
        world.engine.now += 0.3  # a forming that has failed is tried again
        world.failover.advance()
    assert world.failover.is_whole
    assert set(world.failover.nodes) == set(world.roster.places)
    assert world.topology.table.slots == world.formation.full_table.slots
    assert world.states[-1] == ("ready", "")
    world.engine.finish()
    failures = [client.failure for client in world.engine.clients.values() if client.failure]
    assert all(
        failure.code == Poison.code or "attempts have failed" in failure.message
        for failure in failures
    )


def disturb(world: World, rng: random.Random) -> bool:
    """Let something happen to a node; returns whether no step may be given up for it."""
    member = rng.choice(world.roster.places)
    node, takes_part = world.lives.get(member), member in world.failover.nodes
    if node is None:
        world.come(member)
    elif rng.random() < 0.3:
        is_late = rng.random() < 0.5
        generation = world.formation.generation - is_late
        world.failover.step_failed(generation, StepUnfinished("a frame was lost"))
        return is_late
    elif rng.random() < 0.4 and not node.leaves:
        world.leave(member)
    else:
        world.lose(member)
        return not takes_part
    return True


def sent(world: World, kind: type[Message]) -> list[Member]:
    return [member for member, message in world.sent if isinstance(message, kind)]


def test_an_expert_with_live_replicas_is_not_waited_for_and_drained_in_when_it_is_back() -> None:
    world = World()
    world.engine.add(make_request("r", [1, 2, 3], max_tokens=5))
    world.lose(E1)
    assert sent(world, Halt) == [A0, A1, E0]
    world.react_all()
    topology = world.topology
    assert (topology.generation, topology.table.version) == (2, 4)
    assert topology.table.slots == (((0, 1), ()),)
    assert not world.failover.is_whole
    assert world.formation.full_table is REDUNDANT
    assert world.states[0][0] == "recovering"
    assert world.states[-1] == ("ready", "without expert 1")
    assert world.schedule()
    world.sent.clear()
    world.come(E1)
    world.react_all()
    # A step is under way: it is not discarded for a new node.
    assert sent(world, Halt) == []
    assert not world.failover.is_serving
    world.engine.answer(0)
    world.failover.advance()
    world.react_all()
    assert (world.topology.table.slots, world.topology.table.version) == (REDUNDANT.slots, 5)
    world.engine.finish()
    assert world.engine.policy.stats(0, (), 0.0).num_replays == 1  # of the loss


@pytest.mark.parametrize(
    ("table", "lost"), [(SINGLE, [E0]), (SINGLE, [E0, E1]), (REDUNDANT, [A0, A1])]
)
def test_what_cannot_be_done_without_is_waited_for_until_the_deadline(
    table: Any, lost: list[Member]
) -> None:
    world = World(table)
    world.engine.add(make_request("r", [1, 2, 3]))
    for member in lost:
        world.lose(member)
    world.react_all()
    names = ", ".join(map(str, lost))
    assert world.states[-1] == ("recovering", f"waiting for {names}")
    world.engine.now = 29.0
    world.failover.advance()
    assert world.engine.clients["r"].failure is None
    assert world.failover.accepts
    world.engine.now = 30.1
    world.failover.advance()
    world.failover.advance()
    failed = world.engine.clients["r"].failure
    assert failed is not None
    assert (failed.code, failed.status) == ("node_lost", 503)
    assert failed.message == f"{names} did not come back within 30 s"
    assert world.states[-1][0] == "starting"
    assert not world.failover.accepts
    for member in lost:
        world.come(member)
    world.react_all()
    world.failover.advance()
    world.react_all()
    assert world.states[-1] == ("ready", "")
    assert world.failover.accepts


def test_a_failed_forming_is_tried_again_after_a_pause() -> None:
    world = World()
    world.failover.step_failed(1, StepUnfinished("a frame was lost"))
    for member in world.roster.places:
        world.react(member)
    assert sent(world, Reform) == world.roster.places
    world.failover.step_failed(2, StepUnfinished("could not connect"))
    world.react_all()
    assert len(sent(world, Reform)) == 4
    world.engine.now += 0.3
    world.failover.advance()
    world.react_all()
    assert (world.topology.generation, world.topology.table) == (3, REDUNDANT)
    assert world.dead == []


@pytest.mark.parametrize(("has_halted", "limit_s"), [(False, 5.0), (True, 30.0)])
def test_who_answers_pings_but_does_not_react_is_dead(has_halted: bool, limit_s: float) -> None:
    world = World()
    world.failover.step_failed(1, NodeLost("no step ends"))
    for member in (A0, A1, E1, *([E0] if has_halted else [])):
        world.react(member)
    if has_halted:
        for member in (A0, A1, E1):
            world.react(member)
    world.engine.now = limit_s
    world.failover.advance()
    assert world.dead == []
    world.engine.now += 0.1
    world.failover.advance()
    assert world.dead == [1003]
    assert not world.roster.has(E0)
    world.react_all()
    assert world.topology.experts[0] is None


@pytest.mark.parametrize(
    "error", [NodeLost("it closed its connection"), NodeSilent("it is silent")]
)
def test_a_process_whose_connection_ended_comes_back_as_it_is(error: NodeLost) -> None:
    world = World()
    world.lose(E1, error)
    world.react_all()
    world.come(E1, pid=1004, generation=1)
    world.react_all()
    world.engine.now = 10.0
    world.failover.advance()
    assert world.failover.is_whole
    assert world.dead == []


@pytest.mark.parametrize(("table", "limit_s"), [(REDUNDANT, 5.0), (SINGLE, 2.0)])
def test_who_does_not_come_back_in_time_is_dead(table: Any, limit_s: float) -> None:
    world = World(table)
    world.lose(E1)
    world.react_all()
    for now, dead in ((limit_s, []), (limit_s + 0.1, [1004]), (20.0, [1004])):
        world.engine.now = now
        world.failover.advance()
        assert world.dead == dead


def test_a_process_whose_place_is_taken_or_that_must_not_live_is_dead_at_once() -> None:
    world = World()
    world.lose(E1)
    world.lose(E0, NodeGivenUp("it hangs"))
    assert world.dead == [1003]
    world.come(E1)
    assert world.dead == [1003, 1004]


@pytest.mark.parametrize(
    ("events", "is_poison"),
    [
        (["died", "died"], True),
        (["failed and died", "died"], True),
        (["died", "silent"], False),
        (["lost and back", "died"], False),
        (["died, another with its pid", "died"], True),
        (["failed", "failed"], False),
        (["died", "failed, died when halted"], False),
    ],
)
def test_only_deaths_in_a_step_count_against_its_request(
    events: list[str], is_poison: bool
) -> None:
    world = World()
    world.engine.add(make_request("r", [1, 2, 3]))
    for event in events:
        assert world.schedule()
        error = NodeSilent("silent") if event == "silent" else NodeLost("killed")
        pid = world.lives[E1].pid if event.startswith(("lost", "died, another")) else None
        generation = world.formation.generation if event == "lost and back" else 0
        if event.startswith("failed"):  # peers see the end of a connection first
            world.failover.step_failed(world.formation.generation, StepUnfinished("cut off"))
        if event.endswith("halted"):
            for member in world.roster.places:
                world.react(member)
            assert sent(world, Reform)
        if event != "failed":
            world.lose(E1, error)
        world.react_all()
        for member in world.absent:
            world.come(member, pid, generation)
        world.react_all()
        world.failover.advance()
        world.react_all()
    failed = world.engine.clients["r"].failure
    assert (failed is not None and failed.code == Poison.code) == is_poison
    world.engine.finish()


def test_answers_of_an_earlier_generation_count_for_nothing() -> None:
    world = World()
    world.lose(A0)
    world.lose(E0)
    for member in (A1, E1):
        world.say(member, Halted(role=member.role, index=member.index, generation=2))
    assert sent(world, Reform) == []
    for member in (A1, E1) * 2:
        world.react(member)
    assert sent(world, Reform) == [A1, E1]
    for member in (A1, E1):
        world.say(member, Ready(role=member.role, index=member.index, generation=2))
    assert not world.failover.is_serving
    world.react_all()
    assert world.topology.generation == 3


def test_nodes_of_one_process_are_lost_together_and_do_not_leave_one_by_one() -> None:
    world = World(transport="local")
    with pytest.raises(NodeLost, match="attention 1 leaves"):
        world.leave(A1)
    world.lose(A1)
    assert sorted(world.dead) == [1001, 1002, 1003, 1004]
    for member in world.roster.places:
        assert not world.failover.is_serving
        world.come(member)
        world.react_all()
    world.failover.advance()
    world.react_all()
    assert world.failover.is_serving


def test_nodes_that_leave_end_their_steps_and_cost_one_generation() -> None:
    world = World()
    world.engine.add(make_request("r", [1, 2, 3], max_tokens=5))
    assert world.schedule()
    world.leave(A1)
    world.leave(E1)
    world.failover.advance()
    assert world.sent == []
    assert {A1, E1} <= set(world.failover.nodes), "they are watched like the others"
    world.engine.answer(0)
    world.failover.advance()
    assert sorted(sent(world, Stop), key=str) == [A1, E1]
    world.react_all()
    assert world.dead == []  # a process that ends in order is not killed
    assert (world.topology.generation, world.topology.table.slots) == (2, (((0, 1), ()),))
    assert world.states[-1] == ("ready", "without attention 1, expert 1")


def test_a_node_that_leaves_and_dies_is_lost_like_another() -> None:
    world = World()
    world.engine.add(make_request("r", [1, 2, 3]))
    assert world.schedule()
    world.leave(E1)
    world.lose(E1)
    assert sent(world, Stop) == []
    assert world.formation.generation == 2


def test_a_node_must_speak_for_itself_and_come_back_as_large() -> None:
    world = World()
    with pytest.raises(ProtocolError, match="speaks for"):
        world.say(A0, Halted(role="attention", index=1, generation=1))
    world.lose(A0)
    world.react_all()
    world.come(A0)
    assert sent(world, Welcome) == [A0]
    for num_blocks in (NUM_BLOCKS - 1, 0):
        with pytest.raises(ProtocolError, match="blocks"):
            world.say(A0, Loaded(role="attention", index=0, num_blocks=num_blocks))

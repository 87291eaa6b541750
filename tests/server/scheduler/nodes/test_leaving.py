"""Nodes that were asked to end: what is waited for, who is told what, and who comes back."""

from __future__ import annotations

import pytest

from tests.server.scheduler.engine import GATEWAY, make_request
from tests.server.scheduler.nodes.test_failover import A0, A1, E0, E1, REDUNDANT, SINGLE, World
from topspin.errors import NodeLost
from topspin.messages import Halt, Message, Reform, Stop


class Leaving(World):
    """A failover whose nodes are told to end."""

    def told(self, kind: type[Message]) -> set[object]:
        """Return whom messages of this kind were sent to, since they were last taken."""
        return {member for member, message in self.sent if isinstance(message, kind)}

    def forget_stops(self) -> None:
        self.sent = [each for each in self.sent if not isinstance(each[1], Stop)]


def test_steps_under_way_end_before_a_node_is_let_go() -> None:
    world = Leaving()
    world.policy.add(make_request("r", [1, 2, 3], max_tokens=5), peer=GATEWAY, now=0.0)
    assert world.policy.schedule(world.now) is not None
    world.failover.leave(E1)
    world.failover.advance()
    assert world.sent == []
    assert not world.failover.is_serving
    assert E1 in world.failover.nodes  # it is watched like the others
    world.policy.halt()  # in place of the step's result
    world.failover.advance()
    assert world.told(Stop) == {E1}
    assert world.told(Halt) == {A0, A1, E0}
    assert E1 not in world.failover.nodes
    # Its connection closes only now; a process that ends in order is not killed.
    world.failover.lose(E1, NodeLost("it closed its connection"))
    assert not world.roster.has(E1)
    assert world.dead == []
    world.forget_stops()
    world.halt_all()
    topology = world.form_all().topology
    assert topology.table.slots == (((0, 1), ()),)
    assert topology.experts[1] is None
    assert world.states[-1] == ("ready", "without expert 1")
    assert world.policy.num_waiting == 1
    assert world.failed == []
    world.come_back(E1)
    world.drop_welcomes()
    world.failover.advance()
    world.halt_all()
    assert world.form_all().topology.table.slots == REDUNDANT.slots


def test_an_attention_node_gets_no_more_sequences() -> None:
    world = Leaving()
    for number in range(4):
        message = make_request(f"r{number}", [number, 2, 3], max_tokens=5, seed=number)
        world.policy.add(message, peer=GATEWAY, now=0.0)
    world.failover.leave(A1)
    assert world.policy.num_steps_in_flight == 0
    world.failover.advance()
    assert world.told(Stop) == {A1}
    world.forget_stops()
    world.halt_all()
    assert world.form_all().topology.attention_incarnations == (1, None)
    step = world.policy.schedule(world.now)
    assert step is not None
    assert set(step.plans) == {0}


def test_nodes_that_leave_together_cost_one_generation() -> None:
    world = Leaving()
    world.policy.add(make_request("r", [1, 2, 3]), peer=GATEWAY, now=0.0)
    assert world.policy.schedule(world.now) is not None
    world.failover.leave(A1)
    world.failover.leave(E1)
    world.policy.halt()
    world.failover.advance()
    assert world.told(Stop) == {A1, E1}
    world.forget_stops()
    world.halt_all()
    assert world.form_all().topology.generation == 2


def test_a_node_may_leave_while_the_engine_halts_forms_or_waits() -> None:
    world = Leaving(SINGLE)
    world.failover.lose(E0, NodeLost("killed"))
    world.take(Halt)
    world.failover.leave(A1)  # while they halt
    assert world.told(Stop) == {A1}
    world.forget_stops()
    world.halt_all()
    assert world.states[-1] == ("recovering", "waiting for attention 1, expert 0")
    world.failover.leave(E1)  # while they wait
    assert world.told(Stop) == {E1}
    world.forget_stops()
    world.halt_all()
    assert world.states[-1][1] == "waiting for attention 1, expert 0, expert 1"
    for member in (A1, E1):
        world.failover.lose(member, NodeLost("it closed its connection"))
    for member in (A1, E0, E1):
        world.come_back(member)
    world.drop_welcomes()
    world.take(Reform)
    world.failover.leave(A0)  # while they form
    assert world.told(Stop) == {A0}
    world.forget_stops()
    world.halt_all()
    assert world.form_all().topology.attention_incarnations[0] is None
    assert world.states[-1] == ("ready", "without attention 0")
    assert world.dead == [1003]  # the one that was killed


def test_a_node_may_leave_before_it_has_joined() -> None:
    world = Leaving()
    world.failover.lose(A1, NodeLost("killed"))
    world.halt_all()
    world.form_all()
    world.hello(A1)
    world.failover.joined(A1)
    world.drop_welcomes()
    world.failover.leave(A1)
    assert world.told(Stop) == {A1}
    assert world.failover.is_serving


def test_a_node_that_leaves_and_dies_is_lost_like_another() -> None:
    world = Leaving()
    world.policy.add(make_request("r", [1, 2, 3]), peer=GATEWAY, now=0.0)
    assert world.policy.schedule(world.now) is not None
    world.failover.leave(E1)
    world.failover.lose(E1, NodeLost("killed"))
    assert world.told(Stop) == set()
    assert world.dead == [1004]
    world.halt_all()
    assert world.form_all().topology.experts[1] is None


def test_a_step_that_fails_meanwhile_lets_the_node_go() -> None:
    world = Leaving()
    world.policy.add(make_request("r", [1, 2, 3]), peer=GATEWAY, now=0.0)
    assert world.policy.schedule(world.now) is not None
    world.failover.leave(E1)
    world.failover.step_failed(1, NodeLost("no step ends"))
    assert world.told(Stop) == {E1}
    world.forget_stops()
    world.halt_all()
    assert world.form_all().topology.generation == 2


def test_without_a_replica_requests_wait_for_an_expert_node_that_left() -> None:
    world = Leaving(SINGLE)
    world.policy.add(make_request("r", [1, 2, 3]), peer=GATEWAY, now=0.0)
    world.failover.leave(E1)
    world.failover.advance()
    world.forget_stops()
    world.halt_all()
    assert world.states[-1] == ("recovering", "waiting for expert 1")
    world.failover.lose(E1, NodeLost("it closed its connection"))
    world.come_back(E1)
    world.drop_welcomes()
    world.form_all()
    assert world.states[-1] == ("ready", "")
    assert world.failed == []


def test_nodes_of_one_process_do_not_leave_one_by_one() -> None:
    world = Leaving(transport="local")
    with pytest.raises(NodeLost, match="attention 1 leaves"):
        world.failover.leave(A1)

"""A recovery's messages: their receivers and order, and what happens to requests."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from server.scheduler.gateways import StateName
from server.scheduler.nodes.drafts import DraftSide
from server.scheduler.nodes.failover import Failover
from server.scheduler.nodes.formation import Formation
from server.scheduler.nodes.roster import Member, Roster
from server.scheduler.nodes.side import NodeSide
from server.scheduler.planning.outbox import Delivery
from server.scheduler.traces import Tracer
from tests.server.scheduler.engine import GATEWAY, make_config, make_policy, make_request
from topspin.errors import NodeLost, ProtocolError, StepFailed
from topspin.expert_table import ExpertTable
from topspin.messages import (
    AnyMessage,
    Halt,
    Halted,
    Hello,
    Loaded,
    Message,
    Ready,
    Reform,
    RequestFailed,
    Welcome,
)
from topspin.plan.settings import FailoverPolicy, Transport

A0, A1 = Member("attention", 0), Member("attention", 1)
E0, E1 = Member("expert", 0), Member("expert", 1)
REDUNDANT = ExpertTable(3, 2, (((0, 1), (1, 0)),))
SINGLE = ExpertTable(3, 2, (((0,), (1,)),))
NUM_BLOCKS = 32


class World:
    """A failover over two attention and two expert nodes, which answer when `react` is called."""

    def __init__(self, table: ExpertTable = REDUNDANT, *, transport: Transport = "shm") -> None:
        config = make_config(
            num_nodes=2,
            num_expert_nodes=2,
            transport=transport,
            failover=FailoverPolicy(restart=True, restart_deadline_s=30.0, halt_deadline_s=5.0),
        )
        self.roster = Roster([A0, A1, E0, E1], revision="r")
        self.num_hellos = 0
        for member in self.roster.places:
            self.hello(member)
        for member in self.roster.places:
            blocks = NUM_BLOCKS if member.role == "attention" else 0
            ready = Ready(role=member.role, index=member.index, num_blocks=blocks)
            self.roster.ready(member, ready)
        self.formation = Formation(table)
        self.policy = make_policy(config, NUM_BLOCKS, self.formation)
        self.now = 0.0
        self.sent: list[tuple[Member, Message]] = []
        self.states: list[tuple[str, str]] = []
        self.failed: list[RequestFailed] = []
        self.dead: list[int] = []
        log = logging.LoggerAdapter(logging.getLogger("test"))
        self.nodes = NodeSide(
            self.roster,
            DraftSide([], revision="test"),
            send=self._send,
            tracer=Tracer(config.trace),
            log=log,
            experts_follow_tickets=True,
        )
        self.failover = Failover(
            config,
            formation=self.formation,
            nodes=self.nodes,
            gateways=self,
            policy=self.policy,
            clock=lambda: self.now,
            log=log,
            report_dead=self.dead.append,
        )

    def _send(self, peer: bytes, message: Message) -> bool:
        member = self.roster.member(peer)
        assert member is not None
        self.sent.append((member, message))
        return True

    def set_state(self, state: StateName, detail: str = "") -> None:
        self.states.append((state, detail))

    def hello(self, member: Member) -> None:
        self.num_hellos += 1
        hello = Hello(
            role=member.role,
            index=member.index,
            incarnation=self.num_hellos,
            revision="r",
            data_address=f"unix:@{self.num_hellos}" if member.role == "expert" else "",
            pid=1000 + self.num_hellos,
        )
        self.roster.join(f"peer {self.num_hellos}".encode(), hello)

    def deliver(self, deliveries: list[Delivery]) -> None:
        for _, message in deliveries:
            assert isinstance(message, RequestFailed)
            self.failed.append(message)

    def say(self, member: Member, message: AnyMessage) -> None:
        answer = self.nodes.checked(member, message)
        assert isinstance(answer, Halted | Loaded | Ready)
        self.failover.answered(member, answer)

    def take(self, kind: type[Any]) -> dict[Member, Any]:
        """Return the messages sent since the last call; all of one kind."""
        sent, self.sent = self.sent, []
        assert all(isinstance(message, kind) for _, message in sent), sent
        found = dict(sent)
        assert len(found) == len(sent), "sent twice"
        return found

    def halt_all(self) -> None:
        for member, halt in self.take(Halt).items():
            self.say(
                member, Halted(role=member.role, index=member.index, generation=halt.generation)
            )

    def form_all(self) -> Reform:
        reforms = self.take(Reform)
        for member, reform in reforms.items():
            generation = reform.topology.generation
            self.say(member, Ready(role=member.role, index=member.index, generation=generation))
        first, *others = reforms.values()
        assert all(other == first for other in others)
        assert isinstance(first, Reform)
        return first

    def drop_welcomes(self) -> None:
        self.sent = [each for each in self.sent if not isinstance(each[1], Welcome)]

    def come_back(self, member: Member, num_blocks: int | None = None) -> None:
        self.hello(member)
        self.failover.joined(member)
        if num_blocks is None:
            num_blocks = NUM_BLOCKS if member.role == "attention" else 0
        self.say(member, Loaded(role=member.role, index=member.index, num_blocks=num_blocks))


def test_an_expert_with_live_replicas_is_not_waited_for() -> None:
    world = World()
    world.failover.lose(E1, NodeLost("killed"))
    assert world.dead == [1004]
    assert not world.failover.is_serving
    assert set(world.sent and dict(world.sent)) == {A0, A1, E0}
    world.halt_all()
    topology = world.form_all().topology
    assert (topology.generation, topology.table.version) == (2, 4)
    assert topology.table.slots == (((0, 1), ()),)
    assert topology.experts[1] is None
    assert topology.attention_incarnations == (1, 2)
    assert world.failover.is_serving
    assert not world.failover.is_whole
    assert world.formation.table.version == 4
    assert world.formation.full_table is REDUNDANT
    assert [state for state, _ in world.states] == ["recovering", "ready"]


def test_a_restarted_node_is_welcomed_with_its_share_and_drained_in() -> None:
    world = World()
    world.policy.add(make_request("r", [1, 2, 3], max_tokens=5), peer=GATEWAY, now=0.0)
    world.failover.lose(E1, NodeLost("killed"))
    world.halt_all()
    world.form_all()
    assert world.policy.schedule(world.now) is not None
    world.hello(E1)
    world.failover.joined(E1)
    (welcome,) = world.take(Welcome).values()
    assert welcome.joins_late
    assert welcome.table.experts_of(1) == [(1, 0)]
    world.say(E1, Loaded(role="expert", index=1))
    # A step is under way: it is not discarded for a new node.
    assert world.sent == []
    assert not world.failover.is_serving
    world.policy.halt()  # in place of its result
    world.failover.advance()
    assert set(dict(world.sent)) == {A0, A1, E0, E1}
    world.halt_all()
    topology = world.form_all().topology
    assert topology.table.slots == REDUNDANT.slots
    assert topology.table.version == 5
    assert topology.experts[1] is not None
    assert topology.experts[1].incarnation == 5
    assert world.failover.is_whole


def test_without_a_replica_requests_wait_and_then_end_typed() -> None:
    world = World(SINGLE)
    world.policy.add(make_request("r", [1, 2, 3]), peer=GATEWAY, now=0.0)
    world.failover.lose(E0, NodeLost("killed"))
    world.halt_all()
    world.take(Reform)
    assert world.states[-1] == ("recovering", "waiting for expert 0")
    world.now = 29.0
    world.failover.advance()
    assert world.failed == []
    assert world.failover.accepts
    world.now = 31.0
    world.failover.advance()
    world.failover.advance()
    (failed,) = world.failed
    assert (failed.code, failed.status) == ("node_lost", 503)
    assert "expert 0" in failed.message
    assert world.states[-1][0] == "starting"
    assert not world.failover.accepts
    world.come_back(E0)
    world.drop_welcomes()
    world.form_all()
    assert world.states[-1] == ("ready", "")
    assert world.failover.accepts


def test_the_last_attention_node_is_waited_for() -> None:
    world = World()
    world.failover.lose(A0, NodeLost("killed"))
    world.halt_all()
    world.form_all()
    assert world.states[-1] == ("ready", "without attention 0")
    world.failover.lose(A1, NodeLost("killed"))
    world.halt_all()
    assert world.states[-1] == ("recovering", "waiting for attention 0, attention 1")
    world.come_back(A1)
    world.drop_welcomes()
    assert world.form_all().topology.attention_incarnations == (None, 5)
    assert world.states[-1] == ("ready", "without attention 0")


def test_losing_more_while_halting_or_forming_starts_over() -> None:
    world = World()
    world.failover.lose(A0, NodeLost("killed"))
    world.take(Halt)
    world.failover.lose(E0, NodeLost("killed too"))
    halts = world.take(Halt)
    assert {halt.generation for halt in halts.values()} == {3}
    world.say(A1, Halted(role="attention", index=1, generation=2))
    world.say(E1, Halted(role="expert", index=1, generation=3))
    assert world.sent == []
    world.say(A1, Halted(role="attention", index=1, generation=3))
    world.take(Reform)
    world.failover.lose(A1, NodeLost("and another"))
    (halt,) = world.take(Halt).values()
    assert halt.generation == 4


def test_a_failed_step_loses_nobody() -> None:
    world = World()
    world.failover.step_failed(1, StepFailed("a frame was lost"))
    world.failover.step_failed(1, StepFailed("the other side says so too"))
    world.failover.step_failed(7, StepFailed("nonsense"))
    assert len(world.sent) == 4
    world.halt_all()
    topology = world.form_all().topology
    assert (topology.generation, topology.table) == (2, REDUNDANT)
    assert world.dead == []
    assert world.formation.table is REDUNDANT


def test_a_failed_forming_is_tried_again_after_a_pause() -> None:
    world = World()
    world.failover.step_failed(1, StepFailed("a frame was lost"))
    world.halt_all()
    world.take(Reform)
    world.failover.step_failed(2, StepFailed("could not connect"))
    world.halt_all()
    assert world.sent == []
    world.now += 0.3
    world.failover.advance()
    world.form_all()
    assert world.failover.is_serving


def test_who_answers_pings_but_does_not_halt_is_dead() -> None:
    world = World()
    world.failover.step_failed(1, NodeLost("no step ends"))
    for member in (A0, A1, E1):
        world.say(member, Halted(role=member.role, index=member.index, generation=2))
    world.take(Halt)
    world.now = 5.1
    world.failover.advance()
    assert world.dead == [1003]
    assert not world.roster.has(E0)
    world.halt_all()
    world.form_all()
    assert world.failover.is_serving


def test_nodes_of_one_process_are_lost_together() -> None:
    world = World(transport="local")
    world.failover.lose(A1, NodeLost("its thread failed"))
    assert sorted(world.dead) == [1001, 1002, 1003, 1004]
    assert world.states[-1][0] == "recovering"
    for member in world.roster.places:
        assert not world.failover.is_serving
        world.come_back(member)
    world.drop_welcomes()
    world.form_all()
    assert world.failover.is_serving


def test_a_node_that_is_lost_while_it_loads_disturbs_nobody() -> None:
    world = World()
    world.failover.lose(A0, NodeLost("killed"))
    world.halt_all()
    world.form_all()
    world.hello(A0)
    world.failover.joined(A0)
    world.take(Welcome)
    world.failover.lose(A0, NodeLost("killed while loading"))
    assert world.sent == []
    assert world.failover.is_serving


def test_a_node_must_speak_for_itself_and_come_back_as_large() -> None:
    world = World()
    with pytest.raises(ProtocolError, match="speaks for"):
        world.say(A0, Halted(role="attention", index=1, generation=1))
    world.failover.lose(A0, NodeLost("killed"))
    with pytest.raises(ProtocolError, match="blocks"):
        world.come_back(A0, num_blocks=NUM_BLOCKS - 1)

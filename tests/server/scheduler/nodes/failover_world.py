"""An engine that loses nodes: its failover, its requests, and the lives of its nodes.

Two attention nodes (perhaps with stages) and two expert nodes act on their messages when the test
says so. At any moment `check` compares what they were told with the rules of a generation.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from server.scheduler.gateways import StateName
from server.scheduler.nodes.drafts import DraftSide
from server.scheduler.nodes.failover import Failover
from server.scheduler.nodes.recovery import table_without
from server.scheduler.nodes.roster import Member, Replicas, Roster
from server.scheduler.nodes.side import NodeSide
from server.scheduler.nodes.spares import Spares
from server.scheduler.planning.outbox import Outbox
from server.scheduler.traces import Tracer
from tests.server.scheduler.engine import Engine, make_config
from tests.structs import changed
from topspin.errors import NodeLost, TopspinError
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
    Refused,
    Stop,
    Topology,
    Welcome,
)
from topspin.plan.settings import FailoverPolicy, Transport
from topspin.plan.spec import StageNode

A0, A1 = Member("attention", 0), Member("attention", 1)
E0, E1 = Member("expert", 0), Member("expert", 1)
REDUNDANT = ExpertTable(3, 2, (((0, 1), (1, 0)),))
SINGLE = ExpertTable(3, 2, (((0,), (1,)),))
NUM_BLOCKS = 32
KILLED = NodeLost("killed")


class Node:
    """One life of a node: `formed` is the topology that it serves in."""

    def __init__(self, number: int) -> None:
        self.pid = 1000 + number
        self.peer = f"peer {number}".encode()
        self.incarnation = number
        self.inbox: deque[Message] = deque()
        self.has_halted_in = 0
        self.formed: Topology | None = None
        self.leaves = False


class World:
    """A failover and its nodes; `sent` are the messages to them, in order."""

    def __init__(
        self,
        table: ExpertTable = REDUNDANT,
        *,
        transport: Transport = "shm",
        optional: Collection[Member] = (),
        stages: Sequence[int] = (),
        may_be_local: tuple[int, ...] = (),
    ) -> None:
        plan = make_config(
            num_nodes=2,
            num_expert_nodes=2,
            transport=transport,
            failover=FailoverPolicy(restart=True, restart_deadline_s=30.0, halt_deadline_s=5.0),
        )
        own = [
            StageNode(
                index=idx,
                of=of,
                device="cpu",
                kernels="cpu",
                wait="block",
                layers=(idx, idx + 1),
                kv_cache_bytes=9,
            )
            for idx, of in enumerate(stages)
        ]
        plan = changed(plan, {"nodes": (*plan.nodes, *own)})
        blocks = [0 if Member("attention", idx) in optional else NUM_BLOCKS for idx in range(2)]
        self.engine = Engine(plan, num_blocks=blocks, table=table)
        self.policy, self.formation = self.engine.policy, self.engine.formation
        absent = {each.index for each in optional if each.role == "expert"}
        if absent:
            present = table_without(table, absent, current=table)
            assert present is not None
            self.formation.use_part(present)
        places = [A0, A1, *(Member("stage", idx) for idx in range(len(stages))), E0, E1]
        self.replicas = Replicas(stages)
        self.roster = Roster(places, revision="r", stages=stages, optional=optional)
        self.lives: dict[Member, Node] = {}
        self.sent: list[tuple[Member, Message]] = []
        self.states: list[tuple[str, str]] = []
        self.dead: list[int] = []
        self._num_lives = 0
        log = logging.LoggerAdapter(logging.getLogger("test"))
        self.side = NodeSide(
            self.roster,
            DraftSide([], revision="r", report_dead=self._die, log=log),
            send=self._send,
            tracer=Tracer(plan.trace),
            log=log,
            experts_follow_tickets=True,
            replicas=self.replicas,
        )
        first = [place for place in places if place not in optional]
        for member in first:
            self.hello(member)
        for member in first:
            self.roster.ready(member, Ready(**self._own(member), num_blocks=self._blocks(member)))
            self.lives[member].formed = self.roster.topology(
                first, self.formation.table, generation=1
            )
        self.failover = Failover(
            plan,
            formation=self.formation,
            nodes=self.side,
            gateways=self,
            policy=self.policy,
            clock=lambda: self.engine.now,
            log=log,
            report_dead=self._die,
            spares=Spares(),
            may_be_local=may_be_local,
        )

    def _send(self, peer: bytes, message: Message) -> bool:
        member = self.roster.member(peer)
        assert member is not None
        self.sent.append((member, message))
        self.lives[member].inbox.append(message)
        if isinstance(message, Reform):
            generation = message.topology.generation
            for node in map(self.lives.__getitem__, self.failover.nodes):
                # Whoever has just loaded was in none before.
                assert node.has_halted_in == generation or node.formed is None
        return True

    def _die(self, pid: int) -> None:
        """End a process, as the supervisor does with those that are reported."""
        self.dead.append(pid)
        self.lives = {member: node for member, node in self.lives.items() if node.pid != pid}

    @staticmethod
    def _own(member: Member) -> dict[str, Any]:
        return {"role": member.role, "index": member.index}

    @staticmethod
    def _blocks(member: Member) -> int:
        return 0 if member.role == "expert" else NUM_BLOCKS

    # As gateways.GatewaySide.

    def set_state(self, state: StateName, detail: str = "") -> None:
        self.states.append((state, detail))
        if state != "ready":
            self.engine.abandon()

    def deliver(self, outbox: Outbox) -> None:
        self.engine.receive(outbox)

    # What happens to nodes.

    def hello(self, member: Member, pid: int | None = None, generation: int = 0) -> None:
        """Begin another life of a node, as far as its Hello; `pid`: of this process.

        `generation` is that of its life before.
        """
        self._num_lives += 1
        node = self.lives[member] = Node(self._num_lives)
        node.pid = pid or node.pid
        hello = Hello(
            **self._own(member),
            incarnation=node.incarnation,
            revision="r",
            data_address=f"unix:@{node.incarnation}" if member.role == "expert" else "",
            pid=node.pid,
            generation=generation,
        )
        self.roster.join(node.peer, hello)

    def come(self, member: Member, pid: int | None = None, generation: int = 0) -> None:
        """Have a node, which is absent, say Hello."""
        self.hello(member, pid, generation)
        self.failover.joined(member)

    def lose(self, member: Member, error: TopspinError = KILLED) -> None:
        """Close a node's connection."""
        node = self.lives.pop(member)
        if self.roster.member(node.peer) is not None:
            self.failover.lose(member, error)

    def leave(self, member: Member) -> None:
        """Ask a node to end."""
        self.lives[member].leaves = True
        self.failover.leave(member)

    def say(self, member: Member, message: AnyMessage) -> None:
        """Deliver an answer of a node."""
        answer = self.side.checked(member, message)
        assert isinstance(answer, Halted | Loaded | Ready)
        self.failover.answered(member, answer)

    def react(self, member: Member) -> None:
        """Let a node act on the oldest message that it has not read."""
        node, own = self.lives[member], self._own(member)
        match node.inbox.popleft():
            case Halt() as halt:
                node.has_halted_in = halt.generation
                self.say(member, Halted(**own, generation=halt.generation))
            case Reform() as reform:
                node.formed = reform.topology
                self.say(member, Ready(**own, generation=reform.topology.generation))
            case Welcome() as welcome:
                assert welcome.joins_late
                assert welcome.table.slots == self.formation.full_table.slots
                self.say(member, Loaded(**own, num_blocks=self._blocks(member)))
                if member.role == "attention":
                    self.engine.renew(member.index)
            case Stop():
                self.lose(member)
                assert node.pid not in self.dead, "a process that ends in order is not killed"
            case Refused():
                self.lose(member)

    def react_all(self) -> None:
        """Let all nodes act until none has a message left."""
        while any(node.inbox for node in self.lives.values()):
            for member in [each for each, node in self.lives.items() if node.inbox]:
                if member in self.lives:
                    self.react(member)

    @property
    def absent(self) -> list[Member]:
        """Return the places without a process."""
        return [place for place in self.roster.places if place not in self.lives]

    @property
    def topology(self) -> Topology:
        """Return the topology in which the engine serves."""
        self.check()
        assert self.failover.is_serving
        formed = self.lives[self.failover.nodes[0]].formed
        assert formed is not None
        return formed

    def schedule(self) -> bool:
        """Plan a step, as the scheduler's loop does."""
        self.failover.advance()
        return self.failover.is_serving and self.engine.schedule()

    def check(self) -> None:
        """Assert that a generation that serves is one: whole, halted before, of the live nodes."""
        self.policy.check_integrity()
        if not self.failover.is_serving:
            return
        nodes = self.failover.nodes
        first, *others = [self.lives[member].formed for member in nodes]
        assert first is not None
        assert all(other == first for other in others)
        assert first.generation == self.formation.generation
        assert first.table == self.formation.table
        for idx, peer in enumerate(first.experts):
            is_there = Member("expert", idx) in nodes
            assert (peer is not None) == is_there
            assert peer is None or peer.incarnation == self.lives[Member("expert", idx)].incarnation
        for idx, incarnation in enumerate(first.attention_incarnations[:2]):
            member = Member("attention", idx)
            assert incarnation == (self.lives[member].incarnation if member in nodes else None)
            assert len({each in nodes for each in self.replicas.together(member)}) == 1
        for layer, slots in enumerate(first.table.slots):
            full = self.formation.full_table.slots[layer]
            for idx, held in enumerate(slots):
                assert held == (full[idx] if Member("expert", idx) in nodes else ())
            is_complete = {each for held in slots for each in held} == {0, 1}
            assert is_complete or layer in first.table.local

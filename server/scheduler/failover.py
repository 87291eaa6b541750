"""Keeps an engine going when a node is lost (`--restart on`): who is told what, and when.

Owns the course of a recovery: policy, roll and nodes are taken from one generation to the
next. The stages and their rules are recovery.py's, requests policy.py's; messages leave
through a Port. Created by service.py once the engine is ready for the first time; before
that a lost node ends it, since then the configuration is the likely cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from server.scheduler.membership import Member, Membership
from server.scheduler.outbox import Delivery
from server.scheduler.policy import Policy
from server.scheduler.recovery import Recovery, Stage
from topspin.config import EngineConfig
from topspin.errors import NodeLost, ProtocolError
from topspin.expert_table import ExpertTable
from topspin.messages import AnyMessage, Halt, Halted, Loaded, Message, Ready, Reform, Welcome

# How often a loop that waits for nodes looks at its deadlines.
POLL_S = 0.1
# How long to leave nodes alone after they could not connect: what keeps them from it may
# take a moment to show.
RETRY_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """What a recovery needs of the service around it.

    `report_dead` tells whoever started the process with this id that it is not wanted any
    more; `use_table` makes a table the one in use.
    """

    send: Callable[[Member, Message], None]
    deliver: Callable[[list[Delivery]], None]
    announce: Callable[[Literal["starting", "ready", "recovering"], str], None]
    log: Callable[[str, int], None]
    now: Callable[[], float]
    report_dead: Callable[[int], None]
    use_table: Callable[[ExpertTable], None]


class Failover:
    """The recoveries of one engine.

    Invariant: steps are planned only while `is_serving`, in a generation that every present
    node has formed.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        membership: Membership,
        policy: Policy,
        table: ExpertTable,
        port: Port,
    ) -> None:
        self._config = config
        self._membership = membership
        self._policy = policy
        self._port = port
        self._full_table = table
        self._table = table
        self._recovery = Recovery(
            halt_deadline_s=config.failover.halt_deadline_s,
            restart_deadline_s=config.failover.restart_deadline_s,
            needs_all=config.m2n.transport == "local",
        )
        self._recovery.start(set(membership.places))
        self._form_after_s = 0.0
        self._reason = ""

    @property
    def is_serving(self) -> bool:
        """Say whether steps may be planned."""
        return self._recovery.is_serving

    @property
    def is_whole(self) -> bool:
        """Say whether every node serves, so that experts may be moved between them."""
        return self.is_serving and not self._recovery.absent

    @property
    def nodes(self) -> list[Member]:
        """Return the nodes that take part in steps; others may be there, and load."""
        return sorted(self._recovery.nodes, key=str)

    @property
    def accepts(self) -> bool:
        """Say whether new requests may wait for the engine."""
        return not self._recovery.has_expired

    def table_changed(self, table: ExpertTable) -> None:
        """Note a table that came into use without a recovery, while the engine was whole."""
        self._full_table = self._table = table

    # What happens to the engine.

    def lose(self, member: Member, reason: str) -> None:
        """Go on without a node that is gone, or must be taken for dead."""
        if self._config.m2n.transport == "local":
            lost = [node for node in self._membership.places if self._membership.has(node)]
        else:
            lost = [member]
        self._port.log(f"lost {member}: {reason}", logging.WARNING)
        taking_part = [node for node in lost if node in self._recovery.nodes]
        for node in lost:
            pid = self._membership.pid(node)
            self._membership.leave(node)
            self._recovery.lose(node)
            self._port.report_dead(pid)
        if taking_part:
            self._halt(reason)
        for node in taking_part:
            if node.role == "attention":
                self._policy.lose(node.index)

    def step_failed(self, generation: int, reason: str) -> None:
        """Begin a new generation because this one's steps, or its forming, have failed."""
        if generation != self._recovery.generation:
            return
        if self._recovery.stage is Stage.FORMING:
            self._form_after_s = self._port.now() + RETRY_S
        elif self._recovery.stage not in (Stage.SERVING, Stage.DRAINING):
            return
        self._halt(reason)

    def progress_lost(self, reason: str) -> None:
        """Begin a new generation because a step does not come to an end."""
        self.step_failed(self._recovery.generation, reason)

    def joined(self, member: Member) -> None:
        """Welcome a node that takes a place which another one has left."""
        topology = self._membership.topology(
            (), self._full_table, generation=self._recovery.generation
        )
        assert member.role != "gateway"
        config = self._config.for_node(member.role, member.index)
        welcome = Welcome(config=config, topology=topology, joins_late=True)
        self._port.send(member, welcome)

    def handle(self, peer: bytes, member: Member, message: AnyMessage) -> bool:
        """Act on a node's part in a recovery; False if the message is none.

        Raises ProtocolError, with which the node is lost.
        """
        if not isinstance(message, Halted | Loaded | Ready):
            return False
        if member != Member(message.role, message.index):
            raise ProtocolError(f"{member} speaks for {message.role} {message.index}")
        if isinstance(message, Halted):
            self._recovery.halted(member, message.generation)
        elif isinstance(message, Loaded):
            self._membership.loaded(peer, message)
            self._port.log(f"{member} has loaded ({message.load_s:.1f} s)", logging.INFO)
            self._recovery.loaded(member, self._port.now())
        elif self._recovery.ready(member, message.generation, self._port.now()):
            self._resume()
        self.advance()
        return True

    def advance(self) -> None:
        """Do what time, or an answer, has made possible; call after every wait."""
        now = self._port.now()
        for member in self._recovery.overdue(now):
            self.lose(member, f"it does not react ({self._reason})")
        if self._recovery.stage is Stage.DRAINING and not self._policy.num_steps_in_flight:
            self._halt("a node is back")
        if self._recovery.has_halted and now >= self._form_after_s:
            self._form(now)
        if self._recovery.expires(now):
            limit_s = self._config.failover.restart_deadline_s
            error = NodeLost(f"{self._waiting_for()} did not come back within {limit_s:g} s")
            self._port.deliver(self._policy.fail_all(error))
            self._announce(str(error))

    # The stages.

    def _halt(self, reason: str) -> None:
        self._reason = reason
        self._recovery.halt(self._port.now())
        generation = self._recovery.generation
        self._port.log(f"generation {generation} begins: {reason}", logging.WARNING)
        self._port.deliver(self._policy.halt(generation))
        self._announce(reason)
        for member in self._recovery.awaited:
            self._port.send(member, Halt(generation=generation))

    def _form(self, now: float) -> None:
        was_waiting = self._recovery.stage is Stage.WAITING
        table = self._recovery.try_form(self._full_table, self._table, now)
        if table is None:
            if not was_waiting:
                self._announce(f"waiting for {self._waiting_for()}")
            return
        if table is not self._table:
            self._table = table
            self._port.use_table(table)
        nodes = self._recovery.awaited
        topology = self._membership.topology(nodes, table, generation=self._recovery.generation)
        for member in nodes:
            self._port.send(member, Reform(topology=topology))

    def _resume(self) -> None:
        attention = [node.index for node in self._recovery.nodes if node.role == "attention"]
        self._policy.resume(attention, table_version=self._table.version)
        absent = self._waiting_for()
        self._port.announce("ready", f"without {absent}" if absent else "")
        if self._recovery.take_late():
            self._recovery.drain(self._port.now())

    def _waiting_for(self) -> str:
        return ", ".join(str(place) for place in self._recovery.absent)

    def _announce(self, detail: str) -> None:
        """Tell gateways that requests wait, or, once they have waited enough, are refused."""
        self._port.announce("recovering" if self.accepts else "starting", detail)

"""Keeps an engine going when a node is lost (`--restart on`): the messages of a recovery.

Owns the sequence of a recovery: it takes policy, roster and nodes from one generation to the
next. The stages and their rules are recovery.py's, requests policy.py's. Created by service.py
once the engine is ready for the first time; before that a lost node ends it, since the
configuration is then the likely cause (faults.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from server.scheduler.gateways import StateName
from server.scheduler.nodes.formation import Formation
from server.scheduler.nodes.recovery import Recovery, RecoveryStage
from server.scheduler.nodes.roster import Member
from server.scheduler.nodes.side import Log, NodeSide
from server.scheduler.nodes.spares import Spares
from server.scheduler.nodes.unheard import Unheard
from server.scheduler.planning.outbox import Outbox
from server.scheduler.planning.policy import Policy
from topspin.errors import NodeGivenUp, NodeLost, NodeSilent, TopspinError
from topspin.messages import Halt, Halted, Loaded, Message, Ready, Reform, Refused, Stop, Welcome
from topspin.plan.spec import EnginePlan

# How often a loop that waits for nodes checks its deadlines.
POLL_S = 0.1
# The pause after nodes could not connect: the cause may become known only a moment later.
RETRY_S = 0.2


class Gateways(Protocol):
    """The methods used of gateways.GatewaySide."""

    def set_state(self, state: StateName, detail: str = "") -> None:
        """Set the engine's state and tell it to all gateways."""

    def deliver(self, outbox: Outbox) -> None:
        """Send the ends of requests."""


class Failover:
    """The recoveries of one engine; implements faults.Faults.

    Invariant: steps are planned only while `is_serving`, in a generation that every present
    node has formed. `report_dead` gives the supervisor the process id of a lost node. One whose
    connection has ended may come back before (unheard.py), unless other nodes end with it.
    """

    ends_engine = False

    def __init__(
        self,
        plan: EnginePlan,
        *,
        formation: Formation,
        nodes: NodeSide,
        gateways: Gateways,
        policy: Policy,
        clock: Callable[[], float],
        log: Log,
        report_dead: Callable[[int], None],
        spares: Spares,
        may_be_local: tuple[int, ...] = (),
    ) -> None:
        """`may_be_local` is Recovery's."""
        self._spares = spares
        self._plan = plan
        self._formation = formation
        self._nodes = nodes
        self._roster = nodes.roster
        self._gateways = gateways
        self._policy = policy
        self._clock = clock
        self._log = log
        self._report_dead = report_dead
        self._recovery = Recovery(
            formation,
            places=self._roster.places,
            optional=self._roster.optional,
            halt_deadline_s=plan.failover.halt_deadline_s,
            restart_deadline_s=plan.failover.restart_deadline_s,
            needs_all=plan.is_one_process,
            may_be_local=may_be_local,
            replicas=nodes.replicas,
        )
        self._unheard = Unheard()
        self._form_after_s = 0.0
        self._reason = ""
        # They were sent Stop, and have not closed their connections yet.
        self._let_go: set[Member] = set()

    @property
    def is_serving(self) -> bool:
        """Say whether steps may be planned."""
        return self._recovery.is_serving

    @property
    def is_whole(self) -> bool:
        """Say whether every node serves that must, so that experts may be moved between them."""
        return self.is_serving and not self._recovery.missing

    @property
    def nodes(self) -> list[Member]:
        """Return the nodes that take part in steps."""
        return sorted(self._recovery.nodes, key=str)  # others may have joined and be loading

    def takes_part(self, member: Member) -> bool:
        """Say whether a node is one of `nodes`; others may still be connected."""
        return member in self._recovery.nodes

    @property
    def accepts(self) -> bool:
        """Say whether new requests may wait for the engine."""
        return not self._recovery.has_expired

    # Events.

    def lose(self, member: Member, error: TopspinError) -> None:
        """Continue without a node that is gone or must count as dead, and its replica."""
        if member in self._let_go:
            self._let_go.discard(member)
            self._roster.leave(member)
            self._log.info("%s has left", member)
            self._replace(member)
            return
        if self._plan.is_one_process:
            lost = self._roster.members
        else:
            lost = [
                each for each in self._nodes.replicas.together(member) if self._roster.has(each)
            ]
        self._log.warning("lost %s: %s", member, error)
        taking_part = [node for node in lost if node in self._recovery.nodes]
        pids = {self._roster.pid(node) for node in lost}
        was_computing = self._recovery.was_computing
        for node in lost:
            if node != member and not self._plan.is_one_process:
                self._tell(node, Refused(reason=f"{member}, of its replica, is lost"))
            self._roster.leave(node)
            self._recovery.lose(node)
        is_unheard = isinstance(error, NodeLost) and not isinstance(error, NodeGivenUp)
        if is_unheard and lost == [member]:
            self._unheard.lose(member, pids.pop(), self._clock())
        for pid in pids:
            self._report_dead(pid)
        if taking_part:
            self._halt(str(error))
            has_died = is_unheard and not isinstance(error, NodeSilent)
            if has_died and was_computing:  # else no request can be the cause
                self._gateways.deliver(self._policy.node_died())
        for node in taking_part:
            if node.role == "attention":
                self._policy.lose(node.index)
        self._replace(member)

    def _replace(self, member: Member) -> None:
        """Let the spare node of a place that is free take it, if there is one.

        It has got its Welcome.
        """
        spare = self._spares.take(member)
        if spare is None:
            return
        self._roster.join(spare.peer, spare.hello)
        self._log.warning("%s takes its place: it was the spare", self._roster.describe(member))
        self._end_unheard(member)
        if spare.loaded is not None:
            self._loaded(member, spare.loaded)

    def leave(self, member: Member) -> None:
        """Continue without a node, and its replica, once the steps under way have ended."""
        if self._plan.is_one_process:
            raise NodeLost(f"{member} leaves, as it was asked to end")
        if member not in self._recovery.nodes:  # it loads
            self._stop(member)
        else:
            self._log.warning("%s leaves, as it was asked to end", member)
            self._recovery.leave(member, self._clock())
            if self._recovery.stage is not RecoveryStage.DRAINING:
                self._halt(f"{member} leaves")

    def step_failed(self, generation: int, error: TopspinError) -> None:
        """Begin a new generation because this one's steps, or its forming, have failed."""
        if generation != self._formation.generation:
            return
        if self._recovery.stage is RecoveryStage.FORMING:
            self._form_after_s = self._clock() + RETRY_S
        elif self._recovery.stage not in (RecoveryStage.SERVING, RecoveryStage.DRAINING):
            return
        self._halt(str(error))

    def joined(self, member: Member) -> None:
        """Send Welcome to a node that takes the place of a lost one, or an optional one's.

        It may be the lost one, which then keeps its weights.
        """
        self._end_unheard(member)
        formation = self._formation
        topology = self._roster.topology((), formation.full_table, generation=formation.generation)
        assert member.role != "gateway"
        config = self._plan.for_node(member.role, member.index)
        self._tell(member, Welcome(config=config, topology=topology, joins_late=True))

    def _end_unheard(self, member: Member) -> None:
        """Have the process killed that was lost in this place, unless it is the one in it now."""
        lost_pid = self._unheard.take(member)
        if lost_pid == self._roster.pid(member):
            if self._roster.has_served(member):
                self._log.info("%s lives: it had only lost its connection", member)
                self._policy.node_lives()
        elif lost_pid is not None:
            self._report_dead(lost_pid)

    def _loaded(self, member: Member, message: Loaded) -> None:
        self._roster.loaded(member, message)
        if member.role == "attention":
            self._policy.equip(member.index, message.num_blocks, message.num_frames)
        self._recovery.loaded(member, self._clock())

    def answered(self, member: Member, message: Halted | Loaded | Ready) -> None:
        """Handle a node's answer; after a ProtocolError the caller gives the node up."""
        if member in self._let_go:
            return  # it was told to end while it loaded, or before it read what it answers
        if isinstance(message, Halted):
            self._recovery.halted(member, message.generation)
        elif isinstance(message, Loaded):
            self._log.info("%s has loaded (%.1f s)", member, message.load_s)
            self._loaded(member, message)
        elif self._recovery.ready(member, message.generation, self._clock()):
            self._resume()
        self.advance()

    def advance(self) -> None:
        """Act on deadlines and on answers received; call after every wait."""
        now = self._clock()
        waiting_since_s = self._recovery.waiting_since_s
        if self._unheard.lost:
            for pid in self._unheard.take_overdue(now, waiting_since_s=waiting_since_s):
                self._report_dead(pid)
        for member in self._recovery.overdue(now):
            self.lose(member, NodeGivenUp(f"it does not react ({self._reason})"))
        if self._recovery.stage is RecoveryStage.DRAINING and not self._policy.num_steps_in_flight:
            leaving = " and ".join(map(str, self._recovery.leaving))
            self._halt(f"without {leaving}" if leaving else "a node is back")
        if self._recovery.has_halted and now >= self._form_after_s:
            self._form(now)
        if self._recovery.expires(now):
            limit_s = self._plan.failover.restart_deadline_s
            error = NodeLost(f"{self._waiting_for()} did not come back within {limit_s:g} s")
            self._gateways.deliver(self._policy.fail_all(error))
            self._announce(str(error))

    # The stages.

    def _halt(self, reason: str) -> None:
        self._reason = reason
        leaving = self._recovery.leaving
        for member in leaving:
            self._recovery.lose(member)
        self._recovery.halt(self._clock())
        generation = self._formation.generation
        self._log.warning("generation %d begins: %s", generation, reason)
        self._gateways.deliver(self._policy.halt())
        self._announce(reason)
        for member in self._recovery.awaited:
            self._tell(member, Halt(generation=generation))
        for member in leaving:
            if member.role == "attention":
                self._policy.lose(member.index)
            self._stop(member)

    def _stop(self, member: Member) -> None:
        """Tell a node, in whose place no step or generation counts on it, to end."""
        self._recovery.lose(member)
        self._let_go.add(member)
        self._tell(member, Stop(reason="it was asked to end"))

    def _form(self, now: float) -> None:
        was_waiting = self._recovery.stage is RecoveryStage.WAITING
        if not self._recovery.try_form(now):
            if not was_waiting:
                self._announce(f"waiting for {self._waiting_for()}")
            return
        nodes, formation = self._recovery.awaited, self._formation
        topology = self._roster.topology(nodes, formation.table, generation=formation.generation)
        for member in nodes:
            self._tell(member, Reform(topology=topology))

    def _resume(self) -> None:
        attention = [node.index for node in self._recovery.nodes if node.role == "attention"]
        self._policy.resume(attention)
        absent = self._waiting_for()
        self._gateways.set_state("ready", f"without {absent}" if absent else "")
        if self._recovery.take_late():
            self._recovery.drain(self._clock())

    def _tell(self, member: Member, message: Message) -> None:
        if not self._nodes.tell(member, message):
            # Its closed connection, or its silence, is noticed next.
            self._log.warning("%s does not take %s", member, type(message).__name__)

    def _waiting_for(self) -> str:
        return ", ".join(str(place) for place in self._recovery.missing)

    def _announce(self, detail: str) -> None:
        """Tell gateways that requests wait or, after the restart deadline, are refused."""
        self._gateways.set_state("recovering" if self.accepts else "starting", detail)

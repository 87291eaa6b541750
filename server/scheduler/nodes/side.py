"""The scheduler's side of its nodes: their lists, and the sending of messages to them.

Owns sending by place, and the check that a node's messages name the node itself.
Knows no request, and decides nothing. Called by service.py, failover.py and gateways.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from server.scheduler.nodes.drafts import DraftSide
from server.scheduler.nodes.roster import Member, Replicas, Roster
from server.scheduler.planning.plans import StepMessages
from server.scheduler.traces import Ask, Tracer
from topspin.errors import ProtocolError
from topspin.messages import (
    AnyMessage,
    ClockPong,
    CompileGrammar,
    ExpertCounts,
    Goodbye,
    GrammarLost,
    GrammarReady,
    Halted,
    Leaving,
    Loaded,
    Message,
    NodeCount,
    NodeMemory,
    Progress,
    Ready,
    ReleaseGrammar,
    StepFailed,
    StepResult,
    TablePrepared,
    TraceDump,
)
from topspin.trace import Kind

Log = logging.LoggerAdapter[logging.Logger]

NodeMessage = (
    ClockPong
    | ExpertCounts
    | Goodbye
    | GrammarReady
    | GrammarLost
    | Halted
    | Leaving
    | Loaded
    | NodeMemory
    | Progress
    | Ready
    | StepFailed
    | StepResult
    | TablePrepared
    | TraceDump
)


class NodeSide:
    """All nodes of one engine, through the channel's `send`."""

    def __init__(
        self,
        roster: Roster,
        drafts: DraftSide,
        *,
        send: Callable[[bytes, Message], bool],
        tracer: Tracer,
        log: Log,
        experts_follow_tickets: bool,
        replicas: Replicas | None = None,
    ) -> None:
        """Without `experts_follow_tickets` the attention nodes' combine() runs the experts."""
        self.replicas = replicas or Replicas()
        self.roster = roster
        self.drafts = drafts
        self.experts_follow_tickets = experts_follow_tickets
        self._send = send
        self._tracer = tracer
        self._log = log
        self._memory: dict[Member, NodeMemory] = {}

    def checked(self, member: Member, message: AnyMessage) -> NodeMessage:
        """Return `message`; raises ProtocolError if it is no node's or names another node."""
        if not isinstance(message, NodeMessage):
            raise ProtocolError(f"{member} sent {type(message).__name__}")
        if isinstance(message, StepResult | GrammarReady | GrammarLost):
            claimed = Member("attention", message.index)
        elif isinstance(message, ExpertCounts):
            claimed = Member("expert", message.index)
        elif isinstance(message, ClockPong | TraceDump):
            return message
        else:
            claimed = Member(message.role, message.index)
        if member != claimed:
            raise ProtocolError(f"{member} speaks for {claimed}")
        return message

    def result(self, member: Member, message: StepResult) -> StepResult:
        """Return a step's result from `member` and stamp its arrival; raises as checked()."""
        self.checked(member, message)
        self._tracer.stamp(Kind.RESULT_RECEIVED, message.step, message.index)
        return message

    def tell(self, member: Member, message: Message) -> bool:
        """Send a message; False if the node is gone or does not read its messages."""
        return self._send(self.roster.peer(member), message)

    def tell_all(self, message: Message) -> None:
        """Send a message to every node; a node that is lost is noticed elsewhere."""
        for member in self.roster.members:
            if not self.tell(member, message):
                self._log.warning("%s does not take %s", member, type(message).__name__)

    def compile(self, messages: list[CompileGrammar | ReleaseGrammar]) -> None:
        """Have every attention node compile grammars, or let them go.

        A node that is lost is noticed elsewhere.
        """
        for member in self.roster.members if messages else ():
            if member.role == "attention":
                for message in messages:
                    self.tell(member, message)

    def send_step(self, step: StepMessages, takes_part: Callable[[Member], bool]) -> Member | None:
        """Send the ticket to every expert node, each plan to its attention node and its stages.

        Nodes that have joined and take no part in steps (they load, or leave) get nothing. Ends at
        the first node that cannot be sent its part, and returns it.
        """
        if self.experts_follow_tickets:
            for member in self.roster.members:
                is_sent = member.role == "expert" and takes_part(member)
                if is_sent and not self.tell(member, step.ticket):
                    return member
        for index, plan in step.plans.items():
            for member in self.replicas.together(Member("attention", index)):
                if not self.tell(member, plan):
                    return member
            self._tracer.stamp(Kind.PLAN_SENT, step.ticket.step, index)
        return None

    @property
    def peers(self) -> dict[Member, bytes]:
        """Return the connection of every node that is there, draft nodes too."""
        taking_part = {member: self.roster.peer(member) for member in self.roster.members}
        return taking_part | self.drafts.members

    def counts(self) -> tuple[NodeCount, ...]:
        """Return the numbers of places and of nodes that are there, draft nodes too."""
        optional = self.roster.optional
        planned = Counter(
            (place.role, place in optional) for place in (*self.roster.places, *self.drafts.places)
        )
        present = Counter((member.role, member in optional) for member in self.peers)
        return tuple(
            NodeCount(role=kind[0], optional=kind[1], planned=count, present=present[kind])
            for kind, count in planned.items()
        )

    def note_memory(self, member: Member, message: NodeMemory) -> None:
        """Keep a node's report of its memory."""
        self._memory[member] = message

    def memory(self) -> tuple[NodeMemory, ...]:
        """Return the last report of every node that is there, draft nodes too."""
        known = self._memory | self.drafts.memory
        return tuple(known[member] for member in self.peers if member in known)

    def ask(self, asks: list[Ask]) -> None:
        """Send a trace's questions; a node that is lost is noticed elsewhere."""
        peers = {str(member): peer for member, peer in self.peers.items()}
        for name, question in asks:
            if name in peers:
                self._send(peers[name], question)

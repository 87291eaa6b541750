"""The scheduler's loop: the only part of it that touches the control channel.

Owns the engine's life (starting, ready, failed or stopping) and what nodes are told; what
gateways are told is gateways.py's. Decides nothing about requests: `step =
policy.schedule(now)`, send, `policy.update(result, now)`. Runs in the process's only thread,
blocked in poll() when there is nothing to do. Called by command.py.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from server.scheduler.assembly import first_table, fitted_config, make_policy, make_watermark
from server.scheduler.engine_facts import EngineFacts
from server.scheduler.experts.balancer import ExpertBalancer
from server.scheduler.experts.load import ExpertLoad
from server.scheduler.failover import POLL_S as RECOVERY_POLL_S
from server.scheduler.failover import Failover, Port
from server.scheduler.gateways import GatewaySide
from server.scheduler.membership import Member, Membership
from server.scheduler.plans import Step
from server.scheduler.policy import Policy
from server.scheduler.traces import Tracer
from topspin import __version__, errors
from topspin.channel import Event, Malformed, PeerGone, Received
from topspin.config import EngineConfig
from topspin.errors import (
    ConfigError,
    EngineError,
    EngineUnavailable,
    NodeLost,
    ProtocolError,
    TopspinError,
    VersionMismatch,
)
from topspin.expert_table import ExpertTable
from topspin.messages import (
    AddRequest,
    AnyMessage,
    ClockPong,
    ExpertCounts,
    Goodbye,
    Hello,
    Message,
    PrepareTable,
    Progress,
    Ready,
    StepFailed,
    StepResult,
    Stop,
    TablePrepared,
    TraceDump,
)
from topspin.process import CONFIG_ERROR_STATUS
from topspin.trace import Kind

# How often a loop with nothing to do looks at the clock and at stop requests.
POLL_S = 0.5
# The same while a step is in flight, whose nodes are watched.
WATCH_POLL_S = 0.25
# How long a lost peer's own closed connection may come after others' complaints about it.
CAUSE_WAIT_S = 0.2
# How long nodes have to leave after Stop.
STOP_WAIT_S = 3.0


class Channel(Protocol):
    """What the loop needs of topspin.channel.ControlServer."""

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for events."""

    def send(self, peer: bytes, message: Message) -> bool:
        """Queue a message; False if the peer is gone."""


class Service:
    """One engine's scheduler.

    Invariant: a request that a gateway sent is answered by its end (an output with a finish
    reason, or RequestFailed), unless the gateway aborted it or is gone.
    """

    def __init__(
        self,
        channel: Channel,
        config: EngineConfig,
        facts: EngineFacts,
        *,
        clock: Callable[[], float],
        logger: logging.Logger,
        report_dead: Callable[[int], None] = lambda pid: None,
    ) -> None:
        """`report_dead` is told the process ids of nodes that are lost (`--restart on`)."""
        config = fitted_config(config, facts)
        self._channel = channel
        self._config = config
        self._facts = facts
        self._clock = clock
        self._logger = logger
        self._membership = Membership(
            num_attention=config.topology.attention_nodes,
            num_experts=config.topology.expert_nodes,
            revision=__version__,
        )
        self._table = first_table(config, facts)
        self._expert_load = ExpertLoad(self._table, half_life_pairs=config.balance.half_life_pairs)
        self._balancer = ExpertBalancer(self._table, self._expert_load, config.balance)
        self._tracer = Tracer(config.trace)
        self._policy: Policy | None = None
        self._gateways = GatewaySide(
            self._membership,
            balancer=self._balancer,
            expert_load=self._expert_load,
            tracer=self._tracer,
            send=self._send,
            log=self._log,
            clock=clock,
        )
        self._stop_reason: str | None = None
        self._events: deque[Event] = deque()
        self._gone: set[bytes] = set()
        self._report_dead = report_dead
        self._failover: Failover | None = None
        self._watermark = make_watermark(config)

    def request_stop(self, reason: str) -> None:
        """Ask the loop to end the engine in order; safe in a signal handler."""
        self._stop_reason = reason

    def request_balance(self, table: ExpertTable | None = None) -> None:
        """Ask the loop to think the expert table over, or to change to `table`."""
        self._balancer.ask(table)

    def run(self) -> int:
        """Serve until asked to stop (returns 0) or until the engine fails.

        Then it returns 1, or 2 if a node cannot be what it was configured as.
        """
        try:
            while self._stop_reason is None:
                self._turn()
        except TopspinError as error:
            if self._stop_reason is None:
                self._fail(error)
                return CONFIG_ERROR_STATUS if isinstance(error, ConfigError) else 1
            # Everybody may have been told to stop at once: a node that left first is no loss.
            self._log(f"while stopping: {error}")
        self._stop(self._stop_reason)
        return 0

    def _turn(self) -> None:
        """Handle what has come, then keep the nodes busy."""
        is_serving = self._failover is None or self._failover.is_serving
        is_stepping = self._policy is not None and self._policy.num_steps_in_flight > 0
        timeout_s = WATCH_POLL_S if is_stepping else POLL_S
        timeout_s = timeout_s if is_serving else RECOVERY_POLL_S
        self._events.extend(self._channel.poll(0 if self._balancer.is_planning else timeout_s))
        while self._events and self._stop_reason is None:
            self._handle(self._events.popleft())
        self._check_progress()
        self._gateways.send_traces()
        if self._failover is not None:
            self._failover.advance()
            if not self._failover.is_serving:
                self._balancer.cancel()
                return
        if self._policy is not None:
            self._balance(self._policy)
            while (step := self._policy.schedule(self._clock())) is not None:
                self._send_step(step)

    def _balance(self, policy: Policy) -> None:
        """Go on with changing the expert table, if all nodes are there to take part."""
        is_whole = self._failover is None or self._failover.is_whole
        if not is_whole or not policy.uses_one_table:
            return
        table = self._balancer.turn(self._clock(), self._membership.places)
        if table is not None:
            self._log(f"expert table {table.version} is being prepared")
            for peer in self._membership.peers():
                self._send(peer, PrepareTable(table=table))

    # Events.

    def _handle(self, event: Event) -> None:
        """Act on one event; raises the error with which the engine fails."""
        member = self._membership.member(event.peer)
        try:
            self._dispatch(event)
        except TopspinError as error:
            if self._failover is None or member is None:
                raise
            self._failover.lose(member, str(error))

    def _dispatch(self, event: Event) -> None:
        if isinstance(event, PeerGone):
            self._on_gone(event.peer)
        elif isinstance(event, Malformed):
            self._on_malformed(event)
        elif isinstance(event.message, Hello):
            self._on_hello(event.peer, event.message)
        elif event.peer in self._membership.gateways:
            self._gateways.handle(event.peer, event.message)
        elif (member := self._membership.member(event.peer)) is not None:
            self._on_node_message(event.peer, member, event.message)
        else:
            self._gateways.refuse(event.peer, f"{type(event.message).__name__} before Hello")

    def _on_gone(self, peer: bytes) -> None:
        if peer in self._membership.gateways:
            self._gateways.left(peer)
        elif (member := self._membership.member(peer)) is not None:
            self._gone.add(peer)
            raise NodeLost(f"{self._membership.describe(member)} closed its connection")

    def _on_malformed(self, event: Malformed) -> None:
        member = self._membership.member(event.peer)
        if member is not None:
            raise ProtocolError(f"{member}: {event.reason}")
        self._log(f"refused a malformed message: {event.reason}", logging.WARNING)

    def _on_hello(self, peer: bytes, hello: Hello) -> None:
        try:
            self._membership.join(peer, hello)
        except (VersionMismatch, ConfigError) as error:
            self._gateways.refuse(peer, str(error))
            if hello.role != "gateway" and self._gateways.is_starting:
                raise  # the engine cannot become what was asked for
            return
        self._log(f"{hello.role} {hello.index} joined (pid {hello.pid})")
        if hello.role == "gateway":
            self._gateways.joined(peer)
            return
        if self._failover is not None:
            self._failover.joined(Member(hello.role, hello.index))
            return
        if self._membership.is_complete:
            for node in self._membership.peers():
                member = self._membership.member(node)
                assert member is not None
                assert member.role != "gateway"
                config = self._config.for_node(member.role, member.index)
                self._send_to_node(node, self._membership.welcome(config, self._table))
        self._gateways.set_state("starting", self._membership.awaited())

    def _on_node_message(self, peer: bytes, member: Member, message: AnyMessage) -> None:
        if self._failover is not None and self._failover.handle(peer, member, message):
            return
        if isinstance(message, ClockPong | TraceDump):
            now_ns = time.monotonic_ns()
            self._gateways.ask_nodes(self._tracer.on_node_message(str(member), message, now_ns))
        elif isinstance(message, StepResult):
            if self._policy is None or member != Member("attention", message.index):
                raise ProtocolError(f"{member} sent a result of attention {message.index}")
            self._tracer.stamp(Kind.RESULT_RECEIVED, message.step, message.index)
            self._gateways.deliver(self._policy.update(message, self._clock()))
        elif isinstance(message, Progress):
            if member != Member(message.role, message.index):
                raise ProtocolError(f"{member} speaks for {message.role} {message.index}")
            self._on_progress(message)
        elif isinstance(message, ExpertCounts):
            if member != Member("expert", message.index):
                raise ProtocolError(f"{member} sent counts of expert {message.index}")
            # Counts by a table that was given up may come after a recovery; they are few.
            if self._failover is None or self._expert_load.knows(message.table_version):
                self._expert_load.add(message)
        elif isinstance(message, TablePrepared):
            self._on_prepared(member, message)
        elif isinstance(message, Ready):
            self._on_ready(peer, message)
        elif isinstance(message, Goodbye):
            self._raise_if_lost(member, message.code)
            reason = f"{member} left: {message.message} ({message.code})"
            if message.code == ConfigError.code and self._gateways.is_starting:
                raise ConfigError(reason)
            raise NodeLost(reason)
        elif isinstance(message, StepFailed):
            self._raise_if_lost(member, message.code)
            reason = f"step {message.step} failed on {member}: {message.message} ({message.code})"
            if self._failover is not None:
                self._failover.step_failed(message.generation, reason)
                return
            raise errors.StepFailed(reason)
        else:
            raise ProtocolError(f"{member} sent {type(message).__name__}")

    def _on_progress(self, message: Progress) -> None:
        policy, now = self._policy, self._clock()
        if policy is None or message.generation != policy.generation:
            return  # of a step that was given up
        self._watermark.heard(message, now)
        if message.state == "working":
            policy.progressed(message, now)

    def _on_prepared(self, member: Member, message: TablePrepared) -> None:
        if member != Member(message.role, message.index):
            raise ProtocolError(f"{member} speaks for {message.role} {message.index}")
        version, refusal = message.version, message.refusal
        table = self._balancer.prepared(member, version, is_refused=bool(refusal))
        if refusal:
            self._log(f"{member} refuses expert table {version}; the one in use stays: {refusal}")
        if table is None or self._policy is None:
            return
        self._table = table
        self._policy.use_table(table.version)
        if self._failover is not None:
            self._failover.table_changed(table)
        stats = self._balancer.stats()
        self._log(
            f"expert table {table.version} is in use: {stats.migrations} experts moved so far, "
            f"max/mean {stats.balance_before:.3f} -> {stats.balance:.3f} (expected)"
        )

    def _on_ready(self, peer: bytes, message: Ready) -> None:
        self._membership.ready(peer, message)
        self._log(f"{message.role} {message.index} ready ({message.load_s:.1f} s)")
        if not self._membership.is_ready:
            self._gateways.set_state("starting", self._membership.awaited())
            return
        policy = make_policy(self._config, self._facts, self._membership, self._table)
        self._policy = self._gateways.policy = policy
        if self._config.failover.restart:
            self._failover = self._make_failover(policy)
        self._gateways.set_state("ready")

    def _make_failover(self, policy: Policy) -> Failover:
        return Failover(
            self._config,
            membership=self._membership,
            policy=policy,
            table=self._table,
            port=Port(
                send=lambda member, message: self._send(self._membership.peer(member), message),
                deliver=self._gateways.deliver,
                announce=self._gateways.set_state,
                log=self._log,
                now=self._clock,
                report_dead=self._report_dead,
                use_table=self._use_table,
            ),
        )

    def _use_table(self, table: ExpertTable) -> None:
        self._table = table
        self._balancer.use(table)

    def _raise_if_lost(self, member: Member, code: str) -> None:
        """If `member` complains of a lost peer, wait for that peer's own end and name it."""
        if code != errors.PeerLost.code or self._failover is not None:
            return
        self._events.extend(self._channel.poll(CAUSE_WAIT_S))
        for event in self._events:
            if isinstance(event, PeerGone) and event.peer != self._membership.peer(member):
                self._on_gone(event.peer)

    def _check_progress(self) -> None:
        """Lose a node, or begin anew, if the oldest step is kept from its end for too long.

        Raises NodeLost if there is no failover.
        """
        if self._policy is None:
            return
        nodes = self._membership.places if self._failover is None else self._failover.nodes
        is_local = self._config.m2n.transport == "local"  # there, combine() runs the experts
        experts = [node for node in nodes if node.role == "expert" and not is_local]
        verdict = self._watermark.judge(self._policy.oldest_step(), experts, self._clock())
        if verdict is None:
            return
        if self._failover is None:
            raise NodeLost(f"{verdict.member}: {verdict.reason}")
        if verdict.member is None:
            self._failover.progress_lost(verdict.reason)
        else:
            self._failover.lose(verdict.member, verdict.reason)

    # Sending.

    def _send_step(self, step: Step) -> None:
        """Send a step: the ticket to every expert node, each plan to its attention node."""
        if self._config.m2n.transport != "local":  # there, combine() runs the experts
            for peer in self._membership.peers("expert"):
                self._send_to_node(peer, step.ticket)
        for index, plan in step.plans.items():
            self._send_to_node(self._membership.peer(Member("attention", index)), plan)
            self._tracer.stamp(Kind.PLAN_SENT, step.ticket.step, index)

    def _send_to_node(self, peer: bytes, message: Message) -> None:
        if not self._channel.send(peer, message):
            member = self._membership.member(peer)
            reason = f"{member} cannot be sent {type(message).__name__}"
            if self._failover is None:
                raise NodeLost(reason)
            self._log(reason, logging.WARNING)  # its closed connection is reported next

    def _send(self, peer: bytes, message: Message) -> None:
        if not self._channel.send(peer, message):
            self._log(f"a peer does not take {type(message).__name__}", logging.WARNING)

    def _log(self, text: str, level: int = logging.INFO) -> None:
        self._logger.log(level, "scheduler: %s", text)

    # The end.

    def _fail(self, error: TopspinError) -> None:
        """End every request with `error` (as a 503) and tell the gateways."""
        self._log(f"the engine has failed: {error}", logging.ERROR)
        # Requests learn their own cause before their gateway hears that the engine is gone.
        if self._policy is not None:
            cause = error if isinstance(error, EngineError) else errors.StepFailed(str(error))
            self._gateways.deliver(self._policy.fail_all(cause))
        self._gateways.set_state("failed", str(error))
        self._events.extend(self._channel.poll(0))
        self._refuse_rest()

    def _stop(self, reason: str) -> None:
        """End every request, let the nodes go, and refuse what still comes meanwhile."""
        self._gateways.set_state("stopping", reason)
        if self._policy is not None:
            self._gateways.deliver(
                self._policy.fail_all(EngineUnavailable(f"the engine stops: {reason}"))
            )
        stop = Stop(reason=reason)
        staying = set(self._membership.peers()) - self._gone
        leaving = {peer for peer in staying if self._channel.send(peer, stop)}
        deadline_s = self._clock() + STOP_WAIT_S
        while True:
            leaving -= {event.peer for event in self._events if isinstance(event, PeerGone)}
            self._refuse_rest()
            left_s = deadline_s - self._clock()
            if not leaving or left_s <= 0:
                break
            self._events.extend(self._channel.poll(left_s))
        for peer in leaving:
            self._log(f"{self._membership.member(peer)} has not left", logging.WARNING)

    def _refuse_rest(self) -> None:
        """Answer the requests among the events that nobody will handle any more."""
        for event in self._events:
            if isinstance(event, Received) and isinstance(event.message, AddRequest):
                self._gateways.add(event.peer, event.message)
        self._events.clear()

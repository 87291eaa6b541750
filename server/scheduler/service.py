"""The scheduler's loop: the only part of it that touches the control channel.

Owns the engine's life: starting, serving, failed or stopping. A turn is three lines: `step =
policy.schedule(now)`, send, `policy.update(result, now)`; other messages of nodes and gateways
go to the part responsible for them. Decides nothing about requests. Runs in the process's only
thread, blocked in poll() when there is nothing to do. Called by command.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Protocol

from server.scheduler.assembly import (
    make_formation,
    make_local_layers,
    make_policy,
    make_watermark,
    named_layers,
    optional_places,
    places,
    required_experts,
)
from server.scheduler.engine_facts import EngineFacts
from server.scheduler.experts.balancer import ExpertBalancer
from server.scheduler.gateways import GatewaySide
from server.scheduler.nodes.drafts import DraftSide
from server.scheduler.nodes.failover import POLL_S as RECOVERY_POLL_S
from server.scheduler.nodes.failover import Failover
from server.scheduler.nodes.faults import FailStop, Faults
from server.scheduler.nodes.roster import Member, Replicas, Roster
from server.scheduler.nodes.side import NodeSide
from server.scheduler.nodes.slowness import Slowness
from server.scheduler.nodes.spares import Spares
from server.scheduler.nodes.wrong_rows import NUM_STEPS
from server.scheduler.planning.plans import StepMessages
from server.scheduler.planning.policy import Policy
from server.scheduler.planning.telemetry import JournalNote, no_note
from server.scheduler.traces import Tracer
from server.scheduler.watch import Watch
from topspin import __version__, errors
from topspin.errors import (
    ConfigError,
    EngineError,
    EngineUnavailable,
    NodeGivenUp,
    NodeLost,
    NodeSilent,
    ProtocolError,
    TopspinError,
    VersionMismatch,
)
from topspin.messages import (
    AddRequest,
    AnyMessage,
    ClockPong,
    ExpertCounts,
    Goodbye,
    GrammarLost,
    GrammarReady,
    Halted,
    Hello,
    Leaving,
    Loaded,
    Message,
    NodeMemory,
    PrepareTable,
    Progress,
    Ready,
    StepFailed,
    StepResult,
    Stop,
    TablePrepared,
    TraceDump,
    Welcome,
)
from topspin.plan.spec import EnginePlan
from topspin.process import CONFIG_ERROR_STATUS
from topspin.processes.channel import Event, Malformed, PeerGone, Received

# How often a loop with nothing to do looks at the clock and at stop requests.
POLL_S = 0.5
# The same while a step is in flight, whose nodes are watched.
WATCH_POLL_S = 0.25
# How often the nodes' speeds are compared, and how often a node is looked for that hangs.
COMPARE_S = 1.0
CHECK_S = 0.05
# How much later than others' reports of its loss a peer's own disconnection may be seen.
CAUSE_WAIT_S = 0.2
# How long nodes have to leave after Stop.
STOP_WAIT_S = 3.0


class Channel(Protocol):
    """The methods used of topspin.processes.channel.ControlServer."""

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for events."""

    def send(self, peer: bytes, message: Message) -> bool:
        """Queue a message; False if the peer is gone."""

    def may_be(self, peer: bytes, group: str) -> bool:
        """Say whether the peer has a key of the group, if peers have keys."""


class Service:
    """One engine's scheduler.

    Invariant: every request of a gateway ends with an output with a finish reason or with
    RequestFailed, unless the gateway aborted it or is gone. `_policy` is None until every node
    was ready once.
    """

    def __init__(
        self,
        channel: Channel,
        plan: EnginePlan,
        facts: EngineFacts,
        *,
        clock: Callable[[], float],
        logger: logging.Logger,
        report_dead: Callable[[int], None] = lambda pid: None,
        note: JournalNote = no_note,
        on_turn: Callable[[bool], None] = lambda is_ready: None,
    ) -> None:
        """`report_dead` gets the process id of each lost node without which the engine goes on.

        `on_turn` is called in every turn of the loop, with whether requests are taken.
        """
        self._channel = channel
        self._plan = plan
        self._facts = facts
        self._clock = clock
        watch = Watch()
        self._log = _Log(logger, watch)
        self._report_dead = report_dead
        self._on_turn = on_turn
        self._note = note
        tracer = Tracer(plan.trace)
        self._drafts = DraftSide(
            [node.index for node in plan.drafts],
            revision=__version__,
            report_dead=report_dead,
            log=self._log,
        )
        stages = [node.of for node in plan.stages]
        self._nodes = NodeSide(
            Roster(
                places(plan),
                revision=__version__,
                stages=stages,
                optional=optional_places(plan),
            ),
            self._drafts,
            send=channel.send,
            tracer=tracer,
            log=self._log,
            experts_follow_tickets=not plan.is_one_process,
            replicas=Replicas(stages),
        )
        self.formation = make_formation(plan, facts)
        self.balancer = ExpertBalancer(
            self.formation, plan.balance, required=required_experts(plan)
        )
        self.local_layers = make_local_layers(plan, facts)
        self._slowness = Slowness(plan)
        self._compared_s = self._checked_s = 0.0
        self._gateways = GatewaySide(
            self._nodes,
            plan=plan,
            formation=self.formation,
            balancer=self.balancer,
            slowness=self._slowness,
            tracer=tracer,
            watch=watch,
            send=channel.send,
            takes_part=lambda member: self._faults.takes_part(member),
            log=self._log,
            clock=clock,
        )
        self._watermark = make_watermark(plan)
        self._policy: Policy | None = None
        self._faults: Faults = FailStop(self._nodes.roster)
        self._events: deque[Event] = deque()
        # Optional and spare nodes that came before the engine was ready.
        self._early: dict[bytes, Hello] = {}
        self._spares = Spares()
        self._stop_reason: str | None = None
        self._ends_nodes = True

    def request_stop(self, reason: str, *, ends_nodes: bool = True) -> None:
        """Ask the loop to end in order, with its nodes or alone; safe in a signal handler."""
        self._ends_nodes = ends_nodes
        self._stop_reason = reason

    @property
    def num_steps_in_flight(self) -> int | None:
        """Return how many steps the nodes have not answered, None before the engine is ready."""
        return None if self._policy is None else self._policy.num_steps_in_flight

    def run(self) -> int:
        """Serve until a stop is requested (returns 0) or until the engine fails.

        A failure returns 1, or CONFIG_ERROR_STATUS for a ConfigError.
        """
        try:
            while self._stop_reason is None:
                self._turn()
        except TopspinError as error:
            if self._stop_reason is None:
                self._fail(error)
                return CONFIG_ERROR_STATUS if isinstance(error, ConfigError) else 1
            # All processes may have been told to stop at once: a node may leave first.
            self._log.info("while stopping: %s", error)
        self._stop(self._stop_reason)
        return 0

    # A turn of the loop.

    def _turn(self) -> None:
        """Schedule steps and send them, then wait, and update the policy with their results."""
        policy = self._policy
        self._on_turn(self._gateways.is_ready)
        if policy is not None and self._may_plan(policy):
            while (step := policy.schedule(self._clock())) is not None:
                self._send(step)
        if policy is not None:
            self._gateways.deliver(policy.expire(self._clock()))
            self._gateways.deliver(policy.displace_grammars())
            self._nodes.compile(policy.compilations.take_unsent())
        for event in self._receive():
            member = self._nodes.roster.member(event.peer)
            try:
                if member and policy and (result := _result_in(event)) is not None:
                    result = self._nodes.result(member, result)
                    self._gateways.deliver(policy.update(result, self._clock()))
                    if policy.wrong_rows.runs:
                        self._check_rows(policy)
                    if (warning := policy.take_warning()) is not None:
                        self._log.warning(warning)
                else:
                    self._handle(event, member)
            except TopspinError as error:
                if member is None:
                    raise
                self._faults.lose(member, error)
        if policy is not None:
            self._gateways.deliver(policy.take_arrivals(self._clock()))
        now = self._clock()
        if now >= self._checked_s + CHECK_S:
            self._checked_s = now
            self._check_progress(now)
            self._compare_nodes(now)
        self._gateways.send_traces()

    def _may_plan(self, policy: Policy) -> bool:
        """Advance a recovery or a change of the expert table; returns whether to plan steps."""
        self._faults.advance()
        if not self._faults.is_serving:
            self.balancer.cancel()
            return False
        if self._faults.is_whole and policy.uses_one_table:
            if self.local_layers is not None and not self.balancer.is_changing:
                change = self.local_layers.change(self.formation.table.local)
                if change is not None:
                    self._log.info(change.reason)
                    self.balancer.keep_local(change.layers)
            table = self.balancer.turn(self._clock(), self._faults.nodes)
            if table is not None:
                self._log.info("expert table %d is being prepared", table.version)
                self._nodes.tell_all(PrepareTable(table=table))
        return True

    def _send(self, step: StepMessages) -> None:
        deaf = self._nodes.send_step(step, self._faults.takes_part)
        if deaf is not None:
            self._faults.lose(deaf, NodeLost(f"{deaf} cannot be sent its part of a step"))

    def _receive(self) -> Iterator[Event]:
        """Wait for events and yield them until a stop is requested; the rest stay in `_events`."""
        is_stepping = self._policy is not None and self._policy.num_steps_in_flight > 0
        timeout_s = WATCH_POLL_S if is_stepping else POLL_S
        if not self._faults.is_serving:
            timeout_s = RECOVERY_POLL_S
        if self.balancer.is_planning:
            timeout_s = 0.0
        self._events.extend(self._channel.poll(timeout_s))
        while self._events and self._stop_reason is None:
            yield self._events.popleft()

    def _check_progress(self, now: float) -> None:
        """Handle a node, or lost rows, that block the oldest step."""
        if self._policy is None:
            return
        is_watched = self._nodes.experts_follow_tickets
        watched = [node for node in self._faults.nodes if node.role == "expert" and is_watched]
        head = self._policy.oldest_step()
        for index in () if head is None else head.unanswered:
            watched += self._nodes.replicas.stages(index)
        verdict = self._watermark.judge(head, watched, now)
        if verdict is None:
            return
        member, reason, _ = verdict
        if member is None:
            self._faults.step_failed(self.formation.generation, NodeLost(reason))
        else:
            self._faults.lose(member, NodeGivenUp(f"{member}: {reason}"))

    def _compare_nodes(self, now: float) -> None:
        """Tell of nodes that are much slower than others, or were."""
        policy = self._policy
        if now < self._compared_s + COMPARE_S or policy is None or not policy.num_steps_in_flight:
            return
        self._compared_s = now
        attention, experts = policy.attention_times(), self.balancer.load.times()
        times = {Member("attention", index): time for index, time in attention.items()}
        times |= {Member("expert", index): time for index, time in experts.items()}
        present = {each: time for each, time in times.items() if each in self._faults.nodes}
        for news in self._slowness.heard(present):
            self._log.warning(news)

    def _check_rows(self, policy: Policy) -> None:
        """Handle a node whose results are not numbers."""
        member = policy.wrong_rows.take_verdict(self._faults.nodes)
        if member is not None:
            reason = f"{member}: rows of {NUM_STEPS} steps in a row are not numbers"
            self._faults.lose(member, NodeGivenUp(reason))

    # Events other than results.

    def _handle(self, event: Event, member: Member | None) -> None:
        """Handle one event; raises the error by which the node, or the engine, is lost."""
        peer = event.peer
        if isinstance(event, PeerGone):
            if self._early.pop(peer, None) is not None:
                return
            if peer in self._nodes.roster.gateways:
                self._gateways.left(peer)
            elif self._drafts.index(peer) is not None:
                self._drafts.lose(peer, f"it {event.how}")
            elif (place := self._spares.place(peer)) is not None:
                self._log.warning("the spare %s %s", place, event.how)
                self._report_dead(self._spares.drop(peer).pid)
            elif member is not None:
                raise self._gone(member, event)
        elif isinstance(event, Malformed):
            if member is not None:
                raise ProtocolError(f"{member}: {event.reason}")
            self._log.warning("refused a malformed message: %s", event.reason)
        elif isinstance(event.message, Hello):
            self._on_hello(peer, event.message)
        elif peer in self._nodes.roster.gateways:
            self._gateways.handle(peer, event.message)
        elif (index := self._drafts.index(peer)) is not None:
            if isinstance(event.message, ClockPong | TraceDump):
                self._gateways.trace_answer(Member("draft", index), event.message)
            elif self._drafts.heard(peer, event.message) and self._policy is None:
                self._serve_if_ready()
        elif member is not None:
            self._on_node_message(member, event.message)
        elif (place := self._spares.place(peer)) is not None:
            self._on_spare_message(place, peer, event.message)
        else:
            reason = f"{type(event.message).__name__} before Hello"
            self._gateways.refuse(peer, reason, is_before_hello=True)

    def _gone(self, member: Member, event: PeerGone) -> NodeLost:
        kind = NodeSilent if event.was_silent else NodeLost
        return kind(f"{self._nodes.roster.describe(member)} {event.how}")

    def _on_hello(self, peer: bytes, hello: Hello) -> None:
        roster = self._nodes.roster
        group = self._plan.key_group_of(hello.role, hello.index)
        if not self._channel.may_be(peer, group):
            reason = f"{hello.role} {hello.index} has no key of the group {group!r}"
            self._gateways.refuse(peer, reason)
            return
        is_spare = self._is_spare(hello)
        is_optional = Member(hello.role, hello.index) in roster.optional
        if (is_optional or is_spare) and self._policy is None:
            self._early[peer] = hello
            return
        try:
            if hello.role == "draft":
                self._drafts.join(peer, hello)
            elif is_spare:
                roster.check_spare(peer, hello)
            else:
                roster.join(peer, hello)
        except (VersionMismatch, ConfigError) as error:
            self._gateways.refuse(peer, str(error))
            if hello.role != "gateway" and self._gateways.is_starting:
                raise  # the engine cannot start as configured
            return
        spare = "the spare " if is_spare else ""
        self._log.info("%s%s %d joined (pid %d)", spare, hello.role, hello.index, hello.pid)
        if hello.role == "gateway":
            self._gateways.joined(peer)
            return
        if hello.role == "draft" or is_spare:
            topology = roster.topology(
                (), self.formation.full_table, generation=self.formation.generation
            )
            config = self._plan.for_node(hello.role, hello.index)
            if is_spare:
                self._spares.add(peer, hello)
            self._channel.send(peer, Welcome(config=config, topology=topology, joins_late=is_spare))
            return
        self.formation.saw(hello.generation)
        if self._policy is not None:
            self._faults.joined(Member(hello.role, hello.index))
        else:
            if roster.is_complete:
                self._welcome()
            self._set_starting()

    def _is_spare(self, hello: Hello) -> bool:
        """Say whether a node comes second to its place, and may wait there."""
        place = Member(hello.role, hello.index)
        is_asked_for = self._plan.failover.standby == "weights"
        return is_asked_for and self._nodes.roster.has(place) and not self._spares.has(place)

    def _on_spare_message(self, place: Member, peer: bytes, message: AnyMessage) -> None:
        try:
            self._nodes.checked(place, message)
            if isinstance(message, Loaded):
                self._nodes.roster.loaded(place, message)
                self._spares.loaded(peer, message)
                self._log.info("the spare %s has loaded (%.1f s)", place, message.load_s)
            elif isinstance(message, Leaving):
                self._spares.leaves(peer)
                self._channel.send(peer, Stop(reason="it was asked to end"))
        except ProtocolError as error:
            self._spares.drop(peer)
            self._gateways.refuse(peer, str(error))

    def _set_starting(self) -> None:
        awaited = [self._nodes.roster.awaited(), self._drafts.awaited()]
        self._gateways.set_state("starting", ", ".join(filter(None, awaited)))

    def _welcome(self) -> None:
        """Send Welcome to every node, now that all have joined; they then load."""
        roster, formation = self._nodes.roster, self.formation
        formation.begin()
        nodes = roster.members
        topology = roster.topology(nodes, formation.table, generation=formation.generation)
        for member in nodes:
            assert member.role in ("attention", "stage", "expert")
            config = self._plan.for_node(member.role, member.index)
            if not self._nodes.tell(member, Welcome(config=config, topology=topology)):
                raise NodeLost(f"{member} cannot be sent Welcome")

    def _on_node_message(self, member: Member, message: AnyMessage) -> None:
        match self._nodes.checked(member, message):
            case Progress() as progress:
                self._on_progress(progress)
            case NodeMemory() as memory:
                self._nodes.note_memory(member, memory)
            case ExpertCounts() as counts:
                self.balancer.load.add(counts)
            case TablePrepared() as answer:
                self._on_prepared(member, answer)
            case GrammarReady() as compiled:
                if self._policy is not None:
                    self._gateways.deliver(self._policy.compiled(compiled, self._clock()))
            case GrammarLost() as lost:
                if self._policy is not None:
                    self._policy.lost_grammar(lost, self._clock())
            case ClockPong() | TraceDump() as answer:
                self._gateways.trace_answer(member, answer)
            case Ready() as ready if self._policy is None:
                self._on_ready(member, ready)
            case Ready() | Loaded() | Halted() as answer:
                self._faults.answered(member, answer)
            case Leaving():
                self._faults.leave(member)
            case StepFailed() as failed:
                self._name_cause(member, failed.code)
                reason = f"step {failed.step} failed on {member}: {failed.message} ({failed.code})"
                self._faults.step_failed(failed.generation, errors.StepUnfinished(reason))
            case Goodbye() as goodbye:
                self._name_cause(member, goodbye.code)
                reason = f"{member} left: {goodbye.message} ({goodbye.code})"
                if goodbye.code == ConfigError.code and self._gateways.is_starting:
                    raise ConfigError(reason)
                raise NodeLost(reason)
            case StepResult():
                raise ProtocolError(f"{member} sent a result before the engine was ready")

    def _on_progress(self, message: Progress) -> None:
        policy, now = self._policy, self._clock()
        if policy is None or message.generation != self.formation.generation:
            return  # of a step that was given up
        self._watermark.heard(message, now)
        if message.state == "working":
            policy.progressed(message, now)

    def _on_prepared(self, member: Member, message: TablePrepared) -> None:
        version, refusal = message.version, message.refusal
        table = self.balancer.prepared(member, version, is_refused=bool(refusal))
        if refusal:
            self._log.info(
                f"{member} refuses expert table {version}; the one in use stays: {refusal}"
            )
        if table is not None:
            stats = self.balancer.stats()
            speeds = f", speeds {', '.join(map(str, table.speeds))}" if table.speeds else ""
            self._log.info(
                f"expert table {table.version} is in use{speeds}: {stats.migrations} experts moved "
                f"so far, max/mean {stats.balance_before:.3f} -> {stats.balance:.3f} (expected)"
            )

    def _on_ready(self, member: Member, message: Ready) -> None:
        roster = self._nodes.roster
        roster.ready(member, message)
        self._log.info("%s ready (%.1f s)", member, message.load_s)
        self._serve_if_ready()

    def _serve_if_ready(self) -> None:
        """Begin to serve once every node is ready."""
        roster = self._nodes.roster
        if not (roster.is_ready and self._drafts.is_ready):
            self._set_starting()
            return
        self._drafts.may_be_lost = True
        policy = make_policy(
            *(self._plan, self._facts, roster, self.formation, self._note),
            self.local_layers,
        )
        self._policy = self._gateways.policy = policy
        if self._plan.failover.restart:
            self._faults = Failover(
                self._plan,
                formation=self.formation,
                nodes=self._nodes,
                gateways=self._gateways,
                policy=policy,
                clock=self._clock,
                log=self._log,
                report_dead=self._report_dead,
                spares=self._spares,
                may_be_local=named_layers(self._plan, self._facts),
            )
        self._gateways.set_state("ready")
        while self._early:
            self._on_hello(*self._early.popitem())

    def _name_cause(self, member: Member, code: str) -> None:
        """If `member` reports a lost peer, wait for its disconnection and raise NodeLost for it."""
        if code != errors.PeerLost.code or not self._faults.ends_engine:
            return
        self._events.extend(self._channel.poll(CAUSE_WAIT_S))
        for event in self._events:
            lost = self._nodes.roster.member(event.peer)
            if isinstance(event, PeerGone) and lost is not None and lost != member:
                raise self._gone(lost, event)

    # The end.

    def _fail(self, error: TopspinError) -> None:
        """End every request with `error` (as a 503) and tell the gateways."""
        self._log.error("the engine has failed: %s", error)
        # Requests get their own error before their gateway is told that the engine has failed.
        if self._policy is not None:
            cause = error if isinstance(error, EngineError) else errors.StepUnfinished(str(error))
            self._gateways.deliver(self._policy.fail_all(cause))
        self._gateways.set_state("failed", str(error))
        self._events.extend(self._channel.poll(0))
        self._refuse_rest()

    def _stop(self, reason: str) -> None:
        """End every request, stop the nodes if asked, and refuse requests that arrive meanwhile."""
        self._gateways.set_state("stopping", reason)
        if self._policy is not None:
            self._gateways.deliver(
                self._policy.fail_all(EngineUnavailable(f"the engine stops: {reason}"))
            )
        stop = Stop(reason=reason)
        peers = {peer: str(member) for member, peer in self._nodes.peers.items()}
        peers |= {peer: f"{hello.role} {hello.index}" for peer, hello in self._early.items()}
        peers |= self._spares.peers
        if not self._ends_nodes:
            peers = {}
        leaving = {peer: name for peer, name in peers.items() if self._channel.send(peer, stop)}
        deadline_s = self._clock() + STOP_WAIT_S
        while True:
            gone = {event.peer for event in self._events if isinstance(event, PeerGone)}
            leaving = {peer: name for peer, name in leaving.items() if peer not in gone}
            self._refuse_rest()
            left_s = deadline_s - self._clock()
            if not leaving or left_s <= 0:
                break
            self._events.extend(self._channel.poll(left_s))
        for name in leaving.values():
            self._log.warning("%s has not left", name)

    def _refuse_rest(self) -> None:
        """Refuse the requests among the remaining events, and drop the events."""
        for event in self._events:
            if isinstance(event, Received) and isinstance(event.message, AddRequest):
                self._gateways.add(event.peer, event.message)
        self._events.clear()


def _result_in(event: Event) -> StepResult | None:
    """Return the step result in `event`, None if it is another event."""
    if isinstance(event, Received) and isinstance(event.message, StepResult):
        return event.message
    return None


class _Log(logging.LoggerAdapter[logging.Logger]):
    """Adds the process's name to every line, and shows warnings to those who watch."""

    def __init__(self, logger: logging.Logger, watch: Watch) -> None:
        super().__init__(logger)
        self._watch = watch

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        super().log(level, msg, *args, **kwargs)
        if level >= logging.WARNING:
            self._watch.told(str(msg) % args if args else str(msg), is_warning=True)

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[str, MutableMapping[str, Any]]:
        return f"scheduler: {msg}", kwargs

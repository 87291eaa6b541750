"""The scheduler's side of its gateways: their requests and questions, and the answers.

Owns the engine's state as reported to gateways, the answers to their questions (counters,
traces), and passing requests to the policy and results back. Called by service.py and
failover.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Literal

import msgspec

from server.scheduler.experts.balancer import ExpertBalancer
from server.scheduler.nodes.formation import Formation
from server.scheduler.nodes.roster import Member
from server.scheduler.nodes.side import Log, NodeSide
from server.scheduler.nodes.slowness import Slowness
from server.scheduler.planning.outbox import Outbox, failure
from server.scheduler.planning.policy import Policy
from server.scheduler.planning.telemetry import Counters
from server.scheduler.traces import Tracer
from server.scheduler.watch import Watch
from topspin.errors import EngineUnavailable
from topspin.messages import (
    AbortRequest,
    AddRequest,
    AnyMessage,
    ClockPong,
    EngineState,
    Feed,
    FeedNode,
    FeedRequest,
    Message,
    Refused,
    SlowNode,
    Stats,
    StatsQuery,
    TraceDump,
    TraceRequest,
)
from topspin.plan.spec import EnginePlan

StateName = Literal["starting", "ready", "recovering", "failed", "stopping"]
# In place of a gateway: the trace is for those who watch.
WATCH: Final = b""


class GatewaySide:
    """All gateways of one engine.

    Invariant: every gateway in the roster has been told the present state. `policy` is set
    once the engine is ready for the first time.
    """

    def __init__(
        self,
        nodes: NodeSide,
        *,
        plan: EnginePlan,
        formation: Formation,
        balancer: ExpertBalancer,
        slowness: Slowness,
        tracer: Tracer,
        watch: Watch,
        send: Callable[[bytes, Message], bool],
        takes_part: Callable[[Member], bool],
        log: Log,
        clock: Callable[[], float],
    ) -> None:
        """`takes_part` says whether a node is one of those that steps are sent to."""
        self._planned = {Member(node.role, node.index): node for node in plan.nodes}
        self._link = plan.link
        self._formation = formation
        self._watch = watch
        self._takes_part = takes_part
        self._nodes = nodes
        self._peers = nodes.roster.gateways
        self._balancer = balancer
        self._slowness = slowness
        self._tracer = tracer
        self._channel_send = send
        self._log = log
        self._clock = clock
        self.policy: Policy | None = None
        self._state = EngineState(state="starting", detail=nodes.roster.awaited())

    @property
    def is_starting(self) -> bool:
        """Say whether the engine has not been ready yet, or cannot serve any more."""
        return self._state.state == "starting"

    @property
    def is_ready(self) -> bool:
        """Say whether requests are taken."""
        return self._state.state in ("ready", "recovering")

    def set_state(self, state: StateName, detail: str = "") -> None:
        """Set the engine's state and tell it to all gateways."""
        limit = 0 if self.policy is None else self.policy.max_request_tokens
        self._state = EngineState(state=state, detail=detail, max_request_tokens=limit)
        text = f"{state}: {detail}" if detail else state
        self._log.info(text)
        self._watch.told(text)
        for peer in self._peers:
            self._send(peer, self._state)

    def joined(self, peer: bytes) -> None:
        """Tell a new gateway the present state."""
        self._send(peer, self._state)

    def left(self, peer: bytes) -> None:
        """End the requests of a gateway that is gone."""
        self._peers.remove(peer)
        num_aborted = 0 if self.policy is None else self.policy.abort_peer(peer)
        self._log.info("a gateway is gone; %d of its requests aborted", num_aborted)

    def handle(self, peer: bytes, message: AnyMessage) -> None:
        """Act on a gateway's message."""
        if isinstance(message, AddRequest):
            self.add(peer, message)
        elif isinstance(message, AbortRequest):
            if self.policy is not None:
                self.policy.abort(message.request_id, peer=peer)
        elif isinstance(message, StatsQuery):
            self._send(peer, self._stats(message.query_id, self._balancer.load.totals()))
        elif isinstance(message, TraceRequest):
            self._start_trace(peer, message)
        elif isinstance(message, FeedRequest):
            self._show(peer, message)
        else:
            self.refuse(peer, f"a gateway sent {type(message).__name__}")

    def add(self, peer: bytes, message: AddRequest) -> None:
        """Queue a request, or send its refusal."""
        if self.policy is None or not self.is_ready:
            error = EngineUnavailable(f"the engine is {self._state.state}")
            self._send(peer, failure(message.request_id, error))
        elif (refusal := self.policy.add(message, peer=peer, now=self._clock())) is not None:
            self._send(peer, refusal)

    def refuse(self, peer: bytes, reason: str, *, is_before_hello: bool = False) -> None:
        """Refuse a peer's message, and tell it why, as Refused has it."""
        self._log.warning("refused: %s", reason)
        self._send(peer, Refused(reason=reason, is_before_hello=is_before_hello))

    def deliver(self, outbox: Outbox) -> None:
        """Send what has become of requests to their gateways."""
        for peer, message in outbox:
            self._send(peer, message)

    def _send(self, peer: bytes, message: Message) -> None:
        if not self._channel_send(peer, message):
            self._log.warning("a gateway does not take %s", type(message).__name__)

    # Traces.

    def _start_trace(self, peer: bytes, message: TraceRequest) -> None:
        is_ready = self._state.state == "ready"
        members = list(self._nodes.peers) if is_ready else []
        self._nodes.ask(
            self._tracer.start(
                peer,
                message,
                nodes={str(member): (member.role, member.index) for member in members},
                now=self._clock(),
                now_ns=time.monotonic_ns(),
            )
        )

    def trace_answer(self, member: Member, message: ClockPong | TraceDump) -> None:
        """Handle a node's answer for a trace."""
        self._nodes.ask(self._tracer.on_node_message(str(member), message, time.monotonic_ns()))

    def send_traces(self) -> None:
        """Send the traces that are complete or past their deadline, and ask for one to watch."""
        if self._watch.is_on:
            self._tend_watch()
        for answer in self._tracer.finished(self._clock(), time.monotonic_ns()):
            if answer.peer == WATCH:
                self._watch.sampled(answer.trace)
            else:
                self._send(answer.peer, answer.trace)

    # Who watches.

    def _show(self, peer: bytes, message: FeedRequest) -> None:
        """Answer somebody who watches, and note what the next answer needs."""
        watch, load = self._watch, self._balancer.load
        watch.renew(self._clock())
        if self.policy is not None:
            self.policy.on_step = watch.stepped
        feed = Feed(
            query_id=message.query_id,
            cursor=watch.cursor,
            state=self._state.state,
            detail=self._state.detail,
            table_version=self._formation.table.version,
            nodes=tuple(map(self._node, [*self._nodes.roster.places, *self._nodes.drafts.places])),
            link=self._link,
            steps=watch.steps(message.after),
            news=watch.news(message.after),
            sample=watch.sample(message.after),
            stats=self._stats(message.query_id, ()),
            heat=tuple(map(_heat, load.recent())) if message.experts else (),
        )
        self._send(peer, feed)

    def _tend_watch(self) -> None:
        now = self._clock()
        if self._watch.ends(now):
            if self.policy is not None:
                self.policy.on_step = None
        elif (step := self._watch.due(now)) is not None:
            self._start_trace(WATCH, TraceRequest(query_id=0, seconds=0.0, step=step))

    def _node(self, place: Member) -> FeedNode:
        nodes, config = self._nodes, self._planned[place]
        connection = nodes.peers.get(place, b"")
        is_awaited = place.role == "draft" and str(place) in nodes.drafts.awaited().split(", ")
        takes_part = self.policy is not None and self._takes_part(place) and not is_awaited
        memory = {(each.role, each.index): each.resident_bytes for each in nodes.memory()}
        held = self._formation.table.experts_of(place.index) if place.role == "expert" else ()
        return FeedNode(
            role=place.role,
            index=place.index,
            state="lost" if not connection else "serving" if takes_part else "loading",
            connection=connection,
            host=config.host,
            device=config.device,
            num_threads=config.num_threads,
            times=self._slowness.slow.get(place, 1.0),
            resident_bytes=memory.get((place.role, place.index), 0),
            experts=sum(map(len, held)),
        )

    # Counters.

    def _stats(self, query_id: int, totals: tuple[tuple[int, ...], ...]) -> Stats:
        load, nodes = self._balancer.load, self._nodes.counts()
        memory = self._nodes.memory()
        if self.policy is None:
            return Stats(
                query_id=query_id,
                num_waiting=0,
                num_running=0,
                kv_cache_usage=0.0,
                num_blocks=0,
                expert_tokens=totals,
                nodes=nodes,
                memory=memory,
                **Counters().for_stats(),
            )
        balance = self._balancer.stats()
        drafts = self._nodes.drafts.counts
        return msgspec.structs.replace(
            self.policy.stats(query_id, totals, self._clock()),
            num_root_hits=sum(each.num_root_hits for each in drafts),
            num_root_misses=sum(each.num_root_misses for each in drafts),
            num_draft_passes=sum(each.num_passes for each in drafts),
            num_overlapped_passes=sum(each.num_overlapped for each in drafts),
            draft_pass_seconds=sum(each.pass_seconds for each in drafts),
            expert_activations=load.activations,
            expert_batches=load.batches,
            expert_table_version=balance.table_version,
            expert_migrations=balance.migrations,
            expert_balance=balance.balance,
            expert_balance_before=balance.balance_before,
            num_local_layers=balance.num_local_layers,
            nodes=nodes,
            memory=memory,
            slow_nodes=tuple(
                SlowNode(role=each.role, index=each.index, times=times)
                for each, times in self._slowness.slow.items()
            ),
        )


def _heat(shares: Sequence[float]) -> bytes:
    """Return a layer's shares as bytes, where 255 is the largest."""
    largest = max(shares, default=0.0)
    return bytes(round(255 * share / largest) if largest else 0 for share in shares)

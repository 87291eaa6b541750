"""The scheduler's side of its gateways: what they ask, and what they are told.

Owns the engine's state as gateways know it, the answers to their questions (counters,
traces) and the way of requests into the policy and of results back. Knows no node but by
name. Called by service.py, through whose channel everything goes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from server.scheduler.experts.balancer import ExpertBalancer
from server.scheduler.experts.load import ExpertLoad
from server.scheduler.membership import Membership
from server.scheduler.outbox import Delivery, failure
from server.scheduler.policy import Policy
from server.scheduler.traces import Ask, Tracer
from topspin.errors import EngineUnavailable
from topspin.messages import (
    AbortRequest,
    AddRequest,
    AnyMessage,
    EngineState,
    Message,
    Refused,
    Stats,
    StatsQuery,
    TraceRequest,
)

StateName = Literal["starting", "ready", "recovering", "failed", "stopping"]


class GatewaySide:
    """All gateways of one engine.

    Invariant: every gateway on the roll has been told the present state. `policy` is set
    once the engine is ready for the first time.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        balancer: ExpertBalancer,
        expert_load: ExpertLoad,
        tracer: Tracer,
        send: Callable[[bytes, Message], None],
        log: Callable[[str, int], None],
        clock: Callable[[], float],
    ) -> None:
        self._membership = membership
        self._balancer = balancer
        self._expert_load = expert_load
        self._tracer = tracer
        self._send = send
        self._log = log
        self._clock = clock
        self.policy: Policy | None = None
        self._state = EngineState(state="starting", detail=membership.awaited())

    @property
    def is_starting(self) -> bool:
        """Say whether the engine has not been ready yet, or cannot serve any more."""
        return self._state.state == "starting"

    def set_state(self, state: StateName, detail: str = "") -> None:
        """Tell all gateways what the engine is doing."""
        limit = 0 if self.policy is None else self.policy.max_request_tokens
        self._state = EngineState(state=state, detail=detail, max_request_tokens=limit)
        self._log(f"{state}: {detail}" if detail else state, logging.INFO)
        for peer in self._membership.gateways:
            self._send(peer, self._state)

    def joined(self, peer: bytes) -> None:
        """Tell a new gateway what the others know."""
        self._send(peer, self._state)

    def left(self, peer: bytes) -> None:
        """End the requests of a gateway that is gone."""
        self._membership.gateways.remove(peer)
        num_aborted = 0 if self.policy is None else self.policy.abort_peer(peer)
        self._log(f"a gateway is gone; {num_aborted} of its requests aborted", logging.INFO)

    def handle(self, peer: bytes, message: AnyMessage) -> None:
        """Act on a gateway's message."""
        if isinstance(message, AddRequest):
            self.add(peer, message)
        elif isinstance(message, AbortRequest):
            if self.policy is not None:
                self.policy.abort(message.request_id, peer=peer)
        elif isinstance(message, StatsQuery):
            self._send(peer, self._stats(message.query_id))
        elif isinstance(message, TraceRequest):
            self._start_trace(peer, message)
        else:
            self.refuse(peer, f"a gateway sent {type(message).__name__}")

    def add(self, peer: bytes, message: AddRequest) -> None:
        """Queue a request, or answer why not."""
        if self.policy is None or self._state.state not in ("ready", "recovering"):
            error = EngineUnavailable(f"the engine is {self._state.state}")
            self._send(peer, failure(message.request_id, error))
        elif (refusal := self.policy.add(message, peer=peer)) is not None:
            self._send(peer, refusal)

    def refuse(self, peer: bytes, reason: str) -> None:
        """Tell a peer, gateway or not, that it may not do what it does."""
        self._log(f"refused: {reason}", logging.WARNING)
        self._send(peer, Refused(reason=reason))

    def deliver(self, deliveries: list[Delivery]) -> None:
        """Send what a step's results, or the end of requests, mean."""
        for delivery in deliveries:
            self._send(delivery.peer, delivery.message)

    # Traces.

    def _start_trace(self, peer: bytes, message: TraceRequest) -> None:
        nodes: dict[str, tuple[str, int]] = {
            str(member): (member.role, member.index)
            for member in map(self._membership.member, self._membership.peers())
            if member is not None
        }
        ready = nodes if self._state.state == "ready" else {}
        self.ask_nodes(
            self._tracer.start(
                peer, message, nodes=ready, now=self._clock(), now_ns=time.monotonic_ns()
            )
        )

    def ask_nodes(self, asks: list[Ask]) -> None:
        """Send what a trace wants to know; a node that is lost shows elsewhere."""
        names = {str(self._membership.member(peer)): peer for peer in self._membership.peers()}
        for name, question in asks:
            if name in names:
                self._send(names[name], question)

    def send_traces(self) -> None:
        """Send the traces that are complete, or whose time is up."""
        for answer in self._tracer.finished(self._clock(), time.monotonic_ns()):
            self._send(answer.peer, answer.trace)

    # Counters.

    def _stats(self, query_id: int) -> Stats:
        totals = self._expert_load.totals()
        if self.policy is not None:
            balance = self._balancer.stats()
            return msgspec.structs.replace(
                self.policy.stats(query_id, totals, self._clock()),
                expert_table_version=balance.table_version,
                expert_migrations=balance.migrations,
                expert_balance=balance.balance,
                expert_balance_before=balance.balance_before,
            )
        return Stats(
            query_id=query_id,
            num_waiting=0,
            num_running=0,
            kv_cache_usage=0.0,
            num_blocks=0,
            prefix_cache_queries=0,
            prefix_cache_hits=0,
            num_preemptions=0,
            num_steps=0,
            prompt_tokens=0,
            generation_tokens=0,
            step_seconds=0.0,
            expert_tokens=totals,
        )

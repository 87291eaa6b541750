"""A service on a scripted channel: two attention nodes, two expert nodes and a gateway.

Knows no test; test_service.py and test_service_ends.py write the scripts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from server.scheduler.engine_facts import EngineFacts
from server.scheduler.service import Service
from tests.server.scheduler.engine import make_config
from tests.server.scheduler.fake_nodes import VOCAB_SIZE, FakeNode
from topspin import __version__
from topspin.messages import (
    AnyMessage,
    EngineState,
    Hello,
    Message,
    Outputs,
    Ready,
    RequestFailed,
    RequestOutput,
    Role,
    Stats,
    StepPlan,
)
from topspin.plan.settings import Transport
from topspin.plan.spec import EnginePlan
from topspin.processes.channel import Event, Received

FACTS = EngineFacts(
    num_moe_layers=2, num_experts=4, vocab_size=VOCAB_SIZE, hidden_size=8, num_cores=2
)
GATEWAY = b"gateway"
NUM_BLOCKS = 16


class FakeChannel:
    """Plays peers: their messages are scripted, messages to them are kept.

    A script is a list of calls, one per poll; a call may also return more events. When it is used
    up, the polled service is asked to stop. Every poll takes a second.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.script: list[Callable[[], list[Event] | None]] = []
        self.at_end: Callable[[], None] = lambda: None
        self.sent: list[tuple[bytes, Message]] = []
        self.dead: set[bytes] = set()
        self.timeouts: list[float | None] = []

    def poll(self, timeout_s: float | None) -> list[Event]:
        """Return the next scripted events."""
        self.now += 1.0
        self.timeouts.append(timeout_s)
        if self.script:
            return self.script.pop(0)() or []
        self.at_end()
        return []

    def may_be(self, peer: bytes, group: str) -> bool:
        return True

    def send(self, peer: bytes, message: Message) -> bool:
        """Keep a message."""
        if peer in self.dead:
            return False
        self.sent.append((peer, message))
        return True

    def to(self, peer: bytes, kind: type[Any]) -> list[Any]:
        """Return the messages of a kind sent to a peer."""
        return [m for p, m in self.sent if p == peer and isinstance(m, kind)]


class World:
    """A service and its peers: two attention nodes, two expert nodes and a gateway."""

    def __init__(
        self,
        *,
        transport: Transport = "shm",
        facts: EngineFacts = FACTS,
        draft_nodes: int = 0,
        change: Callable[[EnginePlan], EnginePlan] = lambda plan: plan,
    ) -> None:
        config = make_config(
            num_nodes=2,
            num_expert_nodes=2 if facts.num_moe_layers else 0,
            transport=transport,
            draft_nodes=draft_nodes,
        )
        config = change(config)
        self.channel = FakeChannel()
        self.service = Service(
            self.channel,
            config,
            facts,
            clock=lambda: self.channel.now,
            logger=logging.getLogger("test"),
        )
        self.channel.at_end = lambda: self.service.request_stop("test over")
        self.nodes = [
            FakeNode(node, num_blocks=NUM_BLOCKS, block_size=4) for node in config.attention
        ]
        self._executed = 0

    def poll(self, *events: Event) -> None:
        """Script one poll."""
        self.channel.script.append(lambda: list(events))

    def hello(self, role: Role, index: int, **changes: Any) -> None:
        """Script a Hello; the peer's name is its role and index."""
        fields: dict[str, Any] = {
            "role": role,
            "index": index,
            "incarnation": index + 1,
            "revision": __version__,
            "fingerprint": "" if role == "gateway" else "abc",
            "pid": 7,
        }
        peer = GATEWAY if role == "gateway" else f"{role} {index}".encode()
        self.poll(Received(peer, Hello(**{**fields, **changes})))

    def start(self) -> None:
        """Script a complete start."""
        self.hello("gateway", 0)
        for index in range(2):
            self.hello("expert", index)
            self.hello("attention", index)
        for index in range(2):
            self.say(f"expert {index}", Ready(role="expert", index=index))
            ready = Ready(role="attention", index=index, num_blocks=NUM_BLOCKS)
            self.say(f"attention {index}", ready)

    def say(self, peer: str, message: AnyMessage) -> None:
        """Script a message."""
        self.poll(Received(peer.encode(), message))

    def answer(self, num_polls: int) -> None:
        """Script polls in which the attention nodes execute the plans sent to them."""
        self.channel.script += [self._execute] * num_polls

    def _execute(self) -> list[Event]:
        plans = [(p, m) for p, m in self.channel.sent if isinstance(m, StepPlan)]
        fresh, self._executed = plans[self._executed :], len(plans)
        return [
            Received(peer, self.nodes[int(peer.split()[1])].execute(plan)) for peer, plan in fresh
        ]

    def states(self) -> list[str]:
        """Return the engine states sent to the gateway, without repetitions."""
        states = [message.state for message in self.channel.to(GATEWAY, EngineState)]
        return [s for s, before in zip(states, [None, *states], strict=False) if s != before]

    def outputs(self) -> list[RequestOutput]:
        """Return what the gateway has got for its requests."""
        return [each for message in self.channel.to(GATEWAY, Outputs) for each in message.outputs]

    def tokens(self) -> list[int]:
        """Return the tokens of all outputs."""
        return [token for output in self.outputs() for token in output.token_ids]

    def stats(self) -> Stats:
        """Return the one answer to a StatsQuery."""
        (found,) = self.channel.to(GATEWAY, Stats)
        assert isinstance(found, Stats)
        return found

    def failure(self, request_id: str) -> RequestFailed:
        """Return the one RequestFailed of a request."""
        (found,) = [
            m for m in self.channel.to(GATEWAY, RequestFailed) if m.request_id == request_id
        ]
        assert isinstance(found, RequestFailed)
        return found

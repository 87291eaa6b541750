"""The loop on a scripted channel: who is told what when the engine starts, serves and ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from server.scheduler.engine_facts import EngineFacts
from server.scheduler.service import Service
from tests.server.scheduler.engine import make_config, make_request
from tests.server.scheduler.fake_nodes import VOCAB_SIZE, FakeNode, generate
from topspin import __version__
from topspin.channel import Event, Malformed, PeerGone, Received
from topspin.config import M2NSection, TopologySection, Transport
from topspin.messages import (
    AbortRequest,
    AddRequest,
    AnyMessage,
    EngineState,
    ExpertCounts,
    Goodbye,
    Hello,
    Message,
    Outputs,
    PrepareTable,
    Progress,
    Ready,
    Refused,
    RequestFailed,
    Role,
    Stats,
    StatsQuery,
    StepFailed,
    StepPlan,
    StepTicket,
    Stop,
    TablePrepared,
    Welcome,
    pack_ints,
    unpack_ints,
)

FACTS = EngineFacts(
    num_moe_layers=2, num_experts=4, vocab_size=VOCAB_SIZE, hidden_size=8, num_cores=2
)
GATEWAY = b"gateway"
NUM_BLOCKS = 16


class FakeChannel:
    """Plays peers: what they send is scripted, what they are sent is kept.

    A script is a list of calls, one per poll; a call may also return more events. When it
    is used up, the polled service is asked to stop. Every poll takes a second.
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

    def send(self, peer: bytes, message: Message) -> bool:
        """Keep a message."""
        if peer in self.dead:
            return False
        self.sent.append((peer, message))
        return True

    def to(self, peer: bytes, kind: type[Any]) -> list[Any]:
        """Return the messages of a kind that a peer was sent."""
        return [m for p, m in self.sent if p == peer and isinstance(m, kind)]


class World:
    """A service and its peers: two attention nodes, two expert nodes and a gateway."""

    def __init__(self, *, transport: Transport = "shm", facts: EngineFacts = FACTS) -> None:
        config = msgspec.structs.replace(
            make_config(num_nodes=2),
            topology=TopologySection(attention_nodes=2, expert_nodes=2),
            m2n=M2NSection(transport=transport, deadline_s=30.0),
        )
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
            FakeNode(
                index=index,
                num_blocks=NUM_BLOCKS,
                block_size=4,
                max_num_seqs=8,
                max_num_batched_tokens=16,
            )
            for index in range(2)
        ]
        self._executed = 0

    def poll(self, *events: Event) -> None:
        """Script one poll."""
        self.channel.script.append(lambda: list(events))

    def hello(self, role: Role, index: int, **changes: Any) -> None:
        """Script a Hello; the peer is called after the role and index."""
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
        """Script a whole start."""
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
        """Script polls in which the attention nodes execute what they have been sent."""
        self.channel.script += [self._execute] * num_polls

    def _execute(self) -> list[Event]:
        plans = [(p, m) for p, m in self.channel.sent if isinstance(m, StepPlan)]
        fresh, self._executed = plans[self._executed :], len(plans)
        return [
            Received(peer, self.nodes[int(peer.split()[1])].execute(plan)) for peer, plan in fresh
        ]

    def states(self) -> list[str]:
        """Return the states that the gateway was told, without repetitions."""
        states = [message.state for message in self.channel.to(GATEWAY, EngineState)]
        return [s for s, before in zip(states, [None, *states], strict=False) if s != before]

    def failure(self, request_id: str) -> RequestFailed:
        """Return the one RequestFailed of a request."""
        (found,) = [
            m for m in self.channel.to(GATEWAY, RequestFailed) if m.request_id == request_id
        ]
        assert isinstance(found, RequestFailed)
        return found


def test_start_serve_and_stop() -> None:
    world = World()
    world.start()
    request = make_request("r", [1, 2, 3], max_tokens=6)
    world.say("gateway", request)
    world.answer(8)
    assert world.service.run() == 0
    outputs = [o for m in world.channel.to(GATEWAY, Outputs) for o in m.outputs]
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == generate([1, 2, 3], request.sampling, 64)
    assert world.states() == ["starting", "ready", "stopping"]
    ready = next(m for m in world.channel.to(GATEWAY, EngineState) if m.state == "ready")
    assert ready.max_request_tokens == 64
    for peer in ("attention 0", "attention 1", "expert 0", "expert 1"):
        assert len(world.channel.to(peer.encode(), Stop)) == 1
    assert world.channel.to(GATEWAY, RequestFailed) == []


def test_welcome_waits_for_all_and_goes_to_all() -> None:
    world = World()
    world.start()
    world.service.run()
    peers = [peer for peer, message in world.channel.sent if isinstance(message, Welcome)]
    assert peers == [b"attention 0", b"attention 1", b"expert 0", b"expert 1"]
    (welcome,) = world.channel.to(b"expert 0", Welcome)
    assert welcome.table.slots == (((0, 1), (2, 3)),) * 2
    assert welcome.config.topology.expert_nodes == 2
    first_state = world.channel.to(GATEWAY, EngineState)[0]
    assert first_state.detail.startswith("waiting for attention 0")
    assert first_state.max_request_tokens == 0


def test_tickets_go_to_experts_and_plans_to_participants() -> None:
    world = World()
    world.start()
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=2))
    world.answer(3)
    world.service.run()
    for peer in (b"expert 0", b"expert 1"):
        tickets = world.channel.to(peer, StepTicket)
        assert [ticket.step for ticket in tickets] == [1, 2]
        assert {ticket.participants for ticket in tickets} == {(0,)}
    assert [plan.ticket.step for plan in world.channel.to(b"attention 0", StepPlan)] == [1, 2]
    assert world.channel.to(b"attention 1", StepPlan) == []


def test_local_experts_get_no_tickets() -> None:
    world = World(transport="local")
    world.start()
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=2))
    world.answer(3)
    assert world.service.run() == 0
    assert world.channel.to(b"expert 0", StepTicket) == []
    assert len(world.channel.to(b"attention 0", StepPlan)) == 2


def test_a_dense_model_has_no_expert_nodes() -> None:
    facts = EngineFacts(0, 0, VOCAB_SIZE, 8, 2)
    world = World(facts=facts)
    world.hello("gateway", 0)
    for index in range(2):
        world.hello("attention", index)
    for index in range(2):
        ready = Ready(role="attention", index=index, num_blocks=NUM_BLOCKS)
        world.say(f"attention {index}", ready)
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=2))
    world.answer(3)
    world.say("gateway", StatsQuery(query_id=1))
    assert world.service.run() == 0
    (welcome,) = world.channel.to(b"attention 0", Welcome)
    assert welcome.topology.experts == ()
    assert welcome.config.topology.expert_nodes == 0
    (stats,) = world.channel.to(GATEWAY, Stats)
    assert (stats.generation_tokens, stats.expert_tokens) == (2, ())


def test_an_idle_loop_blocks() -> None:
    world = World()
    world.start()
    for _ in range(5):
        world.poll()
    world.service.run()
    assert all(timeout is not None and timeout >= 0.5 for timeout in world.channel.timeouts)


# Refusals.


@pytest.mark.parametrize(
    ("index", "changes", "reason"),
    [
        (0, {"protocol": 99}, "protocol"),
        (0, {"revision": "other"}, "revision"),
        (1, {}, "there already"),
        (5, {}, "no place"),
        (0, {"fingerprint": "other"}, "checkpoint"),
    ],
)
def test_a_wrong_node_at_start_is_refused_and_fatal(
    index: int, changes: dict[str, Any], reason: str
) -> None:
    world = World()
    world.hello("gateway", 0)
    world.hello("attention", 1)
    hello = Hello(
        role="attention", index=index, incarnation=9, revision=__version__, fingerprint="abc"
    )
    world.poll(Received(b"wrong", msgspec.structs.replace(hello, **changes)))
    assert world.service.run() == 1
    (refused,) = world.channel.to(b"wrong", Refused)
    assert reason in refused.reason
    assert world.states() == ["starting", "failed"]
    assert reason in world.channel.to(GATEWAY, EngineState)[-1].detail


def test_a_wrong_node_later_is_refused_only() -> None:
    world = World()
    world.start()
    hello = Hello(role="expert", index=0, incarnation=9, revision=__version__, fingerprint="abc")
    world.poll(Received(b"second", hello))
    assert world.service.run() == 0
    assert len(world.channel.to(b"second", Refused)) == 1


def test_a_wrong_gateway_is_refused_only() -> None:
    world = World()
    hello = Hello(role="gateway", index=0, incarnation=1, revision="other")
    world.poll(Received(b"wrong", hello))
    world.start()
    assert world.service.run() == 0
    assert len(world.channel.to(b"wrong", Refused)) == 1
    assert world.states() == ["starting", "ready", "stopping"]


def test_strangers_and_rubbish_harm_nobody() -> None:
    world = World()
    world.start()
    world.poll(Received(b"stranger", make_request("r", [1])), Malformed(b"stranger", "rubbish"))
    world.poll(Malformed(GATEWAY, "rubbish"), PeerGone(b"stranger"))
    world.say("gateway", Stop(reason="a gateway may not"))
    assert world.service.run() == 0
    assert len(world.channel.to(b"stranger", Refused)) == 1
    assert len(world.channel.to(GATEWAY, Refused)) == 1


def test_requests_are_refused_until_the_engine_is_ready() -> None:
    world = World()
    world.hello("gateway", 0)
    world.say("gateway", make_request("early", [1]))
    world.say("gateway", AbortRequest(request_id="early"))
    world.say("gateway", StatsQuery(query_id=5))
    world.service.run()
    failed = world.failure("early")
    assert (failed.code, failed.status) == ("engine_unavailable", 503)
    assert "starting" in failed.message
    (stats,) = world.channel.to(GATEWAY, Stats)
    assert (stats.query_id, stats.num_blocks, stats.expert_tokens) == (5, 0, ((0,) * 4,) * 2)


def test_an_unservable_request_is_answered() -> None:
    world = World()
    world.start()
    world.say("gateway", make_request("bad", []))
    world.service.run()
    assert world.failure("bad").status == 400


# Gateways.


def test_abort_and_loss_of_a_gateway_end_its_requests() -> None:
    world = World()
    world.start()
    hello = Hello(role="gateway", index=1, incarnation=3, revision=__version__)
    world.poll(Received(b"other", hello), Received(b"other", make_request("x", [1], seed=1)))
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=40))
    world.say("gateway", AbortRequest(request_id="r"))
    world.poll(PeerGone(b"other"))
    world.say("gateway", StatsQuery(query_id=1))
    assert world.service.run() == 0
    (stats,) = world.channel.to(GATEWAY, Stats)
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert world.channel.to(GATEWAY, RequestFailed) == []
    assert world.channel.to(b"other", EngineState)[-1].state == "ready"


def test_stats_count_what_experts_report() -> None:
    world = World()
    world.start()
    counts = ExpertCounts(index=1, table_version=1, counts=(pack_ints([3, 4]), pack_ints([5, 6])))
    world.say("expert 1", counts)
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=2))
    world.answer(3)
    world.say("gateway", StatsQuery(query_id=9))
    world.service.run()
    (stats,) = world.channel.to(GATEWAY, Stats)
    assert stats.expert_tokens == ((0, 0, 3, 4), (0, 0, 5, 6))
    assert (stats.query_id, stats.num_blocks, stats.num_steps) == (9, 2 * NUM_BLOCKS, 2)


def test_a_table_is_named_by_steps_once_every_node_has_prepared_it() -> None:
    world = World()
    world.start()
    old = world.service._table
    swapped = msgspec.structs.replace(old, slots=tuple(layer[::-1] for layer in old.slots))
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=30))
    world.answer(2)
    world.channel.script.append(lambda: world.service.request_balance(swapped))
    world.answer(2)
    for peer in ("expert 0", "attention 1", "expert 1"):
        role, index = peer.split()
        world.say(peer, TablePrepared(role=role, index=int(index), version=2))  # type: ignore[arg-type]
    world.answer(1)
    world.say("attention 0", TablePrepared(role="attention", index=0, version=2))
    world.answer(30)
    world.say("gateway", StatsQuery(query_id=1))
    assert world.service.run() == 0
    for peer in ("attention 0", "attention 1", "expert 0", "expert 1"):
        (prepare,) = world.channel.to(peer.encode(), PrepareTable)
        assert (prepare.table.version, prepare.table.slots) == (2, swapped.slots)
    versions = [t.table_version for t in world.channel.to(b"expert 0", StepTicket)]
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}
    sent = [message for peer, message in world.channel.sent if peer == b"expert 0"]
    first_new = versions.index(2)
    prepared_at = next(i for i, m in enumerate(sent) if isinstance(m, PrepareTable))
    tickets_before = sum(isinstance(m, StepTicket) for m in sent[:prepared_at])
    assert tickets_before < first_new  # steps of the old table went on meanwhile
    (stats,) = world.channel.to(GATEWAY, Stats)
    assert (stats.expert_table_version, stats.expert_migrations) == (2, 8)
    outputs = [o for m in world.channel.to(GATEWAY, Outputs) for o in m.outputs]
    assert sum(len(output.token_ids) for output in outputs) == 30


def test_a_node_answers_for_itself_only() -> None:
    world = World()
    world.start()
    world.say("expert 0", TablePrepared(role="expert", index=1, version=2))
    assert world.service.run() == 1
    assert "expert 0 speaks for expert 1" in world.channel.to(GATEWAY, EngineState)[-1].detail


# The end.


def run_with_two_requests(world: World, *last: Event) -> int:
    """Run an engine with a request on each attention node, then let `last` happen."""
    world.start()
    for number in range(2):
        request = make_request(f"r{number}", [number] * 3, max_tokens=40, seed=number)
        world.say("gateway", request)
    world.answer(2)
    world.poll(*last)
    return world.service.run()


@pytest.mark.parametrize(
    ("event", "code", "reason"),
    [
        (PeerGone(b"expert 1"), "node_lost", "expert 1 (pid 7) closed its connection"),
        (PeerGone(b"attention 0"), "node_lost", "attention 0 (pid 7) closed its connection"),
        (
            Received(
                b"expert 0", Goodbye(role="expert", index=0, code="frame_error", message="bad row")
            ),
            "node_lost",
            "expert 0 left: bad row (frame_error)",
        ),
        (
            Received(
                b"attention 1",
                StepFailed(
                    step=3,
                    generation=1,
                    role="attention",
                    index=1,
                    code="deadline_exceeded",
                    message="expert 0 is late",
                ),
            ),
            "step_failed",
            "step 3 failed on attention 1: expert 0 is late (deadline_exceeded)",
        ),
        (Malformed(b"expert 0", "3 frames"), "step_failed", "expert 0: 3 frames"),
        (
            Received(b"expert 0", StatsQuery(query_id=1)),
            "step_failed",
            "expert 0 sent StatsQuery",
        ),
        (
            Received(b"expert 0", ExpertCounts(index=1, table_version=1, counts=())),
            "step_failed",
            "expert 0 sent counts of expert 1",
        ),
    ],
)
def test_what_ends_the_engine_ends_every_request_once(
    event: Event, code: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    assert run_with_two_requests(world, event) == 1
    for number in range(2):
        failed = world.failure(f"r{number}")
        assert (failed.code, failed.status, failed.message) == (code, 503, reason)
    assert world.states() == ["starting", "ready", "failed"]
    assert world.channel.to(GATEWAY, EngineState)[-1].detail == reason
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [f"scheduler: the engine has failed: {reason}"]


def test_requests_that_come_with_the_failure_are_answered() -> None:
    world = World()
    late = Received(GATEWAY, make_request("late", [1], seed=3))
    assert run_with_two_requests(world, PeerGone(b"expert 1"), late) == 1
    assert world.failure("late").code == "engine_unavailable"


def test_the_lost_node_is_named_and_not_the_one_that_noticed() -> None:
    world = World()
    complaint = StepFailed(
        step=3,
        generation=1,
        role="attention",
        index=0,
        code="peer_lost",
        message="expert 1 closed its socket",
    )
    late = Received(GATEWAY, make_request("late", [1], seed=3))
    world.channel.script.clear()
    world.start()
    world.say("gateway", make_request("r", [1], max_tokens=40))
    world.answer(1)
    world.say("attention 0", complaint)
    world.poll(late, PeerGone(b"attention 0"), PeerGone(b"expert 1"))
    assert world.service.run() == 1
    assert world.failure("r").message == "expert 1 (pid 7) closed its connection"
    assert world.failure("late").status == 503


def test_a_complaint_without_a_loss_is_reported_as_it_is() -> None:
    world = World()
    world.start()
    complaint = Goodbye(role="attention", index=0, code="peer_lost", message="expert 1 is gone")
    world.say("attention 0", complaint)
    world.poll()
    assert world.service.run() == 1
    detail = world.channel.to(GATEWAY, EngineState)[-1].detail
    assert detail == "attention 0 left: expert 1 is gone (peer_lost)"


def test_a_node_that_cannot_be_sent_a_plan_is_lost() -> None:
    world = World()
    world.start()
    world.channel.script.append(lambda: world.channel.dead.add(b"expert 1"))
    world.say("gateway", make_request("r", [1], max_tokens=40))
    assert world.service.run() == 1
    assert world.failure("r").message == "expert 1 cannot be sent StepTicket"


def test_a_silent_node_ends_the_engine_and_is_named() -> None:
    world = World()
    world.start()
    for number in range(2):
        world.say("gateway", make_request(f"r{number}", [number] * 3, max_tokens=40, seed=number))
    for _ in range(40):  # a second each; the limit is 15 s
        world.poll()
    started_polls = len(world.channel.script)
    assert world.service.run() == 1
    assert 15 <= started_polls - len(world.channel.script) < 30
    failed = world.failure("r0")
    assert (failed.code, failed.status) == ("node_lost", 503)
    assert failed.message == (
        "attention 0: it has not got on with step 1 for 16.0 s, although it is connected "
        "(--progress-deadline 15)"
    )


def test_a_long_step_is_fine_while_its_nodes_speak() -> None:
    """Step 1 runs for 70 s; expert 0 has done its part, expert 1 works, and then hangs."""
    world = World()
    world.start()
    world.say("gateway", make_request("r", [1] * 3, max_tokens=40))
    waits = Progress(step=1, generation=1, role="attention", index=0, state="waiting")
    works = Progress(step=1, generation=1, role="expert", index=1)
    world.say("expert 0", Progress(step=1, generation=1, role="expert", index=0, state="done"))
    for _ in range(5):
        for _ in range(12):  # a second each
            world.poll()
        world.say("attention 0", waits)
        world.say("expert 1", works)
    for _ in range(10):
        world.say("attention 0", waits)
        world.poll()
    assert world.service.run() == 1
    assert 0 < len(world.channel.script) < 6  # 15 s after the last word
    assert world.failure("r").message.startswith("expert 1: it has not got on with step 1")


def test_a_node_reports_its_own_progress_only(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.start()
    world.say("expert 0", Progress(step=1, generation=1, role="expert", index=1))
    assert world.service.run() == 1
    assert "expert 0 speaks for expert 1" in caplog.text


def test_stop_ends_requests_and_refuses_new_ones() -> None:
    world = World()
    world.start()
    for number in range(2):
        world.say("gateway", make_request(f"r{number}", [number] * 3, max_tokens=40, seed=number))
    world.answer(1)
    world.channel.script.append(lambda: world.service.request_stop("SIGTERM"))
    world.say("gateway", make_request("late", [1]))
    world.poll(*(PeerGone(f"{r} {i}".encode()) for r in ("attention", "expert") for i in range(2)))
    world.poll(PeerGone(b"never polled"))
    assert world.service.run() == 0
    for request_id in ("r0", "r1", "late"):
        failed = world.failure(request_id)
        assert (failed.code, failed.status) == ("engine_unavailable", 503)
    assert "SIGTERM" in world.failure("r0").message
    assert "stopping" in world.failure("late").message
    assert len(world.channel.script) == 1  # all nodes had left, so it did not wait


@pytest.mark.parametrize("told_first", [True, False])
def test_a_node_that_leaves_while_the_engine_is_told_to_stop_is_no_loss(told_first: bool) -> None:
    world = World()
    world.start()
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=40))
    gone: list[Event] = [PeerGone(b"attention 0")]

    def told() -> list[Event]:
        world.service.request_stop("SIGTERM")
        return gone if told_first else []

    world.channel.script.append(told)
    if not told_first:
        world.poll(*gone)
    world.poll(*(PeerGone(p) for p in (b"attention 1", b"expert 0", b"expert 1")))
    world.poll(PeerGone(b"never polled"))
    assert world.service.run() == 0
    assert world.states() == ["starting", "ready", "stopping"]
    assert world.failure("r").code == "engine_unavailable"
    assert len(world.channel.script) == 1


def test_an_error_after_the_request_to_stop_is_no_failure() -> None:
    world = World()
    world.start()
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=40))
    send = world.channel.send

    def stop_while_sending(peer: bytes, message: Message) -> bool:
        if isinstance(message, StepPlan):
            world.service.request_stop("SIGTERM")
            world.channel.dead.add(peer)
        return send(peer, message)

    world.channel.send = stop_while_sending  # type: ignore[method-assign]
    assert world.service.run() == 0
    assert world.states() == ["starting", "ready", "stopping"]
    assert world.failure("r").code == "engine_unavailable"


def test_stop_does_not_wait_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.start()
    assert world.service.run() == 0
    late = [record.message for record in caplog.records if "has not left" in record.message]
    assert len(late) == 4


def test_results_only_from_their_own_node() -> None:
    world = World()
    world.start()
    request: AddRequest = make_request("r", [1, 2, 3], max_tokens=4)
    world.say("gateway", request)

    def forged() -> list[Event]:
        (event,) = world._execute()[:1]
        assert isinstance(event, Received)
        return [Received(b"attention 1", event.message)]

    world.channel.script.append(forged)
    assert world.service.run() == 1
    assert "attention 1 sent a result of attention 0" in world.failure("r").message
    assert unpack_ints(request.prompt)[0] == 1

"""The loop on a scripted channel: its messages while the engine starts and serves."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from server.scheduler.engine_facts import EngineFacts
from server.scheduler.planning.policy import Policy
from tests.server.scheduler.engine import make_request
from tests.server.scheduler.fake_nodes import TIMINGS, VOCAB_SIZE, generate
from tests.server.scheduler.scripted_world import GATEWAY, NUM_BLOCKS, World
from topspin import __version__
from topspin.grammars import grammar_key
from topspin.messages import (
    AbortRequest,
    CompileGrammar,
    EngineState,
    ExpertCounts,
    GrammarReady,
    Hello,
    NodeMemory,
    Outputs,
    PrepareTable,
    Ready,
    Refused,
    RequestFailed,
    RequestQueued,
    Role,
    StatsQuery,
    StepPlan,
    StepTicket,
    Stop,
    TablePrepared,
    Welcome,
    pack_ints,
)
from topspin.processes.channel import Malformed, PeerGone, Received


def test_start_serve_and_stop() -> None:
    world = World()
    world.start()
    request = make_request("r", [1, 2, 3], max_tokens=6)
    world.say("gateway", make_request("bad", []))
    world.say("gateway", request)
    world.answer(8)
    assert world.service.run() == 0
    assert world.tokens() == generate([1, 2, 3], request.sampling, 64)
    (failed,) = world.channel.to(GATEWAY, RequestFailed)
    assert (failed.request_id, failed.status) == ("bad", 400)
    assert world.states() == ["starting", "ready", "stopping"]
    first, *states = world.channel.to(GATEWAY, EngineState)
    assert (first.detail[:23], first.max_request_tokens) == ("waiting for attention 0", 0)
    assert next(m for m in states if m.state == "ready").max_request_tokens == 64
    nodes = [b"attention 0", b"attention 1", b"expert 0", b"expert 1"]
    for kind in (Welcome, Stop):
        assert [peer for peer, message in world.channel.sent if isinstance(message, kind)] == nodes
    (welcome,) = world.channel.to(b"expert 0", Welcome)
    assert welcome.table.slots == (((0, 1), (2, 3)),) * 2
    assert welcome.config.num_experts == 2
    steps = list(range(1, 7))
    for peer in (b"expert 0", b"expert 1"):
        tickets = world.channel.to(peer, StepTicket)
        assert [ticket.step for ticket in tickets] == steps
        assert {ticket.participants for ticket in tickets} == {(0,)}
    assert [plan.ticket.step for plan in world.channel.to(b"attention 0", StepPlan)] == steps
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
    assert welcome.config.num_experts == 0
    stats = world.stats()
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
    ("index", "changes", "reason", "status"),
    [
        (0, {"revision": "other"}, "revision", 1),
        (5, {}, "no place", 2),
    ],
)
def test_a_wrong_node_at_start_is_refused_and_fatal(
    index: int, changes: dict[str, Any], reason: str, status: int
) -> None:
    world = World()
    world.hello("gateway", 0)
    world.hello("attention", 1)
    hello = Hello(
        role="attention", index=index, incarnation=9, revision=__version__, fingerprint="abc"
    )
    world.poll(Received(b"wrong", msgspec.structs.replace(hello, **changes)))
    assert world.service.run() == status
    (refused,) = world.channel.to(b"wrong", Refused)
    assert reason in refused.reason
    assert world.states() == ["starting", "failed"]
    assert reason in world.channel.to(GATEWAY, EngineState)[-1].detail


def test_strangers_and_rubbish_harm_nobody() -> None:
    world = World()
    world.poll(Received(b"wrong", Hello(role="gateway", index=0, incarnation=1, revision="other")))
    world.start()
    hello = Hello(role="expert", index=0, incarnation=9, revision=__version__, fingerprint="abc")
    world.poll(Received(b"second", hello))
    world.poll(Received(b"stranger", make_request("r", [1])), Malformed(b"stranger", "rubbish"))
    world.poll(Malformed(GATEWAY, "rubbish"), PeerGone(b"stranger"))
    world.say("gateway", Stop(reason="a gateway may not"))
    assert world.service.run() == 0
    for peer in (b"wrong", b"second", b"stranger", GATEWAY):
        assert len(world.channel.to(peer, Refused)) == 1
    assert world.states() == ["starting", "ready", "stopping"]


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
    stats = world.stats()
    assert (stats.query_id, stats.num_blocks, stats.expert_tokens) == (5, 0, ((0,) * 4,) * 2)
    assert [(n.role, n.present) for n in stats.nodes] == [("attention", 0), ("expert", 0)]


# Gateways.


def test_a_grammar_is_compiled_and_its_request_told_to_be_queued_before_any_output() -> None:
    world = World()
    world.start()
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=4))
    grammars = {"g": "start: /a+/", "refused": "start: /b+/"}
    for seed, (request_id, grammar) in enumerate(grammars.items()):
        constrained = make_request(
            request_id, [1], eos_token_ids=(5,), grammar=grammar, seed=1 + seed
        )
        world.say("gateway", constrained)
    world.answer(2)
    for index in range(2):
        ready = GrammarReady(index=index, key=grammar_key(grammars["g"]))
        world.say(f"attention {index}", ready)
    key = grammar_key(grammars["refused"])
    world.say("attention 1", GrammarReady(index=1, key=key, error="too large"))
    world.answer(6)
    assert world.service.run() == 0
    failed = world.failure("refused")
    assert (failed.status, failed.message) == (400, "too large")
    asked = [peer for peer, m in world.channel.sent if isinstance(m, CompileGrammar)]
    assert asked == [b"attention 0", b"attention 1"] * 2
    told = [m for p, m in world.channel.sent if p == GATEWAY and not isinstance(m, EngineState)]
    first = {each: told.index(RequestQueued(request_ids=(each,))) for each in ("r", "g")}
    for place, message in enumerate(told):
        for output in message.outputs if isinstance(message, Outputs) else ():
            assert first[output.request_id] < place
    assert first["r"] == 0
    before = told[: first["g"]]
    assert any(isinstance(each, Outputs) for each in before), "others went on meanwhile"


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
    stats = world.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert world.channel.to(GATEWAY, RequestFailed) == []
    assert world.channel.to(b"other", EngineState)[-1].state == "ready"


def test_stats_count_what_experts_report() -> None:
    world = World()
    world.start()
    counts = ExpertCounts(
        index=1,
        table_version=1,
        counts=(pack_ints([3, 4]), pack_ints([5, 6])),
        activations=9,
        batches=5,
    )
    world.say("expert 1", counts)
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=2))
    world.answer(3)
    world.say("gateway", StatsQuery(query_id=9))
    world.service.run()
    stats = world.stats()
    assert stats.expert_tokens == ((0, 0, 3, 4), (0, 0, 5, 6))
    assert (stats.expert_activations, stats.expert_batches) == (9, 5)
    assert (stats.query_id, stats.num_blocks, stats.num_steps) == (9, 2 * NUM_BLOCKS, 2)


def test_stats_have_the_memory_of_the_nodes_that_are_there() -> None:
    world = World()
    world.start()
    expert = NodeMemory(role="expert", index=0, resident_bytes=2**40)
    attention = NodeMemory(role="attention", index=1, resident_bytes=7)
    for message in (msgspec.structs.replace(expert, resident_bytes=5), expert, attention):
        world.say(f"{message.role} {message.index}", message)
    world.say("gateway", StatsQuery(query_id=9))
    world.service.run()
    assert world.stats().memory == (attention, expert)


@pytest.mark.parametrize("role", ["attention", "expert"])
def test_a_node_that_is_slower_than_its_peers_for_long_is_told_of(
    role: Role, caplog: pytest.LogCaptureFixture
) -> None:
    world = World()
    world.start()
    for number in range(2):
        request = make_request(f"r{number}", [1, number], max_tokens=60, seed=number)
        world.say("gateway", request)
    if role == "attention":
        for node, took_s in zip(world.nodes, (0.1, 0.5), strict=True):
            node.timings = msgspec.structs.replace(TIMINGS, attention_s=took_s)
    slow_s = 0.5 if role == "expert" else 0.1
    for _ in range(40):
        for index, compute_s in enumerate((0.1, slow_s)):
            counts = ExpertCounts(
                index=index,
                table_version=1,
                counts=(pack_ints([30, 40]), pack_ints([50, 60])),
                batches=10,
                compute_s=compute_s,
            )
            world.say(f"expert {index}", counts)
        world.answer(1)
    world.say("gateway", StatsQuery(query_id=1))
    world.service.run()
    (slow,) = world.stats().slow_nodes
    assert (slow.role, slow.index) == (role, 1)
    assert slow.times > 3
    assert [each.message for each in caplog.records if "slower" in each.message] == [
        f"scheduler: {role} 1 is {slow.times:.1f} times slower than its peers"
    ]


class SwappingWorld(World):
    """Serves a long request; expert nodes are asked to exchange all that they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.start()
        old = self.service.formation.table
        self.swapped = msgspec.structs.replace(old, slots=tuple(each[::-1] for each in old.slots))
        self.say("gateway", make_request("r", [1, 2, 3], max_tokens=30))

    def swap(self) -> None:
        """Script the request for the table."""
        self.channel.script.append(lambda: self.service.balancer.ask(self.swapped))
        self.answer(2)

    def prepared(self, role: Role, index: int, refusal: str = "") -> None:
        """Script a node's answer."""
        answer = TablePrepared(role=role, index=index, version=2, refusal=refusal)
        self.say(f"{role} {index}", answer)


def test_a_table_is_named_by_steps_once_every_node_has_prepared_it() -> None:
    world = SwappingWorld()
    world.answer(2)
    world.swap()
    world.prepared("expert", 0)
    world.prepared("attention", 1)
    world.prepared("expert", 1)
    world.answer(1)
    world.prepared("attention", 0)
    world.answer(30)
    world.say("gateway", StatsQuery(query_id=1))
    assert world.service.run() == 0
    for peer in ("attention 0", "attention 1", "expert 0", "expert 1"):
        (prepare,) = world.channel.to(peer.encode(), PrepareTable)
        assert (prepare.table.version, prepare.table.slots) == (2, world.swapped.slots)
    versions = [t.table_version for t in world.channel.to(b"expert 0", StepTicket)]
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}
    sent = [message for peer, message in world.channel.sent if peer == b"expert 0"]
    first_new = versions.index(2)
    prepared_at = next(i for i, m in enumerate(sent) if isinstance(m, PrepareTable))
    tickets_before = sum(isinstance(m, StepTicket) for m in sent[:prepared_at])
    assert tickets_before < first_new  # meanwhile steps with the old table went on
    stats = world.stats()
    assert (stats.expert_table_version, stats.expert_migrations) == (2, 8)
    assert len(world.tokens()) == 30


def test_a_table_that_a_node_refuses_is_told_and_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "test")
    world = SwappingWorld()
    for refusal in ("no memory", ""):
        world.swap()
        world.prepared("expert", 0)
        world.prepared("attention", 1)
        world.prepared("attention", 0)
        world.prepared("expert", 1, refusal)
        world.answer(2)
    world.answer(30)
    world.say("gateway", StatsQuery(query_id=1))
    assert world.service.run() == 0
    assert len(world.channel.to(b"expert 1", PrepareTable)) == 2
    assert "expert 1 refuses expert table 2; the one in use stays: no memory" in caplog.text
    stats = world.stats()
    assert (stats.expert_table_version, stats.expert_migrations) == (2, 8)


def test_what_the_policy_warns_of_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = ["drafts are slow"]
    monkeypatch.setattr(Policy, "take_warning", lambda policy: warnings.pop() if warnings else None)
    world = World()
    world.start()
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=6))
    world.answer(8)
    assert world.service.run() == 0
    assert [each.message for each in caplog.records if "slow" in each.message] == [
        "scheduler: drafts are slow"
    ]

"""The scheduler's loop with draft nodes: awaited at the start, missed afterwards."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.server.scheduler.engine import make_request
from tests.server.scheduler.scripted_world import GATEWAY, World
from topspin import __version__
from topspin.messages import (
    ClockPing,
    DraftCounts,
    EngineState,
    Goodbye,
    Hello,
    NodeMemory,
    Ready,
    Refused,
    Stats,
    StatsQuery,
    Stop,
    TraceRequest,
    Welcome,
)
from topspin.processes.channel import Event, PeerGone, Received

COUNTS: dict[str, Any] = {
    "num_root_hits": 4,
    "num_root_misses": 3,
    "num_passes": 9,
    "num_overlapped": 6,
    "pass_seconds": 0.25,
}

MEMORY = NodeMemory(role="draft", index=0, resident_bytes=3)


def started(*, is_ready: bool = True) -> World:
    """Return the script of the start of an engine with a draft node."""
    world = World(draft_nodes=1)
    world.start()
    join(world, is_ready=is_ready)
    return world


def join(world: World, *, is_ready: bool = True) -> None:
    """Script the coming of the draft node."""
    world.hello("draft", 0, fingerprint="")
    if is_ready:
        world.say("draft 0", Ready(role="draft", index=0))


def test_the_engine_is_ready_once_its_draft_node_is() -> None:
    world = started()
    assert world.service.run() == 0
    details = [each.detail for each in world.channel.to(GATEWAY, EngineState)]
    assert "draft 0" in details[-3]
    assert world.states() == ["starting", "ready", "stopping"]
    (welcome,) = world.channel.to(b"draft 0", Welcome)
    assert welcome.config.draft.kv_cache_tokens == 64
    assert len(world.channel.to(b"draft 0", Stop)) == 1


def test_a_lost_draft_node_is_missed_and_may_come_back() -> None:
    world = started()
    world.say("draft 0", DraftCounts(index=0, **COUNTS))
    world.say("draft 0", MEMORY)
    world.say("gateway", StatsQuery(query_id=0))
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=4))
    world.answer(2)
    world.poll(PeerGone(b"draft 0"))
    world.say("gateway", StatsQuery(query_id=0))
    world.answer(4)
    join(world)
    world.say("draft 0", DraftCounts(index=0, **COUNTS))
    world.say("gateway", StatsQuery(query_id=1))
    assert world.service.run() == 0
    assert world.states() == ["starting", "ready", "stopping"]
    assert len(world.tokens()) == 4
    first, without, stats = world.channel.to(GATEWAY, Stats)
    drafts = [next(n for n in each.nodes if n.role == "draft") for each in (without, stats)]
    assert [(each.planned, each.present) for each in drafts] == [(1, 0), (1, 1)]
    assert (first.memory, without.memory) == ((MEMORY,), ())
    assert (stats.num_root_hits, stats.num_root_misses) == (8, 6)
    assert (stats.num_draft_passes, stats.num_overlapped_passes) == (18, 12)
    assert stats.draft_pass_seconds == 0.5
    assert len(world.channel.to(b"draft 0", Welcome)) == 2


def left(code: str, message: str) -> Received:
    """Return the draft node's Goodbye."""
    goodbye = Goodbye(role="draft", index=0, code=code, message=message)
    return Received(b"draft 0", goodbye)


@pytest.mark.parametrize(
    ("event", "reason", "status"),
    [
        (PeerGone(b"draft 0"), "lost draft 0: it closed its connection", 1),
        (Received(b"draft 0", Stop(reason="x")), "lost draft 0: draft 0 sent Stop", 1),
        (
            Received(b"draft 0", NodeMemory(role="expert", index=0, resident_bytes=1)),
            "lost draft 0: draft 0 sent NodeMemory",
            1,
        ),
        (
            left("internal_error", "a bug"),
            "lost draft 0: draft 0 left: a bug (internal_error)",
            1,
        ),
        (left("invalid_config", "no model"), "draft 0 left: no model (invalid_config)", 2),
    ],
)
def test_what_ends_a_draft_node_ends_the_start_and_is_survived_afterwards(
    event: Event, reason: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    world = started(is_ready=False)
    world.poll(event)
    assert world.service.run() == status
    assert world.channel.to(GATEWAY, EngineState)[-1].detail == reason
    world = started()
    world.poll(event)
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=4))
    world.answer(6)
    assert world.service.run() == 0
    assert world.outputs()[-1].finish_reason == "length"
    assert f"{reason}; decoding goes on without its drafts" in caplog.text


@pytest.mark.parametrize(
    ("index", "changes", "reason", "status"),
    [
        (0, {"revision": "r2"}, "of revision 'r2', this engine", 1),
        (0, {"protocol": 1}, "draft 0 speaks protocol 1", 1),
        (2, {}, "draft 2 has no place: the engine has 2 of them", 2),
        (1, {}, "draft 1 is there already", 2),
    ],
)
def test_wrong_draft_nodes_are_refused(
    index: int, changes: dict[str, Any], reason: str, status: int
) -> None:
    world = World(draft_nodes=2)
    world.start()
    world.hello("draft", 1)
    hello = Hello(role="draft", index=index, incarnation=9, revision=__version__)
    world.poll(Received(b"wrong", msgspec.structs.replace(hello, **changes)))
    assert world.service.run() == status
    (refused,) = world.channel.to(b"wrong", Refused)
    assert reason in refused.reason


def test_a_trace_asks_draft_nodes_too() -> None:
    world = started()
    world.say("gateway", TraceRequest(query_id=5, seconds=1.0))
    assert world.service.run() == 0
    assert len(world.channel.to(b"draft 0", ClockPing)) == 1

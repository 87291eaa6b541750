"""The scheduler's loop with draft nodes: awaited at the start, missed afterwards."""

from __future__ import annotations

from typing import Any

from tests.server.scheduler.engine import make_request
from tests.server.scheduler.scripted_world import GATEWAY, World
from topspin.messages import (
    ClockPing,
    DraftCounts,
    EngineState,
    Goodbye,
    Outputs,
    Ready,
    Refused,
    Stats,
    StatsQuery,
    Stop,
    TraceRequest,
    Welcome,
)
from topspin.processes.channel import PeerGone

COUNTS: dict[str, Any] = {
    "num_root_hits": 4,
    "num_root_misses": 3,
    "num_passes": 9,
    "num_overlapped": 6,
    "pass_seconds": 0.25,
}


def test_the_engine_is_ready_once_its_draft_node_is() -> None:
    world = World(draft_nodes=1)
    world.start()
    world.hello("draft", 0, fingerprint="")
    world.say("draft 0", Ready(role="draft", index=0))
    assert world.service.run() == 0
    details = [each.detail for each in world.channel.to(GATEWAY, EngineState)]
    assert "draft 0" in details[-3]
    assert world.states() == ["starting", "ready", "stopping"]
    (welcome,) = world.channel.to(b"draft 0", Welcome)
    assert welcome.config.draft.kv_cache_tokens == 64
    assert len(world.channel.to(b"draft 0", Stop)) == 1


def test_a_lost_draft_node_is_missed_and_may_come_back() -> None:
    world = World(draft_nodes=1)
    world.start()
    world.hello("draft", 0)
    world.say("draft 0", Ready(role="draft", index=0))
    world.say("draft 0", DraftCounts(index=0, **COUNTS))
    world.say("gateway", make_request("r", [1, 2, 3], max_tokens=4))
    world.answer(2)
    world.poll(PeerGone(b"draft 0"))
    world.say("gateway", StatsQuery(query_id=0))
    world.answer(4)
    world.hello("draft", 0)
    world.say("draft 0", Ready(role="draft", index=0))
    world.say("draft 0", DraftCounts(index=0, **COUNTS))
    world.say("gateway", StatsQuery(query_id=1))
    assert world.service.run() == 0
    assert world.states() == ["starting", "ready", "stopping"]
    outputs = [o for m in world.channel.to(GATEWAY, Outputs) for o in m.outputs]
    assert sum(len(each.token_ids) for each in outputs) == 4
    without, stats = world.channel.to(GATEWAY, Stats)
    drafts = [next(n for n in each.nodes if n.role == "draft") for each in (without, stats)]
    assert [(each.planned, each.present) for each in drafts] == [(1, 0), (1, 1)]
    assert (stats.num_root_hits, stats.num_root_misses) == (8, 6)
    assert (stats.num_draft_passes, stats.num_overlapped_passes) == (18, 12)
    assert stats.draft_pass_seconds == 0.5
    assert len(world.channel.to(b"draft 0", Welcome)) == 2


def test_a_draft_node_that_cannot_load_ends_the_start() -> None:
    world = World(draft_nodes=1)
    world.start()
    world.hello("draft", 0)
    goodbye = Goodbye(role="draft", index=0, code="invalid_config", message="another vocabulary")
    world.say("draft 0", goodbye)
    assert world.service.run() == 2
    assert "another vocabulary" in world.channel.to(GATEWAY, EngineState)[-1].detail


def test_a_draft_node_that_dies_at_the_start_ends_it() -> None:
    world = World(draft_nodes=1)
    world.start()
    world.hello("draft", 0)
    world.poll(PeerGone(b"draft 0"))
    assert world.service.run() == 1
    assert "lost draft 0" in world.channel.to(GATEWAY, EngineState)[-1].detail


def test_an_engine_without_draft_nodes_refuses_one() -> None:
    world = World()
    world.start()
    world.hello("draft", 0)
    assert world.service.run() == 0
    (refused,) = world.channel.to(b"draft 0", Refused)
    assert "draft 0 has no place" in refused.reason


def test_a_trace_asks_draft_nodes_too() -> None:
    world = World(draft_nodes=1)
    world.start()
    world.hello("draft", 0)
    world.say("draft 0", Ready(role="draft", index=0))
    world.say("gateway", TraceRequest(query_id=5, seconds=1.0))
    assert world.service.run() == 0
    assert len(world.channel.to(b"draft 0", ClockPing)) == 1

"""A watch of the engine shows its steps and nodes; unwatched, nothing is noted or asked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from server.scheduler import traces
from server.scheduler.planning.in_flight import RunningStep
from server.scheduler.watch import MAX_STEPS, SAMPLE_S, WATCHED_S, Watch
from tests.server.scheduler.engine import make_request
from tests.server.scheduler.fake_nodes import TIMINGS
from tests.server.scheduler.scripted_world import GATEWAY, World
from topspin.messages import (
    ClockPing,
    ClockPong,
    ExpertCounts,
    Feed,
    FeedRequest,
    StepTicket,
    Trace,
    TraceDump,
    TraceQuery,
    pack_ints,
)
from topspin.plan.settings import FailoverPolicy
from topspin.processes.channel import Event, PeerGone, Received

NODES = ["attention 0", "attention 1", "expert 0", "expert 1"]
TRACE = Trace(query_id=0, nodes=())


class Watched:
    """A world whose nodes answer questions for a trace, too."""

    def __init__(self, **options: Any) -> None:
        self.world = World(**options)
        self.world.start()
        self._num_answered = 0

    def go_on(self, num_polls: int) -> None:
        """Script polls in which nodes execute what they were sent."""
        self.world.channel.script += [self._turn] * num_polls

    def ask(self, query_id: int, *, after: int = 0, experts: bool = False) -> None:
        request = FeedRequest(query_id=query_id, after=after, experts=experts)
        self.world.say("gateway", request)

    def _turn(self) -> list[Event]:
        sent = self.world.channel.sent[self._num_answered :]
        self._num_answered += len(sent)
        answers: list[Event] = []
        for peer, message in sent:
            if isinstance(message, ClockPing):
                pong = ClockPong(query_id=message.query_id, sent_ns=message.sent_ns, node_ns=1)
                answers.append(Received(peer, pong))
            elif isinstance(message, TraceQuery):
                records = f"step {message.step}".encode().ljust(24)
                answers.append(
                    Received(peer, TraceDump(query_id=message.query_id, records=records))
                )
        return [*self.world._execute(), *answers]

    def feeds(self) -> dict[int, Feed]:
        assert self.world.service.run() == 0
        return {feed.query_id: feed for feed in self.world.channel.to(GATEWAY, Feed)}


def test_nothing_is_noted_or_asked_while_nobody_watches() -> None:
    watched = Watched()
    watched.world.say("gateway", make_request("r", [1, 2, 3], max_tokens=20))
    watched.go_on(30)
    watched.ask(1)
    feed = watched.feeds()[1]
    assert feed.stats.num_steps == 20
    assert feed.steps == ()
    assert feed.sample is None
    assert watched.world.channel.to(b"attention 0", ClockPing) == []


def test_who_watches_sees_the_steps_and_one_of_them_in_full() -> None:
    watched = Watched()
    watched.ask(1)
    watched.world.say("gateway", make_request("r", [1, 2, 3], max_tokens=4))
    watched.go_on(4)
    watched.ask(2)
    watched.go_on(5)
    feeds = watched.feeds()
    assert feeds[1].steps == ()
    assert [step.step for step in feeds[2].steps] == [1, 2, 3, 4]
    assert feeds[2].steps[0].nodes == {0: TIMINGS}
    assert [step.num_tokens for step in feeds[2].steps] == [3, 1, 1, 1]
    queries = watched.world.channel.to(b"expert 1", TraceQuery)
    assert {query.step for query in queries} <= {1, 2, 3, 4}
    assert queries


def test_a_cursor_brings_only_what_is_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "DEADLINE_S", 60.0)  # a poll takes a second here
    watched = Watched()
    watched.ask(1)
    watched.world.say("gateway", make_request("r", [1, 2, 3], max_tokens=12))
    watched.go_on(3)
    watched.ask(2)
    watched.go_on(3)
    watched.ask(3)
    watched.go_on(3)
    watched.ask(4)
    first = watched.feeds()
    again = Watched()
    again.ask(1)
    again.world.say("gateway", make_request("r", [1, 2, 3], max_tokens=12))
    again.go_on(3)
    again.ask(2, after=first[1].cursor)
    again.go_on(3)
    again.ask(3, after=first[2].cursor)
    again.go_on(3)
    again.ask(4, after=10**9)  # another scheduler's
    feeds = again.feeds()
    parts = [step.step for number in (1, 2, 3) for step in feeds[number].steps]
    assert parts == [step.step for step in first[3].steps]
    assert feeds[3].news == ()
    assert feeds[4].steps == first[4].steps
    assert [news.text for news in feeds[4].news] == [news.text for news in first[1].news]
    samples = [feed.sample for feed in first.values() if feed.sample is not None]
    assert samples[-1].nodes[1].records.startswith(b"step ")
    assert [f"{node.role} {node.index}" for node in samples[-1].nodes[1:]] == NODES


def test_a_watch_that_is_not_renewed_ends() -> None:
    watched = Watched()
    watched.ask(1)
    watched.go_on(int(WATCHED_S) + 2)
    watched.world.say("gateway", make_request("r", [1, 2, 3], max_tokens=20))
    watched.go_on(25)
    watched.ask(2)
    feed = watched.feeds()[2]
    assert (feed.stats.num_steps, feed.steps, feed.sample) == (20, (), None)
    assert watched.world.channel.to(b"attention 0", ClockPing) == []


def test_nodes_are_shown_with_their_states_and_news() -> None:
    restarts = FailoverPolicy(restart=True)
    watched = Watched(change=lambda plan: msgspec.structs.replace(plan, failover=restarts))
    watched.ask(1)
    watched.world.poll(PeerGone(b"expert 1", "closed its connection"))
    watched.ask(2)
    watched.world.hello("expert", 1, incarnation=9)
    watched.ask(3)
    feeds = watched.feeds()
    states = {
        number: {f"{node.role} {node.index}": node.state for node in feed.nodes}
        for number, feed in feeds.items()
    }
    assert states[1] == dict.fromkeys(NODES, "serving")
    assert states[2] == states[1] | {"expert 1": "lost"}
    assert states[3] == states[1] | {"expert 1": "loading"}
    connections = [feeds[number].nodes[-1].connection for number in (1, 2, 3)]
    assert connections == [b"expert 1", b"", b"expert 1"]
    assert (feeds[1].state, feeds[2].state) == ("ready", "recovering")
    warnings = [news.text for news in feeds[2].news if news.is_warning]
    assert any("lost expert 1" in text for text in warnings)
    assert [node.experts for node in feeds[1].nodes if node.role == "expert"] == [4, 4]


def test_experts_are_shown_to_who_asks_for_them() -> None:
    watched = Watched()
    counts = (pack_ints([8, 2]), pack_ints([0, 4]))
    watched.world.say("expert 0", ExpertCounts(index=0, table_version=1, counts=counts))
    watched.ask(1)
    watched.ask(2, experts=True)
    feeds = watched.feeds()
    assert feeds[1].heat == ()
    assert feeds[2].heat == (bytes([255, 64, 0, 0]), bytes([0, 255, 0, 0]))
    assert feeds[2].stats.expert_tokens == ()


@pytest.mark.parametrize("num_steps", [0, 1, MAX_STEPS + 7])
def test_a_watch_keeps_the_newest_steps(num_steps: int) -> None:
    watch = Watch(wall_clock=lambda: 5.0)
    watch.renew(0.0)
    for step in range(1, num_steps + 1):
        watch.stepped(_step(step), {})
    assert [each.step for each in watch.steps(0)] == list(range(1, num_steps + 1))[-MAX_STEPS:]
    assert watch.due(0.0) == (num_steps or None)


def test_steps_are_shown_in_full_one_at_a_time_and_not_too_often() -> None:
    watch = Watch()
    watch.renew(0.0)
    watch.stepped(_step(1), {})
    assert watch.due(0.0) == 1
    watch.stepped(_step(2), {})
    assert watch.due(SAMPLE_S + 1.0) is None  # the first one's stamps have not come
    watch.sampled(TRACE)
    assert watch.due(SAMPLE_S / 2) is None
    assert watch.due(SAMPLE_S) == 2
    assert watch.sample(0) is TRACE
    assert watch.sample(watch.cursor) is None
    watch.sampled(msgspec.structs.replace(TRACE, query_id=3))
    assert watch.due(5 * SAMPLE_S) is None  # no step has ended since
    assert not watch.ends(WATCHED_S)
    assert watch.ends(WATCHED_S + 0.1)
    watch.sampled(TRACE)
    assert watch.sample(0) is None
    assert not watch.is_on


def _step(number: int) -> RunningStep:
    ticket = StepTicket(
        step=number,
        previous=number - 1,
        generation=1,
        table_version=1,
        num_micro_batches=1,
        participants=(0,),
        row_buckets=(8,),
    )
    return RunningStep(ticket=ticket, sent_s=0.0, parts={})

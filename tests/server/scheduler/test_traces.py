"""A trace collection from simulated nodes: different clocks, late or missing answers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from server.scheduler.traces import DEADLINE_S, NUM_PINGS, Tracer
from topspin.messages import ClockPing, ClockPong, Trace, TraceDump, TraceQuery, TraceRequest
from topspin.plan.settings import TraceSection
from topspin.trace import Kind, read_stamps

NODES = {"attention 0": ("attention", 0), "expert 1": ("expert", 1)}
GATEWAY = b"g"


class Played:
    """Nodes with clock offsets, which answer a ping only after the running step."""

    def __init__(self, offsets_ns: dict[str, int], *, seed: int = 1) -> None:
        self.tracer = Tracer(TraceSection(num_stamps=16))
        self.now_ns = 10**15
        self._offsets_ns = offsets_ns
        self._rng = random.Random(seed)
        self.num_pings: Counter[str] = Counter()

    def run(self, *, silent: tuple[str, ...] = ()) -> None:
        request = TraceRequest(query_id=42, seconds=2.0)
        asks = self.tracer.start(GATEWAY, request, nodes=NODES, now=0.0, now_ns=self.now_ns)
        while asks:
            name, question = asks.pop(0)
            if name in silent:
                continue
            self.now_ns += self._rng.randrange(40_000_000)  # the ping waits until the step is over
            answer: ClockPong | TraceDump
            if isinstance(question, ClockPing):
                self.num_pings[name] += 1
                answer = ClockPong(
                    query_id=question.query_id,
                    sent_ns=question.sent_ns,
                    node_ns=self.now_ns + self._offsets_ns[name],
                )
            else:
                assert isinstance(question, TraceQuery)
                assert question.seconds == 2.0
                answer = TraceDump(query_id=question.query_id, records=name.encode())
            self.now_ns += self._rng.randrange(100_000)
            asks += self.tracer.on_node_message(name, answer, self.now_ns)

    def finished(self, now: float) -> list[Trace]:
        answers = self.tracer.finished(now, self.now_ns)
        assert all(answer.peer == GATEWAY for answer in answers)
        return [answer.trace for answer in answers]


@pytest.mark.parametrize("seed", range(3))
def test_offsets_are_bounded_by_the_pings(seed: int) -> None:
    offsets = {"attention 0": 123_456_789_000, "expert 1": -5_000_000_000_000}
    played = Played(offsets, seed=seed)
    played.run()
    assert played.num_pings == dict.fromkeys(NODES, NUM_PINGS)
    (trace,) = played.finished(0.0)
    assert trace.query_id == 42
    assert trace.missing == ()
    for node in trace.nodes[1:]:
        name = f"{node.role} {node.index}"
        assert node.records == name.encode()
        assert abs(node.offset_ns - offsets[name]) <= node.error_ns < 25_000_000
    assert played.finished(100.0) == []


def test_a_silent_node_is_named_at_the_deadline() -> None:
    played = Played(dict.fromkeys(NODES, 0))
    played.run(silent=("expert 1",))
    assert played.finished(DEADLINE_S - 0.01) == []
    (trace,) = played.finished(DEADLINE_S)
    assert trace.missing == ("expert 1",)
    assert [node.role for node in trace.nodes] == ["scheduler", "attention"]


def test_an_answer_to_another_collection_is_dropped() -> None:
    tracer = Tracer(TraceSection())
    tracer.start(GATEWAY, TraceRequest(query_id=1, seconds=1.0), nodes=NODES, now=0.0, now_ns=5)
    assert (
        tracer.on_node_message("attention 0", ClockPong(query_id=9, sent_ns=5, node_ns=6), 7) == []
    )
    tracer.on_node_message("attention 0", TraceDump(query_id=9, records=b"old"), 7)
    (answer,) = tracer.finished(DEADLINE_S, 10)
    assert answer.trace.missing == tuple(NODES)


def test_the_schedulers_own_stamps_are_part_of_it() -> None:
    tracer = Tracer(TraceSection())
    tracer.stamp(Kind.PLAN_SENT, 3, 1)
    tracer.start(GATEWAY, TraceRequest(query_id=1, seconds=60.0), nodes={}, now=0.0, now_ns=5)
    (answer,) = tracer.finished(0.0, 0)
    (stamp,) = read_stamps(answer.trace.nodes[0].records)
    assert (stamp.kind, stamp.step, stamp.peer) == (Kind.PLAN_SENT, 3, 1)


def test_a_node_that_does_not_record_answers_with_nothing() -> None:
    tracer = Tracer(TraceSection(enabled=False))
    tracer.stamp(Kind.PLAN_SENT, 3, 1)
    tracer.start(GATEWAY, TraceRequest(query_id=1, seconds=60.0), nodes={}, now=0.0, now_ns=5)
    (answer,) = tracer.finished(0.0, 0)
    assert answer.trace.nodes[0].records == b""

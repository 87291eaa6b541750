"""The report against a simulated pipeline: it recovers the known times.

`play` simulates nodes event by event and writes the stamps that real nodes would; the replay is
then compared with playing again with changed times, and with the paper's formula.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import pytest

from app.cli.trace.accounts import accounts_of, explained
from app.cli.trace.export import chrome_trace
from app.cli.trace.replay import replay
from app.cli.trace.report import lanes_of, make_report
from topspin.messages import NodeTrace, Trace
from topspin.trace import Kind, Stamp

Times = Callable[[str, int, int], int]  # (node, layer, micro-batch) -> ns
_START_NS = 10**12


class Recorder:
    """Stamps of one node whose clock is off by `offset_ns`."""

    def __init__(self, role: str, index: int, offset_ns: int) -> None:
        self.role, self.index, self.offset_ns = role, index, offset_ns
        self.stamps: list[Stamp] = []

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    def stamp(self, t_ns: float, kind: Kind, layer: int = 0, mb: int = 0, peer: int = 0) -> None:
        self.stamps.append(Stamp(round(t_ns) + self.offset_ns, 5, kind, layer, mb, peer))

    def trace(self) -> NodeTrace:
        records = b"".join(struct.pack("<QQHHHH", *stamp) for stamp in self.stamps)
        return NodeTrace(
            role=self.role,
            index=self.index,
            offset_ns=self.offset_ns,
            error_ns=0,
            records=records,
        )


def play(
    times: Times, *, num_attention: int, num_experts: int, layers: int, m: int, link_ns: int
) -> tuple[Trace, int]:
    """Return the stamps of one step, and how long its rally took."""
    attention = [Recorder("attention", idx, 10**9 * idx) for idx in range(num_attention)]
    experts = [Recorder("expert", idx, -(10**9) * idx) for idx in range(num_experts)]
    now = {node.name: float(_START_NS) for node in [*attention, *experts]}
    for node in attention:
        node.stamp(_START_NS - 3000, Kind.STEP_ENDED)
        node.stamp(_START_NS - 1000, Kind.PLAN_RECEIVED)
        node.stamp(_START_NS, Kind.STEP_BEGAN)
    for node in experts:
        node.stamp(_START_NS, Kind.STEP_BEGAN)
    answers: dict[int, list[float]] = {}

    def take_back(node: Recorder, layer: int, mb: int) -> None:
        for peer, at in enumerate(answers[mb]):
            now[node.name] = max(now[node.name], at + link_ns)
            node.stamp(now[node.name], Kind.ARRIVED, layer, mb, peer)
        node.stamp(now[node.name], Kind.COMBINED, layer, mb)

    for layer in range(layers):
        for mb in range(m):
            sent = []
            for node in attention:
                if layer:
                    take_back(node, layer - 1, mb)
                now[node.name] += times(node.name, layer, mb)
                node.stamp(now[node.name], Kind.ATTENTION, layer, mb)
                node.stamp(now[node.name], Kind.DISPATCHED, layer, mb)
                sent.append(now[node.name])
            answers[mb] = []
            for node in experts:
                for peer, at in enumerate(sent):
                    now[node.name] = max(now[node.name], at + link_ns)
                    node.stamp(now[node.name], Kind.GATHERED, layer, mb, peer)
                now[node.name] += times(node.name, layer, mb)
                node.stamp(now[node.name], Kind.COMPUTED, layer, mb)
                node.stamp(now[node.name], Kind.REPLIED, layer, mb)
                answers[mb].append(now[node.name])
    for node in attention:
        for mb in range(m):
            take_back(node, layers - 1, mb)
        node.stamp(now[node.name], Kind.RALLIED)
        node.stamp(now[node.name] + 5000, Kind.STEP_ENDED)
    took = max(now[node.name] for node in attention) - _START_NS
    return Trace(query_id=1, nodes=tuple(n.trace() for n in [*attention, *experts])), round(took)


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize(("t_a", "t_e", "t_c"), [(1000, 1000, 100), (700, 1900, 400)])
def test_times_come_out_as_they_went_in(m: int, t_a: int, t_e: int, t_c: int) -> None:
    trace, took_ns = play(
        lambda name, layer, mb: t_a if name.startswith("a") else t_e,
        num_attention=1,
        num_experts=1,
        layers=6,
        m=m,
        link_ns=t_c,
    )
    report = make_report(lanes_of(trace))
    assert report is not None
    assert (report.num_layers, report.num_micro_batches, report.num_steps) == (6, m, 1)
    assert report.t_a_s == pytest.approx(t_a * 1e-9)
    assert report.t_e_s == pytest.approx(t_e * 1e-9)
    assert report.t_c_s == pytest.approx(t_c * 1e-9)
    assert report.gap_s == pytest.approx(2000e-9)
    assert report.step_s == pytest.approx(took_ns * 1e-9)
    assert report.replay_error == pytest.approx(0.0, abs=1e-9)
    busy_a = 6 * m * t_a / took_ns
    assert report.bubble("attention") == pytest.approx(1 - busy_a, abs=1e-6)
    assert report.what_if == []
    if m * max(t_a, t_e) >= t_a + t_e + 2 * t_c:
        assert report.formula_s() == pytest.approx(report.step_s)


@pytest.mark.parametrize(("num_attention", "num_experts"), [(1, 3), (2, 2), (3, 1)])
@pytest.mark.parametrize("seed", [0])
def test_what_if_equals_playing_with_the_peer_made_average(
    num_attention: int, num_experts: int, seed: int
) -> None:
    rng = random.Random(seed)
    table: dict[tuple[str, int, int], int] = {}

    def times(name: str, layer: int, mb: int) -> int:
        slow = 3 if name in ("attention 1", "expert 1") else 1
        return table.setdefault((name, layer, mb), slow * rng.randrange(500, 1500))

    shape = {"num_attention": num_attention, "num_experts": num_experts, "layers": 4, "m": 3}
    trace, took_ns = play(times, **shape, link_ns=0)
    report = make_report(lanes_of(trace))
    assert report is not None
    for name, gain in report.what_if:
        role = name.split()[0]
        others = [
            f"{role} {idx}"
            for idx in range(num_attention if role == "attention" else num_experts)
            if f"{role} {idx}" != name
        ]

        def average(
            node: str, layer: int, mb: int, *, name: str = name, others: list[str] = others
        ) -> int:
            own = times(node, layer, mb)
            if node != name:
                return own
            mean = sum(times(other, layer, mb) for other in others) / len(others)
            return round(min(own, mean))

        _, better_ns = play(average, **shape, link_ns=0)
        assert gain == pytest.approx(1 - better_ns / took_ns, abs=1e-3)
    num_compared = sum(count for count in (num_attention, num_experts) if count > 1)
    assert len(report.what_if) == num_compared
    assert report.what_if[0].name in ("attention 1", "expert 1")
    assert report.what_if[0].gain > 0.1


def test_replay_is_the_papers_formula_under_full_overlap() -> None:
    t_a, t_e, t_c, layers, m = 3.0, 4.0, 1.0, 7, 3
    grid = {"a": [[t_a] * m] * layers}
    took = replay(grid, {"e": [[t_e] * m] * layers}, t_c)
    assert took == pytest.approx((t_a + t_e + 2 * t_c) + max(t_a, t_e) * (m * layers - 1))


def test_a_step_that_is_cut_off_does_not_count() -> None:
    trace, _ = play(lambda *_: 1000, num_attention=1, num_experts=1, layers=3, m=1, link_ns=10)
    expert = trace.nodes[1]
    cut = NodeTrace(
        role="expert", index=0, offset_ns=0, error_ns=0, records=expert.records[24 * 5 :]
    )
    report = make_report(lanes_of(Trace(query_id=1, nodes=(trace.nodes[0], cut))))
    assert report is not None
    assert report.replay_error is None
    assert make_report(lanes_of(Trace(query_id=1, nodes=(cut,)))) is None


def test_the_chrome_document_has_a_slice_per_span_and_an_arrow_per_frame() -> None:
    trace, _ = play(lambda *_: 1000, num_attention=2, num_experts=2, layers=3, m=2, link_ns=10)
    lanes = lanes_of(trace)
    events = chrome_trace(lanes)["traceEvents"]
    slices = [event for event in events if event["ph"] in "Xi"]
    assert len(slices) == sum(len(lane.spans) for lane in lanes)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"attention 0", "attention 1", "expert 0", "expert 1"}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    # Requests and answers: 2 x 2 pairs, 3 layers, 2 micro-batches.
    assert len(starts) == 2 * 4 * 3 * 2
    assert starts.keys() == ends.keys()
    assert all(ends[i]["ts"] - starts[i]["ts"] >= 0.009 for i in starts)


@pytest.mark.parametrize(("num_experts", "lost_ns"), [(1, 0), (1, 250), (2, 0)])
def test_the_accounts_are_the_known_times(num_experts: int, lost_ns: int) -> None:
    """`lost_ns` passes on an expert node before each of its hops, unseen by its stamps."""
    t_a, t_e, t_c, layers = 1000, 3000, 400, 6
    trace, took_ns = play(
        lambda name, layer, mb: t_a if name.startswith("a") else t_e,
        num_attention=1,
        num_experts=num_experts,
        layers=layers,
        m=1,
        link_ns=t_c + lost_ns,
    )
    attention, *experts = lanes_of(trace)
    found = accounts_of(attention, experts, [5], t_c * 1e-9)
    spent_ns = {each.name: round(each.seconds * 1e9) for each in found}
    assert spent_ns == {
        "experts": layers * t_e,
        "attention and routing": layers * t_a,
        "LM head and sampling": 5000,
        "the way there and back": layers * 2 * t_c,
        "the scheduler's turn": 2000,
        "inputs": 1000,
        **({"unexplained": layers * 2 * lost_ns} if lost_ns else {}),
    }
    total_ns = took_ns + 8000
    assert sum(spent_ns.values()) == total_ns
    assert explained(found) == pytest.approx(1 - layers * 2 * lost_ns / total_ns)
    assert [each.seconds for each in found] == sorted((e.seconds for e in found), reverse=True)


def test_accounts_of_no_steps_are_empty() -> None:
    trace, _ = play(lambda *_: 1000, num_attention=1, num_experts=1, layers=2, m=1, link_ns=0)
    attention, *experts = lanes_of(trace)
    assert accounts_of(attention, experts, [], None) == []

"""Recorded steps on either side: the sums of plain steps, and every fault ends in its error."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor

from expert_nodes.worker import TicketGraphs
from kernels.cpu.compiled.program import Program
from kernels.cpu.compiled.runtime import is_recording
from kernels.cpu.recorder import CpuRuntime
from kernels.runtime import Replay
from m2n_comm.emulate import LinkEmulation
from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.expert_side import ExpertSide
from m2n_comm.host.tcp import TcpLines
from m2n_comm.net import ExpertBatch, NetShape, Serve
from tests.m2n_comm.faults import Change, Delay, Drop, Duplicate, Fault, FaultInjector
from tests.m2n_comm.harness import (
    FakeExperts,
    Fleet,
    Transport,
    make_shape,
    make_table,
    make_ticket,
    open_fleet,
    random_rows,
)
from topspin.errors import DeadlineExceeded, FrameError, StaleFrame, TransportError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket

NUM_STEPS = 6


def bf16_shape(**changes: Any) -> NetShape:
    both = {"payload": torch.bfloat16, "compute": torch.bfloat16, "window_rows": 64}
    return make_shape(**(both | changes))


def tickets(num: int = NUM_STEPS, bucket: int = 8, **fields: Any) -> list[StepTicket]:
    made = [make_ticket(step, **fields) for step in range(1, num + 1)]
    return [
        msgspec.structs.replace(each, row_buckets=(bucket,) * each.num_micro_batches)
        for each in made
    ]


def echo(batch: ExpertBatch) -> Tensor:
    """Return the rows themselves, as an expert's answer."""
    return batch.hidden


class RecordedNode:
    """An attention node whose steps of `counts` rows by micro-batch are recorded once."""

    def __init__(self, shape: NetShape, counts: Sequence[int]) -> None:
        self.shape, self.counts = shape, counts
        self.runtime = CpuRuntime()
        self.hidden = [torch.zeros(n, shape.hidden_size, dtype=shape.payload) for n in counts]
        self.experts = [torch.zeros(n, shape.top_k, dtype=torch.int64) for n in counts]
        self.weights = [torch.zeros(n, shape.top_k) for n in counts]
        size = (shape.num_layers, max(counts), shape.hidden_size)
        self.sums = [torch.zeros(size) for _ in counts]
        self.replay: Replay | None = None

    def step(self, net: AttentionSide, seed: int) -> list[Any]:
        """Run a step on rows of `seed`, which is returned; their sums are in `sums`."""
        rows = []
        for idx, count in enumerate(self.counts):
            each = random_rows(self.shape, count, seed=seed + idx)
            self.hidden[idx].copy_(each.hidden)
            self.experts[idx].copy_(each.experts)
            self.weights[idx].copy_(each.weights)
            rows.append(each)
        if self.replay is None:
            self.replay = self.runtime.capture(lambda: self._layers(net))
        self.replay()
        return rows

    def check_step(self, fleet: Fleet, ticket: StepTicket) -> None:
        """Run a step of a fleet's one attention node, and compare its sums."""
        fake = FakeExperts(self.shape, 7)
        for idx, rows in enumerate(self.step(fleet.attention[0], 10 * ticket.step)):
            for layer in range(self.shape.num_layers):
                found = self.sums[idx][layer, : self.counts[idx]]
                want = fake.expected(fleet.table, layer, rows)
                torch.testing.assert_close(found, want, rtol=1e-2, atol=1e-2)

    def _layers(self, net: AttentionSide) -> None:
        for layer in range(self.shape.num_layers):
            for idx in range(len(self.counts)):
                net.dispatch(idx, layer, self.hidden[idx], self.experts[idx], self.weights[idx])
            for idx, count in enumerate(self.counts):
                net.combine(idx, layer, self.sums[idx][layer, :count])


@pytest.fixture
def runs() -> Any:
    """Count the programs that run."""
    with mock.patch.object(Program, "run", autospec=True, side_effect=Program.run) as run:
        yield run


@pytest.mark.parametrize(
    ("transport", "counts", "num_experts"),
    [("shm", (1,), 1), ("shm", (5, 8), 2), ("shm", (3, 0, 1), 3), ("tcp", (5, 8), 2)],
)
def test_replays_give_the_sums_of_their_own_rows(
    transport: Transport, counts: tuple[int, ...], num_experts: int, runs: mock.Mock
) -> None:
    shape = bf16_shape()
    fleet = open_fleet(transport, 1, num_experts, shape=shape)
    node, waits = RecordedNode(shape, counts), []

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        assert net.is_graph_safe
        node.check_step(fleet, ticket)
        waits.append(net.times())

    assert fleet.run(tickets(m=len(counts)), attention) == {}
    assert runs.call_count == NUM_STEPS - 1
    assert all(0 < each.expert_s < 20 for each in waits)
    assert 0 <= sum(each.wait_s for each in waits) < 20  # an answer may be there at once
    fleet.close()


def test_replays_choose_replicas_by_their_own_rows(runs: mock.Mock) -> None:
    shape = bf16_shape()
    layers = tuple((tuple(range(7)), (2, 3, 4)) for _ in range(shape.num_layers))
    table = ExpertTable(version=1, num_experts=7, slots=layers)
    fleet = open_fleet("shm", 1, 2, shape=shape, table=table)
    node, served = RecordedNode(shape, (5, 8)), [0, 0]

    def counted(batch: ExpertBatch, index: int, serve: Serve) -> Tensor:
        served[index] += int((batch.slots >= 0).sum())
        return serve(batch)

    fleet.serves[:] = [partial(counted, index=i, serve=each) for i, each in enumerate(fleet.serves)]

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        assert net.is_graph_safe
        node.check_step(fleet, ticket)

    assert fleet.run(tickets(m=2), attention) == {}
    assert runs.call_count == NUM_STEPS - 1
    # Each choice once, and a third of the choices have a second home.
    assert sum(served) == NUM_STEPS * shape.num_layers * 13 * shape.top_k
    assert served[1] > sum(served) // 10
    fleet.close()


@pytest.mark.parametrize("latency_us", [1_500.0, 4_000.0])
def test_replays_wait_for_an_emulated_link(latency_us: float, runs: mock.Mock) -> None:
    """A latency below that which compiled code waits for, and one above it."""
    shape = bf16_shape()
    fleet = open_fleet("shm", shape=shape, link=LinkEmulation(latency_us=latency_us, gbps=1.0))
    node, steps_s = RecordedNode(shape, (3,)), []

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        assert net.is_graph_safe
        began_s = time.monotonic()
        node.check_step(fleet, ticket)
        steps_s.append(time.monotonic() - began_s)

    assert fleet.run(tickets(m=1), attention) == {}
    assert runs.call_count == NUM_STEPS - 1
    payload_s = 3 * shape.hidden_size * shape.payload.itemsize * 8e-9
    assert min(steps_s) >= 2 * shape.num_layers * (latency_us * 1e-6 + payload_s)
    fleet.close()


def serve_recorded(net: ExpertSide, steps: Sequence[StepTicket], graphs: TicketGraphs) -> None:
    """Serve tickets by recordings; an expert's answer is the row itself.

    A thread may read a batch of a recording when the next one is there, so no two share memory.
    """
    for ticket in steps:
        net.begin(ticket)
        batches: list[ExpertBatch] = []

        def body(ticket: StepTicket = ticket, batches: list[ExpertBatch] = batches) -> None:
            for layer in range(net.shape.num_layers):
                for micro_batch in range(ticket.num_micro_batches):
                    for batch in net.gather(micro_batch, layer):
                        net.reply(batch, batch.hidden)
                        if is_recording():
                            batches.append(batch)

        assert net.is_graph_safe
        graphs.serve(net, ticket, body)
        assert len({each.slots.data_ptr() for each in batches}) == len(batches)


def run_recorded(fleet: Fleet, steps: list[StepTicket], attention: Any) -> dict[str, BaseException]:
    """Play `steps` with recording experts."""
    graphs = [TicketGraphs(CpuRuntime()) for _ in fleet.experts]
    by_net = dict(zip(map(id, fleet.experts), graphs, strict=True))

    def serve(net: ExpertSide, asked: list[StepTicket], _: Any) -> None:
        serve_recorded(net, asked, by_net[id(net)])

    return fleet.run(steps, attention, serve)


def send_plain(shape: NetShape, num_rows: int, seed: int, net: AttentionSide) -> list[Tensor]:
    """Run a step of one micro-batch without a recording; return rows and sums by layer."""
    rows = random_rows(shape, num_rows, seed=seed)
    found = []
    for layer in range(shape.num_layers):
        net.dispatch(0, layer, *rows)
        found.append(net.combine(0, layer, torch.empty(num_rows, shape.hidden_size)))
    return [rows.hidden.float(), *found]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_recorded_experts_answer_every_participant_its_rows(
    transport: Transport, runs: mock.Mock
) -> None:
    shape = bf16_shape()
    fleet = open_fleet(transport, 3, shape=shape, serves=[echo])
    # The same recording serves any two of the three, with any number of rows in the bucket.
    pairs = [(0, 1), (0, 1), (1, 2), (0, 2), (1, 2), (0, 1)]
    steps = [
        ticket
        for step, pair in enumerate(pairs)
        for ticket in tickets(step + 1, participants=pair)[step:]
    ]

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        num_rows = (3 * ticket.step + 2 * index) % 9
        hidden, *sums = send_plain(shape, num_rows, 10 * ticket.step + index, net)
        assert all(torch.equal(each, hidden) for each in sums)

    assert run_recorded(fleet, steps, attention) == {}
    assert runs.call_count == len(pairs) - 2  # the first is run, the second recorded
    fleet.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_recorded_experts_wait_for_an_emulated_link(transport: Transport) -> None:
    """For longer than compiled code waits."""
    shape = bf16_shape()
    link = LinkEmulation(latency_us=4_000.0)
    fleet, steps_s = open_fleet(transport, shape=shape, serves=[echo], link=link), []

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        began_s = time.monotonic()
        hidden, *sums = send_plain(shape, 3, ticket.step, net)
        steps_s.append(time.monotonic() - began_s)
        assert all(torch.equal(each, hidden) for each in sums)

    assert run_recorded(fleet, tickets(m=1), attention) == {}
    assert min(steps_s) >= 2 * shape.num_layers * 4e-3
    fleet.close()


def test_small_frames_over_tcp_need_no_python() -> None:
    shape = bf16_shape()
    fleet = open_fleet("tcp", 2, shape=shape, serves=[echo])

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        hidden, *sums = send_plain(shape, 3, ticket.step + index, net)
        assert all(torch.equal(each, hidden) for each in sums)

    with (
        mock.patch.object(TcpLines, "send", side_effect=AssertionError),
        mock.patch.object(TcpLines, "send_from", side_effect=AssertionError),
    ):
        assert fleet.run(tickets(m=1, participants=(0, 1)), attention) == {}
    fleet.close()


FAULTS: list[tuple[Fault, type[TransportError] | None]] = [
    (Drop(), DeadlineExceeded),
    (Duplicate(), None),
    (Delay(0.02), None),
    (Change("step", 77), StaleFrame),
    (Change("incarnation", 5), StaleFrame),
    (Change("layer", 1), FrameError),
    (Change("hidden_size", 3), FrameError),
    (Change("rows", 9), FrameError),
]
BY_DEFAULT = ((0, 0), (0, 2), (0, 4), (1, 1))


@pytest.mark.parametrize(
    ("faulty", "fault", "error"),
    [
        pytest.param(
            faulty,
            *each,
            # Half of them wait for a deadline.
            marks=[] if (row, idx) in BY_DEFAULT else [pytest.mark.slow],
        )
        for row, faulty in enumerate(("answer", "request"))
        for idx, each in enumerate(FAULTS)
    ],
)
def test_a_fault_inside_a_replay_ends_as_in_a_plain_step(
    fault: Fault, error: type[TransportError] | None, faulty: str, runs: mock.Mock
) -> None:
    shape = bf16_shape(deadline_s=0.5)
    fleet = open_fleet("shm", shape=shape, serves=[echo])
    fleet.close_failed = False  # else the other end of a wait hears of that first
    # The frame of layer 0 in the fourth step.
    injector = FaultInjector({3 * shape.num_layers: fault})
    injector.attach(fleet.experts[0] if faulty == "answer" else fleet.attention[0])
    node, waits = RecordedNode(shape, (4,)), []

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        if faulty == "answer":
            rows = node.step(net, ticket.step)[0].hidden.float()
            sums = list(node.sums[0])
            waits.append(net.times().wait_s)
        else:
            rows, *sums = send_plain(shape, 4, ticket.step, net)
        assert all(torch.equal(each, rows) for each in sums)

    play = fleet.run if faulty == "answer" else lambda *args: run_recorded(fleet, *args)
    failures = play(tickets(bucket=4), attention)
    assert injector.remaining == 0
    victim = "attention 0" if faulty == "answer" else "expert 0"
    if error is None:
        assert failures == {}
        assert runs.call_count == NUM_STEPS - (1 if faulty == "answer" else 2)
        if faulty == "answer" and isinstance(fault, Delay):
            assert 0 < max(waits) < 20
    else:
        assert type(failures[victim]) is error, failures
        assert runs.call_count == (3 if faulty == "answer" else 2)
    fleet.close()


def test_a_request_beyond_the_tickets_bucket_is_refused() -> None:
    shape = bf16_shape(deadline_s=0.5)
    fleet = open_fleet("shm", shape=shape, serves=[echo])

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        send_plain(shape, 5 if ticket.step == 4 else 4, ticket.step, net)

    failures = run_recorded(fleet, tickets(bucket=4), attention)
    with pytest.raises(FrameError, match=r"attention 0: 5 rows in 1 parts, .* at most 4"):
        raise failures["expert 0"]
    fleet.close()


def test_after_a_fault_the_team_runs_other_programs() -> None:
    shape = bf16_shape(deadline_s=0.2)
    fleet = open_fleet("shm", shape=shape, serves=[echo])
    torch.set_num_threads(2)
    node, total = RecordedNode(shape, (1,)), torch.zeros(9)
    add = node.runtime.capture(lambda: total.add_(torch.ones(9)))
    FaultInjector({2 * shape.num_layers: Drop()}).attach(fleet.experts[0])
    fleet.close_failed = False

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        node.step(net, ticket.step)

    assert type(fleet.run(tickets(), attention)["attention 0"]) is DeadlineExceeded
    for _ in range(3):
        add()
    assert total.tolist() == [3.0] * 9
    fleet.close()


def test_a_peer_that_ends_during_a_replay_is_lost_at_once() -> None:
    shape = bf16_shape()
    fleet = open_fleet("shm", shape=shape, serves=[echo])
    node, expert = RecordedNode(shape, (1,)), fleet.experts[0]

    def serve(batch: ExpertBatch) -> Tensor:
        if node.replay is not None and batch.layer == 1:
            threading.Timer(0.05, expert.close).start()
            raise TransportError("this node ends")
        return batch.hidden

    fleet.serves[0] = serve
    fleet.close_failed = False
    began = time.monotonic()

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        node.step(net, ticket.step)

    failures = fleet.run(tickets(), attention)
    assert "expert 0 closed" in str(failures["attention 0"])
    assert time.monotonic() - began < shape.deadline_s / 2
    fleet.close()


def test_another_expert_table_ends_what_was_recorded() -> None:
    shape = bf16_shape()
    table = make_table(shape, 1)
    later = msgspec.structs.replace(
        table, version=2, slots=tuple((each[::-1],) for (each,) in table.slots)
    )
    fleet = open_fleet("shm", shape=shape, table=table, serves=[echo])
    net = fleet.attention[0]
    assert not net.is_graph_safe  # no step is open
    epochs = []
    for step, version in enumerate((1, 1, 2, 2), start=1):
        if version == 2:
            net.set_table(later)
        net.begin(make_ticket(step, version=version))
        assert net.is_graph_safe
        epochs.append(net.epoch)
    assert epochs[0] == epochs[1] != epochs[2] == epochs[3]
    fleet.close()

"""Features of shm alone: the spinning wait, and the detection of a lost peer."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Literal

import pytest
import torch

from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.frames.memory_order import publish
from m2n_comm.host.frames.windows import PairLayout, private_memory
from m2n_comm.host.shm import ShmLines, ShmPair
from m2n_comm.waits import Hop, Waits
from tests.m2n_comm.harness import (
    FakeExperts,
    make_shape,
    make_table,
    make_ticket,
    open_fleet,
    random_rows,
)
from topspin.errors import DeadlineExceeded, PeerLost, StaleFrame
from topspin.messages import StepTicket

Wait = Literal["block", "spin"]


class Bench:
    """Lines of an attention node to `num` expert nodes, which the test plays by hand."""

    def __init__(self, num: int, wait: Wait = "block") -> None:
        layout = PairLayout(make_shape())
        self.windows = [layout.map(private_memory(layout)) for _ in range(num)]
        flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
        self.bells = [(os.eventfd(0, flags), os.eventfd(0, flags)) for _ in range(num)]
        ends = [socket.socketpair() for _ in range(num)]
        self.theirs = [theirs for _, theirs in ends]
        self.lines = ShmLines(
            layout,
            "attention",
            pairs={
                peer: ShmPair(self.windows[peer], *self.bells[peer], ours)
                for peer, (ours, _) in enumerate(ends)
            },
            waits=Waits(timeout_s=10.0, policy=wait),
        )

    def answer(self, expert: int, sequence: int, micro_batch: int = 0) -> None:
        """Publish an answer and ring."""
        publish(self.windows[expert].answers[micro_batch].flag, sequence)
        os.eventfd_write(self.bells[expert][0], 1)

    def close(self) -> None:
        """Close both ends."""
        self.lines.close()
        for sock in self.theirs:
            sock.close()


def hop(peer: int = 0, micro_batch: int = 0, *, timeout_s: float = 10.0) -> Hop:
    return Hop(peer, micro_batch, 4, time.monotonic() + timeout_s)


@pytest.fixture(params=["block", "spin"])
def wait(request: pytest.FixtureRequest) -> Wait:
    """Run with each policy."""
    policy: Wait = request.param
    return policy


def test_a_frame_is_received_once(wait: Wait) -> None:
    bench = Bench(1, wait)
    bench.answer(0, 1)
    assert bench.lines.arrived(0, 0)
    bench.lines.receive(hop(), (0,))
    assert not bench.lines.arrived(0, 0)
    with pytest.raises(DeadlineExceeded, match=r"expert 0 .*layer 4, micro-batch 0"):
        bench.lines.receive(hop(timeout_s=0.05), (0,))
    bench.close()


def test_a_waiting_reader_wakes(wait: Wait) -> None:
    bench = Bench(1, wait)
    timer = threading.Timer(0.05, bench.answer, (0, 1))
    timer.start()
    bench.lines.receive(hop(), (0,))
    timer.join()
    bench.close()


def test_a_bell_for_another_micro_batch_is_not_lost(wait: Wait) -> None:
    bench = Bench(1, wait)
    bench.answer(0, 1, micro_batch=2)
    timer = threading.Timer(0.05, bench.answer, (0, 1))
    timer.start()
    # This consumes the pair's only bell; the flag of micro-batch 2 is still up.
    bench.lines.receive(hop(), (0,))
    bench.lines.receive(hop(0, 2), (0,))
    timer.join()
    bench.close()


@pytest.mark.parametrize("sequence", [2, 2**63])
def test_a_sequence_out_of_order_is_stale(wait: Wait, sequence: int) -> None:
    bench = Bench(1, wait)
    bench.answer(0, sequence)
    with pytest.raises(StaleFrame, match=f"sequence is {sequence}, expected 1"):
        bench.lines.receive(hop(), (0,))
    bench.close()


def test_a_peer_that_ends_while_waiting_is_lost_at_once(wait: Wait) -> None:
    bench = Bench(2, wait)
    threading.Timer(0.05, bench.theirs[1].close).start()
    start_s = time.monotonic()
    with pytest.raises(PeerLost, match=r"expert 1 closed .*layer 4, micro-batch 0"):
        bench.lines.receive(hop(), (0, 1))
    assert time.monotonic() - start_s < 5
    bench.close()


def test_a_peer_that_ended_after_its_answer_is_no_loss(wait: Wait) -> None:
    bench = Bench(2, wait)
    bench.answer(1, 1)
    bench.theirs[1].close()
    timer = threading.Timer(0.05, bench.answer, (0, 1))
    timer.start()
    bench.lines.receive(hop(0), (0, 1))
    bench.lines.receive(hop(1), (1,))
    with pytest.raises(PeerLost):
        bench.lines.receive(hop(1), (1,))
    timer.join()
    bench.close()


def test_a_peer_that_nothing_is_awaited_from_does_not_matter(wait: Wait) -> None:
    bench = Bench(2, wait)
    bench.theirs[1].close()
    timer = threading.Timer(0.05, bench.answer, (0, 1))
    timer.start()
    bench.lines.receive(hop(0), (0,))
    timer.join()
    bench.close()


def test_waiting_for_one_peer_beside_an_ended_one_costs_no_cpu() -> None:
    bench = Bench(2)
    bench.answer(1, 1)
    bench.theirs[1].close()
    cpu_s = time.thread_time()
    with pytest.raises(DeadlineExceeded):
        bench.lines.receive(hop(0, timeout_s=0.4), (0, 1))
    assert time.thread_time() - cpu_s < 0.1
    bench.close()


def test_a_spinning_net_gives_the_same_sums() -> None:
    shape = make_shape()
    table = make_table(shape, 2)
    fake = FakeExperts(shape, 7)
    rows = random_rows(shape, 20, choose_from=tuple(range(7)), seed=1)
    sums: list[torch.Tensor] = []

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        for layer in range(shape.num_layers):
            net.dispatch(0, layer, rows.hidden, rows.experts, rows.weights)
            sums.append(net.combine(0, layer, torch.empty(20, shape.hidden_size)))

    serves = [fake.serve(table, node) for node in range(2)]
    fleet = open_fleet("shm", 1, 2, shape=shape, table=table, serves=serves, wait="spin")
    assert fleet.run([make_ticket(1)], attention) == {}
    fleet.close()
    for layer, got in enumerate(sums):
        want = fake.expected(table, layer, rows)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("reader", "rings"), [("block", True), ("spin", False)])
def test_only_a_reader_that_may_sleep_is_rung_for(reader: Wait, rings: bool) -> None:
    layout = PairLayout(make_shape())
    windows = layout.map(private_memory(layout))
    flags = os.EFD_NONBLOCK | os.EFD_CLOEXEC
    bells = [os.eventfd(0, flags) for _ in range(2)]
    ends = socket.socketpair()
    attention = ShmLines(
        layout,
        "attention",
        pairs={0: ShmPair(windows, bells[0], bells[1], ends[0])},
        waits=Waits(timeout_s=10.0),
    )
    # The expert's ends are copies of the two descriptors, as they are between processes.
    expert = ShmLines(
        layout,
        "expert",
        pairs={0: ShmPair(windows, os.dup(bells[1]), os.dup(bells[0]), ends[1])},
        waits=Waits(timeout_s=10.0, policy=reader),
    )
    attention.send(hop(), 0, 1)
    assert expert.arrived(0, 0)
    if rings:
        assert os.eventfd_read(bells[1]) == 1
    else:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(bells[1])
    expert.send(hop(), 0, 1)
    assert os.eventfd_read(bells[0]) == 1  # the attention node blocks in both cases
    attention.close()
    expert.close()

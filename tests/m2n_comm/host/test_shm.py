"""Features of shm alone: bells, and the detection of a lost peer."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from m2n_comm.host.frames.memory_order import publish
from m2n_comm.host.frames.windows import PairLayout, private_memory
from m2n_comm.host.shm import ShmLines, ShmPair
from m2n_comm.net import WaitPolicy
from m2n_comm.waits import Hop, Waits
from tests.m2n_comm.harness import make_shape
from topspin.errors import DeadlineExceeded, PeerLost, StaleFrame


def bell() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


class Bench:
    """Lines of an attention node to `num` expert nodes, which the test plays by hand."""

    def __init__(self, num: int, wait: WaitPolicy = "block") -> None:
        layout = PairLayout(make_shape())
        self.windows = [layout.map(private_memory(layout)) for _ in range(num)]
        self.bells = [(bell(), bell()) for _ in range(num)]
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

    def receive(self, peer: int = 0, mb: int = 0, *awaited: int, timeout_s: float = 10.0) -> None:
        """Receive a frame of `peer`, while all `awaited` (none: itself) are watched."""
        hop = Hop(peer, mb, 4, time.monotonic() + timeout_s)
        self.lines.receive(hop, awaited or (peer,))

    @contextlib.contextmanager
    def soon(self, event: Callable[..., None], *args: int) -> Iterator[None]:
        """Let `event` happen while the body waits."""
        timer = threading.Timer(0.05, event, args)
        timer.start()
        yield
        timer.join()

    def close(self) -> None:
        """Close both ends."""
        self.lines.close()
        for sock in self.theirs:
            sock.close()


@pytest.fixture(params=["block", "spin"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Yield a bench of two expert nodes, with each policy."""
    bench = Bench(2, request.param)
    yield bench
    bench.close()


def test_a_frame_is_received_once(bench: Bench) -> None:
    with bench.soon(bench.answer, 0, 1):
        bench.receive()
    assert not bench.lines.arrived(0, 0)
    with pytest.raises(DeadlineExceeded, match=r"expert 0 .*layer 4, micro-batch 0"):
        bench.receive(timeout_s=0.05)


def test_a_bell_for_another_micro_batch_is_not_lost(bench: Bench) -> None:
    bench.answer(0, 1, micro_batch=2)
    with bench.soon(bench.answer, 0, 1):
        # This consumes the pair's only bell; the flag of micro-batch 2 is still up.
        bench.receive()
        bench.receive(0, 2)


@pytest.mark.parametrize("sequence", [2, 2**63])
def test_a_sequence_out_of_order_is_stale(bench: Bench, sequence: int) -> None:
    bench.answer(0, sequence)
    with pytest.raises(StaleFrame, match=f"sequence is {sequence}, expected 1"):
        bench.receive()


def test_a_peer_that_ends_while_waiting_is_lost_at_once(bench: Bench) -> None:
    start_s = time.monotonic()
    with (
        bench.soon(bench.theirs[1].close),
        pytest.raises(PeerLost, match=r"expert 1 closed .*layer 4, micro-batch 0"),
    ):
        bench.receive(0, 0, 0, 1)
    assert time.monotonic() - start_s < 5


def test_a_peer_that_ended_after_its_answer_is_no_loss(bench: Bench) -> None:
    bench.answer(1, 1)
    bench.theirs[1].close()
    with bench.soon(bench.answer, 0, 1):
        bench.receive(0, 0, 0, 1)
    bench.receive(1)
    with bench.soon(bench.answer, 0, 2):
        bench.receive()  # nothing is awaited from it
    with pytest.raises(PeerLost):
        bench.receive(1)


def test_waiting_for_one_peer_beside_an_ended_one_costs_no_cpu() -> None:
    bench = Bench(2)
    bench.answer(1, 1)
    bench.theirs[1].close()
    cpu_s = time.thread_time()
    with pytest.raises(DeadlineExceeded):
        bench.receive(0, 0, 0, 1, timeout_s=0.4)
    assert time.thread_time() - cpu_s < 0.1
    bench.close()


@pytest.mark.parametrize(("reader", "rings"), [("block", 1), ("spin", 0)])
def test_only_a_reader_that_may_sleep_is_rung_for(reader: WaitPolicy, rings: int) -> None:
    bench = Bench(1)
    mine, peers = bench.bells[0]
    # The expert's ends are copies of the two descriptors, as they are between processes.
    expert = ShmLines(
        PairLayout(make_shape()),
        "expert",
        pairs={0: ShmPair(bench.windows[0], os.dup(peers), os.dup(mine), bench.theirs[0])},
        waits=Waits(timeout_s=10.0, policy=reader),
    )
    for lines, rung in ((bench.lines, peers), (expert, mine)):
        lines.send(Hop(0, 0, 4, time.monotonic() + 10.0), 0, 1)
        os.eventfd_write(rung, 1)  # else there is nothing to read where nobody has rung
        # The attention node blocks in both cases.
        assert os.eventfd_read(rung) == 1 + (rings if lines is bench.lines else 1)
    assert expert.arrived(0, 0)
    expert.close()
    bench.close()

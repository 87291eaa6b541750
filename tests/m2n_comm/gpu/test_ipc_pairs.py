"""Behaviour that needs an asynchronous device: cuda_ipc on a runtime that is late on purpose."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass, field

import pytest
import torch

from kernels.m2n_windows import ABORT, STEP, step_words
from kernels.runtime import Event, HostRuntime, Stream
from m2n_comm.gpu.ipc_life import IpcLife, parts_of
from m2n_comm.gpu.ipc_pairs import IpcPair, IpcPairs, PeerWatch, inbox_bytes
from m2n_comm.gpu.memory import HostMemory
from m2n_comm.rules import NetRules
from m2n_comm.waits import Check, wait_on
from tests.m2n_comm.gpu.ipc_fleet import NEEDS_INTERPRETER, ipc_fleet, ipc_shape, ticket_of
from tests.m2n_comm.harness import make_shape, random_rows
from topspin.errors import DeadlineExceeded, Interrupted, TransportError


@dataclass
class LateEvent:
    """An event that is done after `looks` calls of is_done(); records calls of wait()."""

    number: int
    looks: int
    waited: list[int]

    def wait(self) -> None:
        self.waited.append(self.number)

    def is_done(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@dataclass
class LateRuntime(HostRuntime):
    """The host as a late device: events are done after some looks."""

    looks: int = 3
    recorded: int = 0
    waited: list[int] = field(default_factory=list)
    is_asynchronous = True  # type: ignore[misc,assignment]

    def current_stream(self) -> Stream:
        return self  # type: ignore[return-value]

    def record(self, *, timed: bool = False) -> Event:
        self.recorded += 1
        return LateEvent(self.recorded, self.looks, self.waited)  # type: ignore[return-value]


class Pair:
    """One end of a pair; the test is the other end."""

    def __init__(self, runtime: HostRuntime, check: Check = wait_on) -> None:
        shape = make_shape()
        self.memory = memory = HostMemory()
        ours, self.peer = socket.socketpair()
        self.theirs = theirs = memory.allocate(inbox_bytes(shape, "expert"))
        pair = IpcPair(
            memory.allocate(inbox_bytes(shape, "attention")),
            memory.open(theirs.handle, theirs.tensor.nbytes),
            ours,
            incarnation=5,
        )
        self.pairs = IpcPairs(
            shape, role="attention", runtime=runtime, memory=memory, pairs={3: pair}, check=check
        )

    def __enter__(self) -> IpcPairs:
        return self.pairs

    def __exit__(self, *_: object) -> None:
        self.pairs.close()
        self.peer.close()
        self.memory.free(self.theirs)


def test_words_of_a_step_wait_until_those_before_them_have_been_copied() -> None:
    runtime = LateRuntime()
    with Pair(runtime) as pairs:
        for step in range(1, 20):
            pairs.begin(step_words(patience_ns=1, step=step, version=1))
            assert int(pairs.step[STEP]) == step
    # Eight steps may be on their way; the ninth reuses the first one's place.
    assert runtime.waited == list(range(1, 12))


def test_settling_looks_while_it_waits_and_gives_up_when_told() -> None:
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 3:
            raise Interrupted("halted")

    runtime = LateRuntime(looks=10**9)
    with Pair(runtime, check) as pairs:
        rules = NetRules("attention 0", make_shape(), on_failure=pairs.control.abort)
        life = IpcLife(rules, pairs)
        with pytest.raises(Interrupted):
            life.settle()
        assert pairs.control.word(ABORT) == 1, "the abort word, at which kernels stop waiting"
        with pytest.raises(TransportError, match="can not be used any more: Interrupted: halted"):
            life.settle()
    runtime.looks = 5
    with Pair(runtime) as pairs:
        IpcLife(NetRules("attention 0", make_shape()), pairs).settle()


@NEEDS_INTERPRETER
def test_what_goes_wrong_on_a_device_shows_when_the_host_looks() -> None:
    shape = ipc_shape(deadline_s=0.05)
    rows = random_rows(shape, 2, seed=1)
    with ipc_fleet(shape=shape, runtime=LateRuntime()) as fleet:
        (net,), (expert,) = fleet.attention, fleet.experts
        fleet.begin(ticket_of(1))
        net.dispatch(0, 0, *rows)
        out = net.combine(0, 0, torch.zeros(rows.hidden.shape))
        assert out.isnan().all()
        # The next layer is already enqueued; it sends nothing and does not wait.
        net.dispatch(0, 1, *rows)
        assert net.combine(0, 1, torch.zeros(rows.hidden.shape)).isnan().all()
        with pytest.raises(DeadlineExceeded, match=r"expert 0 .*layer 0, micro-batch 0"):
            net.check()
        fleet.serve(0, 0)
        assert (next(iter(expert.gather(0, 1))).slots == -1).all()
        with pytest.raises(DeadlineExceeded, match=r"attention 0 .*layer 1, micro-batch 0"):
            expert.finish()


def test_the_watch_tells_of_each_peer_once_and_ends_when_told() -> None:
    ends = [socket.socketpair() for _ in range(3)]
    lost: list[int] = []
    told = threading.Semaphore(0)

    def lose(key: int) -> None:
        lost.append(key)
        told.release()

    watch = PeerWatch({key: ours for key, (ours, _) in enumerate(ends)}, lose)
    for key in (2, 0):
        ends[key][1].close()
        assert told.acquire(timeout=20)
    watch.close()
    ends[1][1].close()
    assert lost == [2, 0]
    for ours, _ in ends:
        ours.close()


@pytest.mark.parametrize(
    ("buckets", "parts"), [((0, 1, 8), (1, 1, 1)), ((9, 16, 17), (2, 2, 3)), ((512,), (64,))]
)
def test_a_bucket_says_how_many_windows_it_takes(
    buckets: tuple[int, ...], parts: tuple[int, ...]
) -> None:
    assert parts_of(ticket_of(1, buckets=buckets), 8) == parts

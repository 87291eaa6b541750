"""The contract of m2n_comm.net over cuda_ipc: the errors; kernels are interpreted."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.runtime import HostRuntime
from m2n_comm.gpu.ipc_pairs import window_shape
from m2n_comm.gpu.memory import HostMemory
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.gpu.ipc_fleet import (
    NEEDS_INTERPRETER,
    IpcFleet,
    ipc_fleet,
    ipc_shape,
    ticket_of,
)
from tests.m2n_comm.harness import make_table, random_rows
from topspin.errors import (
    ConfigError,
    DeadlineExceeded,
    FrameError,
    Interrupted,
    PeerLost,
    ProtocolError,
    StaleFrame,
    TransportError,
)
from topspin.expert_table import ExpertTable
from topspin.messages import ExpertPeer, StepTicket

pytestmark = NEEDS_INTERPRETER
LATE_S = 0.05
ROWS = random_rows(ipc_shape(), 2, seed=1)


def send(fleet: IpcFleet, *, index: int = 0, mb: int = 0, layer: int = 0) -> None:
    fleet.attention[index].dispatch(mb, layer, *ROWS)


def take(fleet: IpcFleet, *, index: int = 0, mb: int = 0, layer: int = 0) -> None:
    fleet.attention[index].combine(mb, layer, torch.empty(ROWS.hidden.shape))


def gather(fleet: IpcFleet, *, index: int = 0, mb: int = 0, layer: int = 0) -> None:
    next(iter(fleet.experts[index].gather(mb, layer)))


def test_a_late_node_is_named_with_layer_and_micro_batch() -> None:
    shape = ipc_shape(deadline_s=LATE_S)
    with ipc_fleet(1, 2, shape=shape) as fleet:
        fleet.begin(ticket_of(1, buckets=(2, 2)))
        send(fleet, mb=1)
        batch = next(iter(fleet.experts[0].gather(1, 0)))
        fleet.experts[0].reply(batch, fleet.serves[0](batch))
        with pytest.raises(
            DeadlineExceeded, match=r"expert 1 before the wait's deadline \(layer 0, micro-batch 1"
        ):
            take(fleet, mb=1)
    with ipc_fleet(2, 1, shape=shape) as fleet:
        fleet.begin(ticket_of(1, buckets=(2,), participants=(0, 1)))
        send(fleet)
        with pytest.raises(
            DeadlineExceeded, match=r"attention 1 before the wait's deadline \(layer 0, micro-batch"
        ):
            gather(fleet)


def begin_apart(fleet: IpcFleet, ours: StepTicket, theirs: StepTicket) -> None:
    """Let the attention node begin one step and the expert node another."""
    fleet.attention[0].begin(ours)
    fleet.experts[0].begin(theirs)


@pytest.mark.parametrize(
    ("theirs", "layer", "error", "text"),
    [
        (ticket_of(3), 0, StaleFrame, "step is 2, expected 3"),
        (ticket_of(2, version=2), 0, StaleFrame, "table_version is 1, expected 2"),
        (ticket_of(2), 1, FrameError, "layer is 0, expected 1"),
        (ticket_of(2, buckets=(17,)), 0, FrameError, "num_parts is 1, expected 3"),
        (ticket_of(2, buckets=(1,)), 0, FrameError, "2 rows, its windows of this step hold 1"),
    ],
)
def test_a_frame_of_another_step_table_or_layer_is_refused(
    theirs: StepTicket, layer: int, error: type[TransportError], text: str
) -> None:
    with ipc_fleet() as fleet:
        slots = make_table(fleet.shape, 1).slots
        fleet.experts[0].set_table(ExpertTable(version=2, num_experts=7, slots=slots))
        begin_apart(fleet, ticket_of(2), theirs)
        send(fleet)
        with pytest.raises(error, match=rf"frame of attention 0, layer {layer}, .*: {text}"):
            gather(fleet, layer=layer)


def test_a_frame_too_many_is_stale() -> None:
    with ipc_fleet() as fleet:
        fleet.begin(ticket_of(1))
        pairs = fleet.attention[0]._pairs
        port = fleet.attention[0]._ports[0]
        for _ in range(2):  # a net never sends twice without an answer; its kernels would
            port.dispatch(*ROWS, fleet.attention[0]._slot_of[0], layer=0)
        assert pairs.control.fault is None
        with pytest.raises(StaleFrame, match="sequence is 2, expected 1"):
            gather(fleet)


def test_a_frame_of_another_life_is_stale() -> None:
    with ipc_fleet() as fleet:
        fleet.begin(ticket_of(1))
        fleet.attention[0]._ports[0]._identity[0] = -1
        send(fleet)
        with pytest.raises(StaleFrame, match=f"incarnation is {2**64 - 1}, expected 200"):
            gather(fleet)


def test_slots_and_experts_that_are_not_there_are_refused() -> None:
    shape = ipc_shape()
    short = ExpertTable(version=1, num_experts=6, slots=((tuple(range(6)),),) * shape.num_layers)
    rows = random_rows(shape, 2, choose_from=(4, 5, 6), seed=1)
    with ipc_fleet() as fleet:
        fleet.experts[0]._limits.fill_(len(short.slots[0][0]))
        fleet.begin(ticket_of(1))
        fleet.attention[0].dispatch(0, 0, *rows)
        with pytest.raises(FrameError, match=r"layer 0, .* slot 6, this expert node has 0\.\.5"):
            gather(fleet)
    with ipc_fleet() as fleet:
        fleet.begin(ticket_of(1))
        with pytest.raises(FrameError, match=r"layer 1, .*: routed to expert 9, there are 0\.\.6"):
            fleet.attention[0].dispatch(0, 1, rows.hidden, rows.experts + 3, rows.weights)


def test_a_closed_peer_ends_a_wait_at_once() -> None:
    start_s = time.monotonic()
    with ipc_fleet(2, 1) as fleet:
        fleet.begin(ticket_of(1, buckets=(2,), participants=(0, 1)))
        send(fleet)
        fleet.attention[1].close()
        with pytest.raises(PeerLost, match="attention 1 closed its connection"):
            gather(fleet)
        fleet.experts[0].close()
        with pytest.raises(PeerLost, match="expert 0 closed its connection"):
            take(fleet)
    assert time.monotonic() - start_s < 10.0  # the deadline is 20 s


def test_what_a_peer_sent_before_it_left_counts() -> None:
    with ipc_fleet() as fleet:
        fleet.begin(ticket_of(1))
        send(fleet)
        fleet.serve(0, 0)
        fleet.experts[0].close()
        take(fleet)
        send(fleet, layer=1)
        with pytest.raises(PeerLost):
            take(fleet, layer=1)


def test_the_end_of_a_generation_ends_waits_and_the_net() -> None:
    halted: list[bool] = []

    def check() -> None:
        if halted:
            raise Interrupted("halted")

    with ipc_fleet(check=check) as fleet:
        (net,) = fleet.attention
        fleet.begin(ticket_of(1))
        send(fleet)
        halted.append(True)
        net._pairs._next_check_s = 0.0
        with pytest.raises(Interrupted):
            net.check()
        with pytest.raises(TransportError, match="can not be used any more: Interrupted"):
            take(fleet)
        # A waiting kernel has ended, too: the abort word is set.
        net._ports[0].combine(torch.empty(ROWS.hidden.shape), layer=0)
        assert net._pairs.control.fault is not None


def test_a_failed_net_refuses_further_use_and_keeps_its_first_error() -> None:
    with ipc_fleet(shape=ipc_shape(deadline_s=LATE_S)) as fleet:
        (net,) = fleet.attention
        fleet.begin(ticket_of(1))
        send(fleet)
        with pytest.raises(DeadlineExceeded):
            take(fleet)
        uses: tuple[Callable[[], None], ...] = (
            lambda: net.begin(ticket_of(2)),
            lambda: send(fleet, mb=1),
            lambda: take(fleet),
            net.check,
        )
        for use in uses:
            with pytest.raises(TransportError, match=r"can not be used any more: Deadline"):
                use()


def test_caller_errors_are_typed_and_name_what_is_wrong() -> None:
    """One of each of the rules that all nets share (m2n_comm.rules), and what is this net's."""
    with ipc_fleet() as fleet:
        (net,), (expert,) = fleet.attention, fleet.experts
        with pytest.raises(ProtocolError, match="4 micro-batches, windows for 3"):
            net.begin(ticket_of(1, buckets=(1,) * 4))
        with pytest.raises(ProtocolError, match="expert table 1: 2 layers over 3 nodes"):
            net.set_table(make_table(fleet.shape, 3))
        with pytest.raises(ProtocolError, match=r"expert table 2, expert 0 has \[1\]"):
            expert.begin(ticket_of(1, version=2))
        net.begin(ticket_of(1, buckets=(2, 2)))
        send(fleet)
        with pytest.raises(ProtocolError, match="micro-batch 0 of step 1 is still in the air"):
            net.begin(ticket_of(2))
        with pytest.raises(FrameError, match=r"experts is \(1, 3\), expected \(2, 3\)"):
            net.dispatch(1, 0, ROWS.hidden, ROWS.experts[1:], ROWS.weights)
    with ipc_fleet() as fleet:
        fleet.begin(ticket_of(1))
        many = random_rows(fleet.shape, 9, choose_from=(1, 2, 3), seed=1)
        with pytest.raises(FrameError, match="9 rows, micro-batch 0 of step 1 has 1 windows of 8"):
            fleet.attention[0].dispatch(0, 0, *many)
    with ipc_fleet() as fleet:
        fleet.begin(ticket_of(1))
        send(fleet)
        with pytest.raises(FrameError, match="combine into"):
            fleet.attention[0].combine(0, 0, torch.empty(1, fleet.shape.hidden_size))
        batch = next(iter(fleet.experts[0].gather(0, 0)))
        with pytest.raises(FrameError, match="reply: partial is"):
            fleet.experts[0].reply(batch, batch.hidden[1:])


def test_closing_twice_is_safe_and_a_closed_net_says_so() -> None:
    with ipc_fleet() as fleet:
        fleet.close()
        fleet.close()
        for net in (*fleet.attention, *fleet.experts):
            with pytest.raises(TransportError, match="it is closed"):
                net.begin(ticket_of(1))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [({"per_expert_answers": True}, "--deterministic"), ({"compressed": torch.int8}, "int8")],
)
def test_what_it_cannot_carry_is_refused_by_name(changes: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        window_shape(ipc_shape(**changes))


@pytest.mark.parametrize(
    ("addresses", "runtime", "text"),
    [
        (("unix:@x", "cuda_ipc:unix:@x"), HostRuntime(), "one transport, found cuda_ipc and shm"),
        (("cuda_ipc:unix:@x",), None, "only between nodes on GPUs"),
        ((), None, "one transport, found none"),
    ],
)
def test_nodes_that_cannot_form_pairs_are_refused(
    addresses: tuple[str, ...], runtime: HostRuntime | None, text: str
) -> None:
    shape = ipc_shape()
    me = Identity(role="attention", index=0, incarnation=1, shape=shape)
    peers = [ExpertPeer(address=address, incarnation=1) for address in addresses]
    table = make_table(shape, len(peers) or 1)
    with pytest.raises(ConfigError, match=text):
        connect_attention(me, peers, table, Waits(timeout_s=1.0), runtime=runtime)


class OddMemory(HostMemory):
    """Memory of a kind that no other node has."""

    kind = "odd"  # type: ignore[misc,assignment]


@pytest.mark.slow
def test_memory_of_another_kind_is_refused_and_nothing_stays_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main = threading.current_thread()

    def open_memory(_: torch.device) -> HostMemory:
        return OddMemory() if threading.current_thread() is main else HostMemory()

    monkeypatch.setattr("m2n_comm.gpu.ipc_forming.open_memory", open_memory)
    waits = Waits(timeout_s=10.0)
    gc.collect()  # what earlier tests left must not be closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    shape = ipc_shape()
    table = make_table(shape, 1)
    listener = listen_expert("cuda_ipc")
    with ThreadPoolExecutor(1) as pool:
        me = Identity(role="expert", index=0, incarnation=9, shape=shape)
        accepting = pool.submit(listener.accept, me, (7,), table, waits, runtime=HostRuntime())
        peer = ExpertPeer(address=listener.address, incarnation=9)
        me = Identity(role="attention", index=0, incarnation=7, shape=shape)
        with pytest.raises(PeerLost, match="closed the connection during the handshake"):
            connect_attention(me, [peer], table, waits, runtime=HostRuntime())
        with pytest.raises(FrameError, match="attention 0: memory is odd, expected memfd"):
            accepting.result()
    listener.close()
    del accepting
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before

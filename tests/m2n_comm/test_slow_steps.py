"""A step may take far longer than a wait: only a silent peer is late."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from m2n_comm.net import ExpertBatch
from m2n_comm.open import CONNECT_TIMEOUT_S, connect_attention, listen_expert
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.harness import (
    NIXL,
    Fleet,
    Transport,
    few_rows,
    fleet_of,
    make_shape,
    make_table,
    make_ticket,
    rally,
)
from topspin.errors import DeadlineExceeded
from topspin.messages import ExpertPeer, StepTicket

DEADLINE_S = 0.3
LAYER_S = 0.2


def check_slowly(fleet: Fleet, tickets: list[StepTicket]) -> None:
    """Let every node play its tickets, with an expert whose computing takes LAYER_S."""
    serve = fleet.serves[0]

    def compute(batch: ExpertBatch) -> torch.Tensor:
        time.sleep(LAYER_S)
        return serve(batch)

    fleet.serves[0] = compute
    fleet.check(tickets, few_rows)


@pytest.mark.parametrize(
    "transport",
    [
        *("shm", "tcp"),
        pytest.param("local", marks=pytest.mark.slow),
        NIXL,
    ],
)
def test_a_step_of_many_slow_layers_is_not_late(transport: Transport) -> None:
    with fleet_of(transport, shape=make_shape(num_layers=2, deadline_s=DEADLINE_S)) as fleet:
        check_slowly(fleet, [make_ticket(1)])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_a_node_that_begins_the_next_step_early_waits_for_its_turn(transport: Transport) -> None:
    """Attention 1 takes no part in step 1, which takes longer than the deadline."""
    shape = make_shape(num_layers=2, deadline_s=DEADLINE_S)
    with fleet_of(transport, 2, shape=shape) as fleet:
        check_slowly(fleet, [make_ticket(1), make_ticket(2, participants=(0, 1))])


@pytest.mark.parametrize("transport", ["tcp"])
def test_a_silent_peer_is_late_after_progress_too(transport: Transport) -> None:
    """A longer wait for one's turn ends with the first answer; the wait for a peer never grows."""
    shape = make_shape(deadline_s=DEADLINE_S)
    with fleet_of(transport, 1, shape=shape) as fleet:
        fleet.close_failed = False
        hung = threading.Event()
        serve = fleet.serves[0]

        def hang(batch: ExpertBatch) -> torch.Tensor:
            if batch.layer == 1:
                hung.wait(3 * DEADLINE_S)
            return serve(batch)

        fleet.serves[0] = hang
        # As far as this node knows, step 4 was another node's.
        failures = fleet.run([make_ticket(5)], rally(few_rows, {}))
    assert isinstance(failures["attention 0"], DeadlineExceeded)
    assert "expert 0" in str(failures["attention 0"])


@pytest.mark.slow
def test_nodes_wait_for_one_that_loads_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention node has connected to an expert node that accepts ten minutes later."""
    shape = make_shape()
    offset_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + offset_s)
    monkeypatch.setattr("m2n_comm.open.time", clock)
    monkeypatch.setattr("m2n_comm.pairing.handshake.time", clock)
    monkeypatch.setattr("m2n_comm.pairing.reception.time", clock)
    asked = threading.Semaphore(0)
    opened: list[object] = []
    listener = listen_expert("shm")
    peer = ExpertPeer(address=listener.address, incarnation=2)

    def connect() -> None:
        me = Identity(role="attention", index=0, incarnation=1, shape=shape)
        waits = Waits(timeout_s=CONNECT_TIMEOUT_S, check=asked.release)
        net = connect_attention(me, [peer], make_table(shape, 1), waits)
        opened.append(net)
        net.close()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    assert asked.acquire(timeout=10.0)
    offset_s = 600.0
    for _ in range(4):  # it reads the clock, and keeps waiting
        assert asked.acquire(timeout=10.0)
    me = Identity(role="expert", index=0, incarnation=2, shape=shape)
    waits = Waits(timeout_s=CONNECT_TIMEOUT_S)
    listener.accept(me, (1,), make_table(shape, 1), waits).close()
    thread.join(10.0)
    listener.close()
    assert opened

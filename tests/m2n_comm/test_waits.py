"""The kind of wait within a step changes no sum and no error; loopback has no checksums."""

from __future__ import annotations

import threading

import pytest

from m2n_comm.hello import Identity
from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.tcp import TcpLines
from m2n_comm.net import WaitPolicy
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.waits import Waits
from tests.m2n_comm.harness import (
    Collected,
    FakeExperts,
    Transport,
    assert_right_sums,
    few_rows,
    make_shape,
    make_table,
    make_ticket,
    open_fleet,
    rally,
)
from topspin.errors import DeadlineExceeded
from topspin.messages import ExpertPeer


@pytest.mark.parametrize("wait", ["block", "spin"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_every_policy_gives_the_same_sums(transport: Transport, wait: WaitPolicy) -> None:
    shape = make_shape()
    table = make_table(shape, 1)
    serve = FakeExperts(shape, 7).serve(table, 0)
    fleet = open_fleet(transport, 1, 1, shape=shape, table=table, serves=[serve], wait=wait)
    results: Collected = {}
    assert fleet.run([make_ticket(s, m=2) for s in (1, 2, 3)], rally(few_rows, results)) == {}
    fleet.close()
    assert len(results) == 12
    assert_right_sums(results)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_spinning_node_keeps_its_deadline(transport: Transport) -> None:
    shape = make_shape(deadline_s=0.2)
    table = make_table(shape, 1)
    serve = FakeExperts(shape, 7).serve(table, 0)
    fleet = open_fleet(transport, 1, 1, shape=shape, table=table, serves=[serve], wait="spin")
    net = fleet.attention[0]
    net.begin(make_ticket(1))
    rows = few_rows(make_ticket(1), 0, 0, 0)
    net.dispatch(0, 0, rows.hidden, rows.experts, rows.weights)
    with pytest.raises(DeadlineExceeded, match="expert 0"):
        net.combine(0, 0, rows.hidden.clone())
    fleet.close()


@pytest.mark.parametrize(("asked", "carried"), [(None, False), (True, True), (False, False)])
def test_payloads_carry_a_checksum_where_there_is_a_wire(asked: bool | None, carried: bool) -> None:
    shape = make_shape()
    table = make_table(shape, 1)
    listener = listen_expert("tcp")
    waits = Waits(timeout_s=10.0)
    accepted = threading.Thread(
        target=lambda: listener.accept(
            Identity(role="expert", index=0, incarnation=2, shape=shape), (1,), table, waits
        ).close()
    )
    accepted.start()
    peer = ExpertPeer(address=listener.address, incarnation=2)
    me = Identity(role="attention", index=0, incarnation=1, shape=shape)
    net = connect_attention(me, [peer], table, waits, checksum=asked)
    assert isinstance(net, AttentionSide)
    assert isinstance(net.lines, TcpLines)
    assert net.lines.checksums == {0: carried}
    net.close()
    accepted.join(10.0)
    assert not accepted.is_alive()

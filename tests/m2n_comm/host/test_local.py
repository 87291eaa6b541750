"""Features of the local hub alone: inline experts, the order of tickets without a scheduler."""

from __future__ import annotations

import threading

import pytest
import torch

from m2n_comm.host.local import LocalHub
from m2n_comm.net import ExpertBatch
from tests.m2n_comm.harness import (
    FakeExperts,
    few_rows,
    fleet_of,
    make_shape,
    make_table,
    make_ticket,
    rally,
)
from topspin.errors import PeerLost, TransportError

SHAPE = make_shape(deadline_s=5.0, num_layers=1)
TABLE = make_table(SHAPE, 1)


def test_one_attention_node_runs_everything_in_its_own_thread() -> None:
    """Steps need not be consecutive: a lone attention node waits for no other."""
    with fleet_of("local", shape=SHAPE) as fleet:
        serve, places = fleet.serves[0], []

        def watched(batch: ExpertBatch) -> torch.Tensor:
            places.append((threading.current_thread().name, threading.active_count()))
            return serve(batch)

        fleet.serves[0] = watched
        others = threading.active_count()
        fleet.check([make_ticket(step) for step in (3, 8, 100)], few_rows)
    assert places == [("attention 0", others + 1)] * 3


def test_an_expert_that_raises_fails_the_caller_and_every_waiting_node() -> None:
    both_sent = threading.Barrier(2, timeout=10)

    def fail(batch: ExpertBatch) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with fleet_of("local", 2, shape=SHAPE, serves=[fail]) as fleet:
        fleet.close_failed = False
        for net in fleet.attention:
            net.combine = lambda *at, combine=net.combine: (both_sent.wait(), combine(*at))[1]
        tickets = [make_ticket(1, participants=(0, 1))]
        errors = list(fleet.run(tickets, rally(few_rows, {})).values())
        assert sorted(type(error).__name__ for error in errors) == ["PeerLost", "RuntimeError"]
        assert all("out of memory" in str(error) for error in errors)
        for net in fleet.attention:
            with pytest.raises(TransportError, match="can not be used any more"):
                net.begin(make_ticket(2, participants=(0, 1)))


def test_an_expert_that_was_never_attached_is_named() -> None:
    hub = LocalHub(SHAPE, 1, 1)
    net = hub.attention_net(0, TABLE)
    rows = few_rows(make_ticket(1), 0, 0, 0)
    net.begin(make_ticket(1))
    net.dispatch(0, 0, *rows)
    with pytest.raises(PeerLost, match="expert 0 was never attached"):
        net.combine(0, 0, rows.hidden.clone())
    net.close()


def test_a_node_may_run_ahead_of_a_step_that_it_takes_no_part_in() -> None:
    fake = FakeExperts(SHAPE, 7)
    hub = LocalHub(SHAPE, 2, 1)
    hub.attach_expert(0, fake.serve(TABLE, 0), table=TABLE)
    first, second = (hub.attention_net(index, TABLE) for index in range(2))
    alone, both = make_ticket(1, participants=(0,)), make_ticket(2, participants=(0, 1))
    rows = few_rows(both, 0, 0, 0)
    want = fake.expected(TABLE, 0, rows)
    # Node 1 begins and sends step 2 before node 0 has begun step 1.
    second.begin(both)
    second.dispatch(0, 0, *rows)
    # Waiting for its answer now runs no expert: step 1 may still come.
    assert hub._advance(hub._programs[0]) is False
    for ticket, nets in ((alone, (first,)), (both, (second, first))):
        first.begin(ticket)
        first.dispatch(0, 0, *rows)
        for net in nets:
            got = net.combine(0, 0, torch.empty(rows.hidden.shape))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)
    first.close()
    second.close()

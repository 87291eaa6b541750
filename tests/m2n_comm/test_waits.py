"""The kind of wait within a step changes no sum and no error."""

from __future__ import annotations

import pytest

from m2n_comm.net import WaitPolicy
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

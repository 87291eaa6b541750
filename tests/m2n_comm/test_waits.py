"""A spinning wait within a step changes no sum and no error; the contract is tested by sleeps."""

from __future__ import annotations

import pytest

from tests.m2n_comm.harness import NIXL, Transport, few_rows, fleet_of, make_shape, make_ticket
from topspin.errors import DeadlineExceeded


@pytest.mark.parametrize("transport", ["shm", "tcp", NIXL])
def test_spinning_nodes_give_the_same_sums_and_keep_their_deadlines(transport: Transport) -> None:
    with fleet_of(transport, 1, 1, shape=make_shape(deadline_s=0.2), wait="spin") as fleet:
        fleet.check([make_ticket(step, m=2) for step in (1, 2, 3)], few_rows)
        (net,) = fleet.attention
        net.begin(make_ticket(4))
        rows = few_rows(make_ticket(4), 0, 0, 0)
        net.dispatch(0, 0, *rows)
        with pytest.raises(DeadlineExceeded, match="expert 0"):
            net.combine(0, 0, rows.hidden.clone())

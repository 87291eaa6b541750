"""Features of the local hub alone: inline experts, the order of tickets without a scheduler."""

from __future__ import annotations

import threading

import pytest
import torch

from m2n_comm.host.local import LocalHub
from m2n_comm.net import ExpertBatch
from tests.m2n_comm.harness import (
    FakeExperts,
    Rows,
    make_shape,
    make_table,
    make_ticket,
    random_rows,
)
from topspin.errors import PeerLost, TransportError

SHAPE = make_shape(deadline_s=5.0, num_layers=1)
TABLE = make_table(SHAPE, 1)


def some_rows(seed: int) -> Rows:
    return random_rows(SHAPE, 4, choose_from=tuple(range(7)), seed=seed)


def test_one_attention_node_runs_everything_in_its_own_thread() -> None:
    fake = FakeExperts(SHAPE, 7)
    compute = fake.serve(TABLE, 0)
    threads: list[str] = []

    def serve(batch: ExpertBatch) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return compute(batch)

    hub = LocalHub(SHAPE, 1, 1)
    hub.attach_expert(0, serve, table=TABLE)
    net = hub.attention_net(0, TABLE)
    before = threading.active_count()
    # Steps need not be consecutive: a lone attention node waits for no other.
    for step in (3, 8, 100):
        rows = some_rows(step)
        net.begin(make_ticket(step))
        net.dispatch(0, 0, rows.hidden, rows.experts, rows.weights)
        got = net.combine(0, 0, torch.empty(4, SHAPE.hidden_size))
        torch.testing.assert_close(got, fake.expected(TABLE, 0, rows), rtol=1e-5, atol=2e-5)
    assert threads == [threading.current_thread().name] * 3
    assert threading.active_count() == before
    net.close()


def test_an_expert_that_raises_fails_the_caller_and_every_waiting_node() -> None:
    def serve(batch: ExpertBatch) -> torch.Tensor:
        raise RuntimeError("out of memory")

    hub = LocalHub(SHAPE, 2, 1)
    hub.attach_expert(0, serve, table=TABLE)
    nets = [hub.attention_net(index, TABLE) for index in range(2)]
    errors: list[BaseException] = []
    both_sent = threading.Barrier(2, timeout=10)

    def attention(index: int) -> None:
        rows = some_rows(index)
        net = nets[index]
        net.begin(make_ticket(1, participants=(0, 1)))
        net.dispatch(0, 0, rows.hidden, rows.experts, rows.weights)
        both_sent.wait()
        try:
            net.combine(0, 0, torch.empty(4, SHAPE.hidden_size))
        except (RuntimeError, TransportError) as error:
            errors.append(error)

    threads = [threading.Thread(target=attention, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    kinds = sorted(type(error).__name__ for error in errors)
    assert kinds == ["PeerLost", "RuntimeError"]
    assert all("out of memory" in str(error) for error in errors)
    for net in nets:
        with pytest.raises(TransportError, match="can not be used any more"):
            net.begin(make_ticket(2, participants=(0, 1)))
        net.close()


def test_an_expert_that_was_never_attached_is_named() -> None:
    hub = LocalHub(SHAPE, 1, 1)
    net = hub.attention_net(0, TABLE)
    rows = some_rows(1)
    net.begin(make_ticket(1))
    net.dispatch(0, 0, rows.hidden, rows.experts, rows.weights)
    with pytest.raises(PeerLost, match="expert 0 was never attached"):
        net.combine(0, 0, torch.empty(4, SHAPE.hidden_size))
    net.close()


def test_a_node_may_run_ahead_of_a_step_that_it_takes_no_part_in() -> None:
    fake = FakeExperts(SHAPE, 7)
    hub = LocalHub(SHAPE, 2, 1)
    hub.attach_expert(0, fake.serve(TABLE, 0), table=TABLE)
    nets = [hub.attention_net(index, TABLE) for index in range(2)]
    ahead, both = make_ticket(1, participants=(0,)), make_ticket(2, participants=(0, 1))
    rows = [some_rows(index) for index in range(3)]
    # Node 1 begins and sends step 2 before node 0 has begun step 1.
    nets[1].begin(both)
    nets[1].dispatch(0, 0, rows[1].hidden, rows[1].experts, rows[1].weights)
    # Waiting for its answer now runs no expert: step 1 may still come.
    assert hub._advance(hub._programs[0]) is False
    nets[0].begin(ahead)
    nets[0].dispatch(0, 0, rows[0].hidden, rows[0].experts, rows[0].weights)
    sums = [nets[0].combine(0, 0, torch.empty(4, SHAPE.hidden_size))]
    nets[0].begin(both)
    nets[0].dispatch(0, 0, rows[2].hidden, rows[2].experts, rows[2].weights)
    sums.append(nets[1].combine(0, 0, torch.empty(4, SHAPE.hidden_size)))
    sums.append(nets[0].combine(0, 0, torch.empty(4, SHAPE.hidden_size)))
    for got, sent in zip(sums, rows, strict=True):
        torch.testing.assert_close(got, fake.expected(TABLE, 0, sent), rtol=1e-5, atol=2e-5)
    for net in nets:
        net.close()

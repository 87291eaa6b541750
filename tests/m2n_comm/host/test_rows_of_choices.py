"""Answers by expert: the same bits for any nodes, windows, parts and neighbours."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from m2n_comm.net import ExpertBatch, NetShape
from tests.m2n_comm.harness import (
    NUM_EXPERTS,
    Collected,
    FakeExperts,
    Fleet,
    Rows,
    Transport,
    make_shape,
    make_table,
    make_ticket,
    open_fleet,
    rally,
    random_rows,
)
from tests.pairwise import cover_pairs
from topspin.errors import FrameError, PeerLost
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket

EVERYTHING = tuple(range(NUM_EXPERTS))
PAYLOADS = (torch.float32, torch.bfloat16)


def row_shape(payload: torch.dtype = torch.float32, **changes: int) -> NetShape:
    return make_shape(payload=payload, per_expert_answers=True, **changes)


def serve_rows(
    fake: FakeExperts, table: ExpertTable, node: int
) -> Callable[[ExpertBatch], torch.Tensor]:
    """Return an expert node's answer: the row of every choice, unweighted."""
    held = [list(experts) for experts in table.experts_of(node)]

    def compute(batch: ExpertBatch) -> torch.Tensor:
        row, choice = (batch.slots >= 0).nonzero(as_tuple=True)
        scale = fake.scale[batch.layer, held[batch.layer]][batch.slots[row, choice].long()]
        return (scale * batch.hidden[row].float()).to(fake.payload)

    return compute


def wanted(fake: FakeExperts, layer: int, rows: Rows) -> torch.Tensor:
    """Add the rows one after the other, by ascending expert id."""
    out = torch.zeros(rows.hidden.shape)
    for token in range(len(out)):
        for expert, choice in sorted((e, k) for k, e in enumerate(rows.experts[token].tolist())):
            row = (fake.scale[layer, expert] * rows.hidden[token].float()).to(fake.payload)
            out[token] += row.float() * rows.weights[token, choice]
    return out


def tokens(ticket: StepTicket, index: int, layer: int, mb: int, shape: NetShape) -> Rows:
    size = (0, 1, 9, 5, 20)[(ticket.step + index + 2 * layer + 3 * mb) % 5]
    seed = 100 * ticket.step + 10 * index + layer + 7 * mb
    return random_rows(shape, size, choose_from=EVERYTHING, seed=seed)


def open_rows(
    transport: Transport, topology: tuple[int, int], shape: NetShape, table: ExpertTable
) -> Fleet:
    fake = FakeExperts(shape, NUM_EXPERTS)
    num_attention, num_experts = topology
    serves = [serve_rows(fake, table, node) for node in range(num_experts)]
    return open_fleet(
        transport, num_attention, num_experts, shape=shape, table=table, serves=serves
    )


@pytest.mark.parametrize(
    ("topology", "transport", "payload"),
    cover_pairs(((1, 1), (2, 2), (1, 3)), ("local", "tcp"), PAYLOADS),
)
def test_sums_are_those_of_one_row_after_the_other(
    transport: Transport, topology: tuple[int, int], payload: torch.dtype
) -> None:
    shape = row_shape(payload)
    fake = FakeExperts(shape, NUM_EXPERTS)
    everyone = tuple(range(topology[0]))
    tickets = [make_ticket(s, participants=everyone, m=1 + s % 3) for s in range(1, 5)]
    fleet = open_rows(transport, topology, shape, make_table(shape, topology[1]))
    results: Collected = {}
    try:
        failures = fleet.run(
            tickets, rally(lambda t, i, la, mb: tokens(t, i, la, mb, shape), results)
        )
    finally:
        fleet.close()
    assert failures == {}
    assert len(results) == sum(2 * len(everyone) * t.num_micro_batches for t in tickets)
    for (step, index, layer, mb), got in results.items():
        rows = tokens(make_ticket(step), index, layer, mb, shape)
        assert torch.equal(got, wanted(fake, layer, rows))


def test_a_node_without_any_of_the_experts() -> None:
    shape = row_shape()
    table = make_table(shape, 2)
    rows = random_rows(shape, 19, choose_from=table.experts_of(1)[0], seed=5)
    fleet = open_rows("shm", (1, 2), shape, table)
    results: Collected = {}
    try:
        assert fleet.run([make_ticket(1)], rally(lambda t, i, la, mb: rows, results)) == {}
    finally:
        fleet.close()
    assert torch.equal(results[1, 0, 1, 0], wanted(FakeExperts(shape, NUM_EXPERTS), 1, rows))


def test_a_partial_sum_is_not_taken_for_rows_of_experts() -> None:
    shape = row_shape()
    table = make_table(shape, 1)
    fake = FakeExperts(shape, NUM_EXPERTS)
    fleet = open_fleet("shm", 1, 1, shape=shape, table=table, serves=[fake.serve(table, 0)])
    rows = random_rows(shape, 5, choose_from=EVERYTHING, seed=1)
    try:
        failures = fleet.run([make_ticket(1)], rally(lambda t, i, la, mb: rows, {}))
    finally:
        fleet.close()
    assert isinstance(failures["expert 0"], FrameError)
    assert "expected (15, 24)" in str(failures["expert 0"])
    assert isinstance(failures["attention 0"], PeerLost)

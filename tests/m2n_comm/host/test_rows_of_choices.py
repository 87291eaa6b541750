"""Answers by expert: the same bits for any nodes, windows, parts and neighbours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

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
    few_rows,
    fleet_of,
    make_shape,
    make_table,
    make_ticket,
    mixed_rows,
    open_fleet,
    rally,
    random_rows,
)
from tests.pairwise import cover_pairs
from topspin.errors import FrameError, PeerLost
from topspin.expert_table import ExpertTable

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


def choices_fleet(
    transport: Transport, topology: tuple[int, int], shape: NetShape
) -> tuple[Fleet, FakeExperts]:
    fake = FakeExperts(shape, NUM_EXPERTS)
    table = make_table(shape, topology[1])
    serves = [serve_rows(fake, table, node) for node in range(topology[1])]
    return open_fleet(transport, *topology, shape=shape, table=table, serves=serves), fake


@pytest.mark.parametrize(
    ("topology", "transport", "payload"),
    cover_pairs(((1, 1), (2, 2), (1, 3)), ("local", "tcp"), PAYLOADS),
)
def test_sums_are_those_of_one_row_after_the_other(
    transport: Transport, topology: tuple[int, int], payload: torch.dtype
) -> None:
    shape = row_shape(payload)
    rows_of = mixed_rows(shape)
    everyone = tuple(range(topology[0]))
    tickets = [make_ticket(s, participants=everyone, m=1 + s % 3) for s in range(1, 5)]
    results: Collected = {}
    fleet, fake = choices_fleet(transport, topology, shape)
    with closing(fleet):
        assert fleet.run(tickets, rally(rows_of, results)) == {}
    assert len(results) == sum(2 * len(everyone) * t.num_micro_batches for t in tickets)
    for (step, index, layer, mb), got in results.items():
        assert torch.equal(got, wanted(fake, layer, rows_of(make_ticket(step), index, layer, mb)))


def test_a_node_without_any_of_the_experts() -> None:
    shape = row_shape()
    rows = random_rows(shape, 19, choose_from=make_table(shape, 2).experts_of(1)[0], seed=5)
    results: Collected = {}
    fleet, fake = choices_fleet("shm", (1, 2), shape)
    with closing(fleet):
        assert fleet.run([make_ticket(1)], rally(lambda *_: rows, results)) == {}
    assert torch.equal(results[1, 0, 1, 0], wanted(fake, 1, rows))


def test_a_partial_sum_is_not_taken_for_rows_of_experts() -> None:
    with fleet_of("shm", shape=row_shape()) as fleet:
        failures = fleet.run([make_ticket(1)], rally(few_rows, {}))
    assert isinstance(failures["expert 0"], FrameError)
    assert "expected (15, 24)" in str(failures["expert 0"])
    assert isinstance(failures["attention 0"], PeerLost)

"""The expert node's arithmetic, its counts, and the order in which it serves a ticket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from expert_nodes.worker import run_ticket
from kernels.contracts import RoutingRule
from kernels.cpu.compiled.matmul.linear import block_width
from kernels.cpu.recorder import CpuRuntime
from kernels.dispatch import select_ops
from m2n_comm.net import ExpertBatch
from tests.checkpoints import make_checkpoint, oracle_model
from tests.expert_nodes.nodes import batch_of, load, taken
from tests.m2n_comm.gpu.ipc_fleet import ticket_of
from topspin.expert_table import uniform_table
from topspin.messages import StepTicket, unpack_ints

NUM_ROWS = 11


def test_partial_sums_of_all_nodes_equal_transformers_moe_block(tmp_path: Path) -> None:
    """Three nodes hold uneven shares of 8 experts; their partials add up to transformers' block."""
    path = make_checkpoint(tmp_path, "mixtral")
    block = oracle_model(path).model.layers[1].mlp
    torch.manual_seed(0)
    hidden = torch.randn(NUM_ROWS, 64)
    logits = torch.nn.functional.linear(hidden, block.gate.weight)
    routed = select_ops("reference", torch.float32).route(logits, RoutingRule(2, renormalise=True))
    table = uniform_table(num_layers=2, num_experts=8, num_nodes=3)
    total = torch.zeros(NUM_ROWS, 64)
    num_pairs = 0
    for node in range(3):
        experts = load(path, tuple(table.experts_of(node)))
        local = {expert: slot for slot, expert in enumerate(table.slots[1][node])}
        slots = torch.tensor([[local.get(e, -1) for e in row] for row in routed.experts.tolist()])
        total += experts.compute(batch_of(hidden, slots, routed.weights, layer=1))
        counts = taken(experts)[1]
        assert counts[0] == [0] * len(local)
        assert counts[1] == [(slots == slot).sum().item() for slot in range(len(local))]
        num_pairs += sum(counts[1])
    assert num_pairs == NUM_ROWS * 2
    expected = block(hidden[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(total, expected.view(NUM_ROWS, 64), rtol=1e-4, atol=1e-5)


def test_counts_start_again_after_they_are_taken(tmp_path: Path) -> None:
    experts = load(make_checkpoint(tmp_path, "mixtral"), ((0, 1), (2, 3)))
    experts.warm_up()
    assert not experts.has_counts
    slots, weights = torch.tensor([[0, 1], [1, -1]]), torch.ones(2, 2)
    experts.compute(batch_of(torch.zeros(2, 64), slots, weights, layer=0))
    assert experts.has_counts
    assert taken(experts) == {1: [[1, 2], [0, 0]]}
    assert not experts.has_counts
    assert taken(experts) == {}


def test_the_experts_that_a_batch_wakes_are_counted_once_per_batch(tmp_path: Path) -> None:
    experts = load(make_checkpoint(tmp_path, "mixtral"), ((0, 1), (2, 3, 4)))
    batches = [(0, [[0, 1], [1, -1]]), (0, [[1, -1]]), (0, [[-1, -1]]), (1, [[2, 0], [0, 2]])]
    for _ in range(2):
        for layer, slots in batches:
            hidden, weights = torch.zeros(len(slots), 64), torch.ones(len(slots), 2)
            experts.compute(batch_of(hidden, torch.tensor(slots), weights, layer=layer))
        (found,) = experts.take_counts()
        assert (found.activations, found.batches) == (2 + 1 + 2, 3)


@pytest.mark.skipif(not block_width(), reason="this processor leaves bf16 products to oneDNN")
def test_a_recorded_batch_is_counted_at_each_replay(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral", intermediate_size=64)
    experts, runtime = load(path, ((0, 1, 2), (3,)), dtype=torch.bfloat16), CpuRuntime()
    slots, weights = torch.tensor([[0, 2], [2, -1]]), torch.ones(2, 2)
    batch = batch_of(torch.zeros(2, 64).bfloat16(), slots, weights, layer=0)
    replay = runtime.capture(lambda: (experts.compute(batch), None)[1])
    assert len(runtime.programs) == 1
    for _ in range(3):
        replay()
    (found,) = experts.take_counts()
    assert list(unpack_ints(found.counts[0])) == [3, 0, 6]
    assert (found.activations, found.batches) == (6, 3)


class RecordingNet:
    """An ExpertNet that yields two parts per gather and records every call."""

    def __init__(self, local: tuple[int, ...] = ()) -> None:
        self.local = frozenset(local)
        self.calls: list[tuple[str, int, int, int]] = []

    def begin(self, ticket: StepTicket) -> None:
        self.calls.append(("begin", ticket.step, 0, 0))

    def gather(self, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        for part in range(2):
            self.calls.append(("gather", layer, micro_batch, part))
            empty = torch.zeros(0, 2)
            yield ExpertBatch(
                micro_batch, layer, part, torch.zeros(0, 64), empty.int(), empty, (0,)
            )

    def reply(self, batch: ExpertBatch, partial: Tensor) -> None:
        assert partial.shape == (0, 64)
        self.calls.append(("reply", batch.layer, batch.micro_batch, batch.part))

    def finish(self) -> None:
        self.calls.append(("finish", 0, 0, 0))

    def close(self) -> None:
        raise AssertionError("a step does not close the net")


@pytest.mark.parametrize(("num_micro_batches", "local"), [(1, ()), (3, ()), (2, (0,)), (1, (0, 1))])
def test_a_ticket_is_served_layer_by_layer_then_micro_batch(
    tmp_path: Path, num_micro_batches: int, local: tuple[int, ...]
) -> None:
    experts = load(make_checkpoint(tmp_path, "mixtral"), (() if 0 in local else (0,), (1, 2)))
    net = RecordingNet(local)
    ticket = ticket_of(4, buckets=(1,) * num_micro_batches)
    run_ticket(net, experts, ticket, beat=lambda: net.calls.append(("beat", 0, 0, 0)))
    expected = [("begin", 4, 0, 0)]
    for layer in {0, 1}.difference(local):
        for micro_batch in range(num_micro_batches):
            for part in range(2):
                expected.append(("gather", layer, micro_batch, part))
                expected.append(("beat", 0, 0, 0))
                expected.append(("reply", layer, micro_batch, part))
    assert net.calls == [*expected, ("finish", 0, 0, 0)]

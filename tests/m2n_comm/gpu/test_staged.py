"""Staged nets over a device that is as late as possible: sums, waits, buffers, passed calls.

Where there is a GPU, also the sums over it, with a pause before each operation. The contract of
m2n_comm.net, over a device that is never late, is in test_contract.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from m2n_comm.gpu.staged import ExpertStaging, StagedExpertNet, StagedNet
from m2n_comm.net import ExpertBatch, NetTimes
from tests.m2n_comm.gpu.late_device import LateRuntime, SlowRuntime, copies_are_late
from tests.m2n_comm.harness import (
    NUM_EXPERTS,
    FakeExperts,
    Rows,
    make_shape,
    make_table,
    make_ticket,
    mixed_rows,
    open_fleet,
)
from topspin.errors import FrameError
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket
from topspin.trace import Ring

NAN = float("nan")
DEVICE = torch.device("cuda", 0)
Device = LateRuntime | SlowRuntime
ON_A_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
)


class LateFleet:
    """One attention node over `num_experts` nodes of the local hub, each on a late device."""

    def __init__(
        self, num_experts: int, kind: type[Device] = LateRuntime, **changes: object
    ) -> None:
        self.shape = make_shape(**changes)
        self.table = make_table(self.shape, num_experts)
        self.fake = FakeExperts(self.shape, NUM_EXPERTS)
        self.kind = kind
        self.runtimes: list[Device] = []
        serves = [self._serve(node) for node in range(num_experts)]
        self.fleet = open_fleet(
            "staged-local", 1, num_experts,
            shape=self.shape, serves=serves, runtimes=self._new_runtime,
        )  # fmt: skip
        self.net = self.fleet.attention[0]
        self.runtime = self.runtimes[-1]

    def _new_runtime(self) -> Device:
        self.runtimes.append(self.kind())
        return self.runtimes[-1]

    def _serve(self, node: int) -> Callable[[ExpertBatch], Tensor]:
        fake = FakeExperts(self.shape, NUM_EXPERTS)
        fake.scale = fake.scale.to(DEVICE if self.kind is SlowRuntime else "cpu")
        compute = fake.serve(self.table, node)

        def serve(batch: ExpertBatch) -> Tensor:
            out = torch.full_like(batch.hidden, NAN, dtype=self.shape.payload)
            self.runtimes[node].enqueue(lambda: out.copy_(compute(batch)))
            return out

        return serve


class Buffers:
    """A device's buffers of a micro-batch, reused in every layer by its stream."""

    def __init__(self, fleet: LateFleet, most: int = 40) -> None:
        shape = fleet.shape
        self._runtime, device = fleet.runtime, fleet.runtime.device
        self.hidden = torch.full((most, shape.hidden_size), NAN, dtype=shape.payload, device=device)
        self.experts = torch.zeros(most, shape.top_k, dtype=torch.int64, device=device)
        self.weights = torch.full((most, shape.top_k), NAN, device=device)
        self.out = torch.full((most, shape.hidden_size), NAN, device=device)

    def compute(self, rows: Rows) -> None:
        """Enqueue the computation of `rows`."""
        size = len(rows.hidden)
        self._runtime.enqueue(lambda: self.hidden[:size].copy_(rows.hidden))
        self._runtime.enqueue(lambda: self.experts[:size].copy_(rows.experts))
        self._runtime.enqueue(lambda: self.weights[:size].copy_(rows.weights))

    def spoil(self) -> None:
        """Enqueue the next layer's use of the same memory."""
        self._runtime.enqueue(lambda: self.hidden.fill_(NAN))
        self._runtime.enqueue(lambda: self.experts.fill_(0))
        self._runtime.enqueue(lambda: self.weights.fill_(NAN))

    def keep(self, results: dict[tuple[int, int, int], Tensor], key: tuple[int, int, int]) -> None:
        """Enqueue reading the sum."""
        self._runtime.enqueue(lambda: results.__setitem__(key, self.out.clone()))


def dispatch(net: StagedNet, mb: int, layer: int, buffers: Buffers, size: int) -> None:
    net.dispatch(mb, layer, buffers.hidden[:size], buffers.experts[:size], buffers.weights[:size])


def play(fleet: LateFleet, ticket: StepTicket, results: dict[tuple[int, int, int], Tensor]) -> None:
    """Run a step in the rally's order, reusing the device's memory in every layer."""
    rows_of = mixed_rows(fleet.shape)
    buffers = [Buffers(fleet) for _ in range(ticket.num_micro_batches)]
    sizes: dict[int, int] = {}
    fleet.net.begin(ticket)
    for layer, (mb, kept) in itertools.product(
        range(fleet.shape.num_layers + 1), enumerate(buffers)
    ):
        if layer > 0:
            fleet.net.combine(mb, layer - 1, kept.out[: sizes[mb]])
            kept.keep(results, (ticket.step, layer - 1, mb))
        if layer < fleet.shape.num_layers:
            rows = rows_of(ticket, 0, layer, mb)
            sizes[mb] = len(rows.hidden)
            kept.compute(rows)
            dispatch(fleet.net, mb, layer, kept, sizes[mb])
            kept.spoil()


@pytest.mark.parametrize("payload", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_experts", [1, 2])
@pytest.mark.parametrize("kind", [LateRuntime, pytest.param(SlowRuntime, marks=ON_A_GPU)])
def test_sums_over_late_devices_equal_the_dense_reference(
    kind: type[Device], num_experts: int, payload: torch.dtype
) -> None:
    fleet = LateFleet(num_experts, kind, payload=payload)
    results: dict[tuple[int, int, int], Tensor] = {}
    tickets = [make_ticket(step, m=1 + step % 4) for step in range(1, 9)]
    with copies_are_late(fleet.runtimes):
        for ticket in tickets:
            play(fleet, ticket, results)
    fleet.runtime.synchronize()
    fleet.fleet.close()
    assert len(results) == sum(2 * ticket.num_micro_batches for ticket in tickets)
    rows_of = mixed_rows(fleet.shape)
    for (step, layer, mb), got in results.items():
        rows = rows_of(make_ticket(step), 0, layer, mb)
        want = fleet.fake.expected(fleet.table, layer, rows)
        atol = 2e-5 if payload == torch.float32 else 2e-2
        torch.testing.assert_close(got[: len(want)].cpu(), want, rtol=1e-5, atol=atol)


def test_the_host_goes_on_while_rows_and_answers_are_under_way() -> None:
    fleet = LateFleet(1)
    rows = mixed_rows(fleet.shape)(make_ticket(1), 0, 0, 0)
    size = len(rows.hidden)
    assert size > 0
    with copies_are_late(fleet.runtimes):
        fleet.net.begin(make_ticket(1, m=2))
        buffers = [Buffers(fleet), Buffers(fleet)]
        for mb in range(2):
            buffers[mb].compute(rows)
            dispatch(fleet.net, mb, 0, buffers[mb], size)
            # Three computations and three copies; a second dispatch sends the first frame.
            assert fleet.runtime.num_waiting == 6
        for mb in range(2):
            fleet.net.combine(mb, 0, buffers[mb].out[:size])
        # Neither answer is on the device yet.
        assert fleet.runtime.num_waiting == 2
        assert all(bool(each.out.isnan().all()) for each in buffers)
    fleet.runtime.synchronize()
    want = fleet.fake.expected(fleet.table, 0, rows)
    for each in buffers:
        torch.testing.assert_close(each.out[:size], want, rtol=1e-5, atol=2e-5)
    fleet.fleet.close()


def test_pinned_buffers_begin_at_balanced_micro_batches_and_grow() -> None:
    fleet = LateFleet(1)
    row_bytes = fleet.shape.hidden_size * (4 + 4) + fleet.shape.top_k * (8 + 4)
    assert fleet.net.pinned_bytes == (20 + 10 + 7 + 5) * row_bytes
    buffers = Buffers(fleet)
    with copies_are_late(fleet.runtimes):
        fleet.net.begin(make_ticket(1, m=4))
        for mb, size in ((0, 20), (3, 6)):
            dispatch(fleet.net, mb, 0, buffers, size)
    assert fleet.net.pinned_bytes == (20 + 10 + 7 + 10) * row_bytes
    fleet.fleet.close()


@pytest.mark.parametrize("name", ["hidden", "experts", "weights"])
def test_tensors_that_do_not_fit_are_named(name: str) -> None:
    fleet = LateFleet(1)
    tensors = {
        "hidden": torch.zeros(4, 24),
        "experts": torch.zeros(4, 3, dtype=torch.int64),
        "weights": torch.zeros(4, 3),
    }
    tensors[name] = tensors[name][:, :2]
    fleet.net.begin(make_ticket(1))
    with pytest.raises(FrameError, match=rf"dispatch: {name} is \(4, 2\), expected"):
        fleet.net.dispatch(0, 0, **tensors)
    fleet.fleet.close()


@pytest.mark.parametrize("out", [torch.zeros(5, 24), torch.zeros(4, 24).double()])
def test_a_sum_of_another_shape_than_its_dispatch_is_refused(out: Tensor) -> None:
    fleet = LateFleet(1)
    fleet.net.begin(make_ticket(1))
    dispatch(fleet.net, 0, 0, Buffers(fleet), 4)
    with pytest.raises(FrameError, match=r"combine into .*, expected \(4, 24\) torch.float32"):
        fleet.net.combine(0, 0, out)
    fleet.fleet.close()


class FakeInner:
    """Both sides' calls, recorded; gather() yields two batches in the same memory."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.replies: list[tuple[ExpertBatch, Tensor]] = []
        self.trace: Ring | None = None
        self.epoch = 7
        self._hidden = torch.zeros(8, 24)

    def set_table(self, table: ExpertTable) -> None:
        self.calls.append(table)

    def begin(self, ticket: StepTicket) -> None:
        self.calls.append(ticket)

    def wait_s(self) -> float:
        return 1.5

    def times(self) -> NetTimes:
        return NetTimes(1.5, 2.5, None)

    def close(self) -> None:
        self.calls.append("close")

    def gather(self, micro_batch: int, layer: int) -> Iterator[ExpertBatch]:
        for part, size in enumerate((8, 3)):
            self._hidden[:size] = torch.arange(size)[:, None] + 10.0 * part
            slots = torch.full((size, 3), part, dtype=torch.int32)
            hidden, weights = self._hidden[:size], torch.full((size, 3), 0.5)
            yield ExpertBatch(micro_batch, layer, part, hidden, slots, weights, (size,), 4)

    def finish(self) -> None:
        self.calls.append("finish")

    def reply(self, batch: ExpertBatch, partial: Tensor) -> None:
        self.replies.append((batch, partial.clone()))


def test_everything_else_is_the_inner_nets() -> None:
    inner, shape = FakeInner(), make_shape()
    net = StagedNet(inner, LateRuntime(), shape=shape, max_rows=4)
    experts = StagedExpertNet(inner, LateRuntime(), shape=shape, num_attention=1)
    table, ticket, ring = make_table(shape, 1), make_ticket(1), Ring(16)
    for each in (net, experts):
        each.set_table(table)
        each.begin(ticket)
        each.trace = ring
        assert inner.trace is each.trace is ring
        inner.trace = None
        each.close()
        assert not each.is_graph_safe
    experts.finish()
    assert inner.calls == [*[table, ticket, "close"] * 2, "finish"]
    assert (net.wait_s(), net.times(), net.epoch) == (1.5, NetTimes(1.5, 2.5, None), 7)


def test_an_expert_nodes_batches_come_and_go_by_a_late_device() -> None:
    inner, runtime, shape = FakeInner(), LateRuntime(), make_shape()
    net = StagedExpertNet(inner, runtime, shape=shape, num_attention=1)
    with copies_are_late([runtime]):
        for batch in net.gather(2, 1):
            assert runtime.num_waiting == 3, "what arrives is only enqueued"
            out = torch.full(batch.hidden.shape, NAN)

            def compute(batch: ExpertBatch = batch, out: Tensor = out) -> None:
                gate = batch.weights.sum(1, keepdim=True) + batch.slots[:, :1]
                out.copy_(batch.hidden * gate)

            runtime.enqueue(compute)
            net.reply(batch, out)
    assert [len(partial) for _, partial in inner.replies] == [8, 3]
    for part, (batch, partial) in enumerate(inner.replies):
        assert (batch.micro_batch, batch.layer, batch.part) == (2, 1, part)
        assert (batch.row_counts, batch.table_version) == ((len(partial),), 4)
        value = torch.arange(len(partial))[:, None] + 10.0 * part
        assert torch.equal(partial, (value * (1.5 + part)).expand(-1, 24))


@pytest.mark.parametrize(
    "partial", [torch.zeros(3, 23), torch.zeros(3, 1), torch.zeros(9, 24), torch.zeros(3, 24).int()]
)
def test_an_answer_that_no_batch_can_have_is_refused(partial: Tensor) -> None:
    staging = ExpertStaging(LateRuntime(), make_shape(), num_attention=1)
    with pytest.raises(FrameError, match=r"reply: partial is .*, expected up to 8 rows of 24"):
        staging.to_host(partial)


def test_replying_to_another_batch_is_a_mistake() -> None:
    net = StagedExpertNet(FakeInner(), LateRuntime(), shape=make_shape(), num_attention=1)
    with pytest.raises(AssertionError, match="gather"):
        net.reply(None, torch.zeros(0, 24))  # type: ignore[arg-type]
    batch = next(net.gather(0, 0))
    with pytest.raises(AssertionError, match="yielded last"):
        net.reply(batch._replace(part=5), torch.zeros(8, 24))

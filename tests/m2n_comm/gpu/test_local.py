"""M2N within one device: sums, padding, recordings, and tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.runtime import HostRuntime, NoSync, Runtime
from kernels.triton.router.launches import local_slots as triton_slots
from m2n_comm.gpu.local import DeviceNet, LocalSlots, home_slots, local_slots
from m2n_comm.net import ExpertBatch, NetShape
from tests.m2n_comm.harness import (
    NUM_EXPERTS,
    FakeExperts,
    Fleet,
    make_shape,
    make_table,
    make_ticket,
    mixed_rows,
    random_rows,
)
from tests.pairwise import cover_pairs
from topspin.errors import ConfigError, FrameError, ProtocolError, TransportError
from topspin.expert_table import ExpertTable

EVERYTHING = tuple(range(NUM_EXPERTS))


def make_net(
    num_nodes: int = 1,
    *,
    shape: NetShape | None = None,
    table: ExpertTable | None = None,
    slots: LocalSlots | None = None,
    wrap: Callable[[Any], Any] = lambda serve: serve,
) -> DeviceNet:
    """Return a net over fake experts; `wrap` wraps each node's serve."""
    shape = shape or make_shape()
    table = table or make_table(shape, num_nodes)
    fake = FakeExperts(shape, NUM_EXPERTS)
    return DeviceNet(
        HostRuntime(),
        shape,
        index=0,
        serves=[wrap(fake.serve(table, node)) for node in range(num_nodes)],
        table=table,
        slots=slots,
    )


class QueueingRuntime(HostRuntime):
    """Is treated as a GPU: experts' work is enqueued by dispatch()."""

    is_asynchronous = True  # type: ignore[misc,assignment]


class NothingIsLookedAt(DeviceNet):
    """Refuses operations that would wait for a GPU; keeps copies, as its caller has to."""

    def dispatch(self, micro_batch: int, layer: int, *tensors: Any) -> None:
        with NoSync():
            super().dispatch(micro_batch, layer, *(each.clone() for each in tensors))

    def combine(self, *args: Any) -> Tensor:
        with NoSync():
            return super().combine(*args)


@pytest.mark.parametrize(
    ("num_nodes", "runtime", "payload"),
    cover_pairs((1, 2, 3), (HostRuntime(), QueueingRuntime()), (torch.float32, torch.bfloat16)),
)
def test_sums_equal_the_dense_reference(
    num_nodes: int, runtime: Runtime, payload: torch.dtype
) -> None:
    shape = make_shape(payload=payload)
    table = make_table(shape, num_nodes)
    fake = FakeExperts(shape, NUM_EXPERTS)
    serves = [fake.serve(table, node) for node in range(num_nodes)]
    net = NothingIsLookedAt(runtime, shape, index=0, serves=serves, table=table)
    tickets = [make_ticket(step, m=1 + step % 4) for step in range(1, 9)]
    rows_of = mixed_rows(shape)
    results = Fleet("local", shape, [net], [], serves, table).check(tickets, rows_of)
    for (step, index, layer, mb), got in results.items():
        rows = rows_of(make_ticket(step), index, layer, mb)
        # One node's answer is used as it is, several are added in fp32.
        assert got.dtype == (payload if num_nodes == 1 else torch.float32)
        assert torch.equal(got.float(), fake.partials(table, layer, rows))


@pytest.mark.parametrize("slots", [local_slots, triton_slots], ids=["torch", "triton"])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_padding_goes_to_no_expert(num_nodes: int, slots: LocalSlots) -> None:
    shape = make_shape()
    seen: list[Tensor] = []

    def wrap(serve: Any) -> Any:
        def recording(batch: ExpertBatch) -> Tensor:
            seen.append(batch.slots)
            return serve(batch)

        return recording

    net = make_net(num_nodes, slots=slots, wrap=wrap)
    rows = random_rows(shape, 8, seed=1)
    out = torch.full((8, shape.hidden_size), torch.nan)
    net.dispatch(0, 1, *rows, torch.tensor([5]))
    got = net.combine(0, 1, out)
    fake = FakeExperts(shape, NUM_EXPERTS)
    want = fake.expected(make_table(shape, num_nodes), 1, rows)
    torch.testing.assert_close(got[:5], want[:5])
    assert torch.equal(got[5:], torch.zeros(3, shape.hidden_size))
    assert len(seen) == num_nodes
    assert all((node[5:] == -1).all() for node in seen)
    held = torch.stack(seen)[:, :5] >= 0
    assert torch.equal(held.sum(0), torch.ones(5, shape.top_k, dtype=torch.int64))


def moved(table: ExpertTable, version: int) -> ExpertTable:
    """Return `table` with the nodes' experts swapped."""
    layers = tuple(tuple(reversed(nodes)) for nodes in table.slots)
    return ExpertTable(version=version, num_experts=table.num_experts, slots=layers)


def test_a_step_is_routed_by_the_table_of_its_ticket() -> None:
    shape = make_shape()
    old = make_table(shape, 2)
    new = moved(old, 2)
    fake = FakeExperts(shape, NUM_EXPERTS)
    by_version = {
        each.version: [fake.serve(each, node) for node in range(2)] for each in (old, new)
    }
    served: list[int] = []

    def serve_of(node: int) -> Any:
        def serve(batch: ExpertBatch) -> Tensor:
            served.append(batch.table_version)
            return by_version[batch.table_version][node](batch)

        return serve

    net = DeviceNet(HostRuntime(), shape, index=0, serves=[serve_of(0), serve_of(1)], table=old)
    rows = random_rows(shape, 5, seed=4)
    want = fake.expected(old, 0, rows)

    def step(number: int, version: int) -> int:
        served.clear()
        net.begin(make_ticket(number, version=version))
        net.set_table(new)  # in the middle of a step, which goes on with the old table
        net.dispatch(0, 0, *rows)
        got = net.combine(0, 0, torch.empty(5, shape.hidden_size))
        torch.testing.assert_close(got, want)
        assert served == [version] * 2
        return net.epoch

    assert [step(1, 1), step(2, 1)] == [0, 0]
    assert [step(3, 2), step(4, 2)] == [1, 1]
    with pytest.raises(ProtocolError, match=r"expert table 1, attention 0 has \[2\]"):
        net.begin(make_ticket(5, version=1))


def test_a_version_that_begins_anew_makes_recordings_invalid() -> None:
    net = make_net(2)
    old = make_table(net.shape, 2)
    net.set_table(old)
    net.begin(make_ticket(1))
    assert net.epoch == 0
    net.set_table(moved(old, old.version))
    net.begin(make_ticket(2))
    assert net.epoch == 1


def test_of_several_replicas_the_first_serves_all() -> None:
    table = ExpertTable(version=1, num_experts=3, slots=(((2, 1), (0, 2)), ((0, 1), (0, 2))))
    table.validate()
    assert home_slots(table).tolist() == [
        [[-1, 1, 0], [0, -1, -1]],
        [[0, 1, -1], [-1, -1, 1]],
    ]


def test_a_table_that_does_not_fit_is_refused() -> None:
    net = make_net(2)
    with pytest.raises(ProtocolError, match="2 layers over 3 nodes, expected 2 over 2"):
        net.set_table(make_table(net.shape, 3))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"compressed": torch.float8_e4m3fn}, "--m2n-payload"),
        ({"payload": torch.bfloat16, "compute": torch.float32}, "--m2n-payload"),
        ({"per_expert_answers": True}, "--deterministic"),
    ],
)
def test_settings_of_a_wire_are_refused(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        make_net(shape=make_shape(**changes))


def test_what_does_not_fit_a_step_is_refused() -> None:
    net = make_net()
    shape = net.shape
    rows = random_rows(shape, 3, seed=1)
    net.begin(make_ticket(1))
    net.dispatch(0, 0, *rows)
    with pytest.raises(ProtocolError, match="micro-batch 0 of step 1 is still in the air"):
        net.begin(make_ticket(2))
    with pytest.raises(FrameError, match="combine into"):
        net.combine(0, 0, torch.empty(2, shape.hidden_size))
    with pytest.raises(TransportError, match="can not be used any more"):
        net.dispatch(1, 0, *rows)


@pytest.mark.parametrize("wrong", ["hidden", "experts", "weights"])
def test_tensors_that_do_not_fit_are_refused(wrong: str) -> None:
    net = make_net()
    rows = random_rows(net.shape, 3, seed=1)
    tensors = {"hidden": rows.hidden, "experts": rows.experts, "weights": rows.weights}
    tensors[wrong] = tensors[wrong].to(torch.float16)
    with pytest.raises(FrameError, match=rf"dispatch: {wrong} is .*float16"):
        net.dispatch(0, 0, *tensors.values())


def test_an_experts_error_fails_the_step_and_the_net() -> None:
    def broken(_: ExpertBatch) -> Tensor:
        raise RuntimeError("no such slot")

    net = make_net(wrap=lambda _: broken)
    rows = random_rows(net.shape, 3, seed=1)
    net.dispatch(0, 0, *rows)
    with pytest.raises(RuntimeError, match="no such slot"):
        net.combine(0, 0, torch.empty(rows.hidden.shape))
    with pytest.raises(TransportError, match="RuntimeError: no such slot"):
        net.begin(make_ticket(1))
    net.close()
    net.close()

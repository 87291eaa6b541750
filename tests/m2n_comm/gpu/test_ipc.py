"""The contract of m2n_comm.net over cuda_ipc: the results; kernels are interpreted."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels.runtime import HostRuntime
from m2n_comm.gpu.ipc_attention import IpcAttentionNet, slot_variants
from m2n_comm.gpu.ipc_expert import IpcExpertNet
from m2n_comm.net import ExpertBatch, Serve
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.gpu.ipc_fleet import (
    NEEDS_INTERPRETER,
    IpcFleet,
    ipc_fleet,
    ipc_shape,
    small_rows,
    ticket_of,
)
from tests.m2n_comm.harness import (
    NUM_EXPERTS,
    FakeExperts,
    Rows,
    RowsOf,
    make_table,
    random_rows,
)
from topspin.errors import DeadlineExceeded, StaleFrame
from topspin.expert_table import ExpertTable, uniform_table
from topspin.messages import ExpertPeer, StepTicket

pytestmark = NEEDS_INTERPRETER


@pytest.mark.parametrize(
    ("m", "n", "payload", "buckets"),
    [
        (1, 1, torch.float32, (4, 2, 1)),
        pytest.param(2, 2, torch.float32, (2, 2), marks=pytest.mark.slow),
        pytest.param(1, 3, torch.bfloat16, (3, 1), marks=pytest.mark.slow),
    ],
)
def test_sums_equal_the_dense_reference(
    m: int, n: int, payload: torch.dtype, buckets: tuple[int, ...]
) -> None:
    shape = ipc_shape(payload=payload)
    rows_of = limited(small_rows(shape), buckets)
    tickets = [
        ticket_of(1, buckets=buckets, participants=tuple(range(m))),
        ticket_of(2, buckets=buckets[:1], participants=(m - 1,)),
    ]
    with ipc_fleet(m, n, shape=shape) as fleet:
        fleet.check(tickets, rows_of, rtol=1e-5 if payload == torch.float32 else 2e-2)


def limited(rows_of: RowsOf, buckets: tuple[int, ...]) -> RowsOf:
    """Return the same rows, cut to the bucket of their micro-batch."""

    def cut(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
        rows, most = rows_of(ticket, index, layer, mb), buckets[mb]
        return Rows(rows.hidden[:most], rows.experts[:most], rows.weights[:most])

    return cut


def test_rows_travel_as_fp8_and_come_back_as_bf16() -> None:
    shape = ipc_shape(
        payload=torch.bfloat16, compressed=torch.float8_e4m3fn, compute=torch.bfloat16
    )
    rows_of = small_rows(shape)
    ticket = ticket_of(3)
    with ipc_fleet(shape=shape) as fleet:
        seen: list[torch.dtype] = []
        serve = fleet.serves[0]
        fleet.serves[0] = lambda batch: (seen.append(batch.hidden.dtype), serve(batch))[1]
        fleet.check([ticket], rows_of, rtol=0.08)
    assert set(seen) == {torch.bfloat16}


def test_batches_have_every_participants_bucket_and_no_slots_beyond_its_rows() -> None:
    shape = ipc_shape(num_layers=1)
    sizes = {0: 3, 2: 1}

    def rows_of(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
        return random_rows(shape, sizes[index], choose_from=(4, 5, 6), seed=index)

    batches: list[ExpertBatch] = []
    with ipc_fleet(3, 1, shape=shape) as fleet:
        serve = fleet.serves[0]

        def keep(batch: ExpertBatch) -> torch.Tensor:
            batches.append(batch._replace(slots=batch.slots.clone()))
            return serve(batch)

        fleet.serves[0] = keep
        ticket = ticket_of(1, participants=(0, 2))
        fleet.check([ticket], rows_of)
    (batch,) = batches
    assert batch.row_counts == (4, 4)
    assert batch.hidden.shape == (8, shape.hidden_size)
    assert (batch.slots >= 0).any(1).tolist() == [True] * 3 + [False, True] + [False] * 3
    assert torch.equal(batch.slots[:3].long(), rows_of(ticket, 0, 0, 0).experts)


def two_tables() -> tuple[ExpertTable, ExpertTable]:
    """Return two tables of two nodes; in the second one experts 0 and 6 have swapped nodes."""
    shape = ipc_shape()
    old = make_table(shape, 2)
    layer = ((6, 1, 2), (3, 4, 5, 0))
    assert old.slots[0] == ((0, 1, 2), (3, 4, 5, 6))
    return old, ExpertTable(version=2, num_experts=7, slots=(layer,) * shape.num_layers)


def serving(fleet: IpcFleet, tables: tuple[ExpertTable, ...]) -> None:
    """Let the fleet's experts compute with the table that a batch names."""
    fake = FakeExperts(fleet.shape, NUM_EXPERTS)
    for node in range(len(fleet.serves)):
        by_version = {table.version: fake.serve(table, node) for table in tables}
        fleet.serves[node] = lambda batch, serves=by_version: serves[batch.table_version](batch)


@pytest.mark.slow
def test_a_step_is_routed_by_the_table_of_its_ticket() -> None:
    shape = ipc_shape()
    old, new = two_tables()
    rows_of = small_rows(shape)
    with ipc_fleet(1, 2, shape=shape, table=old) as fleet:
        serving(fleet, (old, new))
        fleet.set_table(new)
        tickets = [ticket_of(1), ticket_of(2, version=2)]
        fleet.check(tickets, rows_of)
        # An attention node's recordings read the current slots; an expert node's contain the
        # weights of one version.
        assert fleet.attention[0].epoch == 0
        assert [net.epoch for net in fleet.experts] == [1, 1]


def test_copies_of_experts_share_the_rows() -> None:
    shape = ipc_shape(num_layers=1)
    table = uniform_table(num_layers=1, num_experts=7, num_nodes=2, num_redundant=2)
    copied = [expert for expert, found in enumerate(table.replicas(0)) if len(found) == 2]
    assert len(copied) == 2
    everything = tuple(range(NUM_EXPERTS))

    def rows_of(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
        rows = random_rows(shape, 4, seed=3)
        rows.experts[:, 0] = copied[0]
        rows.experts[:, 1:] = torch.tensor([each for each in everything if each not in copied][:2])
        return rows

    served: list[int] = []
    with ipc_fleet(1, 2, shape=shape, table=table) as fleet:
        for node, serve in enumerate(list(fleet.serves)):
            slot = table.slots[0][node].index(copied[0])

            def count(batch: ExpertBatch, serve: Serve = serve, slot: int = slot) -> torch.Tensor:
                served.append(int((batch.slots == slot).sum()))
                return serve(batch)

            fleet.serves[node] = count
        fleet.check([ticket_of(1)], rows_of)
    assert served == [2, 2]


def test_a_table_with_other_numbers_of_copies_ends_recordings() -> None:
    shape = ipc_shape(num_layers=1)
    old = make_table(shape, 2)
    new = ExpertTable(version=2, num_experts=7, slots=((old.slots[0][0] + (3,), old.slots[0][1]),))
    rows_of = small_rows(shape)
    with ipc_fleet(1, 2, shape=shape, table=old) as fleet:
        serving(fleet, (old, new))
        fleet.set_table(new)
        tickets = [ticket_of(1), ticket_of(2, version=2)]
        fleet.check(tickets, rows_of)
        assert fleet.attention[0].epoch == 1


@pytest.mark.parametrize("num_redundant", [0, 3, 7, 12])
def test_every_variant_gives_every_expert_one_home(num_redundant: int) -> None:
    table = uniform_table(num_layers=2, num_experts=7, num_nodes=3, num_redundant=num_redundant)
    slots = slot_variants(table, (0, 1, 2))
    assert ((slots >= 0).sum(2) == 1).all()
    for layer in range(2):
        for expert, found in enumerate(table.replicas(layer)):
            per_node = (slots[layer, :, :, expert] >= 0).sum(0).tolist()
            turns = slots.shape[1] // len(found)
            assert per_node == [
                turns if any(replica.node == node for replica in found) else 0 for node in range(3)
            ]
            for replica in found:
                chosen = slots[layer, :, replica.node, expert]
                assert set(chosen.tolist()) <= {-1, replica.slot}


def test_recordings_follow_steps_tables_rows_and_padding() -> None:
    shape = ipc_shape(hidden_size=16)
    old, new = two_tables()
    runtime = HostRuntime()
    static = random_rows(shape, 3, seed=9)
    num_rows = torch.zeros(1, dtype=torch.int64)
    outs = [torch.empty(3, shape.hidden_size) for _ in range(2)]
    fake = FakeExperts(shape, NUM_EXPERTS)
    with ipc_fleet(1, 2, shape=shape, table=old) as fleet:
        (net,) = fleet.attention
        serving(fleet, (old, new))
        sends, takes = [], []
        for mb in range(2):

            def send(mb: int = mb) -> None:
                net.dispatch(mb, 1, *static, num_rows)

            def take(mb: int = mb) -> None:
                net.combine(mb, 1, outs[mb])

            send()
            take()  # a rehearsal: no step has begun
            assert not outs[mb].any()
            sends.append(runtime.capture(send))
            takes.append(runtime.capture(take))
        fleet.set_table(new)
        replays = {}
        for step, version, rows in ((1, 1, 3), (2, 2, 1), (3, 2, 2)):
            fleet.begin(ticket_of(step, buckets=(3, 3), version=version))
            assert net.is_graph_safe
            if version not in replays:  # the experts' weights are in their recordings
                replays[version] = [
                    runtime.capture(lambda mb=mb: fleet.serve(1, mb)) for mb in range(2)
                ]
            given = random_rows(shape, rows, choose_from=(0, 3, 6, 1), seed=step)
            static.hidden[:rows], static.weights[:rows] = given.hidden, given.weights
            static.experts[:rows] = given.experts
            static.hidden[rows:], static.experts[rows:] = float("nan"), 10**6
            num_rows.fill_(rows)
            for mb in range(2):
                sends[mb]()
            for mb in range(2):
                replays[version][mb]()
            for mb in range(2):
                takes[mb]()
                want = fake.expected(make_table(shape, 1), 1, given)
                torch.testing.assert_close(outs[mb][:rows], want, rtol=1e-5, atol=1e-4)
                assert not outs[mb][rows:].any()
        assert net.epoch == 0


def test_more_padding_than_windows_is_zero_and_leaves_the_windows_alone() -> None:
    shape = ipc_shape(window_rows=2, num_layers=1)
    rows = random_rows(shape, 5, seed=2)
    num_rows = torch.tensor([2])
    out = torch.full((5, shape.hidden_size), float("nan"))
    with ipc_fleet(shape=shape) as fleet:
        (net,) = fleet.attention
        fleet.begin(ticket_of(1, buckets=(2,)))
        net.dispatch(0, 0, *rows, num_rows)
        fleet.serve(0, 0)
        net.combine(0, 0, out)
    first = Rows(rows.hidden[:2], rows.experts[:2], rows.weights[:2])
    want = FakeExperts(shape, NUM_EXPERTS).expected(make_table(shape, 1), 0, first)
    torch.testing.assert_close(out[:2], want, rtol=1e-5, atol=1e-4)
    assert not out[2:].any()


def test_closing_leaves_no_descriptor_and_registered_bytes_are_the_windows() -> None:
    before = len(os.listdir("/proc/self/fd"))
    shape = ipc_shape()
    with ipc_fleet(2, 1, shape=shape) as fleet:
        row = shape.hidden_size * 4
        windows = 2 * 3 * 8 * (row + 2 * shape.top_k * 4)
        assert windows < fleet.experts[0].registered_bytes < 3 * windows + 2**14
        answers = 3 * 8 * row
        assert answers < fleet.attention[0].registered_bytes < 3 * answers + 2**14
        assert len(os.listdir("/proc/self/fd")) > before
    fleet.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_address_forms_pairs_again_and_refuses_those_of_the_past() -> None:
    shape = ipc_shape(deadline_s=0.05)
    table = make_table(shape, 1)
    runtime = HostRuntime()
    listener = listen_expert("cuda_ipc")
    rows = random_rows(shape, 2, choose_from=(0, 1, 2), seed=1)

    def connect(generation: int) -> IpcAttentionNet:
        me = Identity(role="attention", index=0, incarnation=7, shape=shape, generation=generation)
        peer = ExpertPeer(address=listener.address, incarnation=9)
        net = connect_attention(me, [peer], table, Waits(timeout_s=10.0), runtime=runtime)
        assert isinstance(net, IpcAttentionNet)
        return net

    def both(generation: int) -> tuple[IpcAttentionNet, IpcExpertNet]:
        with ThreadPoolExecutor(1) as pool:
            me = Identity(role="expert", index=0, incarnation=9, shape=shape, generation=generation)
            waits = Waits(timeout_s=10.0)
            accepting = pool.submit(
                listener.accept, me, (7,), table, waits, runtime=runtime, reuse=True
            )
            if generation == 2:
                with pytest.raises(StaleFrame, match="generation is 1, expected 2"):
                    connect(1)
            attention, expert = connect(generation), accepting.result()
            assert isinstance(expert, IpcExpertNet)
            return attention, expert

    attention, expert = both(1)
    attention.begin(ticket_of(1))
    attention.dispatch(0, 0, *rows)
    with pytest.raises(DeadlineExceeded):
        attention.combine(0, 0, torch.empty(rows.hidden.shape))
    attention.close()
    expert.close()
    attention, expert = both(2)
    serves = [FakeExperts(shape, NUM_EXPERTS).serve(table, 0)]
    fleet = IpcFleet("cuda_ipc", shape, [attention], [expert], serves, table)
    ticket = ticket_of(1)
    fleet.check([ticket], lambda *_: rows)
    fleet.close()
    listener.close()

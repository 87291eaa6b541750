"""The contract of m2n_comm.net, the same tests for every transport: the results."""

from __future__ import annotations

import time

import pytest
import torch

from m2n_comm.emulate import LinkEmulation
from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.net import ExpertBatch
from tests.m2n_comm.harness import (
    HAS_NIXL,
    NIXL,
    NUM_EXPERTS,
    STAGED,
    TRANSPORTS,
    Collected,
    FakeExperts,
    Rows,
    Transport,
    few_rows,
    fleet_of,
    make_shape,
    make_table,
    make_ticket,
    mixed_rows,
    rally,
    random_rows,
)
from tests.pairwise import cover_pairs
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket

TOPOLOGIES = ((1, 1), (2, 2), (1, 3), (3, 2))


SUMS = ("local", "shm", "tcp", "nixl", *STAGED), TOPOLOGIES, (torch.float32, torch.bfloat16)
# By default every payload over most transports, on one of the topologies each.
BY_DEFAULT = [
    (transport, TOPOLOGIES[(idx + 2 * row) % len(TOPOLOGIES)], payload)
    for idx, transport in enumerate(SUMS[0])
    for row, payload in enumerate(SUMS[2])
    if row == 0 or transport not in ("nixl", "staged-shm")
]


@pytest.mark.parametrize(
    ("transport", "topology", "payload"),
    [
        pytest.param(
            *row,
            marks=[
                *([HAS_NIXL] if row[0] == "nixl" else []),
                *([] if row in BY_DEFAULT else [pytest.mark.slow]),
            ],
        )
        for row in dict.fromkeys((*BY_DEFAULT, *cover_pairs(*SUMS)))
    ],
)
def test_sums_equal_the_dense_reference(
    transport: Transport, topology: tuple[int, int], payload: torch.dtype
) -> None:
    m, n = topology
    shape = make_shape(payload=payload)
    everyone = tuple(range(m))
    tickets = [make_ticket(s, participants=everyone, m=1 + s % 4) for s in range(1, 9)]
    with fleet_of(transport, m, n, shape=shape) as fleet:
        fleet.check(tickets, mixed_rows(shape))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bf16_partials_are_carried_bit_for_bit_and_added_in_fp32(transport: Transport) -> None:
    shape = make_shape(payload=torch.bfloat16)
    table = make_table(shape, 2)
    rows = random_rows(shape, 20, seed=3)
    want = FakeExperts(shape, NUM_EXPERTS).partials(table, 0, rows)
    results: Collected = {}
    with fleet_of(transport, 1, 2, shape=shape) as fleet:
        assert fleet.run([make_ticket(1)], rally(lambda *_: rows, results)) == {}
    assert torch.equal(results[1, 0, 0, 0], want)


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_tokens_whose_experts_are_all_on_one_node(transport: Transport) -> None:
    shape = make_shape()
    table = make_table(shape, 2)
    only = table.experts_of(1)[0]
    assert len(only) >= shape.top_k

    def rows_of(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
        return random_rows(shape, 19, choose_from=only, seed=ticket.step)

    with fleet_of(transport, 2, 2, shape=shape) as fleet:
        tickets = [make_ticket(s, participants=(0, 1), m=2) for s in (1, 2)]
        fleet.check(tickets, rows_of)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_only_the_participants_of_a_ticket_are_waited_for(transport: Transport) -> None:
    shape = make_shape()
    sets = [(0, 2), (1,), (0, 1, 2), (1, 2), (0,)]
    tickets = [make_ticket(s + 1, participants=p, m=2) for s, p in enumerate(sets)]
    with fleet_of(transport, 3, 2, shape=shape) as fleet:
        fleet.check(tickets, mixed_rows(shape))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_participant_with_more_parts_than_the_other(transport: Transport) -> None:
    shape = make_shape()

    def rows_of(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
        size = 41 if index == 0 else mb
        return random_rows(shape, size, seed=ticket.step + index)

    with fleet_of(transport, 2, 1, shape=shape) as fleet:
        tickets = [make_ticket(s, participants=(0, 1), m=3) for s in (1, 2)]
        fleet.check(tickets, rows_of)


def with_replica(table: ExpertTable, version: int) -> ExpertTable:
    """Return `table` with one more slot on node 0, a copy of expert 3."""
    layers = tuple((nodes[0] + (3,), *nodes[1:]) for nodes in table.slots)
    return ExpertTable(version=version, num_experts=table.num_experts, slots=layers)


def rows_for_expert_3(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
    """Return 12 rows that all go to experts 3, 4 and 5."""
    return random_rows(make_shape(), 12, choose_from=(3, 4, 5), seed=ticket.step)


@pytest.mark.parametrize("transport", ["local", "shm", "staged-local"])
def test_a_step_is_routed_by_the_table_of_its_ticket(transport: Transport) -> None:
    """In the old table expert 3 is only on node 1; 4 and 5 are there in both."""
    shape = make_shape()
    old = make_table(shape, 2)
    new = with_replica(old, 2)
    served: list[int] = []
    with fleet_of(transport, 2, 2, shape=shape, table=old) as fleet:
        serve_0 = FakeExperts(shape, NUM_EXPERTS).serve(new, 0)

        def recording(batch: ExpertBatch) -> torch.Tensor:
            assert batch.table_version == ticket.table_version
            served.append(len(batch.hidden))
            return serve_0(batch)

        fleet.serves[0] = recording
        for net in (*fleet.experts, fleet.attention[1]):
            net.set_table(new)
        play = rally(rows_for_expert_3, results := {})

        def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
            if ticket.step == 1:
                net.set_table(new)  # in the middle of step 1
            play(net, ticket, index)

        for step, version in ((1, 1), (2, 1), (3, 2), (4, 2)):
            served.clear()
            ticket = make_ticket(step, participants=((step + 1) % 2,), version=version)
            assert fleet.run([ticket], attention) == {}
            assert bool(sum(served)) == (version == 2)
        fleet.check_sums(results, rows_for_expert_3)


@pytest.mark.parametrize("transport", ["local", "shm", "staged-shm"])
def test_wait_s_counts_from_begin(transport: Transport) -> None:
    waits: list[float] = []

    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        assert net.wait_s() == 0.0
        rally(few_rows, {})(net, ticket, index)
        waits.append(net.wait_s())

    link = LinkEmulation(latency_us=25_000)
    with fleet_of(transport, link=link) as fleet:
        start_s = time.monotonic()
        assert fleet.run([make_ticket(1), make_ticket(2)], attention) == {}
        total_s = time.monotonic() - start_s
    # Two layers, each with 25 ms both ways, nearly all of it inside combine().
    assert all(0.03 <= wait < total_s for wait in waits)
    assert sum(waits) <= total_s


class Clock:
    """A clock that only readings and sleeps advance, for nodes in one thread."""

    def __init__(self) -> None:
        self.now_ns = time.monotonic_ns()

    def thread_time_ns(self) -> int:
        """Return the thread's own time, which does not pass with the clock."""
        return time.thread_time_ns()

    def monotonic_ns(self) -> int:
        """Return the time; each reading advances it."""
        self.now_ns += 1000
        return self.now_ns

    def monotonic(self) -> float:
        """Return the time in seconds."""
        return self.monotonic_ns() * 1e-9

    def sleep(self, duration_s: float) -> None:
        """Advance the time."""
        self.now_ns += round(duration_s * 1e9)


def test_an_emulated_link_overlaps_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in ("emulate", "host.attention_side", "host.expert_side", "host.local"):
        monkeypatch.setattr(f"m2n_comm.{module}.time", clock)
    link = LinkEmulation(latency_us=120_000, gbps=10.0)
    with fleet_of("local", link=link) as fleet:
        start_ns = clock.now_ns
        fleet.check([make_ticket(1, m=4)], few_rows)
        elapsed_s = (clock.now_ns - start_ns) * 1e-9
    # One micro-batch alone needs 2 layers x 2 ways x 120 ms; four in turn would need 1.92 s. The
    # hub runs an expert only while a node waits, so that not all answers overlap.
    assert 0.48 <= elapsed_s < 1.1


@pytest.mark.parametrize("transport", ["shm", "tcp", NIXL])
def test_an_emulated_link_delays_frames_between_processes(transport: Transport) -> None:
    with fleet_of(transport, link=LinkEmulation(latency_us=10_000)) as fleet:
        start_s = time.monotonic()
        assert fleet.run([make_ticket(1, m=4)], rally(few_rows, {})) == {}
        assert time.monotonic() - start_s >= 0.04


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_expert_reads_in_place_when_one_participant_has_rows(transport: Transport) -> None:
    """Over tcp rows that nobody has read before are read straight into the batch."""
    shape = make_shape()
    places: list[bool] = []
    fake = FakeExperts(shape, NUM_EXPERTS)
    with fleet_of(transport, 2, 1, shape=shape) as fleet:
        expert = fleet.experts[0]
        compute = fake.serve(make_table(shape, 1), 0)
        windows = [expert.lines.inbox(peer, 0).hidden.data_ptr() for peer in range(2)]

        def serve(batch: ExpertBatch) -> torch.Tensor:
            places.append(batch.hidden.data_ptr() in windows)
            return compute(batch)

        fleet.serves[0] = serve

        def rows_of(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
            size = 4 if index == 1 or ticket.step == 2 else 0
            return random_rows(shape, size, choose_from=(0, 1, 2), seed=index)

        tickets = [make_ticket(s, participants=(0, 1)) for s in (1, 2)]
        assert fleet.run(tickets, rally(rows_of, {})) == {}
        is_written = bool(expert.lines.inbox(0, 0).hidden.any())
    if transport == "tcp":
        assert not is_written
    else:
        assert places == [True, True, False, False]

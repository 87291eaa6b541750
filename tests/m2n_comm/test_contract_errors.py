"""The contract of m2n_comm.net, the same tests for every transport: the errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, product

import pytest
import torch

from m2n_comm.host.attention_side import AttentionSide
from tests.m2n_comm.faults import (
    Change,
    Damage,
    Delay,
    Drop,
    Duplicate,
    Fault,
    FaultInjector,
    Reorder,
)
from tests.m2n_comm.harness import (
    NIXL,
    NUM_EXPERTS,
    TRANSPORTS,
    Collected,
    Fleet,
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
    reader_of,
)
from tests.pairwise import cover_pairs
from topspin.errors import (
    DeadlineExceeded,
    FrameError,
    PeerLost,
    ProtocolError,
    StaleFrame,
    TransportError,
)
from topspin.expert_table import ExpertTable
from topspin.messages import StepTicket

FEW = few_rows(make_ticket(1), 0, 0, 0)
# One thread, and sockets: enough for the table of errors. Waits are tested on all.
BOTH: tuple[Transport, ...] = ("local", "tcp")
ONE_SIDE_EACH = (
    ("local", "attention"),
    ("shm", "expert"),
    ("tcp", "attention"),
    pytest.param("nixl", "expert", marks=NIXL.marks),
)


@pytest.mark.parametrize("transport", BOTH)
def test_a_table_two_versions_back_is_stale(transport: Transport) -> None:
    with fleet_of(transport) as fleet:
        for version in (2, 3):
            set_version(fleet, version)
        FaultInjector({0: Change("table_version", 1)}).attach(fleet.attention[0])
        failures = fleet.run([make_ticket(1, version=3)], rally(mixed_rows(fleet.shape), {}))
    error = failures[reader_of(transport, "attention")]
    assert isinstance(error, StaleFrame)
    assert "table_version is 1, expected 3" in str(error)


def set_version(fleet: Fleet, version: int) -> None:
    """Give every node of a fleet of one expert node the uniform table as `version`."""
    slots = make_table(fleet.shape, 1).slots
    table = ExpertTable(version=version, num_experts=NUM_EXPERTS, slots=slots)
    for net in (*fleet.attention, *fleet.experts):
        net.set_table(table)


@pytest.mark.parametrize("transport", ["local"])
def test_a_ticket_of_an_unknown_table_is_refused_by_both_sides(transport: Transport) -> None:
    with fleet_of(transport) as fleet:
        with pytest.raises(ProtocolError, match=r"expert table 2, attention 0 has \[1\]"):
            fleet.attention[0].begin(make_ticket(1, version=2))
        with pytest.raises(ProtocolError, match=r"expert table 2, expert 0 has \[1\]"):
            fleet.experts[0].begin(make_ticket(1, version=2))


@pytest.mark.parametrize("transport", ["local"])
def test_an_older_table_is_forgotten_once_a_newer_one_was_used(transport: Transport) -> None:
    with fleet_of(transport) as fleet:
        set_version(fleet, 2)
        tickets = [make_ticket(1), make_ticket(2, version=2)]
        assert fleet.run(tickets, rally(few_rows, {})) == {}
        with pytest.raises(ProtocolError, match=r"expert table 1, attention 0 has \[2\]"):
            fleet.attention[0].begin(make_ticket(3))


STALE = ("incarnation", "reader_incarnation", "step", "table_version", "sequence")


WRONG = (
    "kind",
    "payload",
    "attention",
    "expert",
    "layer",
    "part",
    "num_parts",
    "rows",
    "hidden_size",
    "payload_bytes",
)
HEADERS = [
    (field, side, transport)
    for field, (side, transport) in zip(
        STALE + WRONG, cycle(product(("attention", "expert"), BOTH)), strict=False
    )
]


def run_with_fault(
    transport: Transport,
    side: str,
    faults: dict[int, Fault],
    *,
    deadline_s: float = 20.0,
    close_failed: bool = True,
) -> tuple[dict[str, BaseException], int]:
    """Play 2 steps of 2 micro-batches on 1x1 with faults in the frames of `side`.

    Returns the errors, and how many of the 8 sums came back: all of these must be right.
    """
    injector = FaultInjector(faults)
    results: Collected = {}
    with fleet_of(transport, shape=make_shape(deadline_s=deadline_s)) as fleet:
        fleet.close_failed = close_failed
        injector.attach(fleet.attention[0] if side == "attention" else fleet.experts[0])
        failures = fleet.run([make_ticket(step, m=2) for step in (1, 2)], rally(few_rows, results))
        fleet.check_sums(results, few_rows)
    assert injector.remaining == 0
    return failures, len(results)


@pytest.mark.parametrize(
    ("field", "side", "transport"),
    [
        # By default each field once, in turn at each reader of each transport.
        pytest.param(*row, marks=[] if row in HEADERS else [pytest.mark.slow])
        for row in dict.fromkeys(
            (*HEADERS, *cover_pairs(STALE + WRONG, ("attention", "expert"), BOTH))
        )
    ],
)
def test_every_wrong_header_field_is_a_typed_error_at_the_reader(
    transport: Transport, side: str, field: str
) -> None:
    value = 0 if field == "num_parts" else 77
    failures, count = run_with_fault(transport, side, {5: Change(field, value)})
    error = failures[reader_of(transport, side)]
    assert isinstance(error, StaleFrame if field in STALE else FrameError), error
    assert "77" in str(error) or field == "num_parts"
    assert count < 8


@pytest.mark.parametrize("side", ["attention", "expert"])
@pytest.mark.parametrize("transport", BOTH)
def test_a_frame_for_another_micro_batch_never_becomes_a_sum(
    transport: Transport, side: str
) -> None:
    failures, count = run_with_fault(transport, side, {4: Change("micro_batch", 3)}, deadline_s=0.2)
    # shm, nixl and local read the header where they expect it; tcp files the frame by it, in the
    # window of micro-batch 3, where its sequence is wrong.
    assert isinstance(failures[reader_of(transport, side)], FrameError | StaleFrame)
    assert count < 8


@pytest.mark.parametrize("offset", [9, 20, 100])
def test_a_damaged_header_is_an_error_without_a_checksum_too(offset: int) -> None:
    failures, _ = run_with_fault("local", "attention", {3: Damage(offset)})
    assert isinstance(failures[reader_of("local", "attention")], FrameError | StaleFrame)


@pytest.mark.parametrize(("transport", "side"), ONE_SIDE_EACH)
def test_a_lost_frame_is_a_deadline_that_names_peer_layer_and_micro_batch(
    transport: Transport, side: str
) -> None:
    # Frames of a side are numbered step by step, layer by layer: frame 3 is layer 1, mb 1.
    # Both ends wait in vain; neither closes, or the later one would see a lost peer.
    failures, count = run_with_fault(
        transport, side, {3: Drop()}, deadline_s=0.3, close_failed=False
    )
    error = failures[reader_of(transport, side)]
    assert isinstance(error, DeadlineExceeded)
    waited_for = "attention 0" if reader_of(transport, side) == "expert 0" else "expert 0"
    assert f"{waited_for} before the wait's deadline (layer 1, micro-batch 1)" in str(error)
    assert count == 3


@pytest.mark.parametrize(("transport", "side"), ONE_SIDE_EACH)
def test_a_frame_delivered_late_but_in_time_changes_nothing(
    transport: Transport, side: str
) -> None:
    start_s = time.monotonic()
    assert run_with_fault(transport, side, {3: Delay(0.03)}) == ({}, 8)
    assert time.monotonic() - start_s > 0.03


@pytest.mark.parametrize("transport", BOTH)
def test_a_frame_delivered_after_the_deadline_is_not_used(transport: Transport) -> None:
    failures, count = run_with_fault(transport, "expert", {3: Delay(60.0)}, deadline_s=0.3)
    assert isinstance(failures["attention 0"], DeadlineExceeded)
    assert count == 3


@pytest.mark.parametrize(
    ("transport", "side", "number", "fault"),
    cover_pairs(BOTH, ("attention", "expert"), (0, 3, 4), (Duplicate(), Reorder())),
)
def test_a_duplicated_or_reordered_frame_is_harmless_or_a_typed_error(
    transport: Transport, side: str, number: int, fault: Fault
) -> None:
    failures, count = run_with_fault(transport, side, {number: fault}, deadline_s=0.3)
    assert all(isinstance(error, TransportError) for error in failures.values()), failures
    assert count == 8 or failures
    if isinstance(fault, Duplicate) and transport == "tcp":
        # The second copy is a complete frame there, and must be refused.
        assert isinstance(failures[reader_of(transport, side)], StaleFrame)
    if isinstance(fault, Duplicate) and transport != "tcp":
        assert failures == {}
    if isinstance(fault, Reorder) and side == "attention" and number == 0:
        assert failures == {}


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [("num_parts", 4, FrameError), ("table_version", 2, StaleFrame)],
)
@pytest.mark.parametrize("transport", BOTH)
def test_a_later_part_must_agree_with_the_first(
    transport: Transport, field: str, value: int, error: type[TransportError]
) -> None:
    def rows_of(ticket: StepTicket, index: int, layer: int, mb: int) -> Rows:
        return random_rows(make_shape(), 20, seed=1)

    with fleet_of(transport) as fleet:
        FaultInjector({1: Change(field, value)}).attach(fleet.attention[0])
        failures = fleet.run([make_ticket(1)], rally(rows_of, {}))
    found = failures[reader_of(transport, "attention")]
    assert type(found) is error
    assert f"{field} is {value}" in str(found)


@pytest.mark.parametrize("transport", BOTH)
def test_a_slot_beyond_the_node_is_refused(transport: Transport) -> None:
    # The expert node knows a table with fewer slots per layer than the sender assumes.
    shape = make_shape()
    short = ExpertTable(version=1, num_experts=6, slots=((tuple(range(6)),),) * shape.num_layers)
    with fleet_of(transport) as fleet:
        fleet.experts[0].set_table(short)
        rows = random_rows(shape, 5, choose_from=(4, 5, 6), seed=1)
        failures = fleet.run([make_ticket(1)], rally(lambda t, i, layer, mb: rows, {}))
    error = failures[reader_of(transport, "attention")]
    assert isinstance(error, FrameError)
    assert "slots 4..6, expert 0 has 0..5" in str(error)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_closed_peer_is_lost_at_once(transport: Transport) -> None:
    def attention(net: AttentionSide, ticket: StepTicket, index: int) -> None:
        if index == 1:
            net.close()
            return
        rally(few_rows, {})(net, ticket, index)

    start_s = time.monotonic()
    with fleet_of(transport, 2, 1) as fleet:
        failures = fleet.run([make_ticket(1, participants=(0, 1))], attention)
    assert time.monotonic() - start_s < 5.0  # the deadline is 20 s
    node = reader_of(transport, "attention")
    assert isinstance(failures[node], PeerLost)
    assert "attention 1" in str(failures[node])
    assert isinstance(failures["attention 0"], PeerLost)


@contextmanager
def one_that_waits_in_vain(transport: Transport) -> Iterator[AttentionSide]:
    """Yield an attention node whose first frame was lost, after its wait for the answer."""
    with fleet_of(transport, shape=make_shape(deadline_s=0.2)) as fleet:
        net = fleet.attention[0]
        FaultInjector({0: Drop()}).attach(net)
        net.begin(make_ticket(1))
        net.dispatch(0, 0, *FEW)
        cpu_s = time.thread_time()
        with pytest.raises(DeadlineExceeded):
            net.combine(0, 0, torch.empty_like(FEW.hidden))
        assert time.thread_time() - cpu_s < 0.1, "a wait costs no CPU"
        yield net


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failed_net_refuses_further_use(transport: Transport) -> None:
    with one_that_waits_in_vain(transport) as net:
        for use in (
            lambda: net.begin(make_ticket(2)),
            lambda: net.dispatch(1, 0, *FEW),
            lambda: net.combine(0, 0, torch.empty_like(FEW.hidden)),
        ):
            with pytest.raises(TransportError, match=r"can not be used any more: Deadline"):
                use()


@pytest.mark.parametrize("transport", ["local"])
def test_caller_errors_are_typed_and_name_what_is_wrong(transport: Transport) -> None:
    with fleet_of(transport) as fleet:
        net = fleet.attention[0]
        with pytest.raises(ProtocolError, match="attention 0 takes no part"):
            net.begin(make_ticket(1, participants=(1,)))
        with pytest.raises(ProtocolError, match="5 micro-batches"):
            net.begin(make_ticket(1, m=5))
        with pytest.raises(ProtocolError, match="expert table 1: 2 layers over 3 nodes"):
            net.set_table(make_table(fleet.shape, 3))
        net.begin(make_ticket(1))
        net.dispatch(0, 0, *FEW)
        with pytest.raises(ProtocolError, match="micro-batch 0 of step 1 is still in the air"):
            net.begin(make_ticket(2))
        with pytest.raises(FrameError, match=r"experts is \(4, 3\), expected \(5, 3\)"):
            net.dispatch(1, 0, FEW.hidden, FEW.experts[1:], FEW.weights)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_closing_twice_is_safe_and_a_closed_net_says_so(transport: Transport) -> None:
    with fleet_of(transport) as fleet:
        fleet.close()
        fleet.close()
        with pytest.raises(TransportError, match="it is closed"):
            fleet.attention[0].begin(make_ticket(1))
        with pytest.raises(TransportError, match="it is closed"):
            fleet.experts[0].begin(make_ticket(1))

"""M2N's kernels of an expert node; the test or their own kernels play the attention nodes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.m2n_windows import (
    FLAG,
    FOUND,
    HEADER_WORDS,
    INCARNATION,
    LAYER,
    PARTS,
    PEER,
    PLACE,
    ROWS,
    STEP,
    VERSION,
    WANTED,
    Fault,
    WindowShape,
    signed,
    step_words,
)
from kernels.triton.m2n.expert_port import ExpertPort
from tests.kernels.triton.m2n.bench import (
    ATTENTION,
    EXPERT,
    PATIENCE_NS,
    SHORT_NS,
    Bench,
    runtime_of,
)

WINDOW_ROWS, TOP_K, HIDDEN, LIMITS, BUCKET = 5, 2, 24, (3, 4), 3


def make_bench(
    device: torch.device,
    *,
    m: int = 2,
    wire: torch.dtype = torch.float32,
    num_micro_batches: int = 2,
) -> Bench:
    shape = WindowShape(
        rows=WINDOW_ROWS, hidden_size=HIDDEN, top_k=TOP_K, wire=wire, answer=torch.bfloat16
    )
    return Bench(shape, device, m=m, num_micro_batches=num_micro_batches)


def fill(
    bench: Bench, attention: int, num_rows: int, *, sequence: int = 1, step: int = 1, mb: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Write a request of layer 1 by hand; return its hidden rows, slots and weights."""
    rng = torch.Generator().manual_seed(10 * attention + num_rows)
    slots, weights, hidden, scales, header = bench.request(attention, 0, mb)
    rows = torch.randn(num_rows, HIDDEN, generator=rng)
    factor = torch.rand(num_rows, 1, generator=rng) + 0.5
    sent = rows.to(hidden.dtype)
    hidden[:num_rows] = sent
    scales[:num_rows] = factor[:, 0]
    chosen = torch.randint(-1, LIMITS[1], (num_rows, TOP_K), generator=rng, dtype=torch.int32)
    slots[:num_rows] = chosen
    given = torch.rand(num_rows, TOP_K, generator=rng)
    weights[:num_rows] = given
    hidden[num_rows:] = math.nan
    slots[num_rows:] = 77
    words = [sequence, num_rows, step, 1, 1, 0, 1, signed(ATTENTION + attention)]
    header.copy_(torch.tensor(words))
    wide = sent.float()
    return wide * factor if bench.shape.is_compressed else wide, chosen, given


@pytest.mark.parametrize(
    ("wire", "compute"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.bfloat16),
    ],
)
def test_rows_are_joined_at_fixed_places(
    wire: torch.dtype, compute: torch.dtype, device: torch.device
) -> None:
    bench = make_bench(device, wire=wire)
    port = bench.expert_port(limits=LIMITS, compute=compute)
    bench.begin(1, participants=(0, 1))
    sent = [fill(bench, attention, rows) for attention, rows in ((0, 2), (1, 3))]
    joined = port.gather(1, layer=1, num_participants=2, bucket=BUCKET)
    assert joined.hidden.shape == (2 * BUCKET, HIDDEN)
    assert joined.hidden.dtype == compute
    for place, (rows, slots, weights) in enumerate(sent):
        low, high = place * BUCKET, place * BUCKET + len(rows)
        assert torch.equal(joined.hidden[low:high].cpu(), rows.to(compute))
        assert torch.equal(joined.slots[low:high].cpu(), slots)
        assert torch.equal(joined.weights[low:high].cpu(), weights)
        assert (joined.slots[high : (place + 1) * BUCKET] == -1).all()
    assert bench.controls[2].fault is None


def test_sums_go_back_to_where_their_rows_came_from(device: torch.device) -> None:
    bench = make_bench(device)
    port = bench.expert_port(limits=LIMITS)
    for sequence in (1, 2):
        bench.begin(sequence, participants=(0, 1))
        counts = (2, 0) if sequence == 1 else (1, 3)
        for attention, rows in enumerate(counts):
            fill(bench, attention, rows, sequence=sequence, step=sequence)
        port.gather(1, layer=1, num_participants=2, bucket=BUCKET)
        partial = torch.randn(2 * BUCKET, HIDDEN, device=device)
        partial[counts[0] : BUCKET] = math.nan
        port.reply(partial, 1, num_participants=2)
        for attention, rows in enumerate(counts):
            hidden, header = bench.answer(attention, 0, 1)
            low = attention * BUCKET
            assert torch.equal(hidden[:rows], partial[low : low + rows].bfloat16())
            wanted = bench.request(attention, 0, 1)[4].clone()
            wanted[INCARNATION] = EXPERT
            assert header.tolist() == wanted.tolist()
            assert int(header[FLAG]) == sequence
    assert not bench.answer(0, 0, 0)[1].any()
    assert bench.controls[2].fault is None


def test_only_participants_are_awaited_and_answered(device: torch.device) -> None:
    bench = make_bench(device, m=3)
    port = bench.expert_port(limits=LIMITS)
    bench.begin(1, participants=(2,))
    rows, slots, _ = fill(bench, 2, 2)
    joined = port.gather(1, layer=1, num_participants=1, bucket=BUCKET)
    assert joined.hidden.shape == (BUCKET, HIDDEN)
    assert torch.equal(joined.slots[:2].cpu(), slots)
    port.reply(joined.hidden, 1, num_participants=1)
    assert torch.equal(bench.answer(2, 0, 1)[0][:2].cpu(), rows.bfloat16())
    assert all(not bench.answer(each, 0, 1)[1].any() for each in (0, 1))


def check_fault(bench: Bench, port: ExpertPort, fault: Fault, *words: int, layer: int = 1) -> None:
    """Check that gather finds this fault of attention node 1, and that no answer is sent then."""
    joined = port.gather(1, layer=layer, num_participants=2, bucket=BUCKET)
    control = bench.controls[2]
    assert control.fault is fault
    assert control.word(PEER) == 1
    assert [control.word(place) for place in (PLACE, FOUND, WANTED)][: len(words)] == list(words)
    assert (joined.slots[BUCKET:] == -1).all() or fault is Fault.SLOT
    assert not ((joined.slots < -1) | (joined.slots >= LIMITS[1])).any()
    port.reply(torch.zeros_like(joined.hidden), 1, num_participants=2)
    assert all(not bench.answer(each, 0, 1)[1].any() for each in (0, 1))


@pytest.mark.parametrize(
    ("fault", "word", "value", "wanted"),
    [
        (Fault.HEADER, STEP, 2, 1),
        (Fault.HEADER, VERSION, 2, 1),
        (Fault.HEADER, LAYER, 0, 1),
        (Fault.HEADER, PARTS, 2, 1),
        (Fault.HEADER, INCARNATION, 7, signed(ATTENTION + 1)),
        (Fault.TOO_MANY_ROWS, ROWS, BUCKET + 1, BUCKET),
        (Fault.TOO_MANY_ROWS, ROWS, -1, BUCKET),
        (Fault.LATE, FLAG, 0, 1),
        (Fault.STALE, FLAG, 2, 1),
    ],
)
def test_a_request_with_a_wrong_header_is_a_fault(
    fault: Fault, word: int, value: int, wanted: int, device: torch.device
) -> None:
    bench = asked(device, patience_ns=SHORT_NS if fault is Fault.LATE else PATIENCE_NS)
    bench.request(1, 0, 1)[4][word] = value
    check_fault(bench, bench.expert_port(limits=LIMITS), fault, word, value, wanted)


def asked(device: torch.device, *, patience_ns: int = PATIENCE_NS) -> Bench:
    """Return a bench on which both attention nodes have sent two rows."""
    bench = make_bench(device)
    bench.begin(1, patience_ns=patience_ns)
    for attention in (0, 1):
        fill(bench, attention, 2)
    return bench


@pytest.mark.parametrize("slot", [-2, LIMITS[1]])
def test_a_slot_that_is_not_there_is_a_fault_and_never_used(
    slot: int, device: torch.device
) -> None:
    bench = asked(device)
    bench.request(1, 0, 1)[0][1, 1] = slot
    check_fault(bench, bench.expert_port(limits=LIMITS), Fault.SLOT, 1, slot, LIMITS[1])


def test_a_peer_that_is_gone_ends_the_wait(device: torch.device) -> None:
    bench = make_bench(device)
    bench.begin(1, patience_ns=10**18)
    fill(bench, 0, 2)
    bench.controls[2].lose(0)
    bench.controls[2].lose(1)
    check_fault(bench, bench.expert_port(limits=LIMITS), Fault.GONE)


def test_a_recording_follows_the_words_in_memory(device: torch.device) -> None:
    bench = make_bench(device)
    port = bench.expert_port(limits=LIMITS)
    runtime = runtime_of(device)
    joined = []

    def serve() -> None:
        rows = port.gather(1, layer=1, num_participants=1, bucket=BUCKET)
        joined[:] = rows
        port.reply(rows.hidden * 2, 1, num_participants=1)

    serve()  # a rehearsal: no step has begun, so nothing is awaited or sent
    assert (joined[1] == -1).all()
    assert all(not bench.answer(each, 0, 1)[1].any() for each in (0, 1))
    replay = runtime.capture(serve)
    for step, attention, sequence, num_rows in ((1, 0, 1, 2), (2, 1, 1, 3), (3, 0, 2, 0)):
        words = step_words(patience_ns=SHORT_NS, step=step, version=1, participants=(attention,))
        bench.steps[2][: len(words)] = torch.tensor(words)
        rows, slots, _ = fill(bench, attention, num_rows, sequence=sequence, step=step)
        replay()
        assert torch.equal(joined[1][:num_rows].cpu(), slots)
        assert (joined[1][num_rows:] == -1).all()
        hidden, header = bench.answer(attention, 0, 1)
        assert [int(header[word]) for word in (FLAG, ROWS, STEP)] == [sequence, num_rows, step]
        assert torch.equal(hidden[:num_rows].cpu(), (rows * 2).bfloat16())
    assert bench.controls[2].fault is None


def test_both_sides_kernels_agree(device: torch.device) -> None:
    bench = make_bench(device, num_micro_batches=1)
    sender = bench.attention_port(1)
    port = bench.expert_port(limits=LIMITS)
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, HIDDEN, generator=rng).to(device)
    experts = torch.tensor([[0, 2], [3, 1], [2, 3]], device=device)
    weights = torch.rand(3, TOP_K, generator=rng).to(device)
    slot_of = torch.tensor([[[2, 0, 3, 1]]], dtype=torch.int32, device=device)
    bench.begin(5, participants=(1,))
    sender.dispatch(hidden, experts, weights, slot_of, layer=1)
    joined = port.gather(0, layer=1, num_participants=1, bucket=3)
    assert torch.equal(joined.slots, slot_of[0, 0][experts])
    assert torch.equal(joined.weights, weights)
    port.reply(joined.hidden + 1, 0, num_participants=1)
    out = sender.combine(torch.empty(3, HIDDEN, device=device), layer=1)
    assert torch.equal(out, (hidden + 1).bfloat16().float())
    assert [control.fault for control in bench.controls] == [None] * 3


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    bench = make_bench(device)
    port = bench.expert_port(limits=LIMITS)
    with pytest.raises(ValueError, match="3 participants of 2"):
        port.gather(0, layer=0, num_participants=3, bucket=1)
    with pytest.raises(ValueError, match="6 rows, windows for 1 to 5"):
        port.gather(0, layer=0, num_participants=1, bucket=6)
    with pytest.raises(ValueError, match=r"reply: partial is torch.float32 \(3, 24\)"):
        port.reply(torch.zeros(3, HIDDEN, device=device), 0, num_participants=2)
    with pytest.raises(ValueError, match=r"reply: partial is torch.int64"):
        port.reply(torch.zeros(2, HIDDEN, device=device).long(), 0, num_participants=2)
    with pytest.raises(ValueError, match="1 request windows, 1 answer windows, 2 peers"):
        ExpertPort(
            bench.shape,
            [bench.request_window(0, 0, 0)],
            [bench.answer_window(0, 0, 0)],
            control=bench.controls[2],
            step=torch.zeros(HEADER_WORDS + 2, dtype=torch.int64, device=device),
            limits=torch.zeros(1, dtype=torch.int64, device=device),
            incarnation=1,
            peers=[1, 2],
            compute=torch.float32,
        )

"""M2N's kernels of an attention node against the plans and the packing of m2n_comm.

The test plays the expert nodes by hand.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels.m2n_windows import (
    CODE,
    FLAG,
    FOUND,
    INCARNATION,
    LAYER,
    MICRO_BATCH,
    PART,
    PEER,
    PLACE,
    ROWS,
    STEP,
    VERSION,
    WANTED,
    WHERE,
    Fault,
    WindowShape,
    signed,
)
from kernels.triton.m2n import attention_port as triton_m2n
from kernels.triton.m2n.attention_port import AttentionPort
from m2n_comm.layout import route_map
from m2n_comm.payload import pack_rows
from tests.kernels.triton.m2n.bench import ATTENTION, EXPERT, SHORT_NS, Bench, runtime_of
from tests.pairwise import cover_values
from topspin.expert_table import ExpertTable

WINDOW_ROWS, TOP_K, HIDDEN, NUM_EXPERTS = 9, 3, 40, 8
NODES = (((0, 3, 5), (1, 4), (2, 7, 6)),)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process the tests' few rows in several chunks."""
    monkeypatch.setattr(triton_m2n, "CHUNK", 4)


def make_bench(
    device: torch.device,
    *,
    wire: torch.dtype = torch.float32,
    answer: torch.dtype = torch.float32,
    n: int = 3,
) -> Bench:
    shape = WindowShape(rows=WINDOW_ROWS, hidden_size=HIDDEN, top_k=TOP_K, wire=wire, answer=answer)
    return Bench(shape, device, n=n)


def draw(num_rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, HIDDEN, generator=rng).to(dtype)
    # Row 0 has all its experts on one node.
    scores = torch.rand(num_rows, NUM_EXPERTS, generator=rng)
    scores[:1, [0, 3, 5]] += 1
    experts = scores.topk(TOP_K, dim=-1).indices
    weights = torch.rand(num_rows, TOP_K, generator=rng)
    return hidden.to(device), experts.to(device), weights.to(device)


def plan_of(experts: Tensor) -> tuple[Tensor, Tensor]:
    """Return slot_of [1, N, experts], and the slots [N, T, K] of the CPU's transports."""
    table = ExpertTable(version=1, num_experts=NUM_EXPERTS, slots=NODES)
    slot_of = route_map(table).slot_of[0]
    return slot_of[None].to(experts.device), slot_of[:, experts.cpu()]


@pytest.mark.parametrize(
    ("wire", "num_rows"), cover_values([torch.float32, torch.bfloat16, torch.float8_e4m3fn], [0, 5])
)
def test_windows_hold_what_the_cpus_transports_would_write(
    num_rows: int, wire: torch.dtype, device: torch.device
) -> None:
    bench = make_bench(device, wire=wire)
    port = bench.attention_port()
    dtype = torch.bfloat16 if wire == torch.float8_e4m3fn else wire
    hidden, experts, weights = draw(num_rows, dtype, device)
    slot_of, planned = plan_of(experts)
    bench.begin(7, version=4)
    for _ in range(2):
        port.dispatch(hidden, experts, weights, slot_of, layer=5, part=1, parts=3)
    for node in range(3):
        slots, weight, rows, scales, header = bench.request(0, node)
        chosen = (planned[node] >= 0).any(1).nonzero().view(-1)
        count = len(chosen)
        wanted = [2, count, 7, 4, 5, 1, 3, signed(ATTENTION)]
        assert header.tolist() == wanted
        assert torch.equal(slots[:count].cpu(), planned[node][chosen])
        assert torch.equal(weight[:count], weights[chosen])
        sent = hidden[chosen].cpu()
        if wire == torch.float8_e4m3fn:
            codes, scale = torch.empty(sent.shape, dtype=wire), torch.empty(count, 1)
            pack_rows(sent, codes, scale, torch.empty(sent.shape))
            torch.testing.assert_close(scales[:count].cpu(), scale[:, 0])
            found = rows[:count].cpu().float()
            torch.testing.assert_close(found, codes.float(), rtol=0.13, atol=2**-9)
            assert (found != codes.float()).sum() <= 0.01 * found.numel()
        else:
            assert torch.equal(rows[:count].cpu(), sent)
        assert not slots[count:].any(), "a row too many was written"
    assert bench.controls[0].fault is None


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_rows_that_are_no_numbers_stay_none(device: torch.device) -> None:
    bench = make_bench(device, wire=torch.float8_e4m3fn, n=1)
    hidden, experts, weights = draw(4, torch.float32, device)
    hidden[1, 5], hidden[2, 6], hidden[3] = math.nan, math.inf, 0.0
    bench.begin(1)
    slot_of = torch.arange(NUM_EXPERTS, dtype=torch.int32, device=device)[None, None]
    bench.attention_port().dispatch(hidden, experts, weights, slot_of, layer=0)
    _, _, rows, scales, _ = bench.request(0, 0)
    rows = rows[:4].float() * scales[:4, None]
    assert rows[0].isfinite().all()
    assert rows[1:3].isnan().all()
    assert not rows[3].any()


def test_copies_of_an_expert_take_turns_by_row(device: torch.device) -> None:
    bench = make_bench(device, n=2)
    hidden, experts, weights = draw(4, torch.float32, device)
    experts[:] = torch.tensor([0, 1, 2])
    # Expert 2 is on both nodes: even rows go to slot 1 of node 0, odd ones to slot 0 of node 1.
    slot_of = torch.tensor([[[0, -1, 1], [-1, 1, -1]], [[0, -1, -1], [-1, 1, 0]]])
    bench.begin(1)
    bench.attention_port().dispatch(hidden, experts, weights, slot_of.int().to(device), layer=0)
    assert bench.request(0, 0)[0][:4].tolist() == [[0, -1, 1], [0, -1, -1]] * 2
    assert bench.request(0, 1)[0][:4].tolist() == [[-1, 1, -1], [-1, 1, 0]] * 2


def answer_all(bench: Bench, bias: float = 0.0) -> None:
    """Play the expert nodes: twice each row plus the node's number."""
    for node in range(bench.n):
        _, _, hidden, _, header = bench.request(0, node)
        rows, answer = bench.answer(0, node)
        count = int(header[ROWS])
        rows[:count] = (hidden[:count].float() * 2 + node + bias).to(rows.dtype)
        rows[count:] = math.nan
        answer.copy_(header)
        answer[INCARNATION] = EXPERT + node


@pytest.mark.parametrize(
    ("answer", "num_rows"), cover_values([torch.float32, torch.bfloat16], [0, 5])
)
def test_answers_are_added_by_ascending_node(
    num_rows: int, answer: torch.dtype, device: torch.device
) -> None:
    bench = make_bench(device, answer=answer)
    port = bench.attention_port()
    hidden, experts, weights = draw(num_rows, torch.float32, device)
    slot_of, planned = plan_of(experts)
    bench.begin(3)
    for layer, bias in enumerate((0.0, 5.0)):
        port.dispatch(hidden, experts, weights, slot_of, layer=layer)
        answer_all(bench, bias)
        out = torch.full((num_rows, HIDDEN), math.nan, device=device)
        assert port.combine(out, layer=layer) is out
        wanted = torch.zeros(num_rows, HIDDEN)
        for node in range(3):
            held = (planned[node] >= 0).any(1)
            part = (hidden.cpu() * 2 + node + bias).to(answer).float()
            wanted += torch.where(held[:, None], part, 0.0)
        assert torch.equal(out.cpu(), wanted)
    assert bench.controls[0].fault is None


def test_a_recording_follows_the_words_in_memory(device: torch.device) -> None:
    bench = make_bench(device, n=2)
    port = bench.attention_port()
    runtime = runtime_of(device)
    hidden, experts, weights = draw(4, torch.float32, device)
    slot_of = torch.tensor([[[0, 1, 2, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 0, 1, 2, 3]]])
    slot_of = slot_of.int().to(device)
    num_rows = torch.tensor([4], device=device)
    out = torch.zeros(4, HIDDEN, device=device)

    def send() -> None:
        port.dispatch(hidden, experts, weights, slot_of, layer=0, num_rows=num_rows)

    def take_back() -> None:
        port.combine(out, layer=0)

    # A rehearsal: no step has begun, so nothing is sent or awaited.
    send()
    take_back()
    assert not out.any()
    assert all(not bench.request(0, node)[4].any() for node in range(2))
    replay_send, replay_take = runtime.capture(send), runtime.capture(take_back)
    for step, rows in ((1, 4), (2, 2), (3, 0)):
        given = draw(rows + 3, torch.float32, device)
        for static, new in zip((hidden, experts, weights), given, strict=True):
            static[:rows] = new[:rows]
        hidden[rows:], experts[rows:] = math.nan, 99
        num_rows.fill_(rows)
        bench.begin(step)
        out.fill_(math.nan)
        replay_send()
        answer_all(bench)
        replay_take()
        assert torch.equal(out[rows:], torch.zeros_like(out[rows:]))
        for row in range(rows):
            nodes = {int(expert) // 4 for expert in experts[row]}
            wanted = torch.zeros(HIDDEN, device=device)
            for node in sorted(nodes):
                wanted += hidden[row] * 2 + node
            assert torch.equal(out[row], wanted)
    assert bench.controls[0].fault is None


def dispatched(device: torch.device, num_rows: int = 2) -> tuple[Bench, AttentionPort, Tensor]:
    """Return a bench whose nodes have answered, and the rows that node 1 received."""
    bench = make_bench(device)
    port = bench.attention_port()
    hidden, experts, weights = draw(num_rows, torch.float32, device)
    slot_of, planned = plan_of(experts)
    bench.begin(2, patience_ns=SHORT_NS)
    port.dispatch(hidden, experts, weights, slot_of, layer=4)
    answer_all(bench)
    assert bench.controls[0].fault is None
    return bench, port, (planned[1] >= 0).any(1)


def check_fault(bench: Bench, port: AttentionPort, held: Tensor, fault: Fault, *words: int) -> None:
    """Check that combine finds this fault of node 1, and that nothing is sent after it."""
    device = bench.device
    out = torch.zeros(len(held), HIDDEN, device=device)
    port.combine(out, layer=4)
    control = bench.controls[0]
    assert control.fault is fault
    assert [control.word(place) for place in (PEER, MICRO_BATCH, WHERE)] == [1, 0, 4]
    assert [control.word(place) for place in (PLACE, FOUND, WANTED)[: len(words)]] == list(words)
    assert out.isnan().all(1).cpu()[held].all()
    hidden, experts, weights = draw(len(held), torch.float32, device)
    port.dispatch(hidden, experts, weights, plan_of(experts)[0], layer=5)
    assert [int(bench.request(0, node)[4][FLAG]) for node in range(3)] == [1, 1, 1]
    assert port.combine(out, layer=5).isnan().any()
    assert control.fault is fault


def test_a_late_node_that_got_no_rows_is_awaited_too(device: torch.device) -> None:
    bench, port, held = dispatched(device, num_rows=0)
    bench.answer(0, 1)[1][FLAG] = 0
    port.combine(torch.zeros(0, HIDDEN, device=device), layer=4)
    assert bench.controls[0].fault is Fault.LATE
    assert len(held) == 0


@pytest.mark.parametrize(
    ("fault", "word", "value", "wanted"),
    [
        (Fault.HEADER, ROWS, 77, None),
        *(
            pytest.param(Fault.HEADER, *each, marks=pytest.mark.slow)
            for each in (
                (STEP, 1, 2),
                (VERSION, 77, 1),
                (LAYER, 3, 4),
                (PART, 77, 0),
                (INCARNATION, EXPERT, EXPERT + 1),
            )
        ),
        (Fault.LATE, FLAG, 0, 1),
        (Fault.STALE, FLAG, 2, 1),  # ahead of its request
    ],
)
def test_an_answer_with_a_wrong_header_is_a_fault(
    fault: Fault, word: int, value: int, wanted: int | None, device: torch.device
) -> None:
    """The node is named, and its rows are no numbers."""
    bench, port, held = dispatched(device)
    header = bench.answer(0, 1)[1]
    if wanted is None:
        wanted = int(header[word])
    header[word] = value
    check_fault(bench, port, held, fault, word, value, wanted)


def test_a_node_that_is_gone_ends_the_wait_but_not_what_it_sent_before(
    device: torch.device,
) -> None:
    bench, port, held = dispatched(device)
    bench.begin(2, patience_ns=10**18)
    bench.controls[0].lose(0)
    bench.controls[0].lose(1)
    bench.answer(0, 1)[1][FLAG] = 0
    check_fault(bench, port, held, Fault.GONE)


def test_the_host_ends_a_wait(device: torch.device) -> None:
    bench, port, held = dispatched(device)
    bench.begin(2, patience_ns=10**18)
    bench.controls[0].abort()
    bench.answer(0, 1)[1][FLAG] = 0
    check_fault(bench, port, held, Fault.ABORTED)


@pytest.mark.parametrize(("expert", "num_rows"), [(8, None), (-1, None), (8, 3)])
def test_an_expert_that_does_not_exist_is_a_fault(
    expert: int, num_rows: int | None, device: torch.device
) -> None:
    bench = make_bench(device)
    hidden, experts, weights = draw(3, torch.float32, device)
    slot_of = plan_of(experts)[0]
    experts[2, 1] = expert
    bench.begin(1)
    given = None if num_rows is None else torch.tensor([num_rows], device=device)
    port = bench.attention_port()
    port.dispatch(hidden, experts, weights, slot_of, layer=6, num_rows=given)
    control = bench.controls[0]
    assert control.fault is Fault.EXPERT
    assert [control.word(place) for place in (WHERE, FOUND, WANTED)] == [6, expert, 8]


def test_more_rows_than_its_windows_hold_is_a_fault(device: torch.device) -> None:
    bench = make_bench(device)
    hidden, experts, weights = draw(2, torch.float32, device)
    bench.begin(1)
    num_rows = torch.tensor([19], device=device)
    bench.attention_port().dispatch(
        hidden, experts, weights, plan_of(experts)[0], layer=0, num_rows=num_rows, first=9, part=1,
        parts=2,
    )  # fmt: skip
    control = bench.controls[0]
    assert control.word(CODE) == Fault.TOO_MANY_ROWS
    assert [control.word(place) for place in (FOUND, WANTED)] == [19, 18]


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    bench = make_bench(device)
    port = bench.attention_port()
    hidden, experts, weights = draw(10, torch.float32, device)
    slot_of = plan_of(experts)[0]
    with pytest.raises(ValueError, match="10 rows, windows for 9"):
        port.dispatch(hidden, experts, weights, slot_of, layer=0)
    with pytest.raises(ValueError, match=r"hidden \(4, 39\)"):
        port.dispatch(hidden[:4, :39], experts[:4], weights[:4], slot_of, layer=0)
    with pytest.raises(ValueError, match=r"slots \(1, 2, 8\), 3 nodes"):
        port.dispatch(hidden[:4], experts[:4], weights[:4], slot_of[:, :2], layer=0)
    with pytest.raises(ValueError, match="bfloat16"):
        port.combine(hidden[:4].bfloat16(), layer=0)
    window = bench.request_window(0, 0, 0)
    common = {"control": bench.controls[0], "step": bench.steps[0], "incarnation": 1}
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        AttentionPort(
            bench.shape,
            [window._replace(hidden=window.hidden + 4)],
            [bench.answer_window(0, 0, 0)],
            peers=[1],
            **common,
        )
    with pytest.raises(ValueError, match="1 request windows, 0 answer"):
        AttentionPort(bench.shape, [window], [], peers=[1], **common)

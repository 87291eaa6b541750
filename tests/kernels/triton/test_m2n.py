"""M2N's kernels against the plans and the packing of m2n_comm, with nodes played by the test."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import triton_m2n
from kernels.triton_m2n import AnswerWindow, DeviceNet, RequestWindow
from m2n_comm.layout import SendPlan, plan_sends, route_map
from m2n_comm.payload import pack_rows
from topspin.expert_table import ExpertTable

WINDOW_ROWS, TOP_K, HIDDEN, NUM_EXPERTS = 25, 3, 40, 8
PATIENCE = 10**9 if torch.cuda.is_available() else 3
"""Nanoseconds on a GPU, polls in the interpreter."""
SLOTS = (((0, 3, 5), (1, 4), (2, 7, 6)),)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the tests' few rows in several chunks."""
    monkeypatch.setattr(triton_m2n, "CHUNK", 8)


def make_net(
    device: torch.device,
    *,
    wire: torch.dtype = torch.float32,
    answer: torch.dtype = torch.float32,
    num_nodes: int = 3,
    max_rows: int = WINDOW_ROWS,
) -> DeviceNet:
    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def word() -> Tensor:
        return zeros(1, dtype=torch.int64)

    requests = [
        RequestWindow(
            zeros(WINDOW_ROWS, TOP_K, dtype=torch.int32),
            zeros(WINDOW_ROWS, TOP_K),
            zeros(WINDOW_ROWS, HIDDEN, dtype=wire),
            zeros(WINDOW_ROWS),
            word(),
            word(),
        )
        for _ in range(num_nodes)
    ]
    answers = [
        AnswerWindow(zeros(WINDOW_ROWS, HIDDEN, dtype=answer), word()) for _ in range(num_nodes)
    ]
    return DeviceNet(requests, answers, max_rows=max_rows)


def draw(num_rows: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, HIDDEN, generator=rng).to(dtype)
    # Row 0 has all its experts on one node.
    scores = torch.rand(num_rows, NUM_EXPERTS, generator=rng)
    scores[0, [0, 3, 5]] += 1
    experts = scores.topk(TOP_K, dim=-1).indices
    weights = torch.rand(num_rows, TOP_K, generator=rng)
    return hidden.to(device), experts.to(device), weights.to(device)


def plan_of(experts: Tensor) -> tuple[Tensor, SendPlan]:
    """Give slot_of [N, experts] and the plan that the CPU's transports would send by."""
    table = ExpertTable(version=1, num_experts=NUM_EXPERTS, slots=SLOTS)
    route = route_map(table)
    return route.slot_of[0], plan_sends(route, 0, experts.cpu())


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_rows", [1, 7, 20])
def test_windows_hold_what_the_cpus_transports_would_write(
    num_rows: int, wire: torch.dtype, device: torch.device
) -> None:
    net = make_net(device, wire=wire)
    dtype = torch.bfloat16 if wire == torch.float8_e4m3fn else wire
    hidden, experts, weights = draw(num_rows, dtype, device)
    slot_of, plan = plan_of(experts)
    for sequence in (1, 2):
        net.dispatch(hidden, experts, weights, slot_of.to(device))
        assert [window.flag.item() for window in net.requests] == [sequence] * 3
    for node, window in enumerate(net.requests):
        count = plan.counts[node]
        rows = slice(None) if plan.rows[node] is None else plan.rows[node]
        assert window.num_rows.item() == count
        assert torch.equal(window.slots[:count].cpu(), plan.slots[node][rows].int())
        assert torch.equal(window.weights[:count], weights[rows])
        sent = hidden[rows].cpu()
        if wire == torch.float8_e4m3fn:
            codes, scales = torch.empty(sent.shape, dtype=wire), torch.empty(count, 1)
            pack_rows(sent, codes, scales, torch.empty(sent.shape))
            torch.testing.assert_close(window.scales[:count].cpu(), scales[:, 0])
            found = window.hidden[:count].cpu().float()
            torch.testing.assert_close(found, codes.float(), rtol=0.13, atol=2**-9)
            assert (found != codes.float()).sum() <= 0.01 * found.numel()
        else:
            assert torch.equal(window.hidden[:count].cpu(), sent)
        assert not window.slots[count:].any(), "a row too many was written"


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_rows_that_are_no_numbers_stay_none(device: torch.device) -> None:
    net = make_net(device, wire=torch.float8_e4m3fn)
    hidden, experts, weights = draw(4, torch.float32, device)
    hidden[1, 5], hidden[2, 6], hidden[3] = math.nan, math.inf, 0.0
    experts[:] = torch.tensor([0, 3, 5])
    net.dispatch(hidden, experts, weights, plan_of(experts)[0].to(device))
    window = net.requests[0]
    rows = window.hidden[:4].float() * window.scales[:4, None]
    assert rows[0].isfinite().all()
    assert rows[1:3].isnan().all()
    assert not rows[3].any()


def answer_all(net: DeviceNet, bias: float = 0.0) -> None:
    """Play the expert nodes: twice each row plus the node's number."""
    for node, (request, answer) in enumerate(zip(net.requests, net.answers, strict=True)):
        count = int(request.num_rows)
        rows = request.hidden[:count].float() * 2 + node + bias
        answer.hidden[:count] = rows.to(answer.hidden.dtype)
        answer.hidden[count:] = math.nan
        answer.flag.copy_(request.flag)


@pytest.mark.parametrize("answer", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 12])
def test_answers_are_added_by_ascending_node(
    num_rows: int, answer: torch.dtype, device: torch.device
) -> None:
    net = make_net(device, answer=answer)
    hidden, experts, weights = draw(num_rows, torch.float32, device)
    slot_of, plan = plan_of(experts)
    for bias in (0.0, 5.0):
        net.dispatch(hidden, experts, weights, slot_of.to(device))
        answer_all(net, bias)
        out = torch.full((num_rows, HIDDEN), math.nan, device=device)
        assert net.combine(out, patience=PATIENCE) is out
        wanted = torch.zeros(num_rows, HIDDEN)
        for node in range(3):
            held = (plan.slots[node] >= 0).any(1)
            part = (hidden.cpu() * 2 + node + bias).to(answer).float()
            wanted += torch.where(held[:, None], part, 0.0)
        assert torch.equal(out.cpu(), wanted)
    assert not net.late.any()


@pytest.mark.parametrize("num_rows", [1, 6])
def test_a_late_node_is_named_and_its_rows_are_no_numbers(
    num_rows: int, device: torch.device
) -> None:
    net = make_net(device)
    hidden, experts, weights = draw(num_rows, torch.float32, device)
    slot_of, plan = plan_of(experts)
    for _ in range(2):
        net.dispatch(hidden, experts, weights, slot_of.to(device))
        answer_all(net)
    net.answers[0].flag.fill_(1)
    out = torch.zeros(num_rows, HIDDEN, device=device)
    net.combine(out, patience=PATIENCE if device.type == "cpu" else 10**6)
    assert net.late.tolist() == [1, 0, 0]
    held = (plan.slots[0] >= 0).any(1)
    assert torch.equal(out.isnan().all(1).cpu(), held)
    assert torch.equal(out.isnan().any(1).cpu(), held)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    net = make_net(device, max_rows=8)
    hidden, experts, weights = draw(9, torch.float32, device)
    slot_of = plan_of(experts)[0].to(device)
    with pytest.raises(ValueError, match="9 rows, windows for 1 to 8"):
        net.dispatch(hidden, experts, weights, slot_of)
    with pytest.raises(ValueError, match=r"hidden \(4, 39\)"):
        net.dispatch(hidden[:4, :39], experts[:4], weights[:4], slot_of)
    with pytest.raises(ValueError, match="slots on 2 nodes, 3 windows"):
        net.dispatch(hidden[:4], experts[:4], weights[:4], slot_of[:2])
    with pytest.raises(ValueError, match="bfloat16"):
        net.combine(hidden[:4].bfloat16(), patience=1)
    with pytest.raises(ValueError, match="holds 25 rows, not 26"):
        make_net(device, max_rows=26)
    other = make_net(device, answer=torch.bfloat16).answers[0]
    with pytest.raises(ValueError, match="different kinds"):
        DeviceNet(net.requests, [*net.answers[:2], other], max_rows=4)
    shifted = net.answers[0]._replace(hidden=net.answers[0].hidden.flatten()[1:801].view(20, 40))
    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        DeviceNet(net.requests, [*net.answers[:2], shifted], max_rows=4)
    with pytest.raises(ValueError, match="3 request windows, 2 answer"):
        DeviceNet(net.requests, net.answers[:2], max_rows=4)

"""The router kernels against the reference, and a stable sort for ties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.contracts import Permutation, RoutingRule
from kernels.runtime import NoSync
from kernels.triton.router import launches as triton_router
from tests.pairwise import slow_rows


def draw(num_rows: int, num_experts: int, device: torch.device) -> Tensor:
    rng = torch.Generator().manual_seed(num_rows + num_experts)
    return (torch.randn(num_rows, num_experts, generator=rng) * 3).to(device)


def assert_same_groups(groups: Permutation, wanted: Permutation) -> None:
    for found, should in zip(groups, wanted, strict=True):
        assert found.dtype == should.dtype
        assert torch.equal(found, should)


def test_of_equal_logits_the_lowest_id_goes_first(device: torch.device) -> None:
    logits = draw(40, 60, device).round()
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    routing = triton_router.route(logits, RoutingRule(9, renormalise=True))
    assert torch.equal(routing.experts, order[:, :9])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_that_are_no_numbers_choose_experts_that_exist(device: torch.device) -> None:
    logits = torch.full((4, 5), float("nan"), device=device)
    logits[1], logits[2, 3], logits[3] = float("-inf"), 1.0, float("inf")
    routing = triton_router.route(logits, RoutingRule(5, renormalise=True))
    assert torch.equal(routing.experts.sort().values, torch.arange(5, device=device).expand(4, 5))
    assert routing.experts[2, 0] == 3


@pytest.mark.parametrize(
    ("shape", "is_spread"),
    slow_rows(
        [((150, 5, 100), True), ((9, 3, 4), False)],
        beside=[((1, 1, 1), True), ((9, 3, 4), True), ((60, 2, 300), False), ((0, 4, 6), True)],
    ),
)
def test_permute(
    shape: tuple[int, int, int],
    is_spread: bool,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """Slots repeat within rows, and some are absent."""
    monkeypatch.setattr(triton_router, "SPREAD_BLOCK", 512)
    if not is_spread:
        monkeypatch.setattr(triton_router, "SPREAD_PAIRS", 0)
    num_rows, top_k, num_experts = shape
    rng = torch.Generator().manual_seed(sum(shape))
    drawn = torch.randint(-num_experts // 3, num_experts, (num_rows, top_k), generator=rng)
    slots = drawn.int().to(device)
    with NoSync():
        groups = triton_router.permute(slots, num_experts)
    assert_same_groups(groups, reference.permute(slots, num_experts))


@pytest.mark.parametrize(("num_tokens", "top_k", "num_nodes"), [(0, 2, 2), (1, 3, 1), (300, 2, 3)])
def test_where_experts_are_on_each_node(
    num_tokens: int, top_k: int, num_nodes: int, device: torch.device
) -> None:
    rng = torch.Generator().manual_seed(num_tokens)
    experts = torch.randint(0, 7, (num_tokens, top_k), generator=rng).to(device)
    slot_of = torch.randint(-2, 4, (num_nodes, 7), generator=rng).int().to(device)
    wanted = slot_of[:, experts].clamp(min=-1)
    with NoSync():
        found = triton_router.local_slots(experts, slot_of)
    assert torch.equal(found, wanted)
    real = num_tokens // 2
    # Padding rows may have any route.
    experts[real:] = 1 << 40
    out = torch.full_like(found, 77)
    with NoSync():
        triton_router.local_slots(experts, slot_of, torch.tensor([real], device=device), out=out)
    assert torch.equal(out[:, :real], wanted[:, :real])
    assert (out[:, real:] == -1).all()

"""The router kernels against the reference, and a stable sort for ties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.contracts import Permutation, Routing
from kernels.runtime import NoSync
from kernels.triton.router import launches as triton_router
from tests.pairwise import cover_values

# One block; several blocks, the last one ragged; a number of experts that is no power of two.
SHAPES = [(1, 7, 3), (5, 128, 8), (130, 100, 6), (33, 512, 4), (0, 8, 2)]


def draw(num_rows: int, num_experts: int, device: torch.device) -> Tensor:
    rng = torch.Generator().manual_seed(num_rows + num_experts)
    return (torch.randn(num_rows, num_experts, generator=rng) * 3).to(device)


def assert_same_routing(routing: Routing, wanted: Routing) -> None:
    assert routing.experts.dtype == torch.int64
    assert torch.equal(routing.experts, wanted.experts)
    torch.testing.assert_close(routing.weights, wanted.weights, rtol=1e-5, atol=1e-7)


def assert_same_groups(groups: Permutation, wanted: Permutation) -> None:
    for found, should in zip(groups, wanted, strict=True):
        assert found.dtype == should.dtype
        assert torch.equal(found, should)


@pytest.mark.parametrize(
    ("renormalise", "num_rows", "num_experts", "top_k"),
    [(renormalise, *shape) for renormalise, shape in cover_values([False, True], SHAPES)],
)
def test_softmax(
    num_rows: int, num_experts: int, top_k: int, renormalise: bool, device: torch.device
) -> None:
    logits = draw(num_rows, num_experts, device)
    settings = {"top_k": top_k, "renormalise": renormalise}
    assert_same_routing(
        triton_router.route(logits, **settings), reference.route(logits, **settings)
    )


def test_weights_are_rounded_as_asked(device: torch.device) -> None:
    logits = draw(20, 16, device).bfloat16() + torch.arange(16, device=device) / 8
    routing = triton_router.route(logits, top_k=4, renormalise=True, weights_dtype=torch.bfloat16)
    wanted = reference.route(logits, top_k=4, renormalise=True)
    assert torch.equal(routing.weights, routing.weights.bfloat16().float())
    torch.testing.assert_close(routing.weights, wanted.weights, rtol=2**-8, atol=0.0)


def test_of_equal_logits_the_lowest_id_goes_first(device: torch.device) -> None:
    logits = draw(40, 60, device).round()
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    routing = triton_router.route(logits, top_k=9, renormalise=True)
    assert torch.equal(routing.experts, order[:, :9])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_that_are_no_numbers_choose_experts_that_exist(device: torch.device) -> None:
    logits = torch.full((4, 5), float("nan"), device=device)
    logits[1], logits[2, 3], logits[3] = float("-inf"), 1.0, float("inf")
    routing = triton_router.route(logits, top_k=5, renormalise=True)
    assert torch.equal(routing.experts.sort().values, torch.arange(5, device=device).expand(4, 5))
    assert routing.experts[2, 0] == 3


def test_logits_may_be_columns_of_a_wider_buffer(device: torch.device) -> None:
    wide = draw(6, 40, device)
    routing = triton_router.route(wide[:, 3:20], top_k=2, renormalise=False)
    assert_same_routing(routing, reference.route(wide[:, 3:20], top_k=2, renormalise=False))


@pytest.mark.parametrize(
    ("shape", "is_spread"),
    cover_values([(1, 1, 1), (9, 3, 4), (150, 5, 100), (60, 2, 300), (0, 4, 6)], [True, False]),
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


def test_tables_of_slots_that_do_not_fit_are_refused(device: torch.device) -> None:
    experts = torch.zeros(2, 3, dtype=torch.int64, device=device)
    slot_of = torch.zeros(1, 7, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"out is torch.int32 \(2, 2, 3\)"):
        triton_router.local_slots(
            experts, slot_of, out=torch.empty(2, 2, 3, dtype=torch.int32, device=device)
        )
    with pytest.raises(ValueError, match=r"experts are torch\.int32"):
        triton_router.local_slots(experts.int(), slot_of)
    with pytest.raises(ValueError, match="must be contiguous"):
        triton_router.local_slots(experts.T, slot_of)


def test_what_cannot_be_routed_is_refused(device: torch.device) -> None:
    logits = draw(2, 12, device)
    with pytest.raises(ValueError, match="top_k 13 of 12 experts"):
        triton_router.route(logits, top_k=13, renormalise=True)
    with pytest.raises(ValueError, match="float16"):
        triton_router.route(logits, top_k=2, renormalise=True, weights_dtype=torch.float16)

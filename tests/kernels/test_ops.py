"""Every op of the host's kernels against the reference: each pair of values of its factors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.dispatch import select_ops
from tests.kernels.cases.against_reference import HOST, compare_all
from tests.kernels.cases.ops import OPS
from tests.pairwise import cover_pairs, few


@pytest.mark.parametrize("name", few(OPS, *(name for name in OPS if name != "paged_attention")))
@pytest.mark.parametrize("kernels", ["cpu", "deterministic"])
def test_an_op_gives_the_numbers_of_the_reference(kernels: str, name: str) -> None:
    op = OPS[name]
    compare_all(op, select_ops(kernels, torch.float32), HOST, cover_pairs(*op.factors.values()))


@pytest.mark.parametrize("kernels", ["reference", "cpu", "deterministic", "triton"])
def test_contributions_are_added_by_ascending_choice(kernels: str, device: torch.device) -> None:
    """2**24 + 1 - 2**24 depends on the order."""
    place = device if kernels == "triton" else HOST
    ops = select_ops(kernels, torch.float32, device=str(place))
    down = torch.tensor([2.0**24, 1.0, -(2.0**24)], device=place)[:, None, None]
    weights = torch.full((2, 3), 1 / float(F.silu(torch.ones(1))), device=place)
    slots = torch.tensor([[0, 2, 1], [0, 1, 2]], dtype=torch.int32, device=place)
    experts = ops.pack_experts(torch.ones(3, 2, 1, device=place), down)
    out = ops.grouped_mlp(torch.ones(2, 1, device=place), slots, weights, experts).out
    assert out[0].item() == pytest.approx(1.0, rel=1e-5)
    assert out[1].item() == 0.0


@pytest.mark.parametrize("kernels", ["reference", "cpu", "deterministic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "ffn", "share"), [(8, 5, 0.0), (8, 5, 0.5), (96, 64, 0.0)])
def test_a_slot_outside_the_node_is_an_error(
    kernels: str, dtype: torch.dtype, hidden: int, ffn: int, share: float
) -> None:
    ops = select_ops(kernels, dtype)
    matrices = (torch.zeros(2, *shape).to(dtype) for shape in ((2 * ffn, hidden), (hidden, ffn)))
    experts = ops.pack_experts(*matrices, share_per_row=share)
    slots = torch.tensor([[0], [2], [1]], dtype=torch.int32)
    with pytest.raises(AssertionError, match="below num_experts"):
        ops.grouped_mlp(torch.zeros(3, hidden).to(dtype), slots, torch.ones(3, 1), experts)

"""The compiled experts' MLPs against the reference, over odd shapes and both layouts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import reference
from kernels.contracts import ExpertMatrices, ExpertWeights
from kernels.cpu import ops as cpu
from kernels.cpu.compiled.experts import MAX_ROWS, can_run, mlp_of_rows
from kernels.cpu.matmul import can_prepack
from tests.kernels.cpu.test_compiled_matmul import needs_blocks
from tests.kernels.cpu.test_matmul import routed
from tests.kernels.generators import finish
from tests.kernels.matrices import values_then_pairs

pytestmark = needs_blocks


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def matrices(num_experts: int, hidden: int, ffn: int) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.randn(num_experts, 2 * ffn, hidden) * hidden**-0.5
    down = torch.randn(num_experts, hidden, ffn) * ffn**-0.5
    return gate_up.bfloat16(), down.bfloat16()


@pytest.mark.parametrize(
    ("share", "kind", "shape"),
    values_then_pairs(
        [0.0, 0.5],
        ["all here", "partly absent", "all absent", "empty experts", "one expert"],
        [(576, 192), (38, 64), (100, 128)],
    ),
)
def test_shapes(shape: tuple[int, int], kind: str, share: float) -> None:
    """Experts one by one, or joined if they share rows."""
    hidden, ffn = shape
    gate_up, down = matrices(6, hidden, ffn)
    packed = cpu.pack_experts(gate_up, down, share_per_row=share)
    assert packed.joined == (share > 0 and can_prepack(torch.bfloat16))
    assert packed.addresses is not None
    plain = reference.pack_experts(gate_up, down)
    for num_rows in (1, 2, 3, 7, 16, MAX_ROWS):
        x = torch.randn(num_rows, hidden).bfloat16()
        slots, weights = routed(num_rows, 6, 3, kind)
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.full((num_rows, hidden), float("nan"), dtype=dtype)
            assert can_run(x, slots, weights, out)
            result = mlp_of_rows(x, slots, weights, packed, out)
            wanted = reference.grouped_mlp(x, slots, weights, plain, out=torch.empty_like(out))
            assert result.out is out
            torch.testing.assert_close(out, wanted.out, rtol=2e-2, atol=2e-2)
            assert torch.equal(result.counts, wanted.counts)


def test_rows_and_threads_do_not_change_a_bit() -> None:
    packed = cpu.pack_experts(*matrices(8, 96, 64))
    x = torch.randn(20, 96).bfloat16()
    slots, weights = routed(20, 8, 3, "partly absent")
    torch.set_num_threads(1)
    together = mlp_of_rows(x, slots, weights, packed, torch.empty_like(x)).out
    torch.set_num_threads(3)
    for row in range(20):
        part = slice(row, row + 1)
        out = torch.empty_like(x[part])
        alone = mlp_of_rows(x[part], slots[part], weights[part], packed, out).out
        assert torch.equal(alone, together[part])


def test_an_infinite_expert_stays_with_its_rows() -> None:
    gate_up, down = matrices(4, 64, 64)
    gate_up[2] = float("inf")
    packed = cpu.pack_experts(gate_up, down, share_per_row=0.5)
    slots = torch.tensor([[0, 1], [2, 3], [3, 1]], dtype=torch.int32)
    x = torch.randn(3, 64).bfloat16()
    out = mlp_of_rows(x, slots, torch.rand(3, 2), packed, torch.empty_like(x)).out
    assert out[1].isnan().any()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["by slot", "joined"])
def test_rebuilt_experts_are_read_where_they_are(share: float) -> None:
    gate_up, down = matrices(4, 96, 64)
    packed = cpu.pack_experts(gate_up, down, share_per_row=share)
    other_up, other_down = matrices(1, 96, 64)
    rebuilt: ExpertWeights = finish(
        cpu.rebuild_experts(packed, [3, ExpertMatrices(other_up[0], other_down[0]), 0])
    )
    plain = reference.pack_experts(
        torch.stack((gate_up[3], other_up[0], gate_up[0])),
        torch.stack((down[3], other_down[0], down[0])),
    )
    x = torch.randn(5, 96).bfloat16()
    slots, weights = routed(5, 3, 2, "all here")
    result = mlp_of_rows(x, slots, weights, rebuilt, torch.empty_like(x))
    wanted = reference.grouped_mlp(x, slots, weights, plain)
    torch.testing.assert_close(result.out, wanted.out, rtol=2e-2, atol=2e-2)
    assert torch.equal(result.counts, wanted.counts)


def test_a_slot_that_no_expert_has_is_refused() -> None:
    packed = cpu.pack_experts(*matrices(2, 64, 64))
    x, slots = torch.randn(3, 64).bfloat16(), torch.tensor([[0], [2], [1]], dtype=torch.int32)
    with pytest.raises(AssertionError, match="not below num_experts 2"):
        cpu.grouped_mlp(x, slots, torch.ones(3, 1), packed)


def test_what_the_kernel_does_not_take() -> None:
    packed = cpu.pack_experts(*matrices(2, 32, 33))
    assert packed.addresses is None, "an expert that is no multiple of a block"
    x, slots = torch.zeros(2, 32).bfloat16(), torch.zeros(2, 1, dtype=torch.int32)
    weights = torch.ones(2, 1)
    assert can_run(x, slots, weights, x)
    assert not can_run(x.float(), slots, weights, x)
    assert not can_run(x, slots.long(), weights, x)
    assert not can_run(x[:0], slots[:0], weights[:0], x[:0])
    assert not can_run(x, slots, weights.double(), x)

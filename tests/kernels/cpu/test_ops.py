"""The small CPU ops give the reference's bits, except compiled norms in bf16."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.cpu import ops as cpu
from kernels.cpu import plain
from tests.kernels.matrices import values_then_pairs
from tests.pairwise import cover_pairs

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    values_then_pairs(DTYPES, [(0, 8), (1, 576), (7, 37), (130, 64), (16, 1024), (3, 5, 64)]),
)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    wanted = reference.rms_norm(x, weight, eps=1e-5)
    result = cpu.rms_norm(x, weight, eps=1e-5)
    if dtype == torch.float32:
        assert torch.equal(result, wanted)
    else:  # the sum of squares adds in another order
        torch.testing.assert_close(result, wanted, rtol=2.0**-7, atol=1e-6)
    out = torch.empty_like(x)
    assert cpu.rms_norm(x, weight, eps=1e-5, out=out) is out
    assert torch.equal(out, result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_a_view(dtype: torch.dtype) -> None:
    """Query and key norms read heads inside the joint projection."""
    wide, weight = torch.randn(6, 5, 32).to(dtype), torch.randn(32).to(dtype)
    view = wide[:, 1:3]
    wanted = reference.rms_norm(view.contiguous(), weight, eps=1e-6)
    assert torch.equal(cpu.rms_norm(view, weight, eps=1e-6, out=view), wanted)
    assert torch.equal(wide[:, 1:3], wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(s).to(dtype) for s in ((4, 33), (4, 33), (33,)))
    other = residual.clone()
    wanted = reference.add_rms_norm(x, residual, weight, eps=1e-6)
    result = cpu.add_rms_norm(x, other, weight, eps=1e-6)
    if dtype == torch.float32:
        assert torch.equal(result, wanted)
    else:  # the sum of squares adds in another order
        torch.testing.assert_close(result, wanted, rtol=2.0**-7, atol=1e-6)
    assert torch.equal(other, residual)


@pytest.mark.parametrize(
    ("dtype", "half_tables", "num_rows"), cover_pairs(DTYPES, [True, False], [0, 1, 13])
)
def test_rotate(num_rows: int, half_tables: bool, dtype: torch.dtype) -> None:
    angles = torch.rand(num_rows, 40) * 100
    if not half_tables:
        angles = torch.cat((angles, angles), -1)
    wide = torch.randn(num_rows, 6, 80).to(dtype)
    other = wide.clone()
    for ops, qkv in ((reference, wide), (plain, other)):
        ops.rotate(qkv[:, :3], qkv[:, 3:5], angles.cos(), angles.sin())
    assert torch.equal(wide, other)


@pytest.mark.parametrize("num_experts", [1, 5, 128])
def test_add_counts(num_experts: int) -> None:
    totals = torch.zeros(num_experts + 2, dtype=torch.int64)
    result = totals.clone()
    for _ in range(3):
        counts = torch.randint(3, (num_experts,))
        reference.add_counts(totals, counts)
        cpu.add_counts(result, counts)
    assert torch.equal(result, totals)

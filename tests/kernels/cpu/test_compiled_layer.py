"""The compiled small ops of a layer: the reference's bits, except where a sum's order matters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.contracts import HeadRows
from kernels.cpu import ops as cpu
from kernels.cpu.compiled.layer import MAX_EXPERTS, can_norm, can_rotate, can_route
from kernels.cpu.compiled.rows import can_activate, can_gate
from tests.kernels.matrices import values_then_pairs
from tests.pairwise import cover_pairs

# A mean summed in another order may move a quotient over one bf16 boundary.
ONE_UNIT = {"rtol": 2.0**-7, "atol": 1e-6}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("num_threads", "dtype", "width", "num_rows"),
    values_then_pairs(
        [1, 3], [None, torch.bfloat16, torch.float32], [1, 15, 16, 33, 576], [7, 70, 0, 1]
    ),
)
def test_add_rms_norm(
    num_rows: int, width: int, dtype: torch.dtype | None, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    residual, weight = torch.randn(num_rows, width).bfloat16(), torch.randn(width).bfloat16()
    other = residual.clone()
    if dtype is None:
        assert can_norm(None, residual, weight)
        result = cpu.rms_norm(residual, weight, eps=1e-5)
        wanted = reference.rms_norm(residual, weight, eps=1e-5)
    else:
        x = torch.randn(num_rows, width).to(dtype)
        assert can_norm(x, residual, weight)
        result = cpu.add_rms_norm(x, residual, weight, eps=1e-5)
        wanted = reference.add_rms_norm(x, other, weight, eps=1e-5)
    assert torch.equal(residual, other)
    torch.testing.assert_close(result, wanted, **ONE_UNIT)


@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_rms_norm_in_place_of_a_part_of_wider_rows(num_rows: int) -> None:
    wide, weight = torch.randn(num_rows, 100).bfloat16(), torch.randn(70).bfloat16()
    before, part = wide.clone(), wide[:, 20:90]
    assert can_norm(None, part, weight, part)
    assert cpu.rms_norm(part, weight, eps=1e-5, out=part) is part
    wanted = reference.rms_norm(before[:, 20:90], weight, eps=1e-5)
    torch.testing.assert_close(part, wanted, **ONE_UNIT)
    assert torch.equal(wide[:, :20], before[:, :20])
    assert torch.equal(wide[:, 90:], before[:, 90:])


def test_norms_of_numbers_that_are_none() -> None:
    x = torch.randn(3, 40).bfloat16()
    x[1, 5] = float("nan")
    result = cpu.rms_norm(x, torch.ones(40).bfloat16(), eps=1e-5)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("with_norms", "heads", "num_rows", "dtype"),
    cover_pairs(
        [False, True],
        [(9, 3, 64), (4, 4, 80), (2, 1, 6)],
        [1, 5, 40],
        [torch.bfloat16, torch.float8_e4m3fn],
    ),
)
def test_rotate_and_store(
    num_rows: int, heads: tuple[int, int, int], with_norms: bool, dtype: torch.dtype
) -> None:
    num_heads, num_groups, dim = heads
    qkv = torch.randn(num_rows, num_heads + 2 * num_groups, dim).bfloat16()
    angles = torch.rand(num_rows, dim // 2) * 100
    slots = torch.randperm(2 * num_rows)[:num_rows]
    norms = [torch.randn(dim).bfloat16() if with_norms else None for _ in range(2)]
    results = []
    for ops in (reference, cpu):
        mine = qkv.clone()
        flat = mine.view(num_rows, -1).split(
            [n * dim for n in (num_heads, num_groups, num_groups)], 1
        )
        parts = [part.view(num_rows, -1, dim) for part in flat]
        caches = torch.zeros(2, 2, num_rows, num_groups, dim, dtype=dtype)
        heads = HeadRows(*parts, angles.cos(), angles.sin(), *caches, slots, *norms, eps=1e-6)
        assert can_rotate(heads)
        ops.rotate_and_store(heads)
        results.append((parts[0], caches.bfloat16()))
    for wanted, result, kind in zip(*results, (torch.bfloat16, dtype), strict=True):
        if with_norms:  # two rotated numbers that each moved by a unit
            unit = torch.finfo(kind).eps
            torch.testing.assert_close(result, wanted, rtol=2 * unit, atol=0.05)
        else:
            assert torch.equal(result, wanted)


@pytest.mark.parametrize(
    ("weights", "shape", "num_rows"),
    values_then_pairs(
        [*product([False, True], [torch.float32, torch.bfloat16])],
        [(1, 1), (16, 8), (60, 4), (128, 8), (33, 33)],
        [0, 1, 40],
    ),
)
def test_route(num_rows: int, shape: tuple[int, int], weights: tuple[bool, torch.dtype]) -> None:
    (num_experts, top_k), (renormalise, weights_dtype) = shape, weights
    # Distinct logits, since torch does not specify the order of equal ones.
    order = torch.rand(num_rows, num_experts).argsort(-1)
    logits = ((order - num_experts // 2) / 16).bfloat16()
    assert can_route(logits, top_k, weights_dtype)
    options = {"top_k": top_k, "renormalise": renormalise, "weights_dtype": weights_dtype}
    result, wanted = cpu.route(logits, **options), reference.route(logits, **options)
    assert torch.equal(result.experts, wanted.experts)
    tolerance = 1e-6 if weights_dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(result.weights, wanted.weights, rtol=tolerance, atol=1e-9)


def test_equal_logits_and_no_numbers_give_different_experts() -> None:
    logits = torch.zeros(3, 8).bfloat16()
    logits[1, 3] = float("nan")
    logits[2] = float("-inf")
    result = cpu.route(logits, top_k=4, renormalise=True)
    assert result.experts[0].tolist() == [0, 1, 2, 3]
    for row in result.experts.tolist():
        assert len(set(row)) == 4
        assert all(0 <= expert < 8 for expert in row)
    assert result.weights[1:].isnan().any(-1).all(), "the row is not told to be wrong"
    torch.testing.assert_close(result.weights[0], torch.full((4,), 0.25))


def test_what_the_kernels_do_not_take() -> None:
    x = torch.randn(4, 32).bfloat16()
    weight = x[0]
    assert not can_norm(None, x.float(), weight.float())
    assert not can_norm(x[:1], x, weight)
    assert not can_norm(x.half(), x, weight)
    assert not can_norm(None, x[:, ::2], weight[:16])
    assert not can_norm(None, x, weight, x.float())
    assert not can_norm(None, x, weight, x[:3])
    assert not can_route(x.float(), 2, torch.float32)
    assert not can_route(x, 2, torch.float16)
    assert not can_route(torch.zeros(1, MAX_EXPERTS + 1).bfloat16(), 2, torch.float32)
    q: Tensor = torch.randn(4, 2, 16).bfloat16()
    cos, cache = torch.randn(4, 8), torch.zeros(1, 4, 2, 16).bfloat16()
    slots = torch.arange(4)
    assert can_rotate(HeadRows(q, q, q, cos, cos, cache, cache, slots))
    assert not can_rotate(HeadRows(q, q, q, cos.bfloat16(), cos, cache, cache, slots))
    assert not can_rotate(HeadRows(q, q, q, torch.randn(4, 16), cos, cache, cache, slots))
    assert not can_rotate(HeadRows(q, q[:, :1].contiguous(), q, cos, cos, cache, cache, slots))
    assert not can_rotate(HeadRows(q, q, q, cos, cos, cache.float(), cache.float(), slots))


@pytest.mark.parametrize(("rows", "width"), [(1, 192), (5, 70), (3, 4096)])
def test_activations(rows: int, width: int) -> None:
    gate_up = 3 * torch.randn(rows, 2 * width).bfloat16()
    assert can_activate(gate_up)
    expected = reference.swiglu(gate_up)
    # A unit in the last place of silu, which is rounded before it is multiplied.
    torch.testing.assert_close(cpu.swiglu(gate_up), expected, rtol=2.0**-7, atol=1e-30)
    assert not can_activate(gate_up.float())
    torch.testing.assert_close(cpu.swiglu(gate_up.float()), reference.swiglu(gate_up.float()))


@pytest.mark.parametrize(("num_rows", "width"), [(0, 16), (1, 70), (3, 4096)])
def test_gates(num_rows: int, width: int) -> None:
    x, gate = torch.randn(num_rows, width).bfloat16(), 4 * torch.randn(num_rows, 1).bfloat16()
    gate[:2] = torch.tensor([[float("inf")], [-200.0]])[:num_rows].bfloat16()
    assert can_gate(x, gate)
    other = x.clone()
    assert cpu.sigmoid_gate(other, gate) is other
    # A unit in the last place of the sigmoid, which is rounded before it multiplies.
    torch.testing.assert_close(other, reference.sigmoid_gate(x, gate), rtol=2.0**-7, atol=1e-30)


def test_gates_that_the_kernel_does_not_take() -> None:
    x, gate = torch.randn(3, 8), torch.randn(3, 1)
    assert not can_gate(x, gate)
    assert not can_gate(x.bfloat16(), gate[:1].bfloat16())
    assert torch.equal(cpu.sigmoid_gate(x.clone(), gate), x * gate.sigmoid())

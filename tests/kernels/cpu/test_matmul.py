"""CPU matrix products against the reference, both expert layouts, and their resident memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.contracts import ExpertMatrices, ExpertWeights, LinearWeight
from kernels.cpu import ops as cpu
from kernels.cpu.compiled.matmul import packs_blocks
from kernels.cpu.huge_pages import CHUNK_BYTES
from kernels.cpu.matmul import can_prepack
from kernels.cpu.simd.matmul import TASK_OUTPUTS
from tests.kernels.generators import finish
from tests.kernels.matrices import values_then_pairs
from tests.pairwise import cover_pairs

DTYPES = [torch.float32, torch.bfloat16]
needs_packing = pytest.mark.skipif(
    not can_prepack(torch.bfloat16) and not packs_blocks(),
    reason="this processor does not pack bf16 weights",
)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def unpacked(weight: LinearWeight) -> Tensor:
    """Return the plain matrix of a packed one."""
    if not weight.packed:
        return weight.data
    if weight.data.is_mkldnn:
        return weight.data.to_dense()
    blocks = weight.data.view(*weight.data.shape[:2], TASK_OUTPUTS, 2)
    matrix = blocks.transpose(1, 2).flatten(2).flatten(0, 1)
    return matrix[: weight.out_features, : weight.in_features]


@pytest.mark.parametrize(
    ("dtype_and_bias", "shape", "num_rows"),
    values_then_pairs(
        [*product(DTYPES, [False, True])],
        [(1, 1), (13, 37), (96, 64), (384, 576)],
        [1, 2, 0, 17, 70],
    ),
)
def test_linear(
    num_rows: int, shape: tuple[int, int], dtype_and_bias: tuple[torch.dtype, bool]
) -> None:
    (dtype, with_bias), (num_out, num_in) = dtype_and_bias, shape
    weight = torch.randn(num_out, num_in).to(dtype)
    bias = torch.randn(num_out).to(dtype) if with_bias else None
    x = torch.randn(num_rows, num_in).to(dtype)
    wanted = reference.linear(x, reference.pack_linear(weight), bias)
    packed = cpu.pack_linear(weight)
    result = cpu.linear(x, packed, bias)
    if dtype == torch.float32:
        assert torch.equal(result, wanted)
    else:  # Sums in another order may round differently near a tie.
        torch.testing.assert_close(result, wanted, rtol=2.0**-7, atol=1e-4)
    out = torch.empty_like(wanted)
    assert cpu.linear(x, packed, bias, out) is out
    assert torch.equal(out, result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_a_view_into_wider_rows(dtype: torch.dtype) -> None:
    weight, wide = torch.randn(24, 16).to(dtype), torch.randn(5, 40).to(dtype)
    x = wide[:, 8:24]
    wanted = reference.linear(x.contiguous(), reference.pack_linear(weight))
    assert torch.equal(cpu.linear(x, cpu.pack_linear(weight)), wanted)


@needs_packing
def test_a_packed_weight_replaces_its_original() -> None:
    weight = torch.randn(64, 32).bfloat16()
    original = weakref.ref(weight)
    packed = cpu.pack_linear(weight)
    assert packed.packed
    del weight
    assert original() is None
    assert cpu.linear(torch.ones(1, 32).bfloat16(), packed).shape == (1, 64)


@needs_packing
def test_experts_are_packed_one_at_a_time() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def matrices(rows: int, columns: int) -> Iterator[Tensor]:
        nonlocal most
        for _ in range(5):
            matrix = torch.randn(rows, columns).bfloat16()
            alive.append(weakref.ref(matrix))
            most = max(most, sum(ref() is not None for ref in alive))
            yield matrix
            del matrix

    experts = cpu.pack_experts(matrices(24, 8), matrices(8, 12))
    assert experts.num_experts == 5
    assert most == 1


@pytest.mark.skipif(not packs_blocks(), reason="oneDNN packs bf16 on this processor")
def test_an_expert_of_a_later_table_has_memory_of_its_own() -> None:
    """Packed in a chunk it would keep the chunk when it moves away."""

    def matrices() -> tuple[Tensor, Tensor]:
        return torch.randn(128, 32).bfloat16(), torch.randn(32, 64).bfloat16()

    first, later = matrices(), matrices()
    packed = cpu.pack_experts([first[0]], [first[1]])
    rebuilt = finish(cpu.rebuild_experts(packed, [0, ExpertMatrices(*later)]))
    assert packed.down[0].data.untyped_storage().nbytes() >= CHUNK_BYTES
    for weight in (rebuilt.gate_up[1], rebuilt.down[1]):
        assert weight.data.untyped_storage().nbytes() == weight.data.nbytes


def routed(num_rows: int, num_experts: int, top_k: int, kind: str) -> tuple[Tensor, Tensor]:
    """Slots i32[R, K] and weights; weights of absent pairs are NaN and must not be read."""
    order = torch.rand(num_rows, num_experts).argsort(-1)[:, :top_k].int()
    if kind == "partly absent":
        order[torch.rand(order.shape) < 0.5] = -1
    elif kind == "all absent":
        order[:] = -3
    elif kind == "empty experts":
        order = torch.where(order < num_experts // 2, order, -1)
    elif kind == "one expert":
        order[:, 0], order[:, 1:] = num_experts - 1, -1
    weights = torch.rand(num_rows, top_k)
    weights[order < 0] = float("nan")
    return order, weights


def both(kind: str, num_rows: int, dtype: torch.dtype, share: float, **out: Tensor):  # type: ignore[no-untyped-def]
    gate_up, down = torch.randn(6, 26, 20).to(dtype), torch.randn(6, 20, 13).to(dtype)
    x = torch.randn(num_rows, 20).to(dtype)
    slots, weights = routed(num_rows, 6, 3, kind)
    packed = cpu.pack_experts(gate_up, down, share_per_row=share)
    assert packed.joined == (share > 0 and can_prepack(dtype))
    plain = reference.pack_experts(gate_up, down)
    wanted = reference.grouped_mlp(
        x, slots, weights, plain, **{k: torch.empty_like(v) for k, v in out.items()}
    )
    return cpu.grouped_mlp(x, slots, weights, packed, **out), wanted


KINDS = ["all here", "partly absent", "all absent", "empty experts", "one expert"]


@pytest.mark.parametrize(
    ("dtype", "kind", "num_rows"), values_then_pairs(DTYPES, KINDS, [90, 0, 1, 7])
)
def test_experts_by_slot(num_rows: int, kind: str, dtype: torch.dtype) -> None:
    """Equal bits in bf16; in fp32 the sum depends on the rows' memory layout."""
    result, wanted = both(kind, num_rows, dtype, 0.0)
    tolerance = 1e-5 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(result.out, wanted.out, rtol=tolerance, atol=tolerance)
    assert result.out.dtype == dtype
    assert torch.equal(result.counts, wanted.counts)


@pytest.mark.parametrize(
    ("dtype", "kind", "num_rows"), values_then_pairs(DTYPES, KINDS, [300, 0, 1, 7])
)
def test_joined_experts(num_rows: int, kind: str, dtype: torch.dtype) -> None:
    result, wanted = both(kind, num_rows, dtype, 0.5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    scale = max(float(wanted.out.abs().max()), 1.0) if num_rows else 1.0
    torch.testing.assert_close(result.out, wanted.out, rtol=tolerance, atol=tolerance * scale)
    assert torch.equal(result.counts, wanted.counts)
    absent = ~wanted.out.any(-1)
    assert not result.out[absent].any()


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_buffers_of_either_dtype(dtype: torch.dtype, share: float) -> None:
    for out in (torch.empty(7, 20), torch.empty(7, 20, dtype=torch.bfloat16)):
        result, wanted = both("partly absent", 7, dtype, share, out=out)
        assert result.out is out
        tolerance = 1e-5 if dtype == out.dtype == torch.float32 else 2e-2
        scale = float(wanted.out.abs().max())
        torch.testing.assert_close(result.out, wanted.out, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_broken_expert_reaches_only_rows_that_use_it(share: float) -> None:
    gate_up, down = torch.randn(4, 10, 8).bfloat16(), torch.randn(4, 8, 5).bfloat16()
    x = torch.randn(3, 8).bfloat16()
    slots = torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32)
    weights = torch.rand(3, 2)
    sound = cpu.grouped_mlp(
        x, slots, weights, cpu.pack_experts(gate_up, down, share_per_row=share)
    ).out
    gate_up[3] = float("inf")
    broken = cpu.grouped_mlp(
        x, slots, weights, cpu.pack_experts(gate_up, down, share_per_row=share)
    ).out
    assert torch.equal(broken[[0, 2]], sound[[0, 2]])
    assert not broken[1].isfinite().all()


def test_joined_experts_must_be_small_and_much_used() -> None:
    small = torch.zeros(2, 4, 8).bfloat16(), torch.zeros(2, 8, 2).bfloat16()
    large = torch.zeros(2, 2048, 512).bfloat16(), torch.zeros(2, 512, 1024).bfloat16()
    assert not cpu.pack_experts(*small, share_per_row=0.125).joined
    assert not cpu.pack_experts(*small).joined
    assert not cpu.pack_experts(*large, share_per_row=0.5).joined
    assert cpu.pack_experts(*small, share_per_row=0.5).joined == can_prepack(torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "share", "order"),
    cover_pairs(DTYPES, [0.0, 0.5], [(0, 3, 2), (3, 1, 0), (2, 3, 0, 1), (1, 0)]),
)
def test_rebuilt_experts_compute_like_fresh_ones(
    order: tuple[int, ...], share: float, dtype: torch.dtype
) -> None:
    gate_up, down = torch.randn(4, 12, 8).to(dtype), torch.randn(4, 8, 6).to(dtype)
    x, slots = torch.randn(5, 8).to(dtype), torch.tensor([[0, 1]] * 5, dtype=torch.int32)
    weights = torch.rand(5, 2)

    def compute(experts: ExpertWeights) -> Tensor:
        return cpu.grouped_mlp(x, slots, weights, experts).out

    experts = cpu.pack_experts(gate_up[:3], down[:3], share_per_row=share)
    before = compute(experts)
    new = ExpertMatrices(gate_up[3], down[3])
    rebuilt = finish(cpu.rebuild_experts(experts, [new if e == 3 else e for e in order]))
    fresh = cpu.pack_experts(gate_up[[*order]], down[[*order]], share_per_row=share)
    assert rebuilt.num_experts == len(order)
    assert torch.equal(compute(rebuilt), compute(fresh))
    # The old ones still give their results, and share the experts that stay.
    assert torch.equal(compute(experts), before)
    assert not torch.equal(compute(rebuilt), before)
    if not experts.joined and 2 in order:
        assert rebuilt.down[order.index(2)] is experts.down[2]
    with pytest.raises(AssertionError):
        finish(cpu.rebuild_experts(experts, [ExpertMatrices(gate_up[3], down[3].T)]))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_slot_outside_the_node_is_an_error(share: float) -> None:
    experts = cpu.pack_experts(
        torch.zeros(2, 4, 8).bfloat16(), torch.zeros(2, 8, 2).bfloat16(), share_per_row=share
    )
    slots = torch.tensor([[2]], dtype=torch.int32)
    with pytest.raises(AssertionError, match="below num_experts"):
        cpu.grouped_mlp(torch.zeros(1, 8).bfloat16(), slots, torch.ones(1, 1), experts)

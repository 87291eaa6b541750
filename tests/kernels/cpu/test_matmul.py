"""Packed weights of the CPU: their memory, both layouts of experts, and experts that change."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.contracts import Biases, ExpertMatrices, LinearWeight, PackedExperts
from kernels.cpu import ops as cpu
from kernels.cpu.compiled.matmul.linear import packs_blocks
from kernels.cpu.huge_pages import CHUNK_BYTES
from kernels.cpu.matmul import can_prepack, onednn_rows
from kernels.cpu.simd.matmul import TASK_OUTPUTS
from tests.kernels.cases.ops import CLAMPED
from tests.kernels.generators import finish
from tests.pairwise import cover_pairs
from topspin.expert_activation import SWIGLU

DTYPES = [torch.float32, torch.bfloat16]
needs_packing = pytest.mark.skipif(
    not can_prepack(torch.bfloat16) and not packs_blocks(),
    reason="this processor does not pack bf16 weights",
)


def unpacked(weight: LinearWeight) -> Tensor:
    """Return the plain matrix of a packed one."""
    if not weight.packed:
        return weight.data
    if weight.data.is_mkldnn:
        return weight.data.to_dense()
    blocks = weight.data.view(*weight.data.shape[:2], TASK_OUTPUTS, 2)
    matrix = blocks.transpose(1, 2).flatten(2).flatten(0, 1)
    return matrix[: weight.out_features, : weight.in_features]


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
def test_onednn_gets_few_sizes_of_batches_and_little_more_rows() -> None:
    found = {num_rows: onednn_rows(num_rows) for num_rows in range(1, 8193)}
    assert all(0 <= found[each] - each < max(16, each / 16) for each in found)
    assert len(set(found.values())) <= 100
    assert all(found[each] == each for each in set(found.values()))


@pytest.mark.skipif(not can_prepack(torch.bfloat16), reason="oneDNN multiplies no bf16 here")
@pytest.mark.parametrize("num_rows", [129, 160, 300])
def test_rows_that_are_filled_up_have_the_products_of_theirs(num_rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 70).bfloat16(), torch.randn(num_rows, 70).bfloat16()
    bias = torch.randn(48).bfloat16()
    found = cpu.linear(x, cpu.pack_linear(weight.clone()), bias)
    wanted = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(found.float(), wanted, rtol=1e-2, atol=5e-2)
    assert found.shape == (num_rows, 48)


@pytest.mark.skipif(not can_prepack(torch.bfloat16), reason="oneDNN multiplies no bf16 here")
@pytest.mark.parametrize("width", [37, 64, 70])
def test_what_memory_held_before_is_in_no_product(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_of_nan(tensor: Tensor, *shape: int) -> Tensor:
        return tensor.new_full(shape, float("nan"))

    monkeypatch.setattr(Tensor, "new_empty", full_of_nan)
    found = cpu.linear(
        torch.ones(40, width).bfloat16(), cpu.pack_linear(torch.ones(13, width).bfloat16())
    )
    assert found.eq(width).all()


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


# Of the second the kernels read the layout.
SIZES = pytest.mark.parametrize(("hidden", "ffn"), [(8, 5), (96, 64)])


@SIZES
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_broken_expert_reaches_only_rows_that_use_it(share: float, hidden: int, ffn: int) -> None:
    gate_up, down = (torch.randn(4, *s).bfloat16() for s in ((2 * ffn, hidden), (hidden, ffn)))
    x = torch.randn(3, hidden).bfloat16()
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


@SIZES
@pytest.mark.parametrize(
    ("dtype", "share", "order", "has_biases"),
    cover_pairs(DTYPES, [0.0, 0.5], [(0, 3, 2), (3, 1, 0), (2, 3, 0, 1), (1, 0)], [True, False]),
)
def test_rebuilt_experts_compute_like_fresh_ones(
    order: tuple[int, ...],
    share: float,
    has_biases: bool,
    dtype: torch.dtype,
    hidden: int,
    ffn: int,
) -> None:
    gate_up, down = (torch.randn(4, *s).to(dtype) for s in ((2 * ffn, hidden), (hidden, ffn)))
    x, slots = torch.randn(5, hidden).to(dtype), torch.tensor([[0, 1]] * 5, dtype=torch.int32)
    weights = torch.rand(5, 2)

    def compute(experts: PackedExperts) -> Tensor:
        return cpu.grouped_mlp(x, slots, weights, experts).out

    biases = [torch.randn(4, size).to(dtype) for size in (2 * ffn, hidden)]

    def biases_of(*experts: int) -> Biases | None:
        return (biases[0][[*experts]], biases[1][[*experts]]) if has_biases else None

    def pack(*held: int) -> PackedExperts:
        return cpu.pack_experts(
            gate_up[[*held]],
            down[[*held]],
            share_per_row=share,
            biases=biases_of(*held),
            activation=CLAMPED if has_biases else SWIGLU,
        )

    experts = pack(0, 1, 2)
    before = compute(experts)
    own = (biases[0][3], biases[1][3]) if has_biases else None
    new = ExpertMatrices(gate_up[3], down[3], biases=own)
    rebuilt = finish(cpu.rebuild_experts(experts, [new if e == 3 else e for e in order]))
    fresh = pack(*order)
    assert rebuilt.num_experts == len(order)
    assert torch.equal(compute(rebuilt), compute(fresh))
    # The old ones still give their results, and share the experts that stay.
    assert torch.equal(compute(experts), before)
    assert not torch.equal(compute(rebuilt), before)
    if not experts.joined and 2 in order:
        assert rebuilt.down[order.index(2)] is experts.down[2]
    with pytest.raises(AssertionError):
        finish(cpu.rebuild_experts(experts, [ExpertMatrices(gate_up[3], down[3].T)]))

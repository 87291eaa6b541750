"""The grouped MLP's kernels against the reference on the dequantised matrices."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference
from kernels.runtime import NoSync
from kernels.triton.grouped_mlp import launches as triton_grouped_mlp
from kernels.triton.grouped_mlp.launches import (
    DOWN,
    FEW_PAIRS,
    GATE_UP,
    MlpShape,
    MlpTiles,
    default_tiles,
)
from kernels.triton.grouped_mlp.weights import (
    FORMATS,
    GROUP,
    GpuExperts,
    GpuWeight,
    pack_weight,
    unpack_weight,
)
from kernels.triton.ops import TritonOps
from tests.kernels.cases.against_reference import compare_all
from tests.kernels.cases.matrices import slow_rows
from tests.kernels.cases.ops import CLAMPED, OPS
from tests.pairwise import cover_values
from topspin.plan.precision import UNQUANTISED, Format

QUANTISED = FORMATS[1:]


class Case(NamedTuple):
    hidden: Tensor
    slots: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor


def make_case(
    num_rows: int,
    *,
    hidden_size: int,
    ffn_size: int,
    num_experts: int,
    top_k: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Build a case in which expert 1 gets no row and some pairs have slot -1."""
    rng = torch.Generator().manual_seed(num_rows + hidden_size)
    shapes = ((num_experts, 2 * ffn_size, hidden_size), (num_experts, hidden_size, ffn_size))
    gate_up, down = (torch.randn(s, generator=rng) / s[-1] ** 0.5 for s in shapes)
    slots = torch.randint(-1, num_experts, (num_rows, top_k), generator=rng)
    slots[slots == 1] = 0
    hidden = torch.randn(num_rows, hidden_size, generator=rng)
    weights = torch.rand(num_rows, top_k, generator=rng)
    return Case(
        hidden.to(device, dtype),
        slots.int().to(device),
        weights.to(device),
        gate_up.to(device, dtype),
        down.to(device, dtype),
    )


def pack_experts(gate_up: Tensor, down: Tensor, weight_format: Format = UNQUANTISED) -> GpuExperts:
    packed = TritonOps().pack_experts(gate_up, down, formats=[weight_format] * len(down))
    assert isinstance(packed, GpuExperts)
    return packed


def use_tiles(monkeypatch: pytest.MonkeyPatch, **fields: int) -> None:
    """Use the given tiles for every product."""
    tiles = MlpTiles(
        **{
            "block_m": 16,
            "block_n": 32,
            "block_k": 32,
            "group_m": 1,
            "swap": 0,
            "num_warps": 4,
            "num_stages": 2,
            **fields,
        }
    )
    monkeypatch.setattr(triton_grouped_mlp, "default_tiles", lambda *_: tiles)


@pytest.mark.parametrize(
    ("num_rows", "sizes", "swap"),
    # Rows beyond a tile, sizes that no tile divides, one row.
    slow_rows([(35, (72, 40), 0), (6, (64, 32), 1), (35, (72, 40), 1)], beside=[(1, (33, 5), 0)]),
)
def test_any_tiles(
    num_rows: int,
    sizes: tuple[int, int],
    swap: int,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    use_tiles(monkeypatch, swap=swap, group_m=1 + swap)
    row = ("partly absent", num_rows, torch.float32, sizes, 0.0, None, (True, CLAMPED))
    compare_all(OPS["grouped_mlp"], TritonOps(), device, [row])


@pytest.mark.parametrize(
    ("swap", "weight_format"), slow_rows(cover_values([0, 1], QUANTISED), beside=[(1, "int8")])
)
def test_quantised_weights_are_multiplied_as_what_they_stand_for(
    weight_format: Format, swap: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    use_tiles(monkeypatch, swap=swap, block_n=128, block_k=128)
    case = make_case(20, hidden_size=200, ffn_size=136, num_experts=3, top_k=2, device=device)
    experts = pack_experts(case.gate_up, case.down, weight_format)
    found = triton_grouped_mlp.grouped_mlp(*case[:3], experts).out
    if weight_format == "fp8":
        wanted = mlp_in_fp8(case, experts)
        # A unit near the middle of two codes may be rounded either way.
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
        assert (found - wanted).pow(2).mean() < 1e-5 * wanted.pow(2).mean()
        return
    plain = reference.pack_experts(*(map(unpack_weight, ws) for ws in lists(experts)))
    wanted = reference.grouped_mlp(*case[:3], plain).out
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def lists(experts: GpuExperts) -> tuple[list[GpuWeight], list[GpuWeight]]:
    return experts.gate_up, experts.down  # type: ignore[return-value]


def through_fp8(x: Tensor) -> Tensor:
    """Round groups of 128 of x [R, I] to e4m3 by their greatest number."""
    groups = F.pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)[:, : x.shape[1]]


def mlp_in_fp8(case: Case, experts: GpuExperts) -> Tensor:
    rows = through_fp8(case.hidden)
    total = torch.zeros_like(case.hidden)
    for row, (slots, weights) in enumerate(zip(case.slots.tolist(), case.weights, strict=True)):
        for slot, weight in zip(slots, weights, strict=True):
            if slot >= 0:
                gate_up, down = (unpack_weight(ws[slot]) for ws in lists(experts))
                units = reference.swiglu(rows[row : row + 1] @ gate_up.T)
                total[row] += (through_fp8(units) @ down.T)[0] * weight
    return total


# The error of uniform rounding: a step of the range of 128 normal numbers over sqrt(12).
ERRORS = {"none": 1e-9, "fp8": 0.03, "int8": 0.01, "int4": 0.12, "mxfp4": 0.13}


@pytest.mark.parametrize(("weight_format", "shape"), cover_values(FORMATS, [(2 * 72, 200), (2, 1)]))
def test_formats_keep_matrices(
    weight_format: Format, shape: tuple[int, int], device: torch.device
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
    packed = pack_weight(weight, weight_format, halves=2)
    assert (packed.out_features, packed.in_features) == shape
    error = (unpack_weight(packed) - weight).pow(2).mean() / weight.pow(2).mean()
    assert error.sqrt() < ERRORS[weight_format]
    constant = torch.full(shape, 0.5, device=device)
    kept = unpack_weight(pack_weight(constant, weight_format, halves=2))
    torch.testing.assert_close(kept, constant, rtol=1e-2, atol=0.0)
    zeros = torch.zeros(shape, device=device)
    assert unpack_weight(pack_weight(zeros, weight_format)).abs().max() < 1e-8


def test_sizes_of_formats() -> None:
    weight = torch.zeros(256, 512)
    even = 32 / 128
    sizes = {"fp8": 8 + even / 128, "int8": 8 + even, "int4": 4 + even, "mxfp4": 4 + 8 / 32}
    for weight_format, bits in sizes.items():
        packed = pack_weight(weight, weight_format)
        assert packed.scales is not None
        assert 8 * (packed.data.nbytes + packed.scales.nbytes) == bits * weight.numel()


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [1, 3])
def test_few_pairs_need_no_grouping(
    top_k: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """One expert has several tiles of pairs, a row chooses an expert twice: the same bits."""
    case = make_case(
        FEW_PAIRS // top_k, hidden_size=32, ffn_size=16, num_experts=3, top_k=top_k, device=device
    )
    assert (case.slots == 0).sum() > 16
    experts = pack_experts(case.gate_up, case.down)
    with NoSync():
        few = triton_grouped_mlp.grouped_mlp(*case[:3], experts)
    monkeypatch.setattr(triton_grouped_mlp, "FEW_PAIRS", 0)
    grouped = triton_grouped_mlp.grouped_mlp(*case[:3], experts)
    assert torch.equal(few.out, grouped.out)
    assert torch.equal(few.counts, grouped.counts)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_default_tiles_are_possible(weight_format: Format) -> None:
    dtypes, rows = (torch.float32, torch.bfloat16), (1, 32, 256, 1024, 2048, 8192)
    for op, dtype, num_rows in itertools.product((GATE_UP, DOWN), dtypes, rows):
        shape = MlpShape(weight_format, dtype, 128, 2048, 768, 8, num_rows)
        tiles = default_tiles(op, shape)
        # A step has one group of inputs, and an fp8 tile outputs of one block.
        assert weight_format == "none" or tiles.block_k == GROUP
        assert weight_format != "fp8" or tiles.block_n <= GROUP
        assert weight_format != "fp8" or op == DOWN or tiles.block_n == GROUP
        # the smallest size that tl.dot takes
        assert min(tiles.block_m, tiles.block_n, tiles.block_k // 2) >= 16
        # Weights are the left factor where there are few rows: 64 fill an instruction.
        assert not tiles.swap or tiles.block_n >= 64

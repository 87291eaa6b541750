"""Products with quantised weights against torch's with the dequantised matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.runtime import NoSync
from kernels.triton.grouped_mlp.weights import FORMATS, GpuWeight, pack_weight, unpack_weight
from kernels.triton.linear.launches import LinearTiles, linear, tiled_linear
from tests.pairwise import cover_values
from topspin.plan.precision import Format

QUANTISED = FORMATS[1:]
# A sum of bf16 products is exact in fp32 except for the order; the result is rounded once.
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2**-8, "atol": 2e-5},
}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(x: Tensor, weight: GpuWeight, bias: Tensor | None) -> Tensor:
    """Multiply in fp64, where the order of summation makes no noticeable difference."""
    wide = x.double() @ unpack_weight(weight).double().T
    return (wide if bias is None else wide + bias.double()).float()


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "weight_format"),
    [
        pytest.param(*shape, weight_format, marks=pytest.mark.slow)
        if weight_format == "mxfp4"
        else (*shape, weight_format)
        for shape, weight_format in cover_values(
            [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)],
            QUANTISED,
        )
    ],
)
def test_by_default_tiles(
    weight_format: Format, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device
) -> None:
    """Rows, inputs and outputs that no tile divides."""
    weight = pack_weight((draw(70, 200) / 14).to(device, dtype), weight_format)
    for num_rows in (0, 1, 19):
        x = draw(num_rows, 208, seed=1).to(device, dtype)[:, 4:204]
        bias = draw(70, seed=2).to(device, dtype) if num_rows == 19 else None
        wide = torch.full((num_rows, 80), 7.0, dtype=out_dtype, device=device)
        with NoSync():
            found = linear(x, weight, bias, wide[:, :70])
        torch.testing.assert_close(found.float(), product(x, weight, bias), **TOLERANCE[out_dtype])
        assert (wide[:, 70:] == 7).all()
        if out_dtype == dtype:
            assert torch.equal(linear(x, weight, bias), found)


TILES = [
    LinearTiles(16, 32, group_m=1, splits=3),
    LinearTiles(32, 64, group_m=2, swap=0, splits=9),
]


@pytest.mark.parametrize(
    ("tiles", "weight_format"),
    [
        row if row[1] not in ("int8", "mxfp4") else pytest.param(*row, marks=pytest.mark.slow)
        for row in cover_values(TILES, FORMATS)
    ],
)
def test_any_tiles_and_splits(
    weight_format: Format, tiles: LinearTiles, device: torch.device
) -> None:
    """Five groups of inputs in up to nine splits, some of them shorter or empty."""
    weight = pack_weight((draw(40, 640) / 25).to(device), weight_format)
    x, bias = draw(17, 640, seed=1).to(device), draw(40, seed=2).to(device)
    for given in (None, bias):
        found = tiled_linear(x, weight, given, tiles=tiles)
        torch.testing.assert_close(found, product(x, weight, given), rtol=1e-5, atol=2e-5)
    assert torch.equal(found, tiled_linear(x, weight, bias, tiles=tiles))


@pytest.mark.parametrize("block_n", [64, 128])
def test_each_block_of_fp8_has_its_own_scale(block_n: int, device: torch.device) -> None:
    sizes = torch.linspace(1, 9, 300)[:, None] * torch.linspace(1, 9, 260)
    weight = pack_weight((draw(300, 260) * sizes / 80).to(device), "fp8")
    x = draw(3, 260, seed=1).to(device)
    found = tiled_linear(x, weight, tiles=LinearTiles(block_n=block_n))
    torch.testing.assert_close(found, product(x, weight, None), rtol=1e-5, atol=1e-4)


def test_a_big_matrix_is_quantised_in_pieces(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    matrix = draw(70, 130).to(device)
    whole = {mode: pack_weight(matrix, mode) for mode in ("int8", "int4")}
    monkeypatch.setattr("kernels.triton.grouped_mlp.weights.NUMBERS_AT_ONCE", 16 * 130)
    for mode, wanted in whole.items():
        found = pack_weight(matrix, mode)
        assert torch.equal(found.data, wanted.data)
        assert found.scales is not None
        assert wanted.scales is not None
        assert torch.equal(found.scales, wanted.scales)
        assert found.scales.is_contiguous()

"""Conversions and products inside kernels against torch's, for every kind of number."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels.triton.runtime import FP8_MAX, as_rows, dot, rounded


@triton.jit
def _round_all(x: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, rounded(tl.load(x + place), out.dtype.element_ty))


@triton.jit
def _multiply(a: tl.tensor, b: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    rows, columns = tl.arange(0, BLOCK)[:, None] * BLOCK, tl.arange(0, BLOCK)[None, :]
    zero = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    product = dot(tl.load(a + rows + columns), tl.load(b + rows + columns), zero)
    tl.store(out + rows + columns, product)


def numbers(device: torch.device) -> torch.Tensor:
    """8192 numbers: all sizes and signs, and ties between neighbours of bf16 and of fp8."""
    rng = torch.Generator().manual_seed(0)
    drawn = torch.randn(4096, generator=rng) * torch.logspace(-30, 2, 4096)
    bf16 = torch.arange(0x3F80, 0x3F80 + 2048).to(torch.int16).view(torch.bfloat16).float()
    fp8 = torch.arange(126, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    fp8 = torch.cat((fp8, (fp8[1:] + fp8[:-1]) / 2, torch.zeros(1)))
    ties = torch.cat((bf16 + bf16 * 2.0**-8, fp8, -fp8))
    every = torch.cat((drawn, ties, drawn))[:8192]
    return every.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rounding_is_torchs(dtype: torch.dtype, device: torch.device) -> None:
    x = numbers(device)
    assert len(x) == 8192
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-FP8_MAX, FP8_MAX)
    out = torch.zeros(len(x), dtype=dtype, device=device)
    _round_all[(8,)](x, out, BLOCK=1024)
    assert torch.equal(out.float(), x.to(dtype).float())


def test_fp8_saturates(device: torch.device) -> None:
    x = torch.tensor([1e9, -1e9, 449.0, -470.0], device=device)
    out = torch.zeros(4, dtype=torch.float8_e4m3fn, device=device)
    _round_all[(1,)](x, out, BLOCK=4)
    assert out.float().tolist() == [448.0, -448.0, 448.0, -448.0]


def test_nan_stays_one_in_fp8(device: torch.device) -> None:
    x = torch.tensor([float("nan"), 1.0, -float("nan"), 500.0], device=device)
    out = torch.zeros(4, dtype=torch.float8_e4m3fn, device=device)
    _round_all[(1,)](x, out, BLOCK=4)
    assert out.float().isnan().tolist() == [True, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_accumulated_in_fp32(dtype: torch.dtype, device: torch.device) -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 32, generator=rng).to(device, dtype) for _ in range(2))
    out = torch.zeros(32, 32, device=device)
    _multiply[(1,)](a, b, out, BLOCK=32)
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


def test_rows_are_views() -> None:
    x = torch.zeros(3, 4, 5)
    for part in (x, x[:, 1:3], x[0], x[0, 0], x[None]):
        rows = as_rows(part, "x")
        assert rows.ndim == 3
        assert rows.data_ptr() == part.data_ptr()
        assert rows.numel() == part.numel()
    with pytest.raises(ValueError, match=r"keys: the last dimension.*\(3, 5, 4\)"):
        as_rows(x.transpose(1, 2), "keys")

"""RMSNorm kernels against the reference, bit for bit except for the order of a row's sum."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.triton import norm as triton_norm
from tests.pairwise import cover_pairs, cover_values

TOLERANCE = {
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    # One unit in the last place, where another order of the fp32 sum changes a rounding.
    torch.bfloat16: {"rtol": 2**-7, "atol": 0.0},
}
DTYPES = [torch.float32, torch.bfloat16]


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    rng = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=rng) * 3).to(device, dtype)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    cover_values(DTYPES, [(0, 8), (1, 576), (7, 37), (3, 5, 64), (2, 2, 2, 10), (33,)]),
)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x, weight = draw(shape, dtype, device), draw(shape[-1:], dtype, device)
    wanted = reference.rms_norm(x, weight, eps=1e-5)
    torch.testing.assert_close(
        triton_norm.rms_norm(x, weight, eps=1e-5), wanted, **TOLERANCE[dtype]
    )
    out = torch.full_like(x, float("nan"))
    assert triton_norm.rms_norm(x, weight, eps=1e-5, out=out) is out
    torch.testing.assert_close(out, wanted, **TOLERANCE[dtype])


def test_epsilon_counts_for_small_rows(device: torch.device) -> None:
    x, weight = torch.full((1, 4), 1e-4, device=device), torch.ones(4, device=device)
    wanted = reference.rms_norm(x, weight, eps=1e-5)
    torch.testing.assert_close(triton_norm.rms_norm(x, weight, eps=1e-5), wanted)


@pytest.mark.parametrize(
    ("x_dtype", "dtype", "shape"), cover_pairs(DTYPES, DTYPES, [(1, 33), (5, 128)])
)
def test_add_rms_norm(
    shape: tuple[int, int], dtype: torch.dtype, x_dtype: torch.dtype, device: torch.device
) -> None:
    x, residual = draw(shape, x_dtype, device), draw((shape[0] + 1, shape[1]), dtype, device)[1:]
    weight = draw(shape[1:], dtype, device)
    kept = residual.clone()
    wanted = reference.add_rms_norm(x, kept, weight, eps=1e-6)
    result = triton_norm.add_rms_norm(x, residual, weight, eps=1e-6)
    assert torch.equal(residual, kept)
    torch.testing.assert_close(result, wanted, **TOLERANCE[dtype])


def test_views_of_wider_buffers_are_normed_in_place(device: torch.device) -> None:
    wide = draw((3, 6, 40), torch.bfloat16, device)
    kept, weight = wide.clone(), draw((40,), torch.bfloat16, device)
    wanted = reference.rms_norm(wide[:, 1:4], weight, eps=1e-6)
    triton_norm.rms_norm(wide[:, 1:4], weight, eps=1e-6, out=wide[:, 1:4])
    torch.testing.assert_close(wide[:, 1:4], wanted, **TOLERANCE[torch.bfloat16])
    assert torch.equal(wide[:, 0], kept[:, 0])
    assert torch.equal(wide[:, 4:], kept[:, 4:])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight = draw((4, 8), torch.float32, device), draw((8,), torch.float32, device)
    with pytest.raises(ValueError, match=r"weight \(4,\) for rows of 8"):
        triton_norm.rms_norm(x, weight[:4], eps=1e-6)
    with pytest.raises(ValueError, match=r"contiguous.*strides \(1, 8\)"):
        triton_norm.rms_norm(draw((8, 8), torch.float32, device).T, weight, eps=1e-6)
    with pytest.raises(ValueError, match=r"bfloat16.*weight of torch.float32"):
        triton_norm.rms_norm(x.bfloat16(), weight, eps=1e-6)
    with pytest.raises(ValueError, match=r"shapes differ: \(4, 8\)"):
        triton_norm.rms_norm(x, weight, eps=1e-6, out=x[:2])
    with pytest.raises(ValueError, match=r"residual must be \[T, H\]"):
        triton_norm.add_rms_norm(x[None], x[None], weight, eps=1e-6)

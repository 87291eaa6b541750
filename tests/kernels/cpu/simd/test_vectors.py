"""Vector operations lane by lane, against torch in fp64 and torch's own rounding."""

from __future__ import annotations

import torch

from kernels.cpu.compiled.runtime import Kernel, launch, offsets
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors

INPUT, OUTPUT, ROUNDED, COUNT = offsets(4)


@Kernel
def _apply(block: int) -> None:
    """Write exp and the bf16 rounding of COUNT vectors."""
    for idx in range(simd.read_i64(block + COUNT)):
        value = vectors.load_f32(simd.read_i64(block + INPUT) + 64 * idx)
        vectors.store_f32(simd.read_i64(block + OUTPUT) + 64 * idx, vectors.exp(value))
        vectors.store_bf16(simd.read_i64(block + ROUNDED) + 32 * idx, value)


def apply(x: torch.Tensor, kernel: Kernel = _apply) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.numel() % 16 == 0
    result, rounded = torch.empty_like(x), torch.empty_like(x, dtype=torch.bfloat16)
    words = (x.data_ptr(), result.data_ptr(), rounded.data_ptr(), x.numel() // 16)
    launch(kernel, words, num_threads=1)
    return result, rounded


def test_exp_is_within_two_units() -> None:
    x = torch.linspace(-86.9, 87.9, 160_000)
    result, _ = apply(x)
    relative = (result.double() / x.double().exp() - 1).abs().max()
    assert relative < 2.0**-22
    assert apply(torch.zeros(16))[0].eq(1).all(), "exp(0) is not 1"


def test_exp_at_the_ends() -> None:
    ends = torch.tensor([-87.5, -1e30, -torch.inf, torch.nan] * 4)
    result, _ = apply(ends)
    assert result[:3].eq(0).all()
    assert result[3].isnan()


def test_rounding_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (160_000,), generator=generator).int()
    x = bits.view(torch.float32)
    x[:16] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, torch.inf, -torch.inf] * 4)  # ties
    _, rounded = apply(x)
    numbers = ~x.isnan()
    assert torch.equal(rounded[numbers], x.bfloat16()[numbers])
    assert rounded[~numbers].isnan().all()


@Kernel
def _weigh(block: int) -> None:
    """Write exp2 and its rounding as a weight of COUNT vectors."""
    for idx in range(simd.read_i64(block + COUNT)):
        value = vectors.exp2(vectors.load_f32(simd.read_i64(block + INPUT) + 64 * idx))
        vectors.store_f32(simd.read_i64(block + OUTPUT) + 64 * idx, value)
        vectors.store_weights(simd.read_i64(block + ROUNDED) + 32 * idx, value)


def test_exp2_and_its_weights() -> None:
    x = torch.linspace(-124.9, 126.9, 160_000)
    x[:16] = torch.tensor([torch.nan, -torch.inf, -126.5, -1e30] * 4)
    result, rounded = apply(x, _weigh)
    assert result[:16].view(4, 4)[:, 0].isnan().all()
    assert rounded[:16].view(4, 4)[:, 0].isnan().all()
    assert (result[:16].view(4, 4)[:, 1:] < 2.0**-124).all()
    relative = (result.double() / x.double().exp2() - 1).abs()[16:].max()
    assert relative < 2.0**-13
    assert torch.equal(rounded[16:], result.bfloat16()[16:])

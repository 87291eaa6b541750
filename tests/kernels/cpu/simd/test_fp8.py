"""fp8 numbers of compiled kernels: torch's float8_e4m3fn, but for what is beyond the greatest."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu.compiled.gathered_rows import gather_widened
from kernels.cpu.compiled.runtime import Kernel, launch, offsets
from kernels.cpu.simd import fp8, vectors
from kernels.cpu.simd import lanes as simd

FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16]
NUMBERS, CODES, COUNT = offsets(3)
ROWS, PITCH, HEADS, STRIDE, NUM_HEADS, SIZE, IS_BF16, LISTED = offsets(8)


@Kernel
def _narrow(block: int) -> None:
    """Round COUNT fp32 numbers."""
    count = simd.read_i64(block + COUNT)
    for begin in range(0, count, simd.LANES):
        number = vectors.load_first_f32(simd.read_i64(block + NUMBERS) + 4 * begin, count - begin)
        fp8.store_first_fp8(simd.read_i64(block + CODES) + begin, number, count - begin)


@Kernel
def _widen(block: int) -> None:
    rows, pitch = simd.read_i64(block + ROWS), simd.read_i64(block + PITCH)
    heads, stride = simd.read_i64(block + HEADS), simd.read_i64(block + STRIDE)
    count, size = simd.read_i64(block + NUM_HEADS), simd.read_i64(block + SIZE)
    if simd.read_i64(block + IS_BF16):
        if simd.read_i64(block + LISTED):
            fp8.widen_listed_bf16(rows, pitch, heads, stride, count, size)
        else:
            fp8.widen_bf16(rows, pitch, heads, stride, count, size)
    elif simd.read_i64(block + LISTED):
        fp8.widen_listed_f32(rows, pitch, heads, stride, count, size)
    else:
        fp8.widen_f32(rows, pitch, heads, stride, count, size)


def narrow(numbers: Tensor) -> Tensor:
    codes = torch.full((len(numbers) + 2,), 99, dtype=torch.uint8)
    launch(_narrow, (numbers.data_ptr(), codes.data_ptr(), len(numbers)), num_threads=1)
    assert codes[-2:].tolist() == [99, 99], "more was written"
    return codes[:-2].view(FP8)


def check_all() -> None:
    """Compare all numbers of both dtypes, for the processor that this runs on."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16).float()
    # Halfway between two codes, and the numbers beside that.
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    ties = (codes[1:] + codes[:-1]) / 2
    beside = [ties, *(torch.nextafter(ties, torch.tensor(end)) for end in (0.0, 500.0))]
    for some in (numbers, torch.cat([*beside, *(-each for each in beside)])):
        wanted = some.clamp(-448, 448).to(FP8)
        found = narrow(some)
        assert torch.equal(found.float().isnan(), some.isnan())
        kept = ~some.isnan()
        assert torch.equal(found.view(torch.uint8)[kept], wanted.view(torch.uint8)[kept])
    cache = torch.arange(256, dtype=torch.uint8).view(FP8).view(16, 4, 2, 2)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for dtype in DTYPES:
        found, wanted = gather_widened(cache, slots, dtype), cache.flatten(0, 1).to(dtype)[slots]
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
        for size in (2, 16, 34, 62, 64, 80, 130, 256):
            check_heads(size, dtype)


def check_heads(size: int, dtype: torch.dtype) -> None:
    """Widen five heads, apart and listed; the last ends where memory ends."""
    count, stride, page = 5, size + 6, mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * page)
    held = torch.frombuffer(memory, dtype=torch.uint8)
    assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(held.data_ptr() + page), page, 0)
    codes = torch.randint(256, (count, stride), generator=torch.Generator().manual_seed(size))
    first = page - (count - 1) * stride - size
    held[first:page] = codes.flatten()[: page - first].to(torch.uint8)
    wanted = codes[:, :size].to(torch.uint8).view(FP8).to(dtype)
    heads = held.data_ptr() + first
    places = torch.arange(count) * stride
    for step, is_listed in ((stride, 0), (places.data_ptr(), 1)):
        rows = torch.full((count, size + 2), 7.0, dtype=dtype)
        pitch = rows.stride(0) * rows.itemsize
        is_bf16 = int(dtype == torch.bfloat16)
        words = (rows.data_ptr(), pitch, heads, step, count, size, is_bf16, is_listed)
        launch(_widen, words, num_threads=1)
        torch.testing.assert_close(rows[:, :size], wanted, rtol=0, atol=0, equal_nan=True)
        assert bool((rows[:, size:] == 7).all()), "more was written"


def test_all_numbers() -> None:
    check_all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_reference_stores(dtype: torch.dtype) -> None:
    """torch alone makes NaN of numbers beyond 464."""
    numbers = torch.tensor([1.05, -500.0, 1e30, float("-inf"), float("nan"), 2.0**-10])
    rows = numbers.to(dtype).view(1, 2, 3)
    caches = [torch.zeros(2, 2, 2, 3, dtype=dtype).to(FP8) for _ in range(2)]
    reference.write_kv(rows, -rows, caches[0], caches[1], torch.tensor([3]))
    wanted = torch.tensor([1.0, -448.0, 448.0, -448.0, float("nan"), 0.0])
    for cache, sign in zip(caches, (1, -1), strict=True):
        kept = cache.float()
        torch.testing.assert_close(kept[1, 1].flatten(), sign * wanted, equal_nan=True)
        assert not kept[0].any()

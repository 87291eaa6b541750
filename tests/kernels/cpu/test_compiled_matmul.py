"""The compiled products of few rows against an fp32 computation, over odd shapes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels.cpu import ops as cpu
from kernels.cpu.compiled import matmul as numba_matmul
from kernels.cpu.compiled.matmul import (
    MAX_ROWS,
    address_of,
    can_multiply,
    linear_of_rows,
    packs_blocks,
)
from kernels.cpu.matmul import can_prepack
from kernels.cpu.simd.lanes import cpu_has
from tests.kernels.matrices import values_then_pairs

needs_blocks = pytest.mark.skipif(
    not (packs_blocks() or (can_prepack(torch.bfloat16) and cpu_has("avx512bf16"))),
    reason="this processor leaves bf16 to torch",
)
needs_onednn = pytest.mark.skipif(
    not can_prepack(torch.bfloat16), reason="oneDNN does not pack bf16 on this processor"
)
needs_our_packing = pytest.mark.skipif(
    not packs_blocks(), reason="oneDNN packs bf16 on this processor"
)
pytestmark = needs_blocks


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("with_bias", "shape"),
    values_then_pairs(
        [False, True], [(1, 2), (13, 38), (64, 32), (100, 72), (384, 576), (65, 1024)]
    ),
)
def test_shapes(shape: tuple[int, int], with_bias: bool) -> None:
    num_out, num_in = shape
    weight = torch.randn(num_out, num_in).bfloat16()
    bias = torch.randn(num_out).bfloat16() if with_bias else None
    packed = cpu.pack_linear(weight)
    assert packed.address, "oneDNN's layout is not the one that the kernel reads"
    for num_rows in (*range(1, 14), 16, 17, MAX_ROWS):
        wide = torch.randn(num_rows, num_in + 6).bfloat16()
        x = wide[:, 3:-3]
        result = linear_of_rows(x, packed.address, num_out, bias)
        wanted = x.float() @ weight.float().T
        if bias is not None:
            wanted += bias.float()
        # Half a unit in bf16's last place, and the cancellation error of fp32 sums.
        torch.testing.assert_close(result.float(), wanted, rtol=2.0**-8, atol=1e-4)


def test_rows_and_threads_do_not_change_a_bit() -> None:
    packed = cpu.pack_linear(torch.randn(200, 96).bfloat16())
    x = torch.randn(MAX_ROWS, 96).bfloat16()
    torch.set_num_threads(1)
    together = linear_of_rows(x, packed.address, 200, None)
    torch.set_num_threads(3)
    for first, last in ((0, 1), (1, 3), (3, 8), (8, 20), (20, 24), (24, 31), (31, MAX_ROWS)):
        alone = linear_of_rows(x[first:last], packed.address, 200, None)
        assert torch.equal(alone, together[first:last])


@pytest.mark.parametrize("num_rows", [1, 5, MAX_ROWS + 3])
def test_an_fp32_result_is_rounded_to_bf16(num_rows: int) -> None:
    """The sums are written to where they are wanted, with the reference's rounding."""
    packed = cpu.pack_linear(torch.randn(100, 72).bfloat16())
    x, bias = torch.randn(num_rows, 72).bfloat16(), torch.randn(100).bfloat16()
    wide = torch.full((num_rows, 120), 7.0)
    out = wide[:, 10:110]
    assert cpu.linear(x, packed, bias, out) is out
    assert torch.equal(out, cpu.linear(x, packed, bias).float())
    assert bool((wide[:, :10] == 7).all())
    assert bool((wide[:, 110:] == 7).all())
    # What the kernel does not write is copied.
    across, double = torch.empty(100, num_rows).t(), torch.empty(num_rows, 100).double()
    for other in (across, double):
        assert cpu.linear(x, packed, bias, other) is other
        assert torch.equal(other.float(), out)


@needs_our_packing
@pytest.mark.parametrize("num_rows", [MAX_ROWS + 1, 3 * MAX_ROWS])
def test_any_number_of_rows(num_rows: int) -> None:
    """Also rows whose numbers are not next to each other."""
    weight = torch.randn(150, 72).bfloat16()
    x = torch.randn(72, num_rows).bfloat16().t()
    result = cpu.linear(x, cpu.pack_linear(weight))
    wanted = x.float() @ weight.float().T
    torch.testing.assert_close(result.float(), wanted, rtol=2.0**-8, atol=1e-4)


@needs_our_packing
def test_what_is_not_packed_as_it_is() -> None:
    """A weight at an odd place of its memory, and one with an odd number of inputs."""
    memory = torch.randn(1 + 70 * 34).bfloat16()
    weight = memory[1:].view(70, 34)
    packed = cpu.pack_linear(weight)
    assert packed.packed
    x = torch.randn(3, 34).bfloat16()
    wanted = x.float() @ weight.float().T
    torch.testing.assert_close(cpu.linear(x, packed).float(), wanted, rtol=2.0**-8, atol=1e-4)
    assert not cpu.pack_linear(memory[: 70 * 33].view(70, 33)).packed


@needs_onednn
def test_an_unknown_layout_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    other = torch.ops.mkldnn._reorder_linear_weight(weight.flip(0))
    assert address_of(weight, other) == 0
    assert address_of(weight[:, :63], other) == 0
    assert address_of(weight[:, :32], other) == 0

    def refuse(*_: object) -> None:
        raise AssertionError("the kernel was called")

    monkeypatch.setattr(numba_matmul, "linear_of_rows", refuse)
    monkeypatch.setattr(numba_matmul, "address_of", lambda *_: 0)
    wanted = torch.nn.functional.linear(x, weight)
    assert torch.equal(cpu.linear(x, cpu.pack_linear(weight)), wanted)


def test_what_the_kernel_does_not_take() -> None:
    x = torch.randn(4, 32).bfloat16()
    assert can_multiply(x)
    assert not can_multiply(x.float())
    assert not can_multiply(x[:0])
    assert not can_multiply(x.t())
    assert not can_multiply(x.expand(2, 4, 32))
    assert can_multiply(torch.zeros(MAX_ROWS + 1, 32).bfloat16()) == packs_blocks()

"""The compiled products of few rows: their bits, and the layouts that they read."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import ops as cpu
from kernels.cpu.compiled.matmul import linear as numba_matmul
from kernels.cpu.compiled.matmul.linear import (
    MAX_ROWS,
    address_of,
    can_multiply,
    linear_of_rows,
    packs_blocks,
)
from kernels.cpu.matmul import can_prepack
from kernels.cpu.simd.lanes import cpu_has

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


def test_rows_and_threads_do_not_change_a_bit() -> None:
    packed = cpu.pack_linear(torch.randn(200, 96).bfloat16())
    assert packed.address, "oneDNN's layout is not the one that the kernel reads"
    x = torch.randn(MAX_ROWS, 96).bfloat16()
    torch.set_num_threads(1)
    together = linear_of_rows(x, packed.address, 200, None)
    torch.set_num_threads(3)
    for first, last in ((0, 1), (1, 3), (3, 8), (8, 20), (20, 24), (24, 31), (31, MAX_ROWS)):
        alone = linear_of_rows(x[first:last], packed.address, 200, None)
        assert torch.equal(alone, together[first:last])


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

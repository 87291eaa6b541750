"""The compiled experts' MLPs: a row's bits, and what the kernel takes."""

from __future__ import annotations

import torch

from kernels.cpu import ops as cpu
from kernels.cpu.compiled.matmul.experts import can_run, mlp_of_rows
from tests.kernels.cases.against_reference import HOST
from tests.kernels.cases.ops import Maker, routed
from tests.kernels.cpu.compiled.test_matmul import needs_blocks

pytestmark = needs_blocks


def matrices(num_experts: int, hidden: int, ffn: int) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = torch.randn(num_experts, 2 * ffn, hidden) * hidden**-0.5
    down = torch.randn(num_experts, hidden, ffn) * ffn**-0.5
    return gate_up.bfloat16(), down.bfloat16()


def test_rows_and_threads_do_not_change_a_bit() -> None:
    packed = cpu.pack_experts(*matrices(8, 96, 64))
    x = torch.randn(20, 96).bfloat16()
    slots, weights = routed(Maker(HOST), 20, 8, routes="partly absent")
    torch.set_num_threads(1)
    together = mlp_of_rows(x, slots, weights, packed, torch.empty_like(x)).out
    torch.set_num_threads(3)
    for row in range(20):
        part = slice(row, row + 1)
        out = torch.empty_like(x[part])
        alone = mlp_of_rows(x[part], slots[part], weights[part], packed, out).out
        assert torch.equal(alone, together[part])


def test_what_the_kernel_does_not_take() -> None:
    packed = cpu.pack_experts(*matrices(2, 32, 33))
    assert packed.addresses is None, "an expert that is no multiple of a block"
    x, slots = torch.zeros(2, 32).bfloat16(), torch.zeros(2, 1, dtype=torch.int32)
    weights = torch.ones(2, 1)
    assert can_run(x, slots, weights, x)
    assert not can_run(x.float(), slots, weights, x)
    assert not can_run(x, slots.long(), weights, x)
    assert not can_run(x[:0], slots[:0], weights[:0], x[:0])
    assert not can_run(x, slots, weights.double(), x)

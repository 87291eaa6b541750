"""Experts of any formats on the CPU and a GPU: the reference on what their weights stand for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kernels import deterministic, reference
from kernels.contracts import Biases, ExpertMatrices, LinearWeight, PackedExperts
from kernels.cpu import ops as cpu
from kernels.cpu.quantised import QuantisedOps, QuantisedWeight
from kernels.dispatch import Ops
from kernels.experts.mixed import MixedExperts
from kernels.runtime import NoSync
from kernels.triton.grouped_mlp.weights import GpuWeight, unpack_weight
from kernels.triton.ops import TritonOps
from tests.kernels.cases.matrices import slow_rows, values_then_pairs
from tests.kernels.cases.ops import CLAMPED
from tests.kernels.cases.quantised import dequantise
from tests.kernels.cpu.test_matmul import unpacked
from tests.kernels.generators import finish
from tests.pairwise import few
from topspin.expert_activation import SWIGLU
from topspin.plan.precision import Format

HIDDEN, WIDTH = 72, 64
MIXED: list[Format] = ["int4", "none", "int8", "mxfp4", "none", "int8"]


class Kernels(NamedTuple):
    ops: Ops
    device: torch.device
    meant: Callable[[LinearWeight], Tensor]
    """Returns the matrix that a weight stands for, in fp32."""

    def formats(self, asked: Sequence[Format]) -> list[Format]:
        """Return `asked`, in which int8 is for fp8 where that is not there."""
        return [each if each != "fp8" or self.ops.name == "triton" else "int8" for each in asked]

    def tolerance(self, formats: Sequence[Format], dtype: torch.dtype) -> float:
        """Return the error of a result over its size."""
        if "fp8" in formats:  # whose rows are rounded too
            return 0.08
        if self.ops.name == "cpu":  # rows in 8 bits, before both products
            return 0.03
        return 1e-5 if dtype == torch.float32 else 0.01


def meant_on_cpu(weight: LinearWeight) -> Tensor:
    if isinstance(weight, QuantisedWeight):
        return dequantise(weight)
    return unpacked(weight).float()


def meant_on_gpu(weight: LinearWeight) -> Tensor:
    assert isinstance(weight, GpuWeight)
    return unpack_weight(weight).float()


def kernels_of(name: str, device: torch.device) -> Kernels:
    if name == "triton":
        return Kernels(TritonOps(), device, meant_on_gpu)
    ops = {"cpu": QuantisedOps(), "reference": reference, "deterministic": deterministic}[name]
    return Kernels(ops, torch.device("cpu"), meant_on_cpu)


@pytest.fixture(params=few(["cpu", "triton"], "cpu"))
def kernels(request: pytest.FixtureRequest, device: torch.device) -> Kernels:
    return kernels_of(request.param, device)


def draw(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return gate_up and down of so many experts."""
    gate_up = torch.randn(count, 2 * WIDTH, HIDDEN) / HIDDEN**0.5
    down = torch.randn(count, HIDDEN, WIDTH) / WIDTH**0.5
    return gate_up.to(device, dtype), down.to(device, dtype)


def rows(
    num_rows: int, num_experts: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rows; the last one has no expert here."""
    slots = torch.randint(-1, num_experts, (num_rows, 3), dtype=torch.int32)
    slots[-1:] = -1
    x = torch.randn(num_rows, HIDDEN).to(device, dtype)
    return x, slots.to(device), torch.rand(num_rows, 3).to(device)


def plain(kernels: Kernels, experts: PackedExperts) -> PackedExperts:
    matrices = (map(kernels.meant, each) for each in (experts.gate_up, experts.down))
    return reference.pack_experts(*matrices).completed(experts.biases, experts.activation)


def draw_biases(count: int, device: torch.device) -> Biases:
    return torch.randn(count, 2 * WIDTH).to(device), torch.randn(count, HIDDEN).to(device)


@pytest.mark.parametrize(
    ("asked", "num_rows", "dtype", "has_biases"),
    values_then_pairs(
        [
            ["int4"] * 6,
            ["int8"] * 6,
            ["fp8"] * 6,
            ["mxfp4"] * 6,
            MIXED,
            ["none", "fp8", "none", "int8", "fp8", "none"],
        ],
        [9, 0, 1, 40],
        [torch.float32, torch.bfloat16],
        [True, False],
    ),
)
def test_experts_are_those_of_what_their_weights_stand_for(
    kernels: Kernels, asked: list[Format], num_rows: int, dtype: torch.dtype, has_biases: bool
) -> None:
    ops, formats = kernels.ops, kernels.formats(asked)
    experts = ops.pack_experts(
        *draw(6, dtype, kernels.device),
        formats=formats,
        biases=draw_biases(6, kernels.device) if has_biases else None,
        activation=CLAMPED if has_biases else SWIGLU,
    )
    assert [weight.weight_format for weight in experts.down] == formats
    x, slots, weights = rows(num_rows, 6, dtype, kernels.device)
    with NoSync() if ops.name == "triton" else nullcontext():
        found = ops.grouped_mlp(x, slots, weights, experts, out=x.new_empty(x.shape).float())
        narrow = ops.grouped_mlp(x, slots, weights, experts)
    assert narrow.out.dtype == dtype
    if ops.name == "cpu":
        assert torch.equal(narrow.out, found.out.to(dtype))
    else:  # experts' parts are kept in the dtype of the result
        torch.testing.assert_close(narrow.out.float(), found.out, rtol=2**-6, atol=2**-6)
    if num_rows:
        wanted = reference.grouped_mlp(x.float(), slots, weights, plain(kernels, experts))
        assert torch.equal(found.counts, wanted.counts)
        error = (found.out - wanted.out).norm()
        assert error <= kernels.tolerance(formats, dtype) * wanted.out.norm()
        assert not found.out[-1].any()


@pytest.mark.parametrize(
    ("name", "asked"),
    slow_rows(
        product(["triton"], [["int4"] * 6, ["fp8"] * 6, MIXED, ["none"] * 6]),
        beside=[
            *product(["cpu"], [MIXED, ["none"] * 6, ["int4"] * 6, ["int8"] * 6]),
            *product(["reference", "deterministic"], [["none"] * 6]),
        ],
    ),
)
def test_rebuilt_experts_compute_as_fresh_ones(
    name: str, asked: list[Format], device: torch.device
) -> None:
    """From one format to several and back; what stays has its memory, what is new is a piece."""
    kernels = kernels_of(name, device)
    ops, formats = kernels.ops, kernels.formats(asked)
    gate_up, down = draw(6, torch.bfloat16, kernels.device)
    biases = draw_biases(6, kernels.device)

    def fresh(experts: list[int]) -> PackedExperts:
        wanted = [formats[each] for each in experts]
        own = (biases[0][experts], biases[1][experts])
        return ops.pack_experts(gate_up[experts], down[experts], formats=wanted, biases=own)

    held = [0, 3]
    experts = fresh(held)
    orders = [[3, 4, 5, 0], [4, 2, 5, 4], [1, 4], [4], [0, 4]]
    # An interpreted product takes a second.
    for order in orders[1:4:2] if name == "triton" else orders:
        slots = [
            held.index(each)
            if each in held
            else ExpertMatrices(
                gate_up[each], down[each], formats[each], (biases[0][each], biases[1][each])
            )
            for each in order
        ]
        num_new = len(set(order) - set(held))
        assert sum(1 for _ in ops.rebuild_experts(experts, slots)) >= num_new
        changed = finish(ops.rebuild_experts(experts, slots))
        assert changed.num_experts == len(order)
        for new, slot in enumerate(slots):
            if isinstance(slot, int):
                assert changed.down[new].data is experts.down[slot].data
        held, experts = order, changed
        batch = rows(9, len(held), torch.bfloat16, kernels.device)
        ours, theirs = (ops.grouped_mlp(*batch, each) for each in (experts, fresh(held)))
        assert torch.equal(ours.out, theirs.out)
        assert torch.equal(ours.counts, theirs.counts)
        if name == "cpu":
            kinds = {formats[each] != "none" for each in held}
            assert isinstance(experts, MixedExperts) == (len(kinds) > 1)
    own = (biases[0][0], biases[1][0])
    for wrong in (
        ExpertMatrices(gate_up[0], down[0].T, formats[0], own),
        ExpertMatrices(gate_up[0], down[0], formats[0]),
    ):
        with pytest.raises(AssertionError):
            finish(ops.rebuild_experts(experts, [wrong]))


def test_one_format_is_what_its_own_ops_make() -> None:
    device = torch.device("cpu")
    gate_up, down = draw(6, torch.bfloat16, device)
    batch = rows(5, 6, torch.bfloat16, device)
    ours = QuantisedOps().pack_experts(gate_up, down, share_per_row=0.5)
    theirs = cpu.pack_experts(gate_up, down, share_per_row=0.5)
    assert ours.joined == theirs.joined
    assert torch.equal(
        QuantisedOps().grouped_mlp(*batch, ours).out, cpu.grouped_mlp(*batch, theirs).out
    )

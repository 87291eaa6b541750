"""Coded matrices keep their codes in kernels' formats, or are quantised as their numbers are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.contracts import ExpertMatrices
from kernels.cpu.quantised import QuantisedOps, QuantisedWeight
from kernels.cpu.simd.integers import GROUP as CPU_GROUP
from kernels.triton.grouped_mlp.weights import GROUP as GPU_GROUP
from kernels.triton.grouped_mlp.weights import GpuWeight, pack_weight, unpack_weight
from kernels.triton.ops import TritonOps
from models.quantised.coded import StoredMatrix, stacked
from tests.kernels.cases.quantised import dequantise
from tests.kernels.generators import finish
from topspin.plan.precision import (
    CODE_GROUPS,
    E2M1_INTEGERS,
    E2M1_ZERO,
    MXFP4_BITS,
    MXFP4_GROUP,
    Format,
)

# By kernels: their packing of a matrix, and the numbers [O, I] of the result.
KERNELS: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]] = {
    "cpu": (QuantisedOps().pack_linear, dequantise),
    "triton": (pack_weight, unpack_weight),
}


def integers(
    num_out: int, num_in: int, *, bits: int, group: int, seed: int = 0, mantissa: int = 8
) -> StoredMatrix:
    """Return random codes; scales have `mantissa` bits, of which bf16 holds 8."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = -(-num_in // group)
    most = 1 << bits
    low = 1 << (mantissa - 1)
    wide = torch.randint(low, 2 * low, (num_out, num_groups), generator=generator)
    return StoredMatrix(
        codes=torch.randint(0, most, (num_out, num_in), generator=generator).byte(),
        scales=wide / 2.0**16,
        zeros=torch.full((num_out, num_groups), most / 2),
        group=group,
        bits=bits,
        dtype=torch.float32,
    )


def floats(num_out: int, num_in: int, *, block: int, group: int, seed: int = 0) -> StoredMatrix:
    """Return random fp8 codes with a scale per `block` outputs and `group` inputs."""
    generator = torch.Generator().manual_seed(seed)
    size = (-(-num_out // block), -(-num_in // group))
    scales = torch.rand(size, generator=generator).repeat_interleave(block, dim=0)[:num_out]
    codes = (torch.randn(num_out, num_in, generator=generator) * 90).to(torch.float8_e4m3fn)
    return StoredMatrix(codes, scales, None, group, 8, torch.float32)


def e2m1(num_out: int, num_in: int, *, seed: int = 0) -> StoredMatrix:
    """Return random codes and powers of two as mxfp4 has them."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(0, 16, (num_out, num_in), generator=generator)
    size = (num_out, -(-num_in // MXFP4_GROUP))
    return StoredMatrix(
        codes=torch.tensor(E2M1_INTEGERS, dtype=torch.uint8)[places],
        scales=2.0 ** torch.randint(-40, 9, size, generator=generator),
        zeros=torch.full(size, float(E2M1_ZERO)),
        group=MXFP4_GROUP,
        bits=MXFP4_BITS,
        dtype=torch.float32,
    )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_in", [256, 200, 20])
def test_mxfp4_is_kept_exactly(kernels: str, num_in: int) -> None:
    """Also what is rounded to it: its own numbers, but for a group without its greatest ones."""
    pack, numbers = KERNELS[kernels]
    matrix = e2m1(40, num_in)
    packed = pack(matrix, "mxfp4")
    assert packed.weight_format == "mxfp4"
    assert torch.equal(numbers(packed), matrix.dequantised())
    whole = matrix.dequantised()
    whole[:, ::MXFP4_GROUP] = 6 * 2 * matrix.scales
    assert torch.equal(numbers(pack(whole, "mxfp4")), whole)
    other = integers(40, num_in, bits=4, group=32)
    assert torch.equal(numbers(pack(other, "mxfp4")), numbers(pack(other.dequantised(), "mxfp4")))


def test_products_with_mxfp4_have_the_bits_of_its_integers() -> None:
    """In 8 bits, as kernels without e2m1 multiply them."""
    matrix, ops = e2m1(70, 200), QuantisedOps()
    x = torch.randn(9, 200, generator=torch.Generator().manual_seed(4))
    four, eight = (ops.pack_linear(matrix, each) for each in ("mxfp4", "int8"))
    assert torch.equal(ops.linear(x, four), ops.linear(x, eight))


def test_groups_are_those_of_the_kernels() -> None:
    assert CODE_GROUPS == {"cpu": CPU_GROUP, "triton": GPU_GROUP}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("bits", "weight_format", "group"),
    [(4, "int4", 128), (4, "int8", 256), (8, "int8", 128), (8, "int8", 1000)],
)
@pytest.mark.parametrize("num_in", [256, 200])
def test_symmetric_codes_with_bf16_scales_are_kept_exactly(
    kernels: str, bits: int, weight_format: Format, group: int, num_in: int
) -> None:
    pack, numbers = KERNELS[kernels]
    matrix = integers(40, num_in, bits=bits, group=group)
    packed = pack(matrix, weight_format)
    assert packed.weight_format == weight_format
    assert torch.equal(numbers(packed), matrix.dequantised())


@pytest.mark.parametrize("kernels", KERNELS)
def test_other_scales_and_zeros_are_rounded_to_bf16(kernels: str) -> None:
    pack, numbers = KERNELS[kernels]
    matrix = integers(40, 256, bits=4, group=128, mantissa=11)
    assert matrix.zeros is not None
    generator = torch.Generator().manual_seed(1)
    matrix.zeros.copy_(torch.randint(0, 16, matrix.zeros.shape, generator=generator))
    wide = matrix.scales.repeat_interleave(128, dim=1)
    error = (numbers(pack(matrix, "int4")) - matrix.dequantised()).abs()
    # Codes and zeros up to 15, each times a step or a low that is off by 2 ** -9 at most.
    assert (error <= 2 * 16 * wide * 2.0**-9).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("matrix", "weight_format"),
    [
        (integers(40, 256, bits=8, group=128), "int4"),
        (integers(40, 256, bits=4, group=16), "int4"),
        (floats(40, 256, block=128, group=128), "int8"),
    ],
)
def test_what_a_format_cannot_have_is_quantised_anew(
    kernels: str, matrix: StoredMatrix, weight_format: Format
) -> None:
    pack, numbers = KERNELS[kernels]
    found = numbers(pack(matrix, weight_format))
    assert torch.equal(found, numbers(pack(matrix.dequantised(), weight_format)))
    assert not torch.equal(found, matrix.dequantised())


@pytest.mark.parametrize("kernels", KERNELS)
def test_8_bits_add_little_to_the_errors_of_codes_that_they_cannot_have(kernels: str) -> None:
    pack, numbers = KERNELS[kernels]
    true = torch.randn(256, 512, generator=torch.Generator().manual_seed(6))
    scales = true.abs().amax(1, keepdim=True) / 448.0
    fp8 = StoredMatrix((true / scales).to(torch.float8_e4m3fn), scales, None, 512, 8, true.dtype)
    groups = true.view(256, -1, 16)
    steps = (groups.amax(-1) - groups.amin(-1)) / 15
    zeros = -groups.amin(-1) / steps
    codes = (groups / steps[..., None] + zeros[..., None]).round().byte().flatten(1)
    int4 = StoredMatrix(codes, steps, zeros, 16, 4, true.dtype)
    for matrix in (fp8, int4):
        own = (matrix.dequantised() - true).square().mean()
        added = (numbers(pack(matrix, "int8")) - matrix.dequantised()).square().mean()
        assert added < 0.1 * own


@pytest.mark.parametrize(("block", "group"), [(128, 128), (256, 256), (1000, 1000)])
def test_fp8_blocks_are_kept_exactly(block: int, group: int) -> None:
    matrix = floats(200, 320, block=block, group=group)
    packed = pack_weight(matrix, "fp8")
    assert torch.equal(unpack_weight(packed), matrix.dequantised())
    gate_up = stacked([matrix, floats(200, 320, block=block, group=group, seed=1)])
    assert gate_up is not None
    assert torch.equal(unpack_weight(pack_weight(gate_up, "fp8", halves=2)), gate_up.dequantised())


def test_fp8_with_a_scale_per_output_is_quantised_anew() -> None:
    matrix = floats(200, 320, block=1, group=1000)
    found = pack_weight(matrix, "fp8")
    again = pack_weight(matrix.dequantised(), "fp8")
    assert torch.equal(unpack_weight(found), unpack_weight(again))


@pytest.mark.parametrize(("ffn_size", "form"), [(64, "int4"), (40, "int4"), (40, "mxfp4")])
def test_experts_keep_their_codes(ffn_size: int, form: Format) -> None:
    """At start, and in a later table: there the same expert computes the same."""
    hidden_size = 96
    gate_up = [integers(2 * ffn_size, hidden_size, bits=4, group=32, seed=e) for e in range(3)]
    down = [integers(hidden_size, ffn_size, bits=4, group=1000, seed=9 + e) for e in range(3)]
    if form == "mxfp4":
        gate_up = [e2m1(2 * ffn_size, hidden_size, seed=e) for e in range(3)]
        down = [e2m1(hidden_size, ffn_size, seed=9 + e) for e in range(3)]
    ops = QuantisedOps()
    experts = ops.pack_experts(gate_up, down, formats=[form] * 3)
    for packed, matrix in zip((*experts.gate_up, *experts.down), (*gate_up, *down), strict=True):
        assert isinstance(packed, QuantisedWeight)
        assert torch.equal(dequantise(packed), matrix.dequantised())
    new = ExpertMatrices(gate_up[1], down[1], form)
    rebuilt = finish(ops.rebuild_experts(experts, [2, new]))
    x = torch.randn(5, hidden_size, generator=torch.Generator().manual_seed(4))
    slots, weights = torch.tensor([[0, 1]] * 5), torch.ones(5, 2)
    before = ops.grouped_mlp(x, torch.tensor([[2, 1]] * 5), weights, experts).out
    assert torch.equal(ops.grouped_mlp(x, slots, weights, rebuilt).out, before)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 9])
def test_codes_around_their_middle_need_no_lows(num_rows: int) -> None:
    """The same numbers with lows take more bytes and give the same products, also in one expert."""
    hidden_size, ffn_size = 96, 40
    gate_up = integers(2 * ffn_size, hidden_size, bits=4, group=32)
    down = integers(hidden_size, ffn_size, bits=4, group=32, seed=1)
    with_lows = [replace(each, zeros=None, lows=-8 * each.scales) for each in (gate_up, down)]
    ops = QuantisedOps()
    x = torch.randn(num_rows, hidden_size, generator=torch.Generator().manual_seed(2))
    short, long = (ops.pack_linear(each, "int4") for each in (gate_up, with_lows[0]))
    assert short.data.nbytes * 20 == long.data.nbytes * 18
    assert torch.equal(ops.linear(x, short), ops.linear(x, long))
    slots, weights = torch.zeros(num_rows, 1, dtype=torch.int32), torch.ones(num_rows, 1)
    found = [
        ops.grouped_mlp(x, slots, weights, ops.pack_experts([up], [down], formats=["int4"])).out
        for up, down in [(gate_up, down), (with_lows[0], down), (gate_up, with_lows[1])]
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_triton_experts_are_packed_from_codes() -> None:
    gate_up = [integers(2 * 64, 256, bits=4, group=128, seed=e) for e in range(2)]
    down = [integers(256, 64, bits=4, group=1000, seed=9 + e) for e in range(2)]
    experts = TritonOps().pack_experts(gate_up, down, formats=["int4"] * 2)
    for packed, matrix in zip((*experts.gate_up, *experts.down), (*gate_up, *down), strict=True):
        assert isinstance(packed, GpuWeight)
        assert torch.equal(unpack_weight(packed), matrix.dequantised())

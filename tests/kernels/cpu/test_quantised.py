"""Quantised weights against fp32 products of the dequantised matrices."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from kernels import deterministic, reference
from kernels.contracts import PackedExperts
from kernels.cpu import ops as cpu
from kernels.cpu.quantised import BITS, QuantisedOps, QuantisedWeight, quantise
from kernels.cpu.recorder import CpuRuntime
from kernels.dispatch import select_ops
from tests.kernels.cases.matrices import values_then_pairs
from tests.kernels.cases.quantised import dequantise
from topspin.errors import ConfigError
from topspin.plan.precision import Format

MODES = sorted(BITS)
EVEN: tuple[Format, ...] = ("int4", "int8")
"""Formats whose numbers are evenly spaced, around any middle."""
# Rows are rounded to steps of 1/127 of a group's largest number: an error of half a step at most.
ROW_TOLERANCE = 0.01


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Return the root mean square of the difference over that of `theirs`."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def as_codes(x: Tensor) -> Tensor:
    """Return x [R, I] rounded as in the kernels: groups of 32, in 127ths of the largest."""
    num_in = x.shape[1]
    padded = torch.nn.functional.pad(x.double(), (0, -num_in % 32))
    groups = padded.view(len(x), -1, 32)
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((groups / scale).round() * scale).flatten(1)[:, :num_in]


def make_experts(
    formats: Sequence[Format], hidden: int, width: int, dtype: torch.dtype
) -> PackedExperts:
    return QuantisedOps().pack_experts(
        (torch.randn(len(formats), 2 * width, hidden) / hidden**0.5).to(dtype),
        (torch.randn(len(formats), hidden, width) / width**0.5).to(dtype),
        formats=formats,
    )


@pytest.mark.parametrize(
    ("dtype", "shape"),
    values_then_pairs(
        [torch.float32, torch.bfloat16], [(1, 1), (16, 32), (7, 33), (40, 100), (129, 64)]
    ),
)
def test_eight_bits_lose_little_and_four_less_than_q4_0(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """On bell-shaped weights, in whole groups, the squared error is at most 0.8 of Q4_0's."""
    weight = torch.randn(shape).to(dtype)
    assert relative(dequantise(quantise(weight, "int8")), weight) < 0.006
    ours = relative(dequantise(quantise(weight, "int4")), weight)
    assert ours < 0.09
    if shape[1] % 32 == 0:
        kind = GGMLQuantizationType.Q4_0
        theirs = quants.dequantize(quants.quantize(weight.float().numpy(), kind), kind)
        assert ours**2 < 0.8 * relative(torch.from_numpy(theirs), weight) ** 2


def test_mxfp4_rounds_as_llama_cpp() -> None:
    """Also groups of zeros, and of numbers that are far from one another."""
    weight = torch.randn(50, 96) * torch.logspace(-9, 9, 50)[:, None]
    weight[3], weight[4, ::7] = 0, 1e-20
    kind = GGMLQuantizationType.MXFP4
    theirs = torch.from_numpy(quants.dequantize(quants.quantize(weight.numpy(), kind), kind))
    assert torch.equal(dequantise(quantise(weight, "mxfp4")), theirs)


@pytest.mark.parametrize(("mode", "bits"), [(mode, BITS[mode]) for mode in EVEN])
def test_weights_on_a_grid_of_their_own_are_kept(mode: Format, bits: int) -> None:
    """For any low and step: bf16 numbers of few digits are kept exactly."""
    codes = torch.randint(0, 2**bits, (24, 3, 32)).float()
    codes[..., 0], codes[..., 1] = 0, 2**bits - 1
    step = torch.tensor([0.25, 0.5, 1.0])[None, :, None]
    low = torch.randint(-8, 8, (24, 3, 1)).float()
    weight = (codes * step + low).flatten(1)
    assert torch.equal(dequantise(quantise(weight, mode)), weight)


@pytest.mark.parametrize(("mode", "value"), values_then_pairs(EVEN, [0.0, 1.0, -0.375, 1e-38]))
def test_groups_of_one_value_are_kept(mode: Format, value: float) -> None:
    weight = torch.full((5, 40), value)
    assert torch.equal(dequantise(quantise(weight, mode)), weight.bfloat16().float())


@pytest.mark.parametrize(
    ("mode", "shape", "num_rows"),
    values_then_pairs(MODES, [(1, 1), (16, 32), (33, 70), (100, 256)], [1, 2, 3, 5, 8, 9, 17, 64]),
)
def test_linear_is_the_product_of_the_dequantised_weight(
    mode: Format, shape: tuple[int, int], num_rows: int
) -> None:
    """Only the rows are rounded: the product of the rounded rows is met up to fp32's rounding."""
    num_out, num_in = shape
    ops = QuantisedOps()
    weight = ops.pack_linear(torch.randn(num_out, num_in), mode)
    assert isinstance(weight, QuantisedWeight)
    x, bias = torch.randn(num_rows, num_in), torch.randn(num_out)
    whole = dequantise(weight).double()
    ours = ops.linear(x, weight, bias)
    assert ours.shape == (num_rows, num_out)
    exact = as_codes(x) @ whole.T + bias
    # A number halfway between two codes may be rounded either way: one such step in one product.
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=0.05)
    assert relative(ours, exact) < 1e-3
    assert relative(ours, x.double() @ whole.T + bias) < 2 * ROW_TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_linear_of_bf16_rows(mode: Format) -> None:
    ops = QuantisedOps()
    weight = ops.pack_linear(torch.randn(50, 96).bfloat16(), mode)
    assert isinstance(weight, QuantisedWeight)
    x, bias = torch.randn(11, 96).bfloat16(), torch.randn(50).bfloat16()
    wide = ops.linear(x, weight, bias, torch.empty(11, 50))
    assert relative(wide, x.float() @ dequantise(weight).T + bias) < ROW_TOLERANCE
    assert torch.equal(ops.linear(x, weight, bias), wide.bfloat16())
    scattered = torch.empty(50, 11, dtype=torch.bfloat16).T
    assert torch.equal(ops.linear(x, weight, bias, scattered), wide.bfloat16())
    assert torch.equal(ops.linear(x[:, ::2].repeat_interleave(2, 1), weight).isnan(), wide.isnan())


@pytest.mark.parametrize("mode", MODES)
def test_products_are_recorded(mode: Format, caplog: pytest.LogCaptureFixture) -> None:
    """Also of rows with a remainder, a bias of the model's dtype, and inputs that change."""
    caplog.set_level(logging.INFO, logger="recordings")
    ops, runtime = QuantisedOps(), CpuRuntime()
    weight = ops.pack_linear(torch.randn(50, 100).bfloat16(), mode)
    experts = make_experts([mode] * 4, 100, 40, torch.bfloat16)
    x, bias = torch.randn(3, 100).bfloat16(), torch.randn(50).bfloat16()
    slots, weights = torch.tensor([[0, 2], [3, -1], [1, 0]], dtype=torch.int32), torch.rand(3, 2)
    logits, sums = torch.empty(3, 50), torch.empty(3, 100)
    counts: list[Tensor] = []

    def body() -> None:
        ops.linear(x, weight, bias, logits)
        counts[:] = [ops.grouped_mlp(x, slots, weights, experts, out=sums).counts]

    body()
    replay = runtime.capture(body)
    replay()
    assert not caplog.records
    x.copy_(torch.randn(3, 100))
    slots[0, 0] = 1
    for each in (logits, sums, *counts):
        each.fill_(7)
    replay()
    assert torch.equal(logits, ops.linear(x, weight, bias, torch.empty(3, 50)))
    wanted = ops.grouped_mlp(x, slots, weights, experts, out=torch.empty(3, 100))
    assert torch.equal(sums, wanted.out)
    assert torch.equal(counts[0], wanted.counts)


def test_linear_takes_no_rows_and_rows_of_zeros() -> None:
    ops = QuantisedOps()
    weight = ops.pack_linear(torch.randn(20, 64), "int4")
    assert ops.linear(torch.empty(0, 64), weight).shape == (0, 20)
    assert torch.equal(ops.linear(torch.zeros(3, 64), weight), torch.zeros(3, 20))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_spoils_its_row_only(mode: Format, bad: float) -> None:
    ops = QuantisedOps()
    weight = ops.pack_linear(torch.randn(20, 96), mode)
    x = torch.randn(4, 96)
    before = ops.linear(x, weight)
    x[2, 40] = bad
    after = ops.linear(x, weight)
    assert after[2].isnan().all()
    assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("mode", MODES)
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_threads(mode: Format) -> None:
    ops = QuantisedOps()
    weight = ops.pack_linear(torch.randn(90, 160), mode)
    experts = make_experts([mode] * 6, 96, 40, torch.float32)
    x, hidden = torch.randn(21, 160), torch.randn(21, 96)
    slots = torch.randint(-1, 6, (21, 3), dtype=torch.int32)
    weights = torch.rand(21, 3)
    num_threads = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((ops.linear(x, weight), ops.grouped_mlp(hidden, slots, weights, experts)))
    finally:
        torch.set_num_threads(num_threads)
    product, mixed = found[0]
    for other_product, other_mixed in found[1:]:
        assert torch.equal(product, other_product)
        assert torch.equal(mixed.out, other_mixed.out)
    for row in range(0, 21, 5):
        alone = slice(row, row + 1)
        assert torch.equal(ops.linear(x[alone], weight), product[alone])
        result = ops.grouped_mlp(hidden[alone], slots[alone], weights[alone], experts)
        assert torch.equal(result.out, mixed.out[alone])


def test_what_is_quantised_is_smaller() -> None:
    matrix = torch.randn(256, 512).bfloat16()
    ops = QuantisedOps()
    assert not isinstance(ops.pack_linear(matrix), QuantisedWeight)
    sizes: dict[Format, float] = {"int4": 5, "int8": 9, "mxfp4": 4.25}
    for mode, bits in sizes.items():
        assert ops.pack_linear(matrix, mode).data.nbytes == 256 * 512 * bits / 8


@pytest.mark.parametrize(("kernels", "mode"), [("cpu", "fp8"), ("reference", "int4")])
def test_formats_without_kernels_are_refused_by_name(kernels: str, mode: Format) -> None:
    message = (
        f"{kernels} have no weights in {mode}; cpu have int8, int4, mxfp4; "
        "triton have int8, int4, mxfp4, fp8"
    )
    with pytest.raises(ConfigError, match=message):
        select_ops(kernels, torch.bfloat16, ["int4", mode])


def test_plain_kernels_refuse_a_format() -> None:
    matrix = torch.randn(4, 8)
    for ops in (cpu, reference, deterministic):
        with pytest.raises(AssertionError, match="int8"):
            ops.pack_linear(matrix, "int8")
        with pytest.raises(AssertionError, match="int8"):
            ops.pack_experts([matrix], [matrix.T[:, :2]], formats=["int8"])

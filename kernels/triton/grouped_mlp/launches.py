"""The grouped expert MLP on a GPU: the choice of kernels, tiles and buffers.

Per call: the pairs are grouped by expert unless they are few; then rows to fp8 if the weights
are, gate_up with SwiGLU, down, and the sum over choices. Contributions are written per pair and
added in a fixed order, because atomic adds would make a row's last bits depend on timing. They
are kept in the dtype of the result until they are added in fp32. Nothing waits for the device
and no launch depends on the slots' values, so a CUDA graph can replay it for the same number of
rows.

For few rows per expert the weights are the left factor (SWAP), for many the rows are. Called by
`kernels.triton.ops`. Dimension letters as in `kernels.contracts`, and P = R * K pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.contracts import ExpertOutput, Permutation
from kernels.triton.grouped_mlp.kernels import (
    down_tile,
    gate_up_tile,
    quantise_groups,
    sum_choices,
)
from kernels.triton.grouped_mlp.weights import (
    FORMATS,
    GROUP,
    GpuExperts,
    GpuWeight,
)
from kernels.triton.router.launches import permute
from topspin.plan.precision import UNQUANTISED, Format

GATE_UP: Final = "grouped_gate_up"
DOWN: Final = "grouped_down"
SUM_WIDTH: Final = 1024
QUANTISED_AT_ONCE: Final = 8
FEW_PAIRS: Final = 64
"""Up to this many are not grouped: a program scans all of them in less time."""
_POINTEES: Final = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.uint8: tl.uint8,
    torch.int32: tl.int32,
}


@dataclass(frozen=True)
class MlpTiles:
    """A tile of block_m pairs by block_n outputs, and its program's settings."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    swap: int
    num_warps: int
    num_stages: int


class MlpShape(NamedTuple):
    """The parameters that determine the tiles."""

    weight_format: Format
    dtype: torch.dtype
    num_experts: int
    hidden_size: int
    ffn_size: int
    top_k: int
    num_rows: int


def default_tiles(op: str, shape: MlpShape) -> MlpTiles:
    """Return the tiles of a product: chosen by reasoning for Hopper, not measured.

    Few rows per expert: two or more programs per multiprocessor, so that others' copies hide the
    start and end of one. Many: as large as the fp32 sums' registers allow, since the cache's
    bandwidth is the limit; one program per multiprocessor then, so it may use all of the shared
    memory for stages. ptxas spills only in gate_up of fp8 with 128 rows, a little. Quantised
    weights have steps of one group, and fp8 tiles outputs of one block of 128.
    """
    rows_per_expert = shape.num_rows * shape.top_k / shape.num_experts
    is_fp8, is_plain = shape.weight_format == "fp8", shape.weight_format == UNQUANTISED
    is_first = op == GATE_UP
    if shape.dtype == torch.float32:
        return MlpTiles(16, GROUP if is_fp8 else 32, 32 if is_plain else GROUP, 1, 0, 4, 2)
    if rows_per_expert <= 32:
        # A program converts groups of units to fp8, so it must have whole groups.
        narrow = GROUP if is_fp8 else 64
        block_m = 16 if rows_per_expert <= 8 else 32
        stages = 3 if is_fp8 or (is_first and block_m == 16) else 2
        return MlpTiles(block_m, narrow, 128, 1, 1, 4, stages if is_fp8 or is_plain else 4)
    if is_fp8:
        return MlpTiles(64 if rows_per_expert <= 64 else 128, 128, 128, 8, 0, 8, 3)
    if not is_plain:
        return MlpTiles(64, 64, 128, 4, 1, 4, 3)
    if rows_per_expert < 64:
        return MlpTiles(64, 128, 64, 4, 0, 8 if is_first else 4, 3)
    return MlpTiles(128, 128 if is_first else 256, 64, 8, 0, 8, 4)


class _Launch(NamedTuple):
    """The data shared by both products of a call."""

    is_grouped: bool
    experts: GpuExperts
    shape: MlpShape

    def start(self, kernel: Any, op: str, tensors: tuple[Tensor, ...], *strides: int) -> None:
        """Launch `kernel` for a product of the experts, [.., I] to [.., width]."""
        experts, shape = self.experts, self.shape
        weight = (experts.gate_up if op == GATE_UP else experts.down)[0]
        assert isinstance(weight, GpuWeight)
        width = experts.ffn_size if op == GATE_UP else experts.hidden_size
        tiles = default_tiles(op, shape)
        num_pairs = shape.num_rows * shape.top_k
        num_tiles = num_pairs
        few: dict[str, int] = {"P_PAD": triton.next_power_of_2(num_pairs)}
        if self.is_grouped:
            # An expert wastes at most one tile, and one without pairs has no tile.
            num_tiles = num_pairs // tiles.block_m + min(num_pairs, shape.num_experts)
            few["P_PAD"] = 0
        options: dict[str, float] = {}
        if op == GATE_UP:
            activation = experts.activation
            options = {
                "K": shape.top_k,
                "IS_SWIGLU": activation.is_swiglu,
                "ALPHA": activation.alpha,
                "OFFSET": activation.offset,
                "LIMIT": activation.limit,
            }
        bias = tensors[0]  # not read
        if experts.biases is not None:
            bias = experts.biases[0 if op == GATE_UP else 1]
        num_blocks = triton.cdiv(width, tiles.block_n)
        scales = weight.data if weight.scales is None else weight.scales
        kernel[(num_tiles * num_blocks,)](
            *tensors,
            bias,
            num_pairs,
            shape.num_experts,
            experts.hidden_size,
            experts.ffn_size,
            *strides,
            weight.data.stride(0),
            weight.scale_stride,
            num_tiles,
            num_blocks,
            WEIGHT=_POINTEES[weight.data.dtype],
            SCALE=_POINTEES[scales.dtype],
            FORMAT=FORMATS.index(shape.weight_format),
            SWAP=bool(tiles.swap),
            EVEN=weight.in_features % tiles.block_k == 0,
            GROUP_M=tiles.group_m,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=tiles.block_k,
            E_PAD=triton.next_power_of_2(shape.num_experts),
            HAS_BIAS=experts.biases is not None,
            **few,
            **options,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )


def _ungrouped(slots: Tensor, num_experts: int) -> Permutation:
    """Return a buffer for the counts of few pairs, which gate_up writes; the rest is not read."""
    num_pairs = slots.numel()
    assert num_pairs <= FEW_PAIRS, f"{num_pairs} pairs are not grouped"
    new = torch.empty if num_pairs else torch.zeros
    counts = new(num_experts, dtype=torch.int64, device=slots.device)
    return Permutation(slots, slots, counts, slots)


def _quantise_rows(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden [R, H] as e4m3 [R, H], and the scales f32 of its groups of 128."""
    num_rows, width = hidden.shape
    num_groups = triton.cdiv(width, GROUP)
    codes = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=hidden.device)
    scales = torch.empty(num_rows, num_groups, device=hidden.device)
    quantise_groups[(num_rows, triton.cdiv(num_groups, QUANTISED_AT_ONCE))](
        hidden,
        codes,
        scales,
        width,
        hidden.stride(0),
        num_groups,
        GROUPS=QUANTISED_AT_ONCE,
        num_warps=4,
    )
    return codes, scales


def grouped_mlp(
    hidden: Tensor,
    slots: Tensor,
    weights: Tensor,
    experts: GpuExperts,
    *,
    out: Tensor | None = None,
) -> ExpertOutput:
    """Sum each row's local experts; see `kernels.reference.grouped_mlp`.

    Between the two products only the units are rounded, to hidden's dtype or to fp8.
    Raises ValueError for unsupported shapes, dtypes or strides.
    """
    num_rows, top_k = slots.shape
    if out is None:
        out = torch.empty(num_rows, experts.hidden_size, dtype=hidden.dtype, device=hidden.device)
    _check(hidden, slots, weights, experts, out)
    num_pairs, device = num_rows * top_k, hidden.device
    slots, is_grouped = slots.contiguous(), slots.numel() > FEW_PAIRS
    groups = (permute if is_grouped else _ungrouped)(slots, experts.num_experts)
    if num_pairs == 0:
        return ExpertOutput(out.zero_(), groups.counts)
    shape = MlpShape(
        experts.weight_format,
        hidden.dtype,
        experts.num_experts,
        experts.hidden_size,
        experts.ffn_size,
        top_k,
        num_rows,
    )
    launch = _Launch(is_grouped, experts, shape)
    rows, row_scales, unit_dtype = hidden, weights, hidden.dtype
    unit_scales = weights
    if experts.weight_format == "fp8":
        rows, row_scales = _quantise_rows(hidden)
        unit_dtype = rows.dtype
        unit_scales = torch.empty(num_pairs, triton.cdiv(experts.ffn_size, GROUP), device=device)
    units = torch.empty(num_pairs, experts.ffn_size, dtype=unit_dtype, device=device)
    parts = torch.empty(num_pairs, experts.hidden_size, dtype=out.dtype, device=device)
    table, offsets = experts.table, groups.offsets
    launch.start(
        gate_up_tile,
        GATE_UP,
        (rows, row_scales, table, groups.row_of, offsets, units, unit_scales, slots, groups.counts),
        rows.stride(0),
    )
    launch.start(
        down_tile,
        DOWN,
        (units, unit_scales, table, groups.order, offsets, weights.contiguous(), parts, slots),
    )
    sum_choices[(num_rows, triton.cdiv(experts.hidden_size, SUM_WIDTH))](
        parts,
        slots,
        out,
        experts.hidden_size,
        out.stride(0),
        K=top_k,
        BLOCK_H=SUM_WIDTH,
        num_warps=4,
    )
    return ExpertOutput(out, groups.counts)


def _check(
    hidden: Tensor, slots: Tensor, weights: Tensor, experts: GpuExperts, out: Tensor
) -> None:
    num_rows, width = slots.shape[0], experts.hidden_size
    for what, found in (("hidden", hidden), ("out", out)):
        if found.shape != (num_rows, width):
            raise ValueError(f"{what} is {tuple(found.shape)}, not {(num_rows, width)}")
        if width > 1 and found.stride(1) != 1:
            raise ValueError(f"{what}: rows must be contiguous, strides {found.stride()}")
        if found.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{what} is of {found.dtype}, not float32 or bfloat16")
    if weights.shape != slots.shape or weights.dtype != torch.float32:
        raise ValueError(f"weights are {weights.dtype} {tuple(weights.shape)}")
    if experts.weight_format == UNQUANTISED and hidden.dtype != experts.dtype:
        raise ValueError(f"hidden is of {hidden.dtype}, the experts of {experts.dtype}")

"""Compiles kernels of quantised products, and the small ones of a layer, as attention.py does."""

from __future__ import annotations

from typing import Any

import torch

from kernels.triton.counts import _add_counts
from kernels.triton.grouped_mlp.weights import FORMATS, GpuWeight
from kernels.triton.linear.kernels import add_splits, linear_tile
from kernels.triton.linear.launches import default_tiles
from kernels.triton.router.grouping import group_slot
from kernels.triton.router.kernels import local_slots_block
from kernels.triton.swiglu import _swiglu_block
from tests.kernels.triton.hopper.attention import NAMES, compile_kernel
from topspin.plan.precision import Format

DATA = {"none": "*bf16", "fp8": "*fp8e4nv", "int8": "*u8", "int4": "*u8", "mxfp4": "*u8"}
SCALES = {"fp8": "*fp32", "mxfp4": "*i32"}


def compile_linear(weight_format: Format, dtype: torch.dtype, num_rows: int, **ones: int) -> None:
    """Compile a projection of Qwen3-30B-A3B's; Triton makes constants of arguments that are 1."""
    weight = GpuWeight(torch.empty(0), 5120, 2048, packed=True, weight_format=weight_format)
    tiles = default_tiles(weight, dtype, num_rows)
    split = tiles.splits > 1
    pointers = {
        "x_ptr": NAMES[dtype], "weight_ptr": DATA[weight_format], "bias_ptr": NAMES[dtype],
        "scale_ptr": SCALES.get(weight_format, "*bf16"),
        "out_ptr": "*fp32" if split else NAMES[dtype],
    }  # fmt: skip
    constants: dict[str, Any] = {
        "FORMAT": FORMATS.index(weight_format), "SWAP": bool(tiles.swap), "EVEN": not ones,
        "HAS_BIAS": not split, "GROUP_M": tiles.group_m, "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, **ones,
    }  # fmt: skip
    compile_kernel(
        linear_tile, pointers, constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages
    )


def main() -> None:
    for weight_format in FORMATS[1:]:
        for num_rows in (1, 32, 8192):
            compile_linear(weight_format, torch.bfloat16, num_rows)
        compile_linear(weight_format, torch.bfloat16, 1, R=1)
        compile_linear(weight_format, torch.float32, 32)
    sums = {"parts_ptr": "*fp32", "bias_ptr": "*bf16", "out_ptr": "*bf16"}
    for bias in (True, False):
        constants = {"HAS_BIAS": bias, "SPLITS": 4, "BLOCK": 1024}
        compile_kernel(add_splits, sums, constants, num_warps=4)
        compile_kernel(add_splits, sums, {**constants, "R": 1}, num_warps=4)
    for dtype in (torch.bfloat16, torch.float32):
        units = {"gate_up": NAMES[dtype], "out": NAMES[dtype]}
        compile_kernel(_swiglu_block, units, {"BLOCK": 1024}, num_warps=4)
    for num_experts in ({}, {"num_experts": 1}):
        counts = {"totals": "*i64", "counts": "*i64"}
        compile_kernel(_add_counts, counts, {"BLOCK": 256, **num_experts}, num_warps=1)
    pairs = {
        "experts_ptr": "*i64", "slot_of_ptr": "*i32", "num_rows_ptr": "*i64", "slots_ptr": "*i32",
    }  # fmt: skip
    groups = {name: types for name, types in pairs.items() if name == "slots_ptr"}
    groups |= dict.fromkeys(("order_ptr", "row_of_ptr", "counts_ptr", "offsets_ptr"), "*i64")
    compile_kernel(group_slot, groups, {"K": 8, "BLOCK": 1024}, num_warps=4)
    for has_rows in (True, False):
        counted = {"K": 8, "HAS_ROWS": has_rows, "BLOCK": 512}
        compile_kernel(local_slots_block, pairs, counted, num_warps=4)


if __name__ == "__main__":
    main()

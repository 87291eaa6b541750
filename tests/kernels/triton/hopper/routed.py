"""Compiles the router's, grouped MLP's and sampling's kernels for Hopper, as attention.py does."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from kernels.triton.grouped_mlp.kernels import (
    down_tile,
    gate_up_tile,
    quantise_groups,
    sum_choices,
)
from kernels.triton.grouped_mlp.launches import DOWN, GATE_UP, MlpShape, default_tiles
from kernels.triton.grouped_mlp.weights import FORMATS
from kernels.triton.router.kernels import count_block, place_block, route_block
from kernels.triton.router.launches import ELEMENTS_PER_WARP, MAX_WARPS
from kernels.triton.sampling import filters
from kernels.triton.sampling import kernels as sampling
from tests.kernels.triton.hopper.attention import NAMES, compile_kernel
from topspin.expert_activation import SWIGLU, ExpertActivation
from topspin.plan.precision import Format

GROUPING = {
    "hist_ptr": "*i32", "order_ptr": "*i64", "row_of_ptr": "*i64", "counts_ptr": "*i64",
    "offsets_ptr": "*i64", "slots_ptr": "*i32",
}  # fmt: skip
PAIRS = {"K": 8, "K_PAD": 8}


def compile_router(num_experts: int) -> None:
    """Compile the choice of experts: by softmax, and by sigmoids with a bias in groups."""
    outputs = {"bias_ptr": "*fp32", "experts_ptr": "*i64", "weights_ptr": "*fp32"}
    constants = {"RENORMALISE": True, "E_PAD": num_experts, "BLOCK_R": 1, **PAIRS}
    for logits, is_grouped in (("*bf16", False), ("*fp32", True)):
        groups = 8 if is_grouped else 1
        rule = {
            "SCORES": int(is_grouped),
            "HAS_BIAS": is_grouped,
            "GROUPS": groups,
            "GROUP_SIZE": num_experts // groups,
            "TOP_GROUPS": 4 if is_grouped else 1,
            "BEST_OF_GROUP": 2,
            "ROUND": not is_grouped,
        }
        pointers = {"logits_ptr": logits, **outputs}
        compile_kernel(route_block, pointers, {**constants, **rule}, num_warps=1)


def compile_grouping(width: int, block_rows: int, *, single: bool, **ones: int) -> None:
    """Compile the grouping of many pairs; Triton makes constants of arguments that are 1."""
    pairs = {"S_PAD": width, "BLOCK_R": block_rows, **PAIRS, **ones}
    warps = min(max(block_rows * width // ELEMENTS_PER_WARP, 1), MAX_WARPS)
    compile_kernel(count_block, GROUPING, {**pairs, "SINGLE": single}, num_warps=warps)
    compile_kernel(place_block, GROUPING, {**pairs, "CHUNK": 16}, num_warps=warps)


def compile_mlp(
    weight_format: Format,
    dtype: torch.dtype,
    num_rows: int,
    *,
    activation: ExpertActivation = SWIGLU,
    has_biases: bool = False,
    **ones: int,
) -> None:
    """Compile both products with the default tiles of Qwen3-30B-A3B's shape."""
    rows_type = "*fp8e4nv" if weight_format == "fp8" else NAMES[dtype]
    plain = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    weight = {"none": plain, "fp8": tl.float8e4nv}.get(weight_format, tl.uint8)
    scales = {"none": plain, "fp8": tl.float32, "mxfp4": tl.int32}
    scale = scales.get(weight_format, tl.bfloat16)
    shape = MlpShape(weight_format, dtype, 128, 2048, 768, 8, num_rows)
    common = {
        "table_ptr": "*i64", "offsets_ptr": "*i64", "unit_scale_ptr": "*fp32",
        "units_ptr": rows_type, "slots_ptr": "*i32", "bias_ptr": "*fp32",
    }  # fmt: skip
    rows = {
        **common,
        "x_ptr": rows_type,
        "x_scale_ptr": "*fp32",
        "row_of_ptr": "*i64",
        "counts_ptr": "*i64",
    }
    parts = {**common, "order_ptr": "*i64", "weights_ptr": "*fp32", "parts_ptr": NAMES[dtype]}
    for op, kernel, pointers in ((GATE_UP, gate_up_tile, rows), (DOWN, down_tile, parts)):
        tiles = default_tiles(op, shape)
        constants = {
            "WEIGHT": weight, "SCALE": scale, "FORMAT": FORMATS.index(weight_format),
            "SWAP": bool(tiles.swap), "EVEN": True, "GROUP_M": tiles.group_m, "E_PAD": 128,
            "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k,
            # Few pairs are not grouped.
            "P_PAD": 8 * num_rows if num_rows <= 8 else 0, "HAS_BIAS": has_biases,
        }  # fmt: skip
        if op == GATE_UP:
            constants |= {"K": 8, "IS_SWIGLU": activation.is_swiglu, "ALPHA": activation.alpha}
            constants |= {"OFFSET": activation.offset, "LIMIT": activation.limit}
        constants |= {name: one for name, one in ones.items() if name in kernel.arg_names}
        compile_kernel(
            kernel, pointers, constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages
        )


def compile_sampling(**ones: int) -> None:
    """Compile all kernels; Triton makes constants of arguments that are 1, as `ones` are."""

    def compile_(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], **options: int):
        present = {name: one for name, one in ones.items() if name in kernel.arg_names}
        compile_kernel(kernel, pointers, {**constants, **present}, **options)

    batch = {"ints_ptr": "*i64", "reals_ptr": "*fp64"}
    state = {**batch, "best_ptr": "*fp32", "lowest_ptr": "*fp32", "valid_ptr": "*i1"}
    scores = {"scores_ptr": "*fp32"}
    history = {"tokens_ptr": "*i64", "bounds_ptr": "*i64", "seen_ptr": "*i32"}
    compile_(sampling.count_history, history, {"BLOCK": 1024})
    penalties = {**scores, **batch, "logits_ptr": "*bf16", "seen_ptr": "*i32"}
    compile_(sampling.penalise_block, penalties, {"BLOCK": 1024}, enable_fp_fusion=False)
    masks = {"rows_ptr": "*i64", "bits_ptr": "*i32"}
    compile_(sampling.mask_block, {**scores, **masks}, {"BLOCK": 1024})
    maxima = {"maxima_ptr": "*fp32", "places_ptr": "*i32"}
    survey = {**scores, **maxima, "sums_ptr": "*fp32"}
    compile_(sampling.survey_split, survey, {"SUM": True, "BLOCK": 1024})
    rows = {"uniform_ptr": "*fp64", "tokens_ptr": "*i64"}
    settled = {
        **state, **maxima, **rows, "raw_maxima_ptr": "*fp32", "raw_sums_ptr": "*fp32",
        "norm_ptr": "*fp32",
    }  # fmt: skip
    compile_(sampling.settle_row, settled, {"NORM": True, "S_PAD": 32}, num_warps=1)
    tallies = {"tallies_ptr": "*fp64", "prefixes_ptr": "*i64", "sums_ptr": "*fp64"}
    found = {name: state[name] for name in ("ints_ptr", "reals_ptr", "valid_ptr", "lowest_ptr")}
    for mass in (True, False):
        search = {"MASS": mass, "S_PAD": 32}
        compile_(filters.tally_digit, {**scores, **state, **tallies}, {**search, "BLOCK": 256})
        compile_(filters.finish_search, {**found, **tallies}, search)
    weighed = {**scores, **state, "masses_ptr": "*fp64"}
    compile_(sampling.weigh_split, weighed, {"BLOCK": 1024})
    compile_(sampling.invert_row, {**weighed, **rows}, {"S_PAD": 32, "BLOCK": 1024})


def main() -> None:
    compile_router(128)
    compile_grouping(128, 64, single=True)
    compile_grouping(128, 1, single=True, R=1, num_slots=1)
    compile_grouping(256, 16, single=False)
    for weight_format in FORMATS:
        for num_rows in (1, 8, 256, 1024, 8192):
            compile_mlp(weight_format, torch.bfloat16, num_rows)
    for weight_format, num_rows in (
        ("none", 1),
        ("none", 1024),
        ("fp8", 8),
        ("mxfp4", 1),
        ("mxfp4", 256),
    ):
        own = ExpertActivation(1.702, 1.0, 7.0)
        compile_mlp(weight_format, torch.bfloat16, num_rows, activation=own, has_biases=True)
    compile_mlp("none", torch.float32, 1)
    compile_mlp("fp8", torch.bfloat16, 1, E=1, F=1, num_tiles=1, num_blocks=1, weight_stride=1)
    compile_mlp("int4", torch.bfloat16, 1, E=1, H=1, num_tiles=1, num_blocks=1, x_stride=1)
    compile_kernel(sum_choices, {"parts_ptr": "*bf16", "slots_ptr": "*i32", "out_ptr": "*fp32"},
                   {"K": 8, "BLOCK_H": 1024})  # fmt: skip
    quantised = compile_kernel(quantise_groups, {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv",
                               "scale_ptr": "*fp32"}, {"GROUPS": 8})  # fmt: skip
    # The interpreter's minimum keeps a NaN; on the processor that needs an option.
    assert {"min.NaN.f32", "max.NaN.f32"} <= set(quantised.split()), "a NaN becomes a number"
    compile_sampling()
    compile_sampling(R=1, S=1, row_stride=1, num_histories=1)


if __name__ == "__main__":
    main()

"""Triton kernels of products with one weight, plain or quantised; rows are not quantised.

`linear_tile` computes a tile of BLOCK_M rows by BLOCK_N outputs; for few rows the inputs are cut
into SPLITS parts, one program each, whose fp32 sums `add_splits` adds in a fixed order: few
tiles alone leave a GPU idle, and with atomic adds the last bits would depend on timing.
Blocks of 128 inputs are multiplied as in `kernels.triton.grouped_mlp.kernels`: fp8 in the rows'
dtype (exact) with its scale on a block's fp32 sum, codes of int8 and int4 likewise with their
steps and lowest numbers. With SWAP the weight is the left factor. Launched by
`kernels.triton.linear.launches`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.grouped_mlp.kernels import multiply_tile, scale_offsets
from kernels.triton.runtime import rounded


@triton.jit(do_not_specialize=["R"])
def linear_tile(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    R: tl.tensor,
    num_out: tl.tensor,
    num_in: tl.tensor,
    split_size: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    scale_stride: tl.tensor,
    out_stride: tl.tensor,
    FORMAT: tl.constexpr,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Write the products of a tile and of inputs split * split_size .. to out [splits, R, O].

    GROUP_M consecutive tiles of rows use the same outputs, whose weight is then in the cache.
    """
    pid, split = tl.program_id(0), tl.program_id(1)
    num_tiles, num_blocks = tl.cdiv(R, BLOCK_M), tl.cdiv(num_out, BLOCK_N)
    first = pid // (GROUP_M * num_blocks) * GROUP_M
    width = tl.minimum(num_tiles - first, GROUP_M)
    tile = first + pid % (GROUP_M * num_blocks) % width
    block = pid % (GROUP_M * num_blocks) // width
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the last row and output these are computed again, instead of a mask.
    sources = tl.minimum(rows, R - 1).to(tl.int64)
    outputs = tl.minimum(columns, num_out - 1)
    scales = scale_offsets(outputs, block * BLOCK_N, 0, num_out, num_in, FORMAT)
    begin = split * split_size
    end = tl.minimum(begin + split_size, num_in)
    sums = multiply_tile(
        x_ptr, scale_ptr, sources, weight_ptr, outputs, scale_ptr, scales, begin, end, num_in,
        x_stride, weight_stride, scale_stride, FORMAT, False, SWAP, EVEN, BLOCK_M, BLOCK_N,
        BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs).to(tl.float32)[None, :]
    places = (split * R + rows).to(tl.int64)[:, None] * out_stride + columns[None, :]
    inside = (rows < R)[:, None] & (columns < num_out)[None, :]
    tl.store(out_ptr + places, rounded(sums, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["R"])
def add_splits(
    parts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    R: tl.tensor,
    num_out: tl.tensor,
    out_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add parts f32[SPLITS, R, O] in ascending order, and the bias, to out [R, O]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_out
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + (split * R + row) * num_out + columns, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    places = out_ptr + row * out_stride + columns
    tl.store(places, rounded(total, out_ptr.dtype.element_ty), mask=inside)

"""Entries of products with one weight: projections and the LM head, in every weight format.

Weights are cold, as in a step, which reads every layer's once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_kernels import L2_BYTES, Entry, num_copies
from benchmarks.roofline import BF16, FP32, Work
from kernels.triton.grouped_mlp.weights import FORMATS, GROUP, GpuWeight, pack_weight
from kernels.triton.linear.launches import LinearTiles, linear, tiled_linear


class Matrix(NamedTuple):
    """A weight [O, I] of Qwen3-30B-A3B's."""

    name: str
    num_out: int
    num_in: int


QKV: Final = Matrix("qkv", 5120, 2048)
O_PROJECTION: Final = Matrix("o", 2048, 4096)
LM_HEAD: Final = Matrix("lm_head", 151936, 2048)
MATRICES: Final = (QKV, O_PROJECTION, LM_HEAD)
ROWS: Final = (1, 32, 128, 8192)
FORMATS_OF: Final = {QKV: FORMATS, O_PROJECTION: FORMATS, LM_HEAD: ("plain", "fp8", "int8")}
"""The LM head is never in 4 bits."""


def rows_of(matrix: Matrix) -> tuple[int, ...]:
    """Give the numbers of rows: a prompt's chunk has one row for the LM head, its last."""
    return ROWS[:-1] if matrix == LM_HEAD else ROWS


def weight_bytes(matrix: Matrix, weight_format: str) -> int:
    """Count the bytes of a weight: its numbers, and their scales or steps and lowest numbers."""
    num_out, num_in = matrix.num_out, matrix.num_in
    groups = -(-num_in // GROUP)
    if weight_format == "plain":
        return num_out * num_in * BF16
    if weight_format == "fp8":
        return num_out * num_in + -(-num_out // GROUP) * groups * FP32
    codes = num_out * groups * GROUP
    return (codes if weight_format == "int8" else codes // 2) + num_out * groups * 2 * BF16


def linear_work(num_rows: int, matrix: Matrix, weight_format: str) -> Work:
    """Give the work of R rows of bf16; the LM head's results are fp32."""
    result = FP32 if matrix.name == LM_HEAD.name else BF16
    rows = num_rows * (matrix.num_in * BF16 + matrix.num_out * result)
    flops = 2 * num_rows * matrix.num_out * matrix.num_in
    return Work(weight_bytes(matrix, weight_format) + rows, flops)


class Product(NamedTuple):
    """A product with cold weights: call(i, tiles) takes the i-th of `weights`.

    Tiles None: those that the op chooses.
    """

    call: Callable[[int, LinearTiles | None], Tensor]
    weights: list[GpuWeight]


def make_product(
    num_rows: int,
    matrix: Matrix,
    weight_format: str,
    device: torch.device,
    cache_bytes: int = L2_BYTES,
) -> Product:
    """Give the product of R rows, of as many weights as are more than `cache_bytes`."""
    copies = num_copies(weight_bytes(matrix, weight_format), cache_bytes)
    size = (matrix.num_out, matrix.num_in)
    weights = [
        pack_weight(
            torch.randn(size, dtype=torch.bfloat16, device=device) / matrix.num_in**0.5,
            weight_format,
        )
        for _ in range(copies)
    ]
    x = torch.randn(num_rows, matrix.num_in, dtype=torch.bfloat16, device=device)
    dtype = torch.float32 if matrix.name == LM_HEAD.name else torch.bfloat16
    out = torch.empty(num_rows, matrix.num_out, dtype=dtype, device=device)

    def call(idx: int, tiles: LinearTiles | None) -> Tensor:
        weight = weights[idx % copies]
        if tiles is None or not tiles.splits:
            return linear(x, weight, out=out)
        return tiled_linear(x, weight, out=out, tiles=tiles)

    return Product(call, weights)


def linear_entry(
    num_rows: int,
    matrix: Matrix,
    weight_format: str,
    device: torch.device,
    cache_bytes: int = L2_BYTES,
) -> Entry:
    """Give the entry of R rows."""
    product = make_product(num_rows, matrix, weight_format, device, cache_bytes)
    return Entry(
        f"linear {weight_format}",
        f"{matrix.name}: {num_rows} rows, {matrix.num_out} x {matrix.num_in}",
        linear_work(num_rows, matrix, weight_format),
        lambda idx: product.call(idx, None),
        len(product.weights),
    )

"""What the tuner tries for products with one weight: projections, router and LM head.

A plain weight is torch's (cuBLAS's) unless our kernel is faster: its tiles are candidates for
few rows, where reading the weight is all there is to do. Called by benchmarks.gpu_kernels.tune.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Final

import torch
import triton

from benchmarks.gpu_kernels import L2_BYTES
from benchmarks.gpu_kernels.linear import LM_HEAD, O_PROJECTION, QKV, Matrix, make_product
from benchmarks.gpu_kernels.tune import REPLAYS, Target, Task
from benchmarks.gpu_timing import time_call
from kernels.runtime import Runtime
from kernels.triton.grouped_mlp.weights import GROUP
from kernels.triton.linear.launches import OP, LinearTiles, find_tiles, tiles_key

ROUTER: Final = Matrix("router", 128, 2048)
MATRICES: Final = (QKV, O_PROJECTION, ROUTER, LM_HEAD)
ROWS: Final = (1, 32, 128)
MAX_SPLITS: Final = 16
SHARED_BYTES: Final = 227 * 1024


def blocks(
    num_rows: int, matrix: Matrix, weight_format: str, best: LinearTiles
) -> Iterator[LinearTiles]:
    """Propose tiles and how a program works, their inputs split as in `best`."""
    block_m = min(max(triton.next_power_of_2(num_rows), 16), 128)
    depths = (64, GROUP, 256) if weight_format == "plain" else (GROUP,)
    for block_n, block_k, swap in product((16, 32, 64, 128), depths, (0, 1)):
        for num_warps, num_stages in product((4, 8), (2, 3, 4, 5)):
            staged = (block_m + block_n) * block_k * 2 * num_stages
            if staged <= SHARED_BYTES and block_m * block_n // (32 * num_warps) <= 128:
                yield replace(
                    best,
                    block_m=block_m,
                    block_n=block_n,
                    block_k=block_k,
                    swap=swap,
                    splits=best.splits or default_splits(matrix, block_n),
                    num_warps=num_warps,
                    num_stages=num_stages,
                )


def default_splits(matrix: Matrix, block_n: int) -> int:
    """Give splits that make about two programs for each of Hopper's processors."""
    wanted = triton.next_power_of_2(triton.cdiv(264, triton.cdiv(matrix.num_out, block_n)))
    return int(min(wanted, MAX_SPLITS))


def splits(matrix: Matrix, best: LinearTiles) -> Iterator[LinearTiles]:
    """Propose how many programs share the inputs of a tile; none if torch is faster still."""
    if best.splits:
        for count in (1, 2, 4, 8, MAX_SPLITS):
            if count * best.block_k <= matrix.num_in:
                yield replace(best, splits=count)


def linear_target(
    num_rows: int,
    matrix: Matrix,
    weight_format: str,
    runtime: Runtime,
    cache_bytes: int = L2_BYTES,
) -> Target:
    """Give the target of R rows and a weight."""
    made = make_product(num_rows, matrix, weight_format, runtime.device, cache_bytes)
    weight, dtype = made.weights[0], torch.bfloat16

    def time_of(tiles: LinearTiles) -> float:
        return time_call(
            runtime, lambda idx: made.call(idx, tiles), len(made.weights), REPLAYS
        ).median_s

    return Target(
        OP,
        tiles_key(weight, dtype, num_rows),
        find_tiles(weight, dtype, num_rows, runtime.device),
        [partial(blocks, num_rows, matrix, weight_format), partial(splits, matrix)],
        time_of,
    )


def linear_tasks(formats: Sequence[str], runtime: Runtime) -> list[Task]:
    """Give a task for each format, matrix and number of rows."""
    return [
        Task(
            f"linear {weight_format} {matrix.name}, {num_rows} rows",
            partial(linear_target, num_rows, matrix, weight_format, runtime),
        )
        for weight_format in formats
        for matrix in MATRICES
        for num_rows in ROWS
        # The router is never quantised, the LM head never to 4 bits.
        if weight_format == "plain" or matrix in (QKV, O_PROJECTION)
    ]

"""What the tuner tries for the grouped MLP: tiles of both products, by rows and format.

The second product is timed beside the best tiles of the first. Called by
benchmarks.gpu_kernels.tune.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Final

import torch

from benchmarks.gpu_kernels import L2_BYTES
from benchmarks.gpu_kernels.grouped_mlp import (
    QWEN3_30B,
    ROWS,
    Layer,
    draw_routings,
    random_experts,
)
from benchmarks.gpu_kernels.tune import REPLAYS, Target, Task
from benchmarks.gpu_timing import time_call
from kernels.contracts import ExpertOutput
from kernels.runtime import Runtime
from kernels.triton.grouped_mlp.launches import (
    DOWN,
    FEW_PAIRS,
    GATE_UP,
    MlpTiles,
    Shape,
    check_tiles,
    find_tiles,
    run_experts,
)
from kernels.triton.grouped_mlp.weights import GpuExperts
from kernels.triton.router.launches import permute

__all__ = ["QWEN3_30B", "ROWS", "Layer", "candidates", "mlp_tasks", "product_target"]

SHARED_BYTES: Final = 227 * 1024
"""What a program may have on a H100 or H200; elsewhere the compiler refuses the rest."""
MAX_ACCUMULATORS: Final = 160
"""fp32 sums per thread: beyond, registers spill."""
WEIGHT_BYTES: Final = {"plain": 2, "fp8": 1, "int8": 1, "int4": 0.5}
ROW_BYTES: Final = {"plain": 2, "fp8": 1, "int8": 2, "int4": 2}

Timer = Callable[[dict[str, MlpTiles]], float]
"""Gives the time of a call with these tiles by op."""


def candidates(op: str, shape: Shape) -> Iterator[MlpTiles]:
    """Give the tiles that a format and a device like Hopper can have, and that can pay."""
    rows_per_expert = shape.num_rows * shape.top_k / shape.num_experts
    sums = 2 if op == GATE_UP else 1
    for block_m, block_n, block_k, swap in product(
        (16, 32, 64, 128), (64, 128, 256), (64, 128, 256), (0, 1)
    ):
        is_wasteful = block_m > 16 and block_m > 2 * rows_per_expert
        if is_wasteful or 16 * block_m < min(rows_per_expert, 2048):
            continue
        # Wide tiles are for many rows, which are a good left factor; deep ones are for few.
        if (block_n == 256 and block_m < 64) or (swap and block_m == 128):
            continue
        if block_k == 256 and block_m > 16:
            continue
        # Tiles of one expert follow each other, where it has several of them.
        group_m = 1 if rows_per_expert <= block_m else 8
        for num_warps, num_stages in product((4, 8), (2, 3, 4, 5)):
            tiles = MlpTiles(block_m, block_n, block_k, group_m, swap, num_warps, num_stages)
            weights = sums * block_n * WEIGHT_BYTES[shape.weight_format]
            staged = (weights + block_m * ROW_BYTES[shape.weight_format]) * block_k
            per_thread = sums * block_m * block_n / (32 * num_warps)
            too_large = staged * num_stages > SHARED_BYTES or per_thread > MAX_ACCUMULATORS
            if not too_large and is_possible(op, shape, tiles):
                yield tiles


def is_possible(op: str, shape: Shape, tiles: MlpTiles) -> bool:
    """Tell whether the kernel is right with such tiles."""
    try:
        check_tiles(op, shape.weight_format, tiles)
    except ValueError:
        return False
    return True


def product_target(op: str, shape: Shape, tiles: dict[str, MlpTiles], time_of: Timer) -> Target:
    """Give the target of one product; `tiles` has the other's, and takes what is found."""

    def keep(best: MlpTiles) -> None:
        tiles[op] = best

    return Target(
        op,
        shape.key,
        tiles[op],
        [lambda _: candidates(op, shape)],
        lambda candidate: time_of({**tiles, op: candidate}),
        keep,
    )


def gpu_timer(
    shape: Shape,
    layer: Layer,
    experts: GpuExperts,
    runtime: Runtime,
    cache_bytes: int = L2_BYTES,
) -> Timer:
    """Give a timer of calls as a step makes them: recorded, and of experts that are cold."""
    device = runtime.device
    routings = draw_routings(shape.num_rows, layer, shape.weight_format, cache_bytes)
    slots = [each.to(device) for each in routings]
    # Few pairs are not grouped, as in grouped_mlp.
    is_grouped = shape.num_rows * layer.top_k > FEW_PAIRS
    groups = [permute(each, layer.num_experts) if is_grouped else None for each in slots]
    hidden = torch.randn(shape.num_rows, layer.hidden, dtype=shape.dtype, device=device)
    weights = torch.full((shape.num_rows, layer.top_k), 1 / layer.top_k, device=device)
    copies = len(slots)

    def time_of(tiles: dict[str, MlpTiles]) -> float:
        def call(idx: int) -> ExpertOutput:
            turn = idx % copies
            return run_experts(hidden, slots[turn], weights, groups[turn], experts, tiles=tiles)

        return time_call(runtime, call, copies, REPLAYS).median_s

    return time_of


def mlp_tasks(
    formats: Sequence[str], layer: Layer, rows: Sequence[int], runtime: Runtime
) -> list[Task]:
    """Give the tasks of each format and number of rows: gate_up, then down."""
    device = runtime.device
    experts_of = lru_cache(maxsize=1)(partial(random_experts, layer, device=device))

    def tasks_of(weight_format: str, num_rows: int) -> Iterator[Task]:
        shape = Shape(
            weight_format,
            torch.bfloat16,
            layer.num_experts,
            layer.hidden,
            layer.ffn,
            layer.top_k,
            num_rows,
        )
        tiles = {op: find_tiles(op, shape, device) for op in (GATE_UP, DOWN)}
        for op in tiles:

            def make(op: str = op) -> Target:
                timer = gpu_timer(shape, layer, experts_of(weight_format), runtime)
                return product_target(op, shape, tiles, timer)

            yield Task(f"{op} {shape.key}", make)

    return [
        task
        for weight_format in formats
        for num_rows in rows
        for task in tasks_of(weight_format, num_rows)
    ]

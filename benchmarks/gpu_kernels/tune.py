"""Find the grouped MLP's tiles on the GPU at hand: python -m benchmarks.gpu_kernels.tune.

Times candidates for one product with the other's tiles held, first gate_up, then down, and
writes the best to kernels/tuned/<device>.json, where the kernels look for them; entries of
other shapes there stay. The tiles in use now are the first candidate, so what is written is
never slower than they were in the same run. Takes a GPU; the search itself has no clock.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

import torch
import triton
from triton.errors import TritonError

from benchmarks.gpu_kernels.grouped_mlp import QWEN3_30B, Layer, draw_slots, random_experts
from kernels.tiles import Table, table_path
from kernels.triton_grouped_mlp import (
    DOWN,
    GATE_UP,
    MlpTiles,
    Shape,
    check_tiles,
    find_tiles,
    run_experts,
)
from kernels.triton_grouped_mlp_weights import FORMATS
from kernels.triton_router import permute

SHARED_BYTES: Final = 227 * 1024
"""What a program may have on a H100 or H200; elsewhere the compiler refuses the rest."""
MAX_ACCUMULATORS: Final = 160
"""fp32 sums per thread: beyond, registers spill."""
WEIGHT_BYTES: Final = {"plain": 2, "fp8": 1, "int8": 1, "int4": 0.5}
ROW_BYTES: Final = {"plain": 2, "fp8": 1, "int8": 2, "int4": 2}

Timer = Callable[[dict[str, MlpTiles]], float]
"""Gives the time of a call with these tiles by op; raises TritonError if they do not run."""


class Found(NamedTuple):
    """The best tiles of an op, their time, and that of the tiles before."""

    tiles: MlpTiles
    time: float
    time_before: float


def candidates(op: str, shape: Shape) -> Iterator[MlpTiles]:
    """Give the tiles that a format and a device like Hopper can have, and that can pay."""
    rows_per_expert = shape.num_rows * shape.top_k / shape.num_experts
    sums = 2 if op == GATE_UP else 1
    for block_m, block_n, block_k, swap in product((16, 32, 64, 128), (64, 128), (64, 128), (0, 1)):
        is_wasteful = block_m > 16 and block_m > 2 * rows_per_expert
        if is_wasteful or 16 * block_m < min(rows_per_expert, 2048):
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


def search(
    op: str,
    tried: Iterable[MlpTiles],
    tiles: dict[str, MlpTiles],
    time_of: Timer,
    may_go_on: Callable[[], bool],
) -> Found:
    """Give the fastest of `tried` and of what `tiles` has for the op, until `may_go_on` is False.

    Candidates that do not run (too large for the device) are passed over.
    """
    before = time_of(tiles)
    best, best_time = tiles[op], before
    for candidate in tried:
        if not may_go_on():
            break
        try:
            found = time_of({**tiles, op: candidate})
        except TritonError:
            continue
        if found < best_time:
            best, best_time = candidate, found
    return Found(best, best_time, before)


def tune(
    shape: Shape,
    tiles: dict[str, MlpTiles],
    time_of: Timer,
    may_go_on: Callable[[], bool],
) -> dict[str, Found]:
    """Search for each product in turn, going on from what was found for the one before."""
    found: dict[str, Found] = {}
    for op in (GATE_UP, DOWN):
        found[op] = search(op, candidates(op, shape), tiles, time_of, may_go_on)
        tiles = {**tiles, op: found[op].tiles}
    return found


def write_tiles(path: Path, shape: Shape, found: dict[str, Found]) -> None:
    """Add what was found to a file of tiles, or make it."""
    table: Table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for op, best in found.items():
        table.setdefault(op, {})[shape.key] = asdict(best.tiles)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def gpu_timer(shape: Shape, layer: Layer, device: torch.device) -> Timer:
    """Give a timer of real calls, in milliseconds, each with a cold cache."""
    experts = random_experts(layer, shape.weight_format, device)
    slots = draw_slots(shape.num_rows, layer, 0).to(device)
    groups = permute(slots, layer.num_experts)
    hidden = torch.randn(shape.num_rows, layer.hidden, dtype=shape.dtype, device=device)
    weights = torch.full(slots.shape, 1 / layer.top_k, device=device)

    def time_of(tiles: dict[str, MlpTiles]) -> float:
        found: float = triton.testing.do_bench(
            lambda: run_experts(hidden, slots, weights, groups, experts, tiles=tiles),
            warmup=5,
            rep=20,
            return_mode="median",
        )
        return found

    return time_of


def main() -> None:
    """Tune each number of rows in turn, and print what it brought."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=FORMATS, default="plain")
    for name, default in QWEN3_30B._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 128, 1024, 8192])
    parser.add_argument("--seconds", type=float, default=120.0, help="of search per number of rows")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU to tune for")
    device = torch.device("cuda", torch.cuda.current_device())
    path = table_path(torch.cuda.get_device_name(device))
    layer = Layer(args.num_experts, args.top_k, args.hidden, args.ffn)
    wanted = Shape(
        args.format, torch.bfloat16, layer.num_experts, layer.hidden, layer.ffn, layer.top_k, 0
    )
    for num_rows in args.rows:
        shape = wanted._replace(num_rows=num_rows)
        tiles = {op: find_tiles(op, shape, device) for op in (GATE_UP, DOWN)}
        end = time.monotonic() + args.seconds
        found = tune(
            shape, tiles, gpu_timer(shape, layer, device), lambda end=end: time.monotonic() < end
        )
        write_tiles(path, shape, found)
        for op, best in found.items():
            print(f"{op} {shape.key}: {best.time_before:.4f} -> {best.time:.4f} ms, {best.tiles}")


if __name__ == "__main__":
    main()

"""What the tuner tries for the ops of rows: RMSNorm, and QK-norm with rotation and KV write.

Their tiles do not depend on the number of rows; they are timed at a decode batch's. Called by
benchmarks.gpu_kernels.tune.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final

import torch

from benchmarks.gpu_kernels.norm import norm_call
from benchmarks.gpu_kernels.rotary import QWEN3_30B, Heads, rotary_call
from benchmarks.gpu_kernels.tune import Target, Task
from benchmarks.gpu_timing import time_call
from kernels.runtime import Runtime
from kernels.triton.norm import NormTiles, norm_key, norm_tiles
from kernels.triton.rotary import RotaryTiles, rotary_key, rotary_tiles

ROWS: Final = 128
WIDTHS: Final = (2048, 4096, 7168)


def norm_candidates(_: NormTiles) -> Iterator[NormTiles]:
    """Propose the warps of a row."""
    return (NormTiles(num_warps) for num_warps in (1, 2, 4, 8, 16))


def rotary_candidates(_: RotaryTiles) -> Iterator[RotaryTiles]:
    """Propose heads and warps of a program."""
    return (RotaryTiles(*sizes) for sizes in product((1, 2, 4, 8, 16), (1, 2, 4)))


def norm_target(width: int, runtime: Runtime, num_rows: int = ROWS) -> Target:
    """Give the target of rows of one width."""
    call = norm_call(num_rows, width, runtime.device)
    return Target(
        "rms_norm",
        norm_key(width),
        norm_tiles(width, runtime.device),
        [norm_candidates],
        lambda tiles: time_call(runtime, lambda _: call(tiles)).median_s,
    )


def rotary_target(heads: Heads, runtime: Runtime, num_rows: int = ROWS) -> Target:
    """Give the target of heads of one number and size."""
    call = rotary_call(num_rows, heads, torch.bfloat16, runtime.device)
    return Target(
        "rotate_and_store",
        rotary_key(*heads),
        rotary_tiles(*heads, runtime.device),
        [rotary_candidates],
        lambda tiles: time_call(runtime, lambda _: call(tiles)).median_s,
    )


def norm_tasks(runtime: Runtime) -> list[Task]:
    """Give a task for each width."""
    return [
        Task(f"rms_norm {width}", lambda width=width: norm_target(width, runtime))
        for width in WIDTHS
    ]


def rotary_tasks(runtime: Runtime) -> list[Task]:
    """Give the one task."""
    return [Task("rotate_and_store", lambda: rotary_target(QWEN3_30B, runtime))]

"""What the tuner tries for paged attention: the split kernel's tiles, then the long one's.

Tiles are looked up by head size, group and cache alone, so a candidate is timed on several
batches, and what counts is the mean of its times over those of the tiles in use. Called by
benchmarks.gpu_kernels.tune.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Final

import torch

from benchmarks.gpu_kernels.attention import Batch, attention_call
from benchmarks.gpu_kernels.rotary import QWEN3_30B
from benchmarks.gpu_kernels.tune import REPLAYS, Target, Task
from benchmarks.gpu_timing import time_call
from kernels.runtime import Runtime
from kernels.triton.attention.launches import AttentionTiles, attention_tiles, tiles_key

DECODE: Final = (Batch("decode", 64, 1, 8192, QWEN3_30B), Batch("decode", 1, 1, 2048, QWEN3_30B))
PREFILL: Final = (Batch("prefill", 4, 2048, 2048, QWEN3_30B),)
DTYPES: Final = (torch.bfloat16, torch.float8_e4m3fn)

Propose = Callable[[AttentionTiles], Iterator[AttentionTiles]]


def short_blocks(best: AttentionTiles) -> Iterator[AttentionTiles]:
    """Propose blocks of the split kernel; a split takes whole blocks."""
    for keys, warps, stages in product((32, 64, 128), (4, 8), (2, 3, 4)):
        if best.min_chunk % keys == 0:
            yield replace(best, short_keys=keys, short_warps=warps, short_stages=stages)


def splits(best: AttentionTiles) -> Iterator[AttentionTiles]:
    """Propose how keys are split among programs."""
    for chunk, programs in product((128, 256, 512), (264, 528, 1056, 2112)):
        if chunk % best.short_keys == 0:
            yield replace(best, min_chunk=chunk, programs=programs)


def short_splits(best: AttentionTiles) -> Iterator[AttentionTiles]:
    """Propose up to how many programs splits are shorter than otherwise; 1: they never are."""
    for programs in (1, 66, 132, 264):
        yield replace(best, min_programs=programs)


def long_blocks(best: AttentionTiles) -> Iterator[AttentionTiles]:
    """Propose blocks of the kernel for long slices."""
    for rows, keys, warps, stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4)):
        yield replace(best, long_rows=rows, long_keys=keys, long_warps=warps, long_stages=stages)


def mean_ratio(
    timers: Sequence[Callable[[AttentionTiles], float]], start: AttentionTiles
) -> Callable[[AttentionTiles], float]:
    """Give the mean, over batches, of the time over that of the tiles in use."""
    before = [timer(start) for timer in timers]

    def time_of(tiles: AttentionTiles) -> float:
        times = [timer(tiles) for timer in timers]
        return sum(t / b for t, b in zip(times, before, strict=True)) / len(before)

    return time_of


def target(
    batches: Sequence[Batch],
    stages: Sequence[Propose],
    known: dict[torch.dtype, AttentionTiles],
    dtype: torch.dtype,
    runtime: Runtime,
) -> Target:
    """Give the target of a cache's dtype; `known` has its tiles, and takes what is found."""
    heads = batches[0].heads
    group = heads.query // heads.kv
    if dtype not in known:
        cache = torch.empty(0, dtype=dtype, device=runtime.device)
        known[dtype] = attention_tiles(heads.dim, group, cache)

    def timer(batch: Batch) -> Callable[[AttentionTiles], float]:
        call, copies = attention_call(batch._replace(cache_dtype=dtype), runtime.device)
        return lambda tiles: (
            time_call(runtime, lambda idx: call(idx, tiles), copies, REPLAYS).median_s
        )

    def keep(best: AttentionTiles) -> None:
        known[dtype] = best

    time_of = mean_ratio([timer(batch) for batch in batches], known[dtype])
    key = tiles_key(heads.dim, group, dtype)
    return Target("paged_attention", key, known[dtype], stages, time_of, keep)


def attention_tasks(runtime: Runtime) -> list[Task]:
    """Give the tasks: decode and prefill of each dtype of cache."""
    known: dict[torch.dtype, AttentionTiles] = {}
    phases: tuple[tuple[tuple[Batch, ...], tuple[Propose, ...]], ...] = (
        (DECODE, (short_blocks, splits, short_splits)),
        (PREFILL, (long_blocks,)),
    )

    def task(batches: Sequence[Batch], stages: Sequence[Propose], dtype: torch.dtype) -> Task:
        name = f"attention {batches[0].op}, {str(dtype).removeprefix('torch.')} cache"
        return Task(name, lambda: target(batches, stages, known, dtype, runtime))

    return [task(batches, stages, dtype) for dtype in DTYPES for batches, stages in phases]

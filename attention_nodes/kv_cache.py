"""The paged KV cache's memory.

Owns the tensors and the arithmetic of their size. The scheduler assigns blocks to sequences;
decoder.py writes the cache; memory_budget.py measures how much memory a GPU has for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kernels.runtime import HostRuntime, Runtime
from models.config import ModelConfig
from topspin.errors import ConfigError
from topspin.units import format_size

MIN_BLOCKS: Final = 2
"""The minimum for one sequence that is one token longer than a block."""


@dataclass(frozen=True, eq=False)
class KvCache:
    """Per layer, keys and values [num_blocks, block_size, kv heads, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int
    num_blocks: int

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots `sources` i64[n] of all layers to slots `targets`, as if all at once."""
        for cache in (*self.keys, *self.values):
            slots = cache.flatten(0, 1)
            slots.index_copy_(0, targets, slots.index_select(0, sources))


def bytes_per_block(config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a block, keys and values of all layers."""
    return 2 * config.num_layers * block_size * config.kv_size * dtype.itemsize


def allocate(
    config: ModelConfig,
    *,
    block_size: int,
    size_bytes: int | None,
    dtype: torch.dtype,
    max_len: int,
    runtime: Runtime | None = None,
    code_bytes: Callable[[int], int] | None = None,
) -> KvCache:
    """Allocate as many blocks as fit in `size_bytes`, on `runtime`'s device (None: the host).

    `size_bytes` None (not known yet): the MIN_BLOCKS that a step needs. `code_bytes` of the size
    are left for the codes of so many blocks (None: nothing is coded). Raises ConfigError with the
    numbers when fewer than MIN_BLOCKS fit, or the device has less memory free; a cache smaller
    than `max_len` is allowed (requests are then shorter).
    """
    if size_bytes is None:
        return of_blocks(config, MIN_BLOCKS, block_size=block_size, dtype=dtype, runtime=runtime)
    available_bytes, what = _available(runtime or HostRuntime())
    if size_bytes > available_bytes:
        raise ConfigError(
            f"--kv-cache-memory {format_size(size_bytes)}: {what} has "
            f"{format_size(available_bytes)} free, before weights and buffers"
        )
    block_bytes = bytes_per_block(config, block_size=block_size, dtype=dtype)

    def bytes_of(num_blocks: int) -> int:
        codes = 0 if code_bytes is None else code_bytes(num_blocks)
        return num_blocks * block_bytes + codes

    sizes = range(size_bytes // block_bytes + 1)
    num_blocks = max(0, bisect_right(sizes, size_bytes, key=bytes_of) - 1)
    if num_blocks < MIN_BLOCKS:
        codes = ""
        if code_bytes is not None:
            codes = (
                f" with {format_size(code_bytes(MIN_BLOCKS))} of codes for --kv-retrieval-tokens"
            )
        raise ConfigError(
            f"--kv-cache-memory {format_size(size_bytes)} holds {num_blocks} blocks of "
            f"{block_size} tokens ({format_size(block_bytes)} each){codes}; at least {MIN_BLOCKS} "
            f"are needed, and {-(-max_len // block_size)} for one sequence of --max-model-len "
            f"{max_len}"
        )
    return of_blocks(config, num_blocks, block_size=block_size, dtype=dtype, runtime=runtime)


def of_blocks(
    config: ModelConfig,
    num_blocks: int,
    *,
    block_size: int,
    dtype: torch.dtype,
    runtime: Runtime | None = None,
) -> KvCache:
    """Allocate `num_blocks` blocks on `runtime`'s device (None: the host)."""
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    device = torch.device("cpu") if runtime is None else runtime.device
    return KvCache(
        keys=[torch.zeros(shape, dtype=dtype, device=device) for _ in config.layers],
        values=[torch.zeros(shape, dtype=dtype, device=device) for _ in config.layers],
        block_size=block_size,
        num_blocks=num_blocks,
    )


def _available(runtime: Runtime) -> tuple[int, str]:
    """Return the bytes that can be allocated (on the host: without swapping), and their name."""
    if runtime.device.type != "cpu":
        return runtime.memory().free, f"device {runtime.device}"
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024, "this machine"
    raise OSError("/proc/meminfo does not say MemAvailable")

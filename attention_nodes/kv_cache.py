"""The paged KV cache's memory.

Owns the tensors and the arithmetic of their size. Which block belongs to whom is the
scheduler's business; what is written where is decoder.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.config import ModelConfig
from topspin.errors import ConfigError
from topspin.units import format_size


@dataclass(frozen=True, eq=False)
class KvCache:
    """Per layer, keys and values [num_blocks, block_size, kv heads, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]
    block_size: int
    num_blocks: int


def allocate(
    config: ModelConfig, *, block_size: int, size_bytes: int, dtype: torch.dtype, max_len: int
) -> KvCache:
    """Allocate as many blocks as fit in `size_bytes`.

    Raises ConfigError with the numbers when they could not hold one sequence of one block
    more than a token, or are more than the machine has free; a cache smaller than `max_len`
    is allowed (requests are then shorter).
    """
    available_bytes = _available_bytes()
    if size_bytes > available_bytes:
        raise ConfigError(
            f"--kv-cache-memory {format_size(size_bytes)}: this machine has "
            f"{format_size(available_bytes)} free, before weights and buffers"
        )
    block_bytes = (
        2 * config.num_layers * block_size * config.kv_size * torch.empty(0, dtype=dtype).itemsize
    )
    num_blocks = size_bytes // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"--kv-cache-memory {format_size(size_bytes)} holds {num_blocks} blocks of "
            f"{block_size} tokens ({format_size(block_bytes)} each); at least 2 are needed, "
            f"and {-(-max_len // block_size)} for one sequence of --max-model-len {max_len}"
        )
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    return KvCache(
        keys=[torch.zeros(shape, dtype=dtype) for _ in config.layers],
        values=[torch.zeros(shape, dtype=dtype) for _ in config.layers],
        block_size=block_size,
        num_blocks=num_blocks,
    )


def _available_bytes() -> int:
    """Return what the kernel says can be allocated without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say MemAvailable")

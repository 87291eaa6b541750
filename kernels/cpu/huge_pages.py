"""Memory for weights on huge pages, which saves page walks for every 4 KiB.

Owns chunks of memory from which weights that are loaded together are allocated. If the system
has no huge pages (they are only advised) a chunk is ordinary memory. Reading weights once per
step was 15-17 % faster with them on a virtual machine. Knows no layout.
Used by `kernels.cpu.matmul`, `kernels.cpu.quantised` and `kernels.cpu.step_memory`.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import Final

import torch
from torch import Tensor

CHUNK_BYTES: Final = 32 << 20
ALIGNMENT: Final = 64


class Arena:
    """Allocates zeroed memory from chunks.

    A chunk is returned to the system when none of its tensors is left, so allocate tensors of
    equal lifetime from it. Any thread.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros u8 of `shape`, at an address that is a multiple of 64."""
        size = 1
        for extent in shape:
            size *= extent
        if size == 0:
            return torch.zeros(shape, dtype=torch.uint8)
        with self._lock:
            if self._used + size > len(self._chunk):
                self._chunk, self._used = map_pages(max(size, CHUNK_BYTES)), 0
            cut = self._chunk[self._used : self._used + size]
            self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return cut.view(shape)


def map_pages(size: int) -> Tensor:
    """Map a new zeroed region, u8[size]."""
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # An operating system without huge pages refuses the advice.
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)

"""The file that holds keys and values of cache blocks that have no frame in memory.

Owns an unlinked file, so that nothing is left whatever happens, and the layout of a block in it: a
record per block, in that by layer, head and token the key and the value one behind the other, which
`kernels.cpu.compiled.hot_keys` reads for single tokens. Records are written without the page cache
where the file system allows. Knows no sequence and no policy. Used by residency.py.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from attention_nodes.kv_cache import KvCache
from attention_nodes.sequences import IntArray
from topspin.errors import ConfigError
from topspin.progress import Beat
from topspin.units import format_size

_PAGE: Final = 4096
# Records are moved so many bytes at a time, or one by one.
_TRANSFER_BYTES: Final = 2 << 20


def record_bytes(block_bytes: int) -> int:
    """Return the size of a block in the file: whole pages, as transfers past the cache need."""
    return -(-block_bytes // _PAGE) * _PAGE


class SpillFile:
    """`num_blocks` records of the blocks of `cache`."""

    def __init__(self, directory: Path, cache: KvCache, num_blocks: int) -> None:
        """Raises ConfigError if there can be no such file."""
        self._caches = [
            (keys.view(torch.uint8), values.view(torch.uint8))
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        assert len({(each.shape, each.dtype) for each in cache.keys}) == 1, "layers are alike"
        _, block_size, num_heads, head_dim = cache.keys[0].shape
        head_bytes = head_dim * cache.keys[0].itemsize
        self._shape = (len(cache.keys), num_heads, block_size, 2, head_bytes)
        used = int(np.prod(self._shape))
        self.record_bytes = record_bytes(used)
        size = num_blocks * self.record_bytes
        self.fd = -1
        self._direct: int | None = None
        try:
            self.fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(self.fd, 0, size)
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
        except (OSError, OverflowError) as error:
            self.close()
            reason = getattr(error, "strerror", "too large")
            raise ConfigError(
                f"--kv-spill-dir {directory}: no file of {format_size(size)} there: {reason}"
            ) from error
        try:
            flags = os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC
            self._direct = os.open(f"/proc/self/fd/{self.fd}", flags)
        except OSError:
            pass  # the file system has no such writes
        self._at_once = max(_TRANSFER_BYTES // self.record_bytes, 1)
        # Memory of whole pages, as writes past the cache need.
        self._memory = mmap.mmap(-1, self._at_once * self.record_bytes)
        raw = torch.frombuffer(self._memory, dtype=torch.uint8).view(self._at_once, -1)
        self._records = raw[:, :used].view(self._at_once, *self._shape)

    def save(self, blocks: IntArray, frames: IntArray, beat: Beat | None = None) -> IntArray:
        """Write `blocks`, whose contents are in `frames`; returns those that were not written.

        `beat` is called every few blocks.
        """
        return self._each(blocks, frames, self._save, beat)

    def load(self, blocks: IntArray, frames: IntArray, beat: Beat | None = None) -> IntArray:
        """Read `blocks` to `frames`; returns those that could not be read."""
        return self._each(blocks, frames, self._load, beat)

    def _each(
        self,
        blocks: IntArray,
        frames: IntArray,
        move: Callable[[list[int], Tensor], list[bool]],
        beat: Beat | None,
    ) -> IntArray:
        is_moved: list[bool] = []
        for begin in range(0, len(blocks), self._at_once):
            here = torch.from_numpy(frames[begin : begin + self._at_once])
            is_moved += move(blocks[begin : begin + self._at_once].tolist(), here)
            if beat is not None:
                beat()
        failed: IntArray = blocks[~np.array(is_moved, dtype=bool)]
        return failed

    def _save(self, blocks: list[int], frames: Tensor) -> list[bool]:
        """Write blocks; returns which were written."""
        records = self._records[: len(blocks)]
        for layer, (keys, values) in enumerate(self._caches):
            records[:, layer, :, :, 0] = keys[frames].transpose(1, 2)
            records[:, layer, :, :, 1] = values[frames].transpose(1, 2)
        return [
            self._write(self._part(idx), block * self.record_bytes)
            for idx, block in enumerate(blocks)
        ]

    def _write(self, part: memoryview, offset: int) -> bool:
        for fd in (self._direct, self.fd):
            try:
                if fd is not None and os.pwrite(fd, part, offset) == len(part):
                    return True
            except OSError:
                pass
            self.forgo_direct()
        return False

    def forgo_direct(self) -> None:
        """Write through the page cache from now on."""
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def _load(self, blocks: list[int], frames: Tensor) -> list[bool]:
        """Read blocks; returns which were read; the others' frames keep what they have."""
        is_read = [
            self._read(self._part(idx), block * self.record_bytes)
            for idx, block in enumerate(blocks)
        ]
        chosen = torch.tensor(is_read).nonzero()[:, 0]
        records, frames = self._records[chosen], frames[chosen]
        for layer, (keys, values) in enumerate(self._caches):
            keys[frames] = records[:, layer, :, :, 0].transpose(1, 2)
            values[frames] = records[:, layer, :, :, 1].transpose(1, 2)
        return is_read

    def _read(self, part: memoryview, offset: int) -> bool:
        try:
            return os.preadv(self.fd, [part], offset) == len(part)
        except OSError:
            return False

    def _part(self, idx: int) -> memoryview:
        return memoryview(self._memory)[idx * self.record_bytes : (idx + 1) * self.record_bytes]

    def close(self) -> None:
        """Give the file's space back."""
        self.forgo_direct()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

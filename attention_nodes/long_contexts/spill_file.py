"""The file that holds keys and values of cache blocks that have no frame in memory.

Owns an unlinked file, so that nothing is left whatever happens, the copies of selected keys in
memory, and the layout of a block in the file: a record per block, in that by layer, head and token
the key, the value and a sum of both, which `kernels.cpu.compiled.retrieval.hot_keys` reads for
single tokens; what has another sum counts as not read. Records are written without the page cache
where the file system allows. Knows no policy. Used by residency.py.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from attention_nodes.long_contexts.spill_store import Reads
from attention_nodes.step.kv_cache import KvCache, LayerSpec
from attention_nodes.step.sequences import IntArray
from kernels.contracts import CHECK_BYTES, CHECK_SUM, HotKeys, Retrieval
from topspin.errors import ConfigError
from topspin.plan.retrieval import RetrievalPolicy
from topspin.processes.progress import Beat, no_beat
from topspin.units import format_size

_PAGE: Final = 4096
# Records are moved so many bytes at a time, or one by one.
_TRANSFER_BYTES: Final = 2 << 20
_UNUSED: Final = -1
_NEVER: Final = -2
"""So long ago was an entry used that is free."""
# Records that are written while a step runs.
_AHEAD_BYTES: Final = 16 << 20


def record_bytes(layers: Iterable[LayerSpec], *, block_size: int) -> int:
    """Return the size of a block in the file: whole pages, as transfers past the cache need."""
    used = sum(
        layer.bytes_per_block(block_size) + layer.num_heads * block_size * CHECK_BYTES
        for layer in layers
    )
    return -(-used // _PAGE) * _PAGE


def copies_bytes(layers: Iterable[LayerSpec], num_tokens: int, num_slots: int) -> int:
    """Return the bytes that tell where the copies of so many tokens are, in so many slots."""
    num_heads = sum(layer.num_heads for layer in layers if layer.has_codes)
    return num_heads * torch.int32.itemsize * (num_tokens + 2 * num_slots)


class SpillFile:
    """`num_blocks` records of the blocks of `cache`; satisfies SpillStore."""

    def __init__(
        self,
        directory: Path,
        cache: KvCache,
        num_blocks: int,
        *,
        coded_layers: Sequence[int] = (),
    ) -> None:
        """Keys of `coded_layers` are searched. Raises ConfigError if there can be no such file."""
        self._caches = [
            (keys.view(torch.uint8), values.view(torch.uint8))
            for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        assert len({(each.shape, each.dtype) for each in cache.keys}) == 1, "layers are alike"
        _, block_size, num_heads, head_dim = cache.keys[0].shape
        self._head_bytes = head_dim * cache.keys[0].itemsize
        row_bytes = 2 * self._head_bytes + CHECK_BYTES
        self._shape = (len(cache.keys), num_heads, block_size, row_bytes)
        self._layers = torch.tensor(coded_layers)
        self._hot: dict[int, HotKeys] = {}
        used = int(np.prod(self._shape))
        self.record_bytes = record_bytes(cache.layers, block_size=block_size)
        size = num_blocks * self.record_bytes
        self.fd = -1
        self._direct: int | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="spill")
        self._writing: Future[IntArray] | None = None
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
        self._used = used
        self._at_once = max(_TRANSFER_BYTES // self.record_bytes, 1)
        self._staging = self._pages(self._at_once)
        self.most_ahead = max(_AHEAD_BYTES // self.record_bytes, 1)
        self._ahead = self._pages(self.most_ahead)

    def _pages(self, num_records: int) -> mmap.mmap:
        """Return memory of whole pages, as writes past the page cache need."""
        return mmap.mmap(-1, num_records * self.record_bytes)

    def _records(self, pages: mmap.mmap) -> Tensor:
        """Return the records in memory: u8[records, layers, heads, tokens, bytes]."""
        raw = torch.frombuffer(pages, dtype=torch.uint8).view(-1, self.record_bytes)
        return raw[:, : self._used].view(-1, *self._shape)

    def save(self, blocks: IntArray, frames: IntArray, beat: Beat = no_beat) -> IntArray:
        if len(blocks) and self._writing is not None:
            self._writing.result()  # an older content must not come later
        return self._each(blocks, frames, self._save, beat)

    def save_ahead(self, blocks: IntArray, frames: IntArray) -> None:
        assert not self.is_writing
        self._gather(frames, self._records(self._ahead))
        self._writing = self._writer.submit(self._write_all, blocks, self._ahead)

    @property
    def is_writing(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def take_ahead(self) -> IntArray:
        if self._writing is None or self.is_writing:
            return np.zeros(0, dtype=np.int64)
        written, self._writing = self._writing.result(), None
        return written

    def load(self, blocks: IntArray, frames: IntArray, beat: Beat = no_beat) -> IntArray:
        return self._each(blocks, frames, self._load, beat)

    def _each(
        self,
        blocks: IntArray,
        frames: IntArray,
        move: Callable[[IntArray, IntArray], IntArray],
        beat: Beat,
    ) -> IntArray:
        moved = [np.zeros(0, dtype=np.int64)]
        for begin in range(0, len(blocks), self._at_once):
            end = begin + self._at_once
            moved.append(move(blocks[begin:end], frames[begin:end]))
            beat()
        failed: IntArray = blocks[~np.isin(blocks, np.concatenate(moved))]
        return failed

    def _save(self, blocks: IntArray, frames: IntArray) -> IntArray:
        """Write blocks; returns those that were written."""
        self._gather(frames, self._records(self._staging))
        return self._write_all(blocks, self._staging)

    def _gather(self, frames: IntArray, records: Tensor) -> None:
        records, chosen = records[: len(frames)], torch.from_numpy(frames)
        for layer, (keys, values) in enumerate(self._caches):
            own_keys, own_values = self._pairs(records, layer)
            own_keys[...] = keys[chosen].transpose(1, 2)
            own_values[...] = values[chosen].transpose(1, 2)
        words = records.view(torch.int64)
        words[..., -1] = _sums(words)

    def _pairs(self, records: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, u8[records, heads, tokens, bytes] each."""
        width = self._head_bytes
        return records[:, layer, :, :, :width], records[:, layer, :, :, width : 2 * width]

    def _write_all(self, blocks: IntArray, pages: mmap.mmap) -> IntArray:
        """Write blocks from memory; returns those that were written.

        Called by two threads, never at once.
        """
        return self._in_runs(blocks, pages, self._write)

    def _in_runs(
        self, blocks: IntArray, pages: mmap.mmap, move: Callable[[memoryview, int], int]
    ) -> IntArray:
        """Move blocks, those that follow each other at once; returns those that were moved."""
        size, memory = self.record_bytes, memoryview(pages)
        begin, moved = 0, np.zeros(len(blocks), dtype=bool)
        while begin < len(blocks):
            following = np.flatnonzero(np.diff(blocks[begin:], append=-1) != 1)
            end = begin + min(int(following[0]) + 1, self._at_once)
            part = memory[begin * size : end * size]
            num_bytes = move(part, int(blocks[begin]) * size)
            moved[begin : begin + num_bytes // size] = True
            begin = end
        found: IntArray = blocks[moved]
        return found

    def _write(self, part: memoryview, offset: int) -> int:
        """Return how many bytes were written."""
        for fd in (self._direct, self.fd):
            try:
                if fd is not None and os.pwrite(fd, part, offset) == len(part):
                    return len(part)
            except OSError:
                pass
            self.forgo_direct()
        return 0

    def forgo_direct(self) -> None:
        """Write through the page cache from now on."""
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None

    def _load(self, blocks: IntArray, frames: IntArray) -> IntArray:
        """Read blocks; returns those that were read; the others' frames keep what they have."""
        read = self._in_runs(blocks, self._staging, self._read)
        records = self._records(self._staging)[: len(blocks)]
        words = records.view(torch.int64)
        is_whole = (words[..., -1] == _sums(words)).flatten(1).all(1)
        is_read = np.isin(blocks, read) & is_whole.numpy()
        records, targets = records[torch.from_numpy(is_read)], torch.from_numpy(frames[is_read])
        for layer, (keys, values) in enumerate(self._caches):
            own_keys, own_values = self._pairs(records, layer)
            keys[targets], values[targets] = own_keys.transpose(1, 2), own_values.transpose(1, 2)
        found: IntArray = blocks[is_read]
        return found

    def _read(self, part: memoryview, offset: int) -> int:
        try:
            return os.preadv(self.fd, [part], offset)
        except OSError:
            return 0

    def num_copies(self, policy: RetrievalPolicy) -> int:
        return policy.num_hot

    def lend(self, row: int, slots: IntArray, max_blocks: int) -> None:
        _, num_groups, block_size, _ = self._shape
        shape = (len(self._layers), num_groups)
        self._hot[row] = HotKeys(
            fd=self.fd,
            records=torch.zeros(max_blocks, dtype=torch.int64),
            cache_layers=self._layers,
            slots=torch.from_numpy(slots),
            entries=torch.full((*shape, max_blocks * block_size), _UNUSED, dtype=torch.int32),
            tokens=torch.full((*shape, len(slots)), _UNUSED, dtype=torch.int32),
            used=torch.full((*shape, len(slots)), _NEVER, dtype=torch.int32),
            clocks=torch.zeros(*shape, 2, dtype=torch.int64),
            counts=torch.zeros(*shape, 3, dtype=torch.int64),
        )

    def forget(self, row: int) -> None:
        del self._hot[row]

    def told(
        self, retrieval: Retrieval, searched: Sequence[tuple[int, IntArray] | None]
    ) -> Retrieval:
        hot = tuple(None if each is None else self._copies(*each) for each in searched)
        return retrieval._replace(hot=hot)

    def _copies(self, row: int, blocks: IntArray) -> HotKeys:
        """Return the copies of a sequence, told where its blocks are in the file."""
        hot = self._hot[row]
        hot.records.numpy()[: len(blocks)] = blocks * self.record_bytes
        return hot

    def no_keys(self) -> None:
        return None

    def take_reads(self, row: int) -> Reads:
        counts = self._hot[row].counts
        reads = Reads(*counts.sum((0, 1)).tolist())
        counts.zero_()
        return reads

    def close(self) -> None:
        self._writer.shutdown()
        self.forgo_direct()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _sums(words: Tensor) -> Tensor:
    """Return the sums of keys and values i64[..., n + 1], whose last word is the sum's place."""
    return words[..., :-1].sum(-1) + CHECK_SUM

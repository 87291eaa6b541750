"""Keys and values of a device's cache blocks that have no frame there, in memory of the host.

Owns pinned memory, and the layout of a block in it: by layer, head and token the key and the value
one behind the other, which `kernels.triton.retrieval.fetch` reads for single tokens. All copies are
enqueued on the stream of the steps, so that they are in order with what reads and writes frames;
the host waits for none. Knows no sequence but the slots for its selected keys. Used by
residency.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from attention_nodes.long_contexts.spill_store import Reads
from attention_nodes.step.kv_cache import KvCache
from attention_nodes.step.sequences import IntArray
from kernels.contracts import HostKeys, Retrieval
from kernels.runtime import Runtime
from topspin.errors import ConfigError
from topspin.plan.retrieval import RetrievalPolicy
from topspin.processes.progress import Beat, no_beat
from topspin.units import format_size

_NONE: Final = np.zeros(0, dtype=np.int64)
# Bytes that are put together on the device at a time.
_TRANSFER_BYTES: Final = 2 << 20


class HostStore:
    """`num_blocks` records of the blocks of `cache`; satisfies SpillStore."""

    most_ahead = 0  # no copy is waited for
    is_writing = False

    def __init__(
        self, runtime: Runtime, cache: KvCache, num_blocks: int, *, coded_layers: Sequence[int]
    ) -> None:
        """Keys of `coded_layers` are searched. Raises ConfigError if there is no such memory."""
        self._runtime = runtime
        self._caches = list(zip(cache.keys, cache.values, strict=True))
        first = cache.keys[0]
        assert len({(each.shape, each.dtype) for each in cache.keys}) == 1, "layers are alike"
        _, block_size, num_heads, head_dim = first.shape
        self._shape = (len(cache.keys), num_heads, block_size, 2, head_dim)
        self._layers = tuple(coded_layers)
        block_bytes = int(np.prod(self._shape)) * first.itemsize
        try:
            memory = runtime.host_buffer(num_blocks * block_bytes)
        except (RuntimeError, MemoryError) as error:
            size = format_size(num_blocks * block_bytes)
            raise ConfigError(f"--kv-spill-dir host: this machine has no {size}: {error}") from None
        self.records = memory.view(first.dtype).view(num_blocks, *self._shape)
        self._at_once = max(_TRANSFER_BYTES // block_bytes, 1)
        self._slots: dict[int, IntArray] = {}

    def save(self, blocks: IntArray, frames: IntArray, beat: Beat = no_beat) -> IntArray:
        for some, own in self._parts(blocks, frames, beat):
            staged = self._staged(len(some))
            for layer, (keys, values) in enumerate(self._caches):
                staged[:, layer, :, :, 0] = keys.index_select(0, own).transpose(1, 2)
                staged[:, layer, :, :, 1] = values.index_select(0, own).transpose(1, 2)
            for begin, end, record in _runs(some):
                target = self.records[record : record + end - begin]
                target.copy_(staged[begin:end], non_blocking=True)
        return _NONE

    def load(self, blocks: IntArray, frames: IntArray, beat: Beat = no_beat) -> IntArray:
        for some, own in self._parts(blocks, frames, beat):
            staged = self._staged(len(some))
            for begin, end, record in _runs(some):
                source = self.records[record : record + end - begin]
                staged[begin:end].copy_(source, non_blocking=True)
            for layer, (keys, values) in enumerate(self._caches):
                keys.index_copy_(0, own, staged[:, layer, :, :, 0].transpose(1, 2))
                values.index_copy_(0, own, staged[:, layer, :, :, 1].transpose(1, 2))
        return _NONE

    def _parts(
        self, blocks: IntArray, frames: IntArray, beat: Beat
    ) -> Iterator[tuple[IntArray, Tensor]]:
        """Yield some blocks at a time, and their frames on the device."""
        for begin in range(0, len(blocks), self._at_once):
            part = slice(begin, begin + self._at_once)
            yield blocks[part], self._runtime.upload(torch.from_numpy(frames[part].copy()))
            beat()

    def _staged(self, count: int) -> Tensor:
        like = self._caches[0][0]
        return torch.empty(count, *self._shape, dtype=like.dtype, device=like.device)

    def save_ahead(self, blocks: IntArray, frames: IntArray) -> None:
        raise AssertionError("most_ahead is 0")

    def take_ahead(self) -> IntArray:
        return _NONE

    def num_copies(self, policy: RetrievalPolicy) -> int:
        return policy.num_selected

    def lend(self, row: int, slots: IntArray, max_blocks: int) -> None:
        self._slots[row] = slots

    def forget(self, row: int) -> None:
        del self._slots[row]

    def told(
        self, retrieval: Retrieval, searched: Sequence[tuple[int, IntArray] | None]
    ) -> Retrieval:
        found = [each for each in searched if each is not None]
        if not found:
            return retrieval
        num_blocks = max(len(blocks) for _, blocks in found)
        num_slots = max(len(self._slots[row]) for row, _ in found)
        records = np.zeros((len(searched), num_blocks), dtype=np.int32)
        slots = np.zeros((len(searched), num_slots), dtype=np.int32)
        for idx, each in enumerate(searched):
            if each is not None:
                row, blocks = each
                records[idx, : len(blocks)] = blocks
                slots[idx, : len(self._slots[row])] = self._slots[row]
        keys = self._keys(torch.from_numpy(records), torch.from_numpy(slots))
        return retrieval._replace(host_keys=keys)

    def _keys(self, records: Tensor, slots: Tensor) -> HostKeys:
        return HostKeys(self.records, self._layers, records=records, slots=slots)

    def no_keys(self) -> HostKeys:
        none = torch.zeros(1, 1, dtype=torch.int32, device=self._runtime.device)
        return self._keys(none, none)

    def take_reads(self, row: int) -> Reads:
        return Reads(0, 0, 0)  # only the device knows

    def close(self) -> None:
        pass


def _runs(blocks: IntArray) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of blocks that follow each other: from, to, and the first block."""
    ends = np.flatnonzero(np.diff(blocks, append=-1) != 1) + 1
    for begin, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        yield begin, end, int(blocks[begin])

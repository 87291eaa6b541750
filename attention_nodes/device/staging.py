"""Copies small arrays to a device and back: one transfer per step each way, by pinned memory.

Owns the pinned buffers and their reuse: one ring per direction with an event per slot, so that
no buffer is written while a copy may still read it, nor read before its copy is done. Knows no
step. Called by device/executor.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.runtime import Event, Runtime

# Two steps may be under way while a third one's arrays are written.
NUM_SLOTS: Final = 3
# Addresses of arrays are multiples of it, for vector loads of kernels.
ALIGNMENT: Final = 16


_DTYPES: Final = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


def aligned(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class _Slot:
    """A pinned buffer and the event of its last copy."""

    def __init__(self, runtime: Runtime, num_bytes: int) -> None:
        self.memory = runtime.host_buffer(num_bytes)
        self.array = self.memory.numpy()
        self.copied: Event | None = None


class Outbound:
    """Copies arrays to the device, always to the same memory there.

    Arrays of the same shapes in the same order have the same addresses every time, so that a
    recording can read them. Send the next ones on the same stream, after the kernels that read
    these.
    """

    def __init__(self, runtime: Runtime, num_bytes: int) -> None:
        self._runtime = runtime
        self._slots = [_Slot(runtime, num_bytes) for _ in range(NUM_SLOTS)]
        self._next = 0
        self._landed = torch.zeros(num_bytes, dtype=torch.uint8, device=runtime.device)

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Enqueue the copy of `arrays`, which may change after return; return the copies."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % NUM_SLOTS
        if slot.copied is not None:
            slot.copied.wait()
        tensors = []
        end = 0
        for array in arrays:
            begin, end = aligned(end), aligned(end) + array.nbytes
            assert end <= len(slot.array), "more than a step may have"
            slot.array[begin:end].view(array.dtype).reshape(array.shape)[...] = array
            tensors.append(self._landed[begin:end].view(_DTYPES[array.dtype]).view(array.shape))
        self._landed[:end].copy_(slot.memory[:end], non_blocking=True)
        slot.copied = self._runtime.current_stream().record()
        return tensors


class Inbound:
    """Copies tensors of the device to the host; its buffers grow as needed."""

    def __init__(self, runtime: Runtime, num_bytes: int) -> None:
        self._runtime = runtime
        self._slots = [_Slot(runtime, num_bytes) for _ in range(NUM_SLOTS)]
        self._next = 0

    def fetch(self, tensors: Sequence[Tensor]) -> DeviceReceipt:
        """Enqueue one copy of `tensors`, whose elements have at most 8 bytes."""
        slot = self._slots[self._next]
        # In descending order of element size all are aligned.
        order = sorted(range(len(tensors)), key=lambda idx: -tensors[idx].itemsize)
        num_bytes = sum(each.nbytes for each in tensors)
        if num_bytes > len(slot.array):
            slot = self._slots[self._next] = _Slot(self._runtime, 2 * num_bytes)
        self._next = (self._next + 1) % NUM_SLOTS
        if num_bytes:
            flat = [tensors[idx].contiguous().view(-1).view(torch.uint8) for idx in order]
            slot.memory[:num_bytes].copy_(torch.cat(flat), non_blocking=True)
        arrays: list[np.ndarray] = [np.empty(0)] * len(tensors)
        end = 0
        for idx in order:
            begin, end = end, end + tensors[idx].nbytes
            dtype = torch.empty(0, dtype=tensors[idx].dtype).numpy().dtype
            arrays[idx] = slot.array[begin:end].view(dtype).reshape(tensors[idx].shape)
        return DeviceReceipt(arrays, self._runtime.current_stream().record(timed=True))


class DeviceReceipt:
    """Satisfies executor.Receipt."""

    def __init__(self, arrays: list[np.ndarray], ended: Event) -> None:
        self._arrays = arrays
        self.ended = ended

    def arrays(self) -> list[np.ndarray]:
        """Wait for the copy; the arrays are overwritten NUM_SLOTS fetches later."""
        self.ended.wait()
        return self._arrays

"""Memory for the tensors that recorded steps make: one piece for all recordings of a runtime.

Owns where such tensors lie. Recordings never run at the same time, and nobody reads what one has
left behind, so every recording begins at the same address: together they take as much as the
largest, however many shapes of steps there are. The tensors of one recording lie apart: a thread
that lost its core may read how much there was to do in an op that others have done. Knows no op.
Used by `kernels.cpu.recorder`.
"""

from __future__ import annotations

from torch import Tensor

from kernels.cpu.huge_pages import ALIGNMENT, CHUNK_BYTES, map_pages


class StepMemory:
    """Chunks of memory, given out from the first one on after each begin()."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._chunk_idx = self._used = 0

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all chunks; pages that no tensor had take no memory."""
        return sum(map(len, self._chunks))

    def begin(self) -> None:
        """Give out the same memory again: tensors made before keep their content until then."""
        self._chunk_idx = self._used = 0

    def moved(self, tensor: Tensor) -> Tensor:
        """Return a tensor like `tensor` (shape, strides, dtype, content) in this memory."""
        if not tensor.numel():
            return tensor
        ends = zip(tensor.shape, tensor.stride(), strict=True)
        size = (1 + sum((extent - 1) * step for extent, step in ends)) * tensor.itemsize
        cut = self._take(size).view(tensor.dtype)
        return cut.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    def _take(self, size: int) -> Tensor:
        """Return u8[size], at an address that is a multiple of ALIGNMENT."""
        while self._chunk_idx < len(self._chunks):
            chunk, begin = self._chunks[self._chunk_idx], self._used
            if begin + size <= len(chunk):
                self._used += -(-size // ALIGNMENT) * ALIGNMENT
                return chunk[begin : begin + size]
            self._chunk_idx, self._used = self._chunk_idx + 1, 0
        self._chunks.append(map_pages(max(size, CHUNK_BYTES)))
        return self._take(size)

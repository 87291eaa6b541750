"""The rows of several requests, together in one batch.

Owns the buffers of an expert node, allocated at start. Knows no ticket and no order of frames;
expert_side.py fills them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from m2n_comm.host.frames.native import copy_request
from m2n_comm.host.frames.records import Record
from m2n_comm.host.frames.windows import FrameWindow
from m2n_comm.net import NetShape
from m2n_comm.payload import unpack_rows


class Taken(NamedTuple):
    """A request that was checked; `is_placed`: its hidden rows are in the buffer already."""

    record: Record
    window: FrameWindow
    num_rows: int
    is_placed: bool


class Buffers:
    """hidden [R, H] in the compute dtype, slots [R, K] and weights [R, K] for a batch's rows."""

    def __init__(self, shape: NetShape, num_rows: int) -> None:
        compute = shape.compute or shape.payload
        self.hidden = torch.empty((num_rows, shape.hidden_size), dtype=compute)
        self._slots = torch.empty((num_rows, shape.top_k), dtype=torch.int32)
        self._weights = torch.empty((num_rows, shape.top_k), dtype=torch.float32)
        self._at = [each.data_ptr() for each in (self.hidden, self._slots, self._weights)]
        self._row_bytes = shape.hidden_size * compute.itemsize, 4 * shape.top_k

    @property
    def nbytes(self) -> int:
        """Return the bytes of all three."""
        return self.hidden.nbytes + self._slots.nbytes + self._weights.nbytes

    def places(self, low: int) -> tuple[int, int, int]:
        """Return the addresses of row `low`: hidden, slots and weights."""
        hidden_at, slots_at, weights_at = self._at
        hidden_bytes, choice_bytes = self._row_bytes
        return (
            hidden_at + low * hidden_bytes,
            slots_at + low * choice_bytes,
            weights_at + low * choice_bytes,
        )

    def first(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden, slots and weights of the first rows."""
        return self.hidden[:rows], self._slots[:rows], self._weights[:rows]


class Join:
    """The rows of all peers, in the compute dtype, in buffers allocated at start."""

    def __init__(self, shape: NetShape, num_peers: int) -> None:
        self.buffers = Buffers(shape, shape.window_rows * num_peers)
        packed_rows = shape.window_rows if shape.compressed else 0
        self._scratch = torch.empty((packed_rows, shape.hidden_size), dtype=torch.float32)
        self.takes_rows = self.buffers.hidden.dtype == shape.request_dtype
        """Whether hidden rows are kept as they travel, so that others may write them."""

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all buffers."""
        return self.buffers.nbytes + self._scratch.nbytes

    def join(self, found: list[Taken]) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden, slots and weights of all rows, valid until the next call.

        If only one peer has rows, in the compute dtype, they are read in place in its window.
        """
        if len(found) == 1 and self.takes_rows and not found[0].is_placed:
            rows = found[0].window.first(found[0].num_rows)
            return rows.hidden, rows.slots, rows.weights
        low = 0
        for record, window, num_rows, is_placed in found:
            hidden, slots, weights = self.buffers.places(low)
            if not self.takes_rows:
                self._widen(window, low, num_rows)
            copies = self.takes_rows and not is_placed
            copy_request(record.address, hidden if copies else 0, slots, weights, num_rows)
            low += num_rows
        return self.buffers.first(low)

    def _widen(self, window: FrameWindow, low: int, num_rows: int) -> None:
        """Copy hidden rows out of a window, in the compute dtype."""
        rows, out = window.first(num_rows), self.buffers.hidden[low : low + num_rows]
        if window.scales is not None:
            unpack_rows(rows.hidden, rows.scales, out, self._scratch)
        else:
            out.copy_(rows.hidden)

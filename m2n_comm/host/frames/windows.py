"""The memory layout of one (attention node, expert node) pair: the place of every window.

Per micro-batch a request window (flag, header, slots, weights, hidden rows) and an answer
window (flag, header, hidden rows), each of a fixed number of rows, each field on its own
cache line. Pure layout, and the views over it, which are built once. Knows no transport:
local.py and shm.py share one mapping between both ends; tcp.py and nixl have one at each end.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from m2n_comm.host.frames.memory_order import WORD_BYTES, word_at
from m2n_comm.host.frames.wire import HEADER_BYTES
from m2n_comm.net import NetShape

_LINE_BYTES = 64
# A batch keeps its size for many steps; slicing its views again costs more than most copies.
_MAX_CACHED_VIEWS = 64


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _LINE_BYTES) * _LINE_BYTES


class _Column(NamedTuple):
    """One field of a window's rows: `width` elements of `dtype` in each."""

    name: str
    dtype: torch.dtype
    width: int

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Byte offsets of one pair's windows; both ends compute the same from one NetShape."""

    shape: NetShape

    @property
    def answer_row_bytes(self) -> int:
        """Return the payload bytes of one answer row."""
        return sum(column.row_bytes for column in self._answer_columns)

    @property
    def request_row_bytes(self) -> int:
        """Return the payload bytes of one request row: K slots, K weights, its scale, hidden."""
        return sum(column.row_bytes for column in self._request_columns)

    @property
    def answer_bytes(self) -> int:
        """Return the size of one answer window."""
        return self._window_bytes(self._answer_columns, self.shape.answer_rows)

    @property
    def request_bytes(self) -> int:
        """Return the size of one request window."""
        return self._window_bytes(self._request_columns, self.shape.window_rows)

    @property
    def _answer_columns(self) -> tuple[_Column, ...]:
        return (_Column("hidden", self.shape.payload, self.shape.hidden_size),)

    @property
    def _request_columns(self) -> tuple[_Column, ...]:
        top_k, hidden_size = self.shape.top_k, self.shape.hidden_size
        scale = (_Column("scales", torch.float32, 1),) if self.shape.compressed else ()
        return (
            _Column("slots", torch.int32, top_k),
            _Column("weights", torch.float32, top_k),
            *scale,
            _Column("hidden", self.shape.request_dtype, hidden_size),
        )

    @property
    def _front_bytes(self) -> int:
        return _LINE_BYTES + _aligned(HEADER_BYTES)

    def _window_bytes(self, columns: tuple[_Column, ...], rows: int) -> int:
        return self._front_bytes + sum(_aligned(rows * column.row_bytes) for column in columns)

    @property
    def total_bytes(self) -> int:
        """Return the size of the whole pair, in whole pages."""
        size = self.shape.num_micro_batches * (self.request_bytes + self.answer_bytes)
        return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE

    def map(self, memory: mmap.mmap) -> PairWindows:
        """Return the views over `memory`, which must have `total_bytes` bytes."""
        assert len(memory) == self.total_bytes, "the mapping is not of this layout"
        requests, answers, offset = [], [], 0
        for _ in range(self.shape.num_micro_batches):
            requests.append(self._window(memory, offset, routing=True))
            offset += self.request_bytes
            answers.append(self._window(memory, offset, routing=False))
            offset += self.answer_bytes
        return PairWindows(tuple(requests), tuple(answers))

    def _window(self, memory: mmap.mmap, offset: int, *, routing: bool) -> FrameWindow:
        rows = self.shape.window_rows if routing else self.shape.answer_rows
        columns = self._request_columns if routing else self._answer_columns
        view = memoryview(memory)
        base = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        start = offset + self._front_bytes
        tensors: dict[str, torch.Tensor] = {}
        fields = []
        for column in columns:
            size = rows * column.row_bytes
            tensors[column.name] = _tensor(memory, start, (rows, column.width), column.dtype)
            fields.append(WindowField(view[start : start + size], column.row_bytes, base + start))
            start += _aligned(size)
        header = view[offset + _LINE_BYTES : offset + _LINE_BYTES + HEADER_BYTES]
        return FrameWindow(
            flag=word_at(view, offset),
            reader_is_awake=word_at(view, offset + WORD_BYTES),
            header=header,
            words=header.cast("Q"),
            header_at=base + offset + _LINE_BYTES,
            flag_at=base + offset,
            reader_is_awake_at=base + offset + WORD_BYTES,
            slots=tensors.get("slots"),
            weights=tensors.get("weights"),
            scales=tensors.get("scales"),
            hidden=tensors["hidden"],
            fields=tuple(fields),
        )


@dataclass(frozen=True, slots=True)
class WindowField:
    """The bytes of one payload field of a window, at `address`, `row_bytes` each row."""

    data: memoryview
    row_bytes: int
    address: int


class WindowRows(NamedTuple):
    """The first R rows of a window: slots [R, K], weights [R, K], hidden [R, H], scales [R, 1].

    Answers have only hidden rows, uncompressed ones no scales; those entries are empty.
    """

    slots: torch.Tensor
    weights: torch.Tensor
    hidden: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class FrameWindow:
    """Views over one window. slots [W, K] int32 and weights [W, K] fp32 on requests only.

    hidden [W, H] in the dtype that is sent, with scales [W, 1] fp32 if it is compressed; `fields`
    the same memory as bytes, in wire order; `words` the header as 64-bit numbers. Names in `_at`
    are addresses. `reader_is_awake` is not 0 if the reader needs no bell.
    """

    flag: memoryview
    reader_is_awake: memoryview
    header: memoryview
    words: memoryview
    header_at: int
    flag_at: int
    reader_is_awake_at: int
    slots: torch.Tensor | None
    weights: torch.Tensor | None
    hidden: torch.Tensor
    fields: tuple[WindowField, ...]
    scales: torch.Tensor | None = None
    _views: dict[int, WindowRows] = field(default_factory=dict)
    _payloads: dict[int, list[memoryview]] = field(default_factory=dict)

    def first(self, rows: int) -> WindowRows:
        """Return views over the first `rows` rows; views of recent sizes are kept."""
        views = self._views.get(rows)
        if views is None:
            if len(self._views) >= _MAX_CACHED_VIEWS:
                self._views.clear()
            views = WindowRows(
                torch.empty(0) if self.slots is None else self.slots[:rows],
                torch.empty(0) if self.weights is None else self.weights[:rows],
                self.hidden[:rows],
                torch.empty(0) if self.scales is None else self.scales[:rows],
            )
            self._views[rows] = views
        return views

    def payload(self, rows: int) -> list[memoryview]:
        """Return the bytes of the first `rows` rows, field by field; the same list each time."""
        parts = self._payloads.get(rows)
        if parts is None:
            if len(self._payloads) >= _MAX_CACHED_VIEWS:
                self._payloads.clear()
            parts = [field.data[: rows * field.row_bytes] for field in self.fields] if rows else []
            self._payloads[rows] = parts
        return parts


@dataclass(frozen=True, slots=True)
class PairWindows:
    """The windows of one pair, indexed by micro-batch."""

    requests: tuple[FrameWindow, ...]
    answers: tuple[FrameWindow, ...]


def private_memory(layout: PairLayout) -> mmap.mmap:
    """Return a zeroed mapping of this process, every page already present."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return mmap.mmap(-1, layout.total_bytes, flags=flags)


def _tensor(
    memory: mmap.mmap, offset: int, size: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    count = size[0] * size[1]
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(size)


assert 2 * WORD_BYTES <= _LINE_BYTES

"""The common frame in one compiled call: rows, routing and header written, or checked and read.

Owns the record of a (pair, micro-batch) and the functions that work on it. They handle uncompressed
frames of one part; for any other they return -1 and leave it unchanged, and the sides use the
general code (parts.py, wire.py), which serves it or names the error. So no rule is implemented only
here. Called by hops.py and expert_side.py, which publish and wait.

Why compiled: a frame costs some ten tensor operations and a header of twenty fields; in Python that
is 10 us a side, more than the rows of a small batch.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.compiled.runtime import compiled
from kernels.frame_header import NUM_WORDS, word
from m2n_comm.emulate import LinkShaper
from m2n_comm.host.lines import Port
from m2n_comm.host.tcp_frames import IS_PLACED
from m2n_comm.host.windows import PairLayout, Window
from m2n_comm.host.wire import ANSWER, REQUEST, payload_code
from m2n_comm.net import NetShape

# A record: the header of the newest request, then words that do not change, then (from SENT_NS)
# times of the newest frames, which hops.py writes. The loops below rely on the order of the header
# fields that they name. OUT_FLAG to BLOCK are the port's, 0 without one; SHAPER is the address
# of an emulated link's words (0: none), SELF the record's own address, COUNT the address of the
# number of requests sent or taken.
_SEQUENCE, ROWS, _STEP, _VERSION = map(word, ("sequence", "rows", "step", "table_version"))
_LAYER, _PART, _NUM_PARTS = map(word, ("layer", "part", "num_parts"))
_WRITER, _READER = map(word, ("incarnation", "reader_incarnation"))
_KIND, _PAYLOAD = map(word, ("kind", "payload"))
_ATTENTION, EXPERT, _MICRO_BATCH = map(word, ("attention", "expert", "micro_batch"))
_HIDDEN_SIZE, _SIZE = map(word, ("hidden_size", "payload_bytes"))
_DELIVER, _COMPUTE, _IDLE = map(word, ("deliver_ns", "compute_ns", "idle_ns"))
(
    OUT_HEADER,
    OUT_SLOTS,
    OUT_WEIGHTS,
    OUT_HIDDEN,
    IN_HEADER,
    _IN_SLOTS,
    _IN_WEIGHTS,
    _IN_HIDDEN,
    _CHOSEN,
    TOP_K,
    _WINDOW_ROWS,
    ROW_BYTES,
    _REQUEST_ROW_BYTES,
    ANSWER_ROW_BYTES,
    _ANSWER_PAYLOAD,
    _IS_BF16,
    _SENDS_ALL,
    RUNS_AT,
    NUM_RUNS,
    OUT_FLAG,
    OUT_IS_AWAKE,
    BELL,
    IN_FLAG,
    IN_IS_AWAKE,
    CONSUMED,
    LINE,
    BLOCK,
    SHAPER,
    SELF,
    COUNT,
    SENT_NS,
    WAIT_BEGAN_NS,
    ARRIVED_NS,
    _RECORD_WORDS,
) = range(NUM_WORDS, NUM_WORDS + 34)
MAX_RUNS = 128
_IS_ANSWER = np.uint64(ANSWER)


class Record:
    """The words of one (pair, micro-batch) at one end, and their address."""

    __slots__ = ("_chosen", "_count", "_runs", "_shaper", "address", "words")

    def __init__(
        self,
        layout: PairLayout,
        header: tuple[int, int, int],
        incarnations: tuple[int, int],
        *,
        outbox: Window,
        inbox: Window,
        count: array[int],
        port: Port | None = None,
        shaper: LinkShaper | None = None,
        sends_all: bool = False,
        in_place: bool = False,
    ) -> None:
        """`header` is (attention, expert, micro-batch); `incarnations` is (own, peer's).

        `count[micro_batch]` is the number of requests sent or taken. `sends_all`: all rows go to
        this expert node, even if they chose no expert there. `in_place`: hidden rows need not be
        written into the outbox if they lie in few `runs` where they are.
        """
        shape = layout.shape
        self.words = array("Q", bytes(8 * _RECORD_WORDS))
        self._chosen = array("i", bytes(4 * shape.window_rows))
        words = self.words
        words[_ATTENTION], words[EXPERT], words[_MICRO_BATCH] = header
        writes_requests = outbox.slots is not None
        writer, reader = incarnations if writes_requests else incarnations[::-1]
        words[_WRITER], words[_READER] = writer, reader
        words[_NUM_PARTS] = 1
        words[_KIND], words[_PAYLOAD] = REQUEST, payload_code(shape.request_dtype)
        words[_HIDDEN_SIZE] = shape.hidden_size
        words[OUT_HEADER], words[IN_HEADER] = outbox.header_at, inbox.header_at
        words[OUT_HIDDEN], words[_IN_HIDDEN] = outbox.hidden.data_ptr(), inbox.hidden.data_ptr()
        for window, slots in ((outbox, OUT_SLOTS), (inbox, _IN_SLOTS)):
            words[slots] = 0 if window.slots is None else window.slots.data_ptr()
        for window, weights in ((outbox, OUT_WEIGHTS), (inbox, _IN_WEIGHTS)):
            words[weights] = 0 if window.weights is None else window.weights.data_ptr()
        words[_CHOSEN] = self._chosen.buffer_info()[0]
        self._runs = array("i", bytes(8 * MAX_RUNS))
        words[RUNS_AT] = self._runs.buffer_info()[0] if in_place else 0
        words[TOP_K] = shape.top_k
        words[_WINDOW_ROWS] = shape.window_rows
        words[ROW_BYTES] = shape.hidden_size * shape.payload.itemsize
        words[_REQUEST_ROW_BYTES] = layout.request_row_bytes
        words[ANSWER_ROW_BYTES] = layout.answer_row_bytes
        words[_ANSWER_PAYLOAD] = payload_code(shape.payload)
        words[_IS_BF16] = shape.payload.itemsize == 2
        words[_SENDS_ALL] = sends_all
        if port is not None:
            words[OUT_FLAG : BLOCK + 1] = array("Q", port)
        if shaper is not None:
            words[SHAPER] = shaper.address
        words[COUNT] = count.buffer_info()[0] + count.itemsize * header[2]
        self.address = words[SELF] = words.buffer_info()[0]
        self._count = count
        self._shaper = shaper

    @property
    def place(self) -> int:
        """Return the address of a word that holds `address`."""
        return self.address + 8 * SELF

    @property
    def is_placed(self) -> bool:
        """Return whether the newest frame's hidden rows went where hops.await_frame was told to."""
        block = self.words[BLOCK]
        return block != 0 and ctypes.c_int64.from_address(block + IS_PLACED).value != 0

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Return the first row and the end of each run of the newest request's rows.

        Empty if its rows were written into the outbox.
        """
        ends = self._runs[: 2 * self.words[NUM_RUNS]]
        return list(zip(ends[::2], ends[1::2], strict=True))

    @property
    def request(self) -> bytes:
        """Return the header of the newest request, as it was sent or taken."""
        return self.words[:NUM_WORDS].tobytes()


def serves(shape: NetShape) -> bool:
    """Return whether these functions support frames of `shape`."""
    return shape.compressed is None and not shape.per_expert_answers


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typingctx: Any, address: Any) -> Any:
    """uint64 -> void*."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _copy(typingctx: Any, to: Any, source: Any, num_bytes: Any) -> Any:
    """memcpy(void* to, void* source, num_bytes), of addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointers = [builder.inttoptr(arg, cgutils.voidptr_t) for arg in args[:2]]
        cgutils.raw_memcpy(builder, *pointers, args[2], 1)
        return context.get_dummy_value()

    return types.none(types.uint64, types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(typingctx: Any, bits: Any) -> Any:
    """The float32 that has these bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), generate


_inline = njit(error_model="numpy", inline="always")


@_inline  # type: ignore[untyped-decorator]
def _words(address: Any) -> Any:
    return carray(_pointer(address), (_RECORD_WORDS,), np.uint64)


@_inline  # type: ignore[untyped-decorator]
def _is_answer(header: Any, words: Any) -> Any:
    """Return whether `header` belongs to the answer to the request in `words`."""
    right = (
        (header[_KIND] == _IS_ANSWER)
        & (header[_PAYLOAD] == words[_ANSWER_PAYLOAD])
        & (header[_WRITER] == words[_READER])
        & (header[_READER] == words[_WRITER])
        & (header[_SIZE] == words[ROWS] * words[ANSWER_ROW_BYTES])
    )
    for idx in range(_WRITER):
        right &= header[idx] == words[idx]
    for idx in range(_ATTENTION, _SIZE):
        right &= header[idx] == words[idx]
    return right


@_inline  # type: ignore[untyped-decorator]
def _find_runs(rows: Any, count: Any, runs_at: Any) -> Any:
    """Write the first row and the end of each run of rows; return their number, 0 if too many."""
    runs = carray(_pointer(runs_at), (2 * MAX_RUNS,), np.int32)
    num_runs = 0
    for idx in range(count):
        if idx > 0 and rows[idx] == runs[2 * num_runs - 1]:
            runs[2 * num_runs - 1] += 1
            continue
        if num_runs == MAX_RUNS:
            return 0
        runs[2 * num_runs], runs[2 * num_runs + 1] = rows[idx], rows[idx] + 1
        num_runs += 1
    return num_runs


@compiled(11)
def write_request(
    record: int,
    chosen_at: int,
    columns_at: int,
    num_columns: int,
    num_rows: int,
    hidden_at: int,
    weights_at: int,
    layer: int,
    version: int,
    step: int,
    sequence: int,
) -> int:
    """Write the share of one expert node and its header; return its rows, -1 for an unknown id.

    Its hidden rows are not written if the record has room for their runs and they are few.

    chosen i64[T, K] name columns of columns i32[P], the node's slots or -1; hidden [T, H] in
    the payload's dtype, weights f32[T, K], all contiguous, T at most a window.
    """
    words = _words(record)
    top_k, row_bytes = words[TOP_K], words[ROW_BYTES]
    num_choices = num_rows * top_k
    chosen = carray(_pointer(chosen_at), (num_choices,), np.int64)
    columns = carray(_pointer(columns_at), (num_columns,), np.int32)
    weights = carray(_pointer(weights_at), (num_choices,), np.float32)
    to_slots = carray(_pointer(words[OUT_SLOTS]), (num_choices,), np.int32)
    to_weights = carray(_pointer(words[OUT_WEIGHTS]), (num_choices,), np.float32)
    rows = carray(_pointer(words[_CHOSEN]), (num_rows,), np.int32)
    limit, sends_all = np.int64(num_columns), words[_SENDS_ALL] != 0
    count = 0
    for row in range(np.int64(num_rows)):
        held = sends_all
        source, to = row * np.int64(top_k), count * np.int64(top_k)
        for idx in range(np.int64(top_k)):
            column = chosen[source + idx]
            if column < 0 or column >= limit:
                return -1
            slot = columns[column]
            held |= slot >= 0
            to_slots[to + idx] = slot
            to_weights[to + idx] = weights[source + idx]
        if held:
            rows[count] = row
            count += 1
    to_hidden = words[OUT_HIDDEN]
    num_runs = 0
    if words[RUNS_AT] != 0:
        num_runs = _find_runs(rows, count, words[RUNS_AT])
    words[NUM_RUNS] = num_runs
    if num_runs > 0:
        pass
    elif count == np.int64(num_rows):
        _copy(to_hidden, hidden_at, num_rows * row_bytes)
    else:
        for idx in range(count):
            _copy(
                to_hidden + np.uint64(idx) * row_bytes,
                hidden_at + np.uint64(rows[idx]) * row_bytes,
                row_bytes,
            )
    words[_SEQUENCE], words[_STEP], words[_VERSION] = sequence, step, version
    words[_LAYER], words[ROWS] = layer, np.uint64(count)
    words[_SIZE] = words[ROWS] * words[_REQUEST_ROW_BYTES]
    header = _words(words[OUT_HEADER])
    for idx in range(NUM_WORDS):
        header[idx] = words[idx]
    return count


@_inline  # type: ignore[untyped-decorator]
def _add_row(out_at: Any, from_at: Any, size: Any, is_bf16: Any, adds: Any) -> None:
    """Add a row of an answer to out f32[size], or (not `adds`) write it there."""
    out = carray(_pointer(out_at), (size,), np.float32)
    in_bf16 = carray(_pointer(from_at), (size,), np.uint16)
    in_fp32 = carray(_pointer(from_at), (size,), np.float32)
    if is_bf16 and adds:
        for column in range(size):
            out[column] += _as_float(np.uint32(in_bf16[column]) << np.uint32(16))
    elif is_bf16:
        for column in range(size):
            out[column] = _as_float(np.uint32(in_bf16[column]) << np.uint32(16))
    elif adds:
        for column in range(size):
            out[column] += in_fp32[column]
    else:
        for column in range(size):
            out[column] = in_fp32[column]


@compiled(4)
def add_answers(records_at: int, num_records: int, out_at: int, num_rows: int) -> int:
    """Fill out f32[T, H] with the sums of the answers to the newest request of each record.

    T is num_rows; a row is added in the records' order, and 0 if no answer has it. `records_at` is
    the address of their addresses, then of as many words for this function. Row by row, so that
    each sum stays in the nearest cache until it is complete. Returns -1, and fills nothing, if a
    frame is not the answer, else 0.
    """
    count = np.int64(num_records)
    records = carray(_pointer(records_at), (count,), np.uint64)
    for idx in range(count):
        words = _words(records[idx])
        if not _is_answer(_words(words[IN_HEADER]), words):
            return -1
    done = carray(_pointer(records_at + np.uint64(8) * num_records), (count,), np.int64)
    done[:] = 0
    size = np.int64(_words(records[0])[_HIDDEN_SIZE])
    for row in range(np.int64(num_rows)):
        to_at = out_at + np.uint64(row) * np.uint64(4 * size)
        is_first = True
        for idx in range(count):
            words = _words(records[idx])
            rows = carray(_pointer(words[_CHOSEN]), (np.int64(words[ROWS]),), np.int32)
            if done[idx] == len(rows) or rows[done[idx]] != row:
                continue
            from_at = words[_IN_HIDDEN] + np.uint64(done[idx]) * words[ROW_BYTES]
            if is_first and idx > 0:
                carray(_pointer(to_at), (size,), np.float32)[:] = np.float32(0)
            _add_row(to_at, from_at, size, words[_IS_BF16] != 0, idx > 0)
            is_first = False
            done[idx] += 1
        if is_first:
            carray(_pointer(to_at), (size,), np.float32)[:] = np.float32(0)
    return 0


@compiled(5)
def add_bf16(out_at: int, rows_at: int, from_at: int, count: int, size: int) -> int:
    """Add rows bf16[count, size] to rows `rows` i64[count] of out f32[:, size], all contiguous.

    `rows_at` 0: to the first ones, in order. torch would widen them all before it adds.
    """
    in_bf16 = carray(_pointer(from_at), (np.int64(count), np.int64(size)), np.uint16)
    rows = carray(_pointer(rows_at), (np.int64(count),), np.int64)
    for idx in range(np.int64(count)):
        row = idx if rows_at == 0 else rows[idx]
        to_at = out_at + np.uint64(row) * size * np.uint64(4)
        out = carray(_pointer(to_at), (np.int64(size),), np.float32)
        for column in range(np.int64(size)):
            out[column] += _as_float(np.uint32(in_bf16[idx, column]) << np.uint32(16))
    return int(count)


@compiled(6)
def take_request(
    record: int, layer: int, version: int, step: int, sequence: int, num_slots: int
) -> int:
    """Check the request in the inbox and keep its header; return its rows.

    Returns -1 if it has several parts, is not the next one of this step, or names a slot that is
    not below num_slots.
    """
    words = _words(record)
    header = _words(words[IN_HEADER])
    count = header[ROWS]
    is_next = (
        (header[_SEQUENCE] == sequence)
        & (header[_STEP] == step)
        & (header[_VERSION] == version)
        & (header[_LAYER] == layer)
        & (count <= words[_WINDOW_ROWS])
        & (header[_SIZE] == count * words[_REQUEST_ROW_BYTES])
    )
    for idx in range(_PART, _SIZE):
        is_next &= header[idx] == words[idx]
    if not is_next:
        return -1
    num_choices = np.int64(count * words[TOP_K])
    slots = carray(_pointer(words[_IN_SLOTS]), (num_choices,), np.int32)
    low, high = np.int32(-1), np.int32(-1)
    for idx in range(num_choices):
        low, high = min(low, slots[idx]), max(high, slots[idx])
    if low < -1 or np.int64(high) >= np.int64(num_slots):
        return -1
    for idx in range(NUM_WORDS):
        words[idx] = header[idx]
    return int(count)


@compiled(5)
def copy_request(record: int, hidden_at: int, slots_at: int, weights_at: int, bucket: int) -> int:
    """Copy the request that was taken, R rows, to hidden [bucket, H], slots and weights.

    hidden 0: its hidden rows are in their place already. slots i32[bucket, K] are -1 in the rows
    that did not come. Returns R.
    """
    words = _words(record)
    count, num_choices = words[ROWS], words[ROWS] * words[TOP_K]
    if hidden_at != 0:
        _copy(hidden_at, words[_IN_HIDDEN], count * words[ROW_BYTES])
    _copy(slots_at, words[_IN_SLOTS], np.uint64(4) * num_choices)
    _copy(weights_at, words[_IN_WEIGHTS], np.uint64(4) * num_choices)
    size = np.int64(bucket * words[TOP_K])
    slots = carray(_pointer(slots_at), (size,), np.int32)
    for idx in range(np.int64(num_choices), size):
        slots[idx] = -1
    return int(count)


@compiled(4)
def write_answer(record: int, partial_at: int, compute_ns: int, idle_ns: int) -> int:
    """Write the answer to the request that was taken; returns its payload bytes.

    partial [R, H] in the payload's dtype, contiguous; 0: the rows need not be copied.
    """
    words = _words(record)
    header = _words(words[OUT_HEADER])
    size = words[ROWS] * words[ANSWER_ROW_BYTES]
    if partial_at != 0:
        _copy(words[OUT_HIDDEN], partial_at, size)
    for idx in range(_SIZE):
        header[idx] = words[idx]
    header[_KIND], header[_PAYLOAD] = _IS_ANSWER, words[_ANSWER_PAYLOAD]
    header[_WRITER], header[_READER] = words[_READER], words[_WRITER]
    header[_SIZE] = size
    header[_DELIVER] = np.uint64(0)
    header[_COMPUTE] = compute_ns
    header[_IDLE] = idle_ns
    return int(size)

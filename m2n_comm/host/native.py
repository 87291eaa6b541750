"""The common frame in one compiled call: rows, routing and header written, or checked and read.

Owns the record of a (pair, micro-batch), the words that these functions need of it, and the
functions. They know frames of one part, in the clear; what they do not recognise as right
they refuse with -1 and leave as it is, and the sides go the plain way (layout.py, wire.py),
which serves it or names the error. So no rule is here alone. Called by attention_side.py and
expert_side.py; publishing and waiting stay theirs.

Why compiled: a frame costs some ten tensor operations and a header of twenty fields; in
Python that is 10 us a side, more than the rows of a small batch. The interpreter's lock is
kept: a call takes microseconds, and getting the lock back may take milliseconds.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from m2n_comm.host.windows import PairLayout, Window
from m2n_comm.host.wire import ANSWER, HEADER_BYTES, REQUEST, first_word, payload_code
from m2n_comm.net import NetShape

_HEADER_WORDS = HEADER_BYTES // 8
assert HEADER_BYTES == 104, "the word numbers below are those of wire.py's header"

# A record: the header of the newest request, then what does not change. Numbers of words.
_PEERS, _ROWS, _THEIRS, _OURS, _VERSION, _STEP, _SEQUENCE, _SIZE, _DELIVER = (1, *range(3, 11))
_PARTS, _COMPUTE, _IDLE = 2, 11, 12
(
    _OUT_HEADER,
    _OUT_SLOTS,
    _OUT_WEIGHTS,
    _OUT_HIDDEN,
    _IN_HEADER,
    _IN_SLOTS,
    _IN_HIDDEN,
    _CHOSEN,
    _TOP_K,
    _HIDDEN_SIZE,
    _WINDOW_ROWS,
    _ROW_BYTES,
    _REQUEST_ROW_BYTES,
    _ANSWER_ROW_BYTES,
    _REQUEST_WORD,
    _ANSWER_WORD,
    _IS_BF16,
    _SENDS_ALL,
    _RECORD_WORDS,
) = range(_HEADER_WORDS, _HEADER_WORDS + 19)

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ONE_PART = np.uint64(1 << 32)
_LAYER_AT = np.uint64(48)
_BELOW_LAYER = np.uint64((1 << 48) - 1)
_BYTE = np.uint64(0xFF)
_EIGHT = np.uint64(8)


def _crc_tables() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return the 8 tables of a CRC-32 (polynomial of zlib) that takes 8 bytes at a time."""
    tables = np.zeros((8, 256), dtype=np.uint64)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
        tables[0, byte] = crc
    for step in range(1, 8):
        before = tables[step - 1]
        tables[step] = before >> _EIGHT ^ tables[0, before & _BYTE]
    return tables


_CRC = _crc_tables()


class Record:
    """The words of one (pair, micro-batch) as one end holds it, and where they lie."""

    __slots__ = ("_chosen", "address", "words")

    def __init__(
        self,
        layout: PairLayout,
        header: tuple[int, int, int],
        incarnations: tuple[int, int],
        *,
        outbox: Window,
        inbox: Window,
        sends_all: bool = False,
    ) -> None:
        """`header` is (attention, expert, micro-batch), `incarnations` are theirs.

        `sends_all`: rows go to this expert node whether or not they chose an expert there.
        """
        shape = layout.shape
        attention, expert, micro_batch = header
        self.words = array("Q", bytes(8 * _RECORD_WORDS))
        self._chosen = array("i", bytes(4 * shape.window_rows))
        words = self.words
        words[_PEERS] = attention | expert << 16 | micro_batch << 32
        words[_ROWS] = shape.hidden_size << 32
        words[_THEIRS], words[_OURS] = incarnations
        words[_PARTS] = int(_ONE_PART)
        words[_OUT_HEADER], words[_IN_HEADER] = outbox.header_at, inbox.header_at
        words[_OUT_HIDDEN], words[_IN_HIDDEN] = outbox.hidden.data_ptr(), inbox.hidden.data_ptr()
        for window, slots in ((outbox, _OUT_SLOTS), (inbox, _IN_SLOTS)):
            words[slots] = 0 if window.slots is None else window.slots.data_ptr()
        words[_OUT_WEIGHTS] = 0 if outbox.weights is None else outbox.weights.data_ptr()
        words[_CHOSEN] = self._chosen.buffer_info()[0]
        words[_TOP_K], words[_HIDDEN_SIZE] = shape.top_k, shape.hidden_size
        words[_WINDOW_ROWS] = shape.window_rows
        words[_ROW_BYTES] = shape.hidden_size * shape.payload.itemsize
        words[_REQUEST_ROW_BYTES] = layout.request_row_bytes
        words[_ANSWER_ROW_BYTES] = layout.answer_row_bytes
        words[_REQUEST_WORD] = first_word(REQUEST, payload_code(shape.request_dtype))
        words[_ANSWER_WORD] = first_word(ANSWER, payload_code(shape.payload))
        words[_IS_BF16] = shape.payload.itemsize == 2
        words[_SENDS_ALL] = sends_all
        self.address = words.buffer_info()[0]

    @property
    def request(self) -> bytes:
        """Return the header of the newest request, as it was sent or taken."""
        return self.words[:_HEADER_WORDS].tobytes()


def serves(shape: NetShape) -> bool:
    """Return whether frames of `shape` are of the kind that these functions know."""
    return shape.compressed is None and not shape.per_pair_answers


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


def _compiled(num_arguments: int) -> Any:
    """Compile for so many addresses and numbers, once per machine."""
    signature = types.int64(*(types.uint64,) * num_arguments)

    def compile_it(function: Any) -> Any:
        try:
            return njit(signature, error_model="numpy", cache=True)(function)
        except RuntimeError:  # there is no directory to keep the code in
            return njit(signature, error_model="numpy")(function)

    return compile_it


@_inline  # type: ignore[untyped-decorator]
def _words(address: Any) -> Any:
    return carray(_pointer(address), (_RECORD_WORDS,), np.uint64)


@_inline  # type: ignore[untyped-decorator]
def _crc(words: Any) -> Any:
    """CRC-32 of a header but for its last four bytes."""
    crc = _LOW
    for idx in range(_HEADER_WORDS - 1):
        rest = words[idx] ^ crc
        crc = np.uint64(0)
        for table in range(7, -1, -1):
            crc ^= _CRC[table, rest & _BYTE]
            rest >>= _EIGHT
    rest = (words[_HEADER_WORDS - 1] & _LOW) ^ crc
    crc = np.uint64(0)
    for table in range(3, -1, -1):
        crc ^= _CRC[table, rest & _BYTE]
        rest >>= _EIGHT
    return crc ^ _LOW


@_inline  # type: ignore[untyped-decorator]
def _seal(words: Any) -> None:
    """Put the checksum into a header."""
    last = _HEADER_WORDS - 1
    words[last] = (words[last] & _LOW) | _crc(words) << _HALF


@_inline  # type: ignore[untyped-decorator]
def _seal_request(
    words: Any, count: Any, layer: int, version: int, step: int, sequence: int
) -> None:
    """Make a record's header that of a request of `count` rows."""
    words[0] = words[_REQUEST_WORD]
    words[_PEERS] = (words[_PEERS] & _BELOW_LAYER) | layer << _LAYER_AT
    words[_PARTS] = _ONE_PART
    words[_ROWS] = words[_HIDDEN_SIZE] << _HALF | count
    words[_VERSION], words[_STEP], words[_SEQUENCE] = version, step, sequence
    words[_SIZE] = count * words[_REQUEST_ROW_BYTES]
    words[_DELIVER] = words[_COMPUTE] = words[_IDLE] = np.uint64(0)
    _seal(words)


@_compiled(11)  # type: ignore[untyped-decorator]
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

    chosen i64[T, K] name columns of columns i32[P], the node's slots or -1; hidden [T, H] in
    the payload's dtype, weights f32[T, K], all contiguous, T at most a window.
    """
    words = _words(record)
    top_k, row_bytes = words[_TOP_K], words[_ROW_BYTES]
    num_pairs = num_rows * top_k
    chosen = carray(_pointer(chosen_at), (num_pairs,), np.int64)
    columns = carray(_pointer(columns_at), (num_columns,), np.int32)
    weights = carray(_pointer(weights_at), (num_pairs,), np.float32)
    to_slots = carray(_pointer(words[_OUT_SLOTS]), (num_pairs,), np.int32)
    to_weights = carray(_pointer(words[_OUT_WEIGHTS]), (num_pairs,), np.float32)
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
    to_hidden = words[_OUT_HIDDEN]
    if count == np.int64(num_rows):
        _copy(to_hidden, hidden_at, num_rows * row_bytes)
    else:
        for idx in range(count):
            _copy(
                to_hidden + np.uint64(idx) * row_bytes,
                hidden_at + np.uint64(rows[idx]) * row_bytes,
                row_bytes,
            )
    _seal_request(words, np.uint64(count), layer, version, step, sequence)
    header = _words(words[_OUT_HEADER])
    for idx in range(_HEADER_WORDS):
        header[idx] = words[idx]
    return count


@_compiled(4)  # type: ignore[untyped-decorator]
def add_answer(record: int, out_at: int, num_rows: int, adds: int) -> int:
    """Add the answer to the newest request to out f32[T, H], or (not `adds`) put it there.

    T is num_rows. Returns the answer's rows, -1 if it is not the answer that was asked for.
    """
    words = _words(record)
    header = _words(words[_IN_HEADER])
    right = header[0] == words[_ANSWER_WORD]
    for idx in range(1, _SIZE):
        right &= header[idx] == words[idx]
    count = words[_ROWS] & _LOW
    right &= header[_SIZE] == count * words[_ANSWER_ROW_BYTES]
    if not right or header[_HEADER_WORDS - 1] >> _HALF != _crc(header):
        return -1
    size = np.int64(words[_HIDDEN_SIZE])
    out = carray(_pointer(out_at), (np.int64(num_rows), size), np.float32)
    rows = carray(_pointer(words[_CHOSEN]), (np.int64(count),), np.int32)
    in_order = count == num_rows
    shape = (np.int64(count), size)
    brief = carray(_pointer(words[_IN_HIDDEN]), shape, np.uint16)
    whole = carray(_pointer(words[_IN_HIDDEN]), shape, np.float32)
    is_bf16 = words[_IS_BF16] != 0
    for idx in range(np.int64(count)):
        row = idx if in_order else np.int64(rows[idx])
        if is_bf16 and adds:
            for column in range(size):
                out[row, column] += _as_float(np.uint32(brief[idx, column]) << np.uint32(16))
        elif is_bf16:
            for column in range(size):
                out[row, column] = _as_float(np.uint32(brief[idx, column]) << np.uint32(16))
        elif adds:
            for column in range(size):
                out[row, column] += whole[idx, column]
        else:
            for column in range(size):
                out[row, column] = whole[idx, column]
    return int(count)


@_compiled(6)  # type: ignore[untyped-decorator]
def take_request(
    record: int, layer: int, version: int, step: int, sequence: int, num_slots: int
) -> int:
    """Check the request that lies in the inbox and keep its header; return its rows.

    -1 if it is of several parts, not the next one of this step, or names a slot that is not
    below num_slots.
    """
    words = _words(record)
    header = _words(words[_IN_HEADER])
    peers = words[_PEERS] & _BELOW_LAYER
    count, size = header[_ROWS] & _LOW, header[_ROWS] >> _HALF
    right = (
        (header[0] == words[_REQUEST_WORD])
        & (header[_PEERS] == (peers | layer << _LAYER_AT))
        & (header[_PARTS] == _ONE_PART)
        & (size == words[_HIDDEN_SIZE])
        & (count <= words[_WINDOW_ROWS])
        & (header[_THEIRS] == words[_THEIRS])
        & (header[_OURS] == words[_OURS])
        & (header[_VERSION] == version)
        & (header[_STEP] == step)
        & (header[_SEQUENCE] == sequence)
        & (header[_SIZE] == count * words[_REQUEST_ROW_BYTES])
    )
    if not right or header[_HEADER_WORDS - 1] >> _HALF != _crc(header):
        return -1
    num_pairs = np.int64(count * words[_TOP_K])
    slots = carray(_pointer(words[_IN_SLOTS]), (num_pairs,), np.int32)
    low, high = np.int32(-1), np.int32(-1)
    for idx in range(num_pairs):
        low, high = min(low, slots[idx]), max(high, slots[idx])
    if low < -1 or np.int64(high) >= np.int64(num_slots):
        return -1
    for idx in range(_HEADER_WORDS):
        words[idx] = header[idx]
    return int(count)


@_compiled(4)  # type: ignore[untyped-decorator]
def write_answer(record: int, partial_at: int, compute_ns: int, idle_ns: int) -> int:
    """Write the answer to the request that was taken; returns its payload bytes.

    partial [R, H] in the payload's dtype, contiguous; 0: the rows lie in the window already.
    """
    words = _words(record)
    header = _words(words[_OUT_HEADER])
    size = (words[_ROWS] & _LOW) * words[_ANSWER_ROW_BYTES]
    if partial_at != 0:
        _copy(words[_OUT_HIDDEN], partial_at, size)
    header[0] = words[_ANSWER_WORD]
    for idx in range(1, _SIZE):
        header[idx] = words[idx]
    header[_SIZE] = size
    header[_DELIVER] = np.uint64(0)
    header[_COMPUTE] = compute_ns << _HALF
    header[_IDLE] = idle_ns
    _seal(header)
    return int(size)

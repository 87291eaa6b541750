"""A frame in one compiled call: rows, routing and header written, or checked and read.

Owns the functions that work on a record (records.py). A frame that must be refused they leave as it
is and return -1; the sides then name what is wrong with it. Rows that do not travel as they are
(compressed ones) they leave to the sides too. Called by hops.py and expert_side.py, which publish
and wait.

Why compiled: a frame costs some ten tensor operations and a header of twenty fields; in Python that
is 10 us a side, more than the rows of a small batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.compiled.runtime import compiled
from kernels.frame_header import NUM_WORDS, word
from m2n_comm.host.frames.records import (
    ANSWER_PAYLOAD,
    ANSWER_ROW_BYTES,
    ANSWER_ROWS,
    CHOSEN,
    FIRST_ROW,
    IN_HEADER,
    IN_HIDDEN,
    IN_SLOTS,
    IN_WEIGHTS,
    IS_BF16,
    IS_PLAIN,
    MAX_RUNS,
    NEXT_ROW,
    NUM_ADDED,
    NUM_PARTS,
    NUM_RUNS,
    OUT_HEADER,
    OUT_HIDDEN,
    OUT_SLOTS,
    OUT_WEIGHTS,
    PER_CHOICE,
    RECORD_WORDS,
    REQUEST_ROW_BYTES,
    ROW_BYTES,
    ROWS,
    RUNS_AT,
    SENDS_ALL,
    TOP_K,
    WINDOW_ROWS,
)
from m2n_comm.host.frames.wire import ANSWER

# The loops below rely on the order of the header fields that they name.
_SEQUENCE, _STEP, _VERSION = map(word, ("sequence", "step", "table_version"))
_LAYER, _PART = map(word, ("layer", "part"))
_WRITER, _READER = map(word, ("incarnation", "reader_incarnation"))
_KIND, _PAYLOAD = map(word, ("kind", "payload"))
_ATTENTION, _HIDDEN_SIZE, _SIZE = map(word, ("attention", "hidden_size", "payload_bytes"))
_DELIVER, _COMPUTE, _IDLE = map(word, ("deliver_ns", "compute_ns", "idle_ns"))
_IS_ANSWER = np.uint64(ANSWER)


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
    return carray(_pointer(address), (RECORD_WORDS,), np.uint64)


@_inline  # type: ignore[untyped-decorator]
def _is_answer(header: Any, words: Any) -> Any:
    """Return whether `header` belongs to the answer to the request in `words`."""
    right = (
        (header[_KIND] == _IS_ANSWER)
        & (header[_PAYLOAD] == words[ANSWER_PAYLOAD])
        & (header[_WRITER] == words[_READER])
        & (header[_READER] == words[_WRITER])
        & (header[_SEQUENCE] == words[_SEQUENCE])
        & (header[ROWS] == words[ANSWER_ROWS])
        & (header[_SIZE] == words[ANSWER_ROWS] * words[ANSWER_ROW_BYTES])
    )
    for idx in range(_STEP, _WRITER):
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


@_inline  # type: ignore[untyped-decorator]
def _count_parts(words: Any, chosen: Any, columns: Any, num_rows: Any) -> Any:
    """Return the number of parts of an expert node's share of all rows, -1 for an unknown id."""
    top_k, sends_all, count = np.int64(words[TOP_K]), words[SENDS_ALL] != 0, 0
    for row in range(num_rows):
        held = sends_all
        for idx in range(row * top_k, (row + 1) * top_k):
            if chosen[idx] < 0 or chosen[idx] >= len(columns):
                return -1
            held |= columns[chosen[idx]] >= 0
        count += held
    window_rows = np.int64(words[WINDOW_ROWS])
    return max(1, (count + window_rows - 1) // window_rows)


@_inline  # type: ignore[untyped-decorator]
def _copy_rows(words: Any, rows: Any, count: Any, hidden_at: Any) -> None:
    """Write the hidden rows that were chosen into the outbox."""
    row_bytes, to_hidden = words[ROW_BYTES], words[OUT_HIDDEN]
    if count > 0 and rows[count - 1] - rows[0] + 1 == count:
        _copy(to_hidden, hidden_at + np.uint64(rows[0]) * row_bytes, np.uint64(count) * row_bytes)
        return
    for idx in range(count):
        from_at = hidden_at + np.uint64(rows[idx]) * row_bytes
        _copy(to_hidden + np.uint64(idx) * row_bytes, from_at, row_bytes)


@compiled(12)
def write_request(
    record: int,
    chosen_at: int,
    columns_at: int,
    num_columns: int,
    num_rows: int,
    hidden_at: int,
    weights_at: int,
    layer: int,
    part: int,
    version: int,
    step: int,
    sequence: int,
) -> int:
    """Write a part of an expert node's share and its header; return its rows, -1: an unknown id.

    A share's parts are written in order. The hidden rows are not written if they do not travel as
    they are, or if the record has room for their runs and they are few.

    chosen i64[T, K] name columns of columns i32[P], the node's slots or -1; hidden [T, H] in
    the payload's dtype, weights f32[T, K], all contiguous.
    """
    words = _words(record)
    end, top_k, window_rows = (
        np.int64(num_rows),
        np.int64(words[TOP_K]),
        np.int64(words[WINDOW_ROWS]),
    )
    chosen = carray(_pointer(chosen_at), (end * top_k,), np.int64)
    columns = carray(_pointer(columns_at), (np.int64(num_columns),), np.int32)
    weights = carray(_pointer(weights_at), (end * top_k,), np.float32)
    to_slots = carray(_pointer(words[OUT_SLOTS]), (window_rows * top_k,), np.int32)
    to_weights = carray(_pointer(words[OUT_WEIGHTS]), (window_rows * top_k,), np.float32)
    rows = carray(_pointer(words[CHOSEN]), (window_rows,), np.int32)
    num_parts, row = np.int64(words[NUM_PARTS]), np.int64(words[NEXT_ROW])
    if part == 0:
        num_parts, row = np.int64(1), np.int64(0)
        if end > window_rows:
            num_parts = np.int64(_count_parts(words, chosen, columns, end))
            if num_parts < 0:
                return -1
    sends_all = words[SENDS_ALL] != 0
    words[FIRST_ROW] = np.uint64(row)
    count, num_choices = np.int64(0), np.int64(0)
    while row < end and count < window_rows:
        held = sends_all
        source, to = row * top_k, count * top_k
        for idx in range(top_k):
            column = chosen[source + idx]
            if column < 0 or column >= len(columns):
                return -1
            slot = columns[column]
            held |= slot >= 0
            num_choices += slot >= 0
            to_slots[to + idx] = slot
            to_weights[to + idx] = weights[source + idx]
        if held:
            rows[count] = row
            count += 1
        row += 1
    words[NEXT_ROW] = np.uint64(end if np.int64(part) + 1 == num_parts else row)
    num_runs = 0
    if words[RUNS_AT] != 0 and words[IS_PLAIN] != 0:
        num_runs = _find_runs(rows, count, words[RUNS_AT])
    words[NUM_RUNS] = num_runs
    if num_runs == 0 and words[IS_PLAIN] != 0:
        _copy_rows(words, rows, count, hidden_at)
    words[_SEQUENCE], words[_STEP], words[_VERSION] = sequence, step, version
    words[_LAYER], words[_PART], words[NUM_PARTS] = layer, part, np.uint64(num_parts)
    words[ROWS] = np.uint64(count)
    words[ANSWER_ROWS] = np.uint64(num_choices if words[PER_CHOICE] != 0 else count)
    words[_SIZE] = words[ROWS] * words[REQUEST_ROW_BYTES]
    header = _words(words[OUT_HEADER])
    for idx in range(NUM_WORDS):
        header[idx] = words[idx]
    return int(count)


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


@_inline  # type: ignore[untyped-decorator]
def _put_choices(words: Any, out_at: Any) -> None:
    """Copy an answer's rows to the places of their choices among all: out [T * K, H]."""
    top_k, row_bytes, from_at = np.int64(words[TOP_K]), words[ROW_BYTES], words[IN_HIDDEN]
    count = np.int64(words[ROWS])
    rows = carray(_pointer(words[CHOSEN]), (count,), np.int32)
    slots = carray(_pointer(words[OUT_SLOTS]), (count * top_k,), np.int32)
    for idx in range(count):
        for choice in range(top_k):
            if slots[idx * top_k + choice] >= 0:
                place = np.uint64(np.int64(rows[idx]) * top_k + choice)
                _copy(out_at + place * row_bytes, from_at, row_bytes)
                from_at += row_bytes


@compiled(4)
def add_answers(records_at: int, num_records: int, out_at: int, fills: int) -> int:
    """Add the answers to the newest request of each record; returns -1, and adds nothing, if a
    frame is not the answer, else 0.

    They are added to out f32[T, H], a row in the records' order. `fills`: the rows that the first
    record's part covers get the sums, and 0 if no answer has them. `records_at` is the address of
    the records' addresses. Row by row, so that each sum stays in the nearest cache until it is
    complete. Rows of choices are put into out [T * K, H], in the payload's dtype.
    """
    count = np.int64(num_records)
    records = carray(_pointer(records_at), (count,), np.uint64)
    for idx in range(count):
        words = _words(records[idx])
        if not _is_answer(_words(words[IN_HEADER]), words):
            return -1
        words[NUM_ADDED] = np.uint64(0)
    first = _words(records[0])
    if first[PER_CHOICE] != 0:
        for idx in range(count):
            _put_choices(_words(records[idx]), out_at)
        return 0
    size = np.int64(first[_HIDDEN_SIZE])
    for row in range(np.int64(first[FIRST_ROW]), np.int64(first[NEXT_ROW])):
        to_at = out_at + np.uint64(row) * np.uint64(4 * size)
        adds = fills == 0
        for idx in range(count):
            words = _words(records[idx])
            rows = carray(_pointer(words[CHOSEN]), (np.int64(words[ROWS]),), np.int32)
            added = np.int64(words[NUM_ADDED])
            if added == len(rows) or rows[added] != row:
                continue
            from_at = words[IN_HIDDEN] + words[NUM_ADDED] * words[ROW_BYTES]
            _add_row(to_at, from_at, size, words[IS_BF16] != 0, adds)
            words[NUM_ADDED] += np.uint64(1)
            adds = True
        if not adds:
            carray(_pointer(to_at), (size,), np.float32)[:] = np.float32(0)
    return 0


@compiled(8)
def take_request(
    record: int,
    layer: int,
    part: int,
    max_parts: int,
    version: int,
    step: int,
    sequence: int,
    num_slots: int,
) -> int:
    """Check the request in the inbox and keep its header; return its rows.

    Returns -1 if it is not the next one of this step, part `part` of at most `max_parts`, or names
    a slot that is not below num_slots.
    """
    words = _words(record)
    header = _words(words[IN_HEADER])
    count, num_parts = header[ROWS], header[NUM_PARTS]
    is_next = (
        (header[_SEQUENCE] == sequence)
        & (header[_STEP] == step)
        & (header[_VERSION] == version)
        & (header[_LAYER] == layer)
        & (header[_PART] == part)
        & (part < num_parts)
        & (num_parts <= max_parts)
        & ((part == 0) | (num_parts == words[NUM_PARTS]))
        & (count <= words[WINDOW_ROWS])
        & (header[_SIZE] == count * words[REQUEST_ROW_BYTES])
    )
    for idx in range(_WRITER, _SIZE):
        is_next &= header[idx] == words[idx]
    if not is_next:
        return -1
    num_choices = np.int64(count * words[TOP_K])
    slots = carray(_pointer(words[IN_SLOTS]), (num_choices,), np.int32)
    low, high, num_served = np.int32(-1), np.int32(-1), np.int64(0)
    for idx in range(num_choices):
        low, high = min(low, slots[idx]), max(high, slots[idx])
        num_served += slots[idx] >= 0
    if low < -1 or np.int64(high) >= np.int64(num_slots):
        return -1
    for idx in range(NUM_WORDS):
        words[idx] = header[idx]
    words[ANSWER_ROWS] = np.uint64(num_served) if words[PER_CHOICE] != 0 else count
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
        _copy(hidden_at, words[IN_HIDDEN], count * words[ROW_BYTES])
    _copy(slots_at, words[IN_SLOTS], np.uint64(4) * num_choices)
    _copy(weights_at, words[IN_WEIGHTS], np.uint64(4) * num_choices)
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
    size = words[ANSWER_ROWS] * words[ANSWER_ROW_BYTES]
    if partial_at != 0:
        _copy(words[OUT_HIDDEN], partial_at, size)
    for idx in range(_SIZE):
        header[idx] = words[idx]
    header[_KIND], header[_PAYLOAD] = _IS_ANSWER, words[ANSWER_PAYLOAD]
    header[_WRITER], header[_READER] = words[_READER], words[_WRITER]
    header[ROWS], header[_SIZE] = words[ANSWER_ROWS], size
    header[_DELIVER] = np.uint64(0)
    header[_COMPUTE] = compute_ns
    header[_IDLE] = idle_ns
    return int(size)

"""Triton kernels of M2N on GPUs: rows to their experts' nodes, and partial sums back.

`put_row` has a program per node and row: it finds the row's place among those that the node
gets, writes slots, weights and the row, in fp8 with a scale if so asked, straight into the
node's request window, and the node's last program releases the window's flag. `combine_row`
has a program per row and block of columns: it acquires the answers' flags, until a deadline,
and adds the partial sums in fp32 by ascending node. Windows lie wherever the table of
addresses says: in this device's memory or a peer's that is mapped here. No program knows how
many rows a node gets before it runs, so a CUDA graph can replay both. Launched by
`kernels.triton_m2n`.

A flag is the sequence number of the window's newest content, an i64 that nothing else touches
than one writer. The writer's data is visible to whoever has seen the number: a barrier in each
program, then acquire-release adds to a counter, then a release at system scope.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_runtime import INTERPRETED, rounded

# Columns of a table of request windows, i64[N, 6], and of answer windows, i64[N, 2].
SLOTS: tl.constexpr = tl.constexpr(0)
WEIGHTS: tl.constexpr = tl.constexpr(1)
HIDDEN: tl.constexpr = tl.constexpr(2)
SCALES: tl.constexpr = tl.constexpr(3)
COUNT: tl.constexpr = tl.constexpr(4)
FLAG: tl.constexpr = tl.constexpr(5)
NUM_COLUMNS: tl.constexpr = tl.constexpr(6)
ANSWER_HIDDEN: tl.constexpr = tl.constexpr(0)
ANSWER_FLAG: tl.constexpr = tl.constexpr(1)

THREADS: tl.constexpr = tl.constexpr(128)
"""Of a program that waits: four warps."""

FP8_MAX: tl.constexpr = tl.constexpr(448.0)
SMALLEST_SCALE: tl.constexpr = tl.constexpr(1e-30)


@triton.jit
def _pointer(table_ptr: tl.tensor, place: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    return tl.load(table_ptr + place).to(tl.pointer_type(dtype))


@triton.jit
def _rows_pointer(table_ptr: tl.tensor, place: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Give the pointer to a window's hidden rows, which begin at a multiple of 16 bytes.

    (Only the operation that makes the pointer can carry that; a call that returns it cannot.)
    """
    return tl.multiple_of(tl.load(table_ptr + place).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _count_rows_above(
    experts_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    row: tl.tensor,
    T: tl.tensor,
    num_columns: tl.tensor,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Give how many rows before `row`, and how many of all T, have an expert on the node."""
    choices = tl.arange(0, K_PAD)[None, :]
    above = 0
    total = 0
    for start in range(0, T, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        is_pair = (rows < T)[:, None] & (choices < K)
        experts = tl.load(experts_ptr + rows[:, None] * K + choices, mask=is_pair, other=-1)
        is_known = (experts >= 0) & (experts < num_columns)
        slots = tl.load(columns_ptr + experts, mask=is_pair & is_known, other=-1)
        is_held = (tl.max(slots, axis=1) >= 0).to(tl.int32)
        total += tl.sum(is_held, axis=0)
        above += tl.sum(tl.where(rows < row, is_held, 0), axis=0)
    return above, total


@triton.jit
def put_row(
    hidden_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    table_ptr: tl.tensor,
    places_ptr: tl.tensor,
    done_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.tensor,
    num_columns: tl.tensor,
    hidden_stride: tl.tensor,
    WIRE: tl.constexpr,
    COMPRESSED: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    H_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Put one row into one node's window, if the node has any of its experts."""
    node, row = tl.program_id(0), tl.program_id(1)
    columns_ptr += node * num_columns
    place, total = _count_rows_above(experts_ptr, columns_ptr, row, T, num_columns, K, K_PAD, CHUNK)
    choices = tl.arange(0, K_PAD)
    experts = tl.load(experts_ptr + row * K + choices, mask=choices < K, other=-1)
    is_known = (choices < K) & (experts >= 0) & (experts < num_columns)
    slots = tl.load(columns_ptr + experts, mask=is_known, other=-1)
    is_held = tl.max(slots, axis=0) >= 0
    tl.store(places_ptr + node * T + row, tl.where(is_held, place, -1))
    table_ptr += node * NUM_COLUMNS
    if is_held:
        pairs = place * K + choices
        weights = tl.load(weights_ptr + row * K + choices, mask=choices < K, other=0.0)
        tl.store(_pointer(table_ptr, SLOTS, tl.int32) + pairs, slots, mask=choices < K)
        tl.store(_pointer(table_ptr, WEIGHTS, tl.float32) + pairs, weights, mask=choices < K)
        columns = tl.arange(0, H_PAD)
        inside = columns < H
        hidden_ptr += row.to(tl.int64) * hidden_stride
        x = tl.load(hidden_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if COMPRESSED:
            scale = tl.maximum(tl.max(tl.abs(x), axis=0) / FP8_MAX, SMALLEST_SCALE)
            # A row with a NaN or an infinity must not become one of finite numbers.
            is_number = tl.sum((tl.abs(x) < float("inf")).to(tl.int32), axis=0) == H_PAD
            tl.store(
                _pointer(table_ptr, SCALES, tl.float32) + place,
                tl.where(is_number, scale, float("nan")),
            )
            x = tl.where(is_number, x / scale, 0.0)
        places = _rows_pointer(table_ptr, HIDDEN, WIRE) + place.to(tl.int64) * H + columns
        tl.store(places, rounded(x, WIRE), mask=inside)
    tl.debug_barrier()
    # The programs of a node count themselves; the last one knows that all have written.
    if tl.atomic_add(done_ptr + node, 1, sem="acq_rel") == T - 1:
        tl.store(done_ptr + node, 0)
        sequence = tl.load(sequences_ptr + node) + 1
        tl.store(sequences_ptr + node, sequence)
        tl.store(_pointer(table_ptr, COUNT, tl.int64), total.to(tl.int64))
        tl.debug_barrier()
        tl.atomic_xchg(_pointer(table_ptr, FLAG, tl.int64), sequence, sem="release", scope="sys")


@triton.jit
def _ticks(polls: tl.tensor) -> tl.tensor:
    """Give the device's clock in nanoseconds; interpreted, which has none, the polls so far.

    Every thread reads a clock of its own, and a loop that threads leave at different times
    never ends: the greatest of all readings is the same for all of them.
    """
    if INTERPRETED:
        now = polls
    else:
        readings = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;",
            "=l,r",
            [tl.arange(0, THREADS)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
        now = tl.max(readings, axis=0)
    return now


@triton.jit
def combine_row(
    table_ptr: tl.tensor,
    places_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    late_ptr: tl.tensor,
    out_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.tensor,
    N: tl.tensor,
    out_stride: tl.tensor,
    patience: tl.tensor,
    ANSWER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add a block of columns of a row's partial sums; NaN if a node was late.

    late i32[N] is set to 1 for the nodes whose answer did not come in `patience` ticks.
    """
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    polls = tl.zeros((), tl.int64)
    end = _ticks(polls) + patience
    for node in range(N):
        place = tl.load(places_ptr + node * T + row)
        if place >= 0:
            flag_ptr = _pointer(table_ptr, node * 2 + ANSWER_FLAG, tl.int64)
            awaited = tl.load(sequences_ptr + node)
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
            while (seen < awaited) & (_ticks(polls) < end):
                polls += 1
                seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
            tl.debug_barrier()
            if seen < awaited:
                tl.store(late_ptr + node, 1)
                total += float("nan")
            else:
                answers = _rows_pointer(table_ptr, node * 2 + ANSWER_HIDDEN, ANSWER)
                part = tl.load(
                    answers + place.to(tl.int64) * H + columns, mask=columns < H, other=0.0
                )
                total += part.to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * out_stride + columns, total, mask=columns < H)

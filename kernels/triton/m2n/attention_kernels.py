"""Triton kernels of M2N on an attention node's GPU: rows to their experts' nodes, sums back.

`put_row` has a program per node and row: it finds the row's place among the node's rows, writes
slots, weights and the row, in fp8 with a scale if COMPRESSED, directly into the node's request
window, and the node's last program writes the header and releases the flag. `await_answer` has a
program per node: it acquires the flag of the node's answer, until a deadline, and compares its
header with the request's. Only these few wait: waiting programs occupy their multiprocessors.
`combine_row` has a program per row and block of columns, and adds the partial sums in fp32 by
ascending node. The table of addresses gives the windows: in this device's memory or in a peer's
that is mapped here. The rows of a node, the step, the table's version and the sequence are read
from memory, so a CUDA graph can replay all. Launched by `kernels.triton.m2n.attention_port`;
`kernels.triton.m2n.wait` has the code of both sides.

A flag is the sequence number of the window's newest frame, an i64 with one writer. A reader that
has seen the number sees the writer's data: a barrier in each program, then acquire-release adds
to a counter, then a release at system scope.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import m2n_windows
from kernels.triton.m2n import wait
from kernels.triton.runtime import rounded

UNKNOWN_EXPERT: tl.constexpr = tl.constexpr(m2n_windows.Fault.EXPERT.value)

FP8_MAX: tl.constexpr = tl.constexpr(448.0)
SMALLEST_SCALE: tl.constexpr = tl.constexpr(1e-30)


@triton.jit
def _count_rows_above(
    experts_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    variants: tl.tensor,
    variant_stride: tl.tensor,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the number of rows before `row`, and of all rows, that have an expert on the node."""
    choices = tl.arange(0, K_PAD)[None, :]
    above = 0
    total = 0
    for start in range(0, num_rows, CHUNK):
        rows = start + tl.arange(0, CHUNK)
        is_pair = (rows < num_rows)[:, None] & (choices < K)
        experts = tl.load(experts_ptr + rows[:, None] * K + choices, mask=is_pair, other=-1)
        is_known = (experts >= 0) & (experts < num_columns)
        columns = (rows % variants)[:, None] * variant_stride + experts
        slots = tl.load(columns_ptr + columns, mask=is_pair & is_known, other=-1)
        is_held = (tl.max(slots, axis=1) >= 0).to(tl.int32)
        total += tl.sum(is_held, axis=0)
        above += tl.sum(tl.where(rows < row, is_held, 0), axis=0)
    return above, total


@triton.jit
def _write_row(
    hidden_ptr: tl.tensor,
    table_ptr: tl.tensor,
    place: tl.tensor,
    H: tl.tensor,
    WIRE: tl.constexpr,
    COMPRESSED: tl.constexpr,
    H_PAD: tl.constexpr,
) -> None:
    columns = tl.arange(0, H_PAD)
    inside = columns < H
    x = tl.load(hidden_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if COMPRESSED:
        scale = tl.maximum(tl.max(tl.abs(x), axis=0) / FP8_MAX, SMALLEST_SCALE)
        # A row with a NaN or an infinity must not become finite.
        is_number = tl.sum((tl.abs(x) < float("inf")).to(tl.int32), axis=0) == H_PAD
        scales = wait.pointer(table_ptr, wait.SCALES, tl.float32)
        tl.store(scales + place, tl.where(is_number, scale, float("nan")))
        x = tl.where(is_number, x / scale, 0.0)
    places = wait.rows_pointer(table_ptr, wait.HIDDEN, WIRE) + place.to(tl.int64) * H + columns
    tl.store(places, rounded(x, WIRE), mask=inside)


@triton.jit(
    do_not_specialize=["T", "first", "layer", "part", "parts", "limit", "micro_batch"],
    do_not_specialize_on_alignment=["num_rows_ptr"],
)
def put_row(
    hidden_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    num_rows_ptr: tl.tensor,
    table_ptr: tl.tensor,
    identity_ptr: tl.tensor,
    step_ptr: tl.tensor,
    places_ptr: tl.tensor,
    sent_ptr: tl.tensor,
    done_ptr: tl.tensor,
    sequences_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    control_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.tensor,
    num_columns: tl.tensor,
    variants: tl.tensor,
    hidden_stride: tl.tensor,
    first: tl.tensor,
    limit: tl.tensor,
    layer: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    micro_batch: tl.tensor,
    HAS_ROWS: tl.constexpr,
    WIRE: tl.constexpr,
    COMPRESSED: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    H_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Put one row into one node's window, if the node has any of its experts.

    identity i64[1 + N] is this node's incarnation and the others'; sent i64[N, 8] gets the
    expected header of the answer. Row `first` of the micro-batch is row 0 here; at most `limit`
    of its num_rows[0] rows can be sent.
    """
    node, row = tl.program_id(0), tl.program_id(1)
    num_nodes, num_programs = tl.num_programs(0), tl.num_programs(1)
    step = tl.load(step_ptr + wait.STEP)
    num_rows = T
    if HAS_ROWS:
        given = tl.load(num_rows_ptr)
        num_rows = tl.minimum(tl.maximum(given - first, 0), T).to(tl.int32)
        if (given > limit) & (row == 0) & (step != 0):
            wait.report(
                control_ptr, failed_ptr, wait.TOO_MANY_ROWS, node, micro_batch, layer,
                0, given, limit,
            )  # fmt: skip
    columns_ptr += node * num_columns
    variant_stride = num_nodes * num_columns
    place, total = _count_rows_above(
        experts_ptr, columns_ptr, row, num_rows, num_columns, variants, variant_stride, K, K_PAD,
        CHUNK,
    )  # fmt: skip
    choices = tl.arange(0, K_PAD)
    is_pair = (choices < K) & (row < num_rows)
    experts = tl.load(experts_ptr + row * K + choices, mask=is_pair, other=0)
    is_known = (experts >= 0) & (experts < num_columns)
    if (node == 0) & (step != 0):
        num_unknown = tl.sum((is_pair & (is_known == 0)).to(tl.int32), axis=0)
        if num_unknown > 0:
            lowest = tl.min(experts, axis=0)
            unknown = tl.where(lowest < 0, lowest, tl.max(experts, axis=0))
            wait.report(
                control_ptr, failed_ptr, UNKNOWN_EXPERT, node, micro_batch, layer,
                0, unknown, num_columns,
            )  # fmt: skip
    columns = (row % variants) * variant_stride + experts
    slots = tl.load(columns_ptr + columns, mask=is_pair & is_known, other=-1)
    is_held = (tl.max(slots, axis=0) >= 0) & (step != 0)
    tl.store(places_ptr + node * num_programs + row, tl.where(is_held, place, -1))
    table_ptr += node * wait.NUM_COLUMNS
    if is_held:
        pairs = place * K + choices
        weights = tl.load(weights_ptr + row * K + choices, mask=choices < K, other=0.0)
        tl.store(wait.pointer(table_ptr, wait.SLOTS, tl.int32) + pairs, slots, mask=choices < K)
        tl.store(
            wait.pointer(table_ptr, wait.WEIGHTS, tl.float32) + pairs, weights, mask=choices < K
        )
        hidden_ptr += row.to(tl.int64) * hidden_stride
        _write_row(hidden_ptr, table_ptr, place, H, WIRE, COMPRESSED, H_PAD)
    tl.debug_barrier()
    # The programs of a node are counted; the last one knows that all have written.
    if tl.atomic_add(done_ptr + node, 1, sem="acq_rel") == num_programs - 1:
        tl.store(done_ptr + node, 0)
        if (step != 0) & (wait.is_set(failed_ptr) == 0):
            sequence = tl.load(sequences_ptr + node) + 1
            tl.store(sequences_ptr + node, sequence)
            words = tl.arange(0, wait.HEADER_WORDS)
            header = tl.load(step_ptr + words)
            header = tl.where(words == wait.ROWS, total, header)
            header = tl.where(words == wait.LAYER, layer, header)
            header = tl.where(words == wait.PART, part, header)
            header = tl.where(words == wait.PARTS, parts, header)
            header = tl.where(words == wait.FLAG, sequence, header)
            theirs = tl.where(words == wait.INCARNATION, tl.load(identity_ptr + 1 + node), header)
            tl.store(sent_ptr + node * wait.HEADER_WORDS + words, theirs)
            ours = tl.where(words == wait.INCARNATION, tl.load(identity_ptr), header)
            header_ptr = wait.pointer(table_ptr, wait.HEADER, tl.int64)
            tl.store(header_ptr + words, ours, mask=words > wait.FLAG)
            tl.debug_barrier()
            tl.atomic_xchg(header_ptr + wait.FLAG, sequence, sem="release", scope="sys")


@triton.jit(do_not_specialize=["layer", "micro_batch"])
def await_answer(
    table_ptr: tl.tensor,
    sent_ptr: tl.tensor,
    step_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    control_ptr: tl.tensor,
    ready_ptr: tl.tensor,
    layer: tl.tensor,
    micro_batch: tl.tensor,
) -> None:
    """Wait for one node's answer; ready i32[N] is 1 if it is the expected one.

    All nodes are awaited: even a node without rows must answer before its window is free again.
    """
    node = tl.program_id(0)
    words = tl.arange(0, wait.HEADER_WORDS)
    if tl.load(step_ptr + wait.STEP) != 0:
        header_ptr = wait.pointer(
            table_ptr, node * wait.NUM_ANSWER_COLUMNS + wait.ANSWER_HEADER, tl.int64
        )
        awaited = tl.load(sent_ptr + node * wait.HEADER_WORDS + wait.FLAG)
        seen = wait.await_flag(
            header_ptr + wait.FLAG, awaited, node, step_ptr, failed_ptr, control_ptr
        )
        tl.debug_barrier()
        found = tl.load(header_ptr + words)
        wanted = tl.load(sent_ptr + node * wait.HEADER_WORDS + words)
        num_wrong = tl.sum(((found != wanted) & (words > wait.FLAG)).to(tl.int32), axis=0)
        is_right = (seen == awaited) & (num_wrong == 0)
        if is_right == 0:
            if seen == awaited:
                wait.report_header(control_ptr, failed_ptr, node, micro_batch, layer, found, wanted)
            else:
                wait.report_wait(control_ptr, failed_ptr, node, micro_batch, layer, seen, awaited)
        tl.store(ready_ptr + node, is_right.to(tl.int32))


@triton.jit(do_not_specialize=["T"])
def combine_row(
    table_ptr: tl.tensor,
    places_ptr: tl.tensor,
    ready_ptr: tl.tensor,
    step_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    out_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.tensor,
    N: tl.tensor,
    out_stride: tl.tensor,
    ANSWER: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add a block of columns of a row's partial sums; NaN if one is missing or the net failed.

    Runs after `await_answer` on the same stream.
    """
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    num_programs = tl.num_programs(0)
    step = tl.load(step_ptr + wait.STEP)
    total = tl.zeros((BLOCK,), tl.float32)
    for node in range(N):
        place = tl.load(places_ptr + node * num_programs + row)
        if (place >= 0) & (step != 0):
            if (tl.load(ready_ptr + node) != 0) & (wait.is_set(failed_ptr) == 0):
                answers = wait.rows_pointer(
                    table_ptr, node * wait.NUM_ANSWER_COLUMNS + wait.ANSWER_HIDDEN, ANSWER
                )
                part = tl.load(
                    answers + place.to(tl.int64) * H + columns, mask=columns < H, other=0.0
                )
                total += part.to(tl.float32)
            else:
                total += float("nan")
    rows = out_ptr + row.to(tl.int64) * out_stride
    tl.store(rows + columns, total, mask=(columns < H) & (row < T))

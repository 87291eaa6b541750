"""Triton kernels of M2N on an expert node's GPU: rows of all attention nodes in, sums out.

`await_request` has a program per participant: it acquires the flag of the participant's request,
until a deadline, and compares the header with the one expected in this step. `gather_row` has a
program per participant and row of the step's bucket: it copies the row, dequantised, to the
participant's fixed place in one batch; rows beyond the participant's count get slot -1.
`send_row` has the same programs: it writes the rows' sums into
the answer window, and the participant's last program writes the header and releases the flag.
Counts, participants, step, table version and sequences are read from memory, so a CUDA graph can
replay all. Launched by `kernels.triton.m2n.expert_port`; see
`kernels.triton.m2n.attention_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import m2n_windows
from kernels.triton.m2n import wait
from kernels.triton.runtime import rounded

WRONG_SLOT: tl.constexpr = tl.constexpr(m2n_windows.Fault.SLOT.value)


@triton.jit
def _take_frame(
    table_ptr: tl.tensor,
    consumed_ptr: tl.tensor,
    incarnations_ptr: tl.tensor,
    step_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    control_ptr: tl.tensor,
    peer: tl.tensor,
    bucket: tl.tensor,
    micro_batch: tl.tensor,
    layer: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
) -> tl.tensor:
    """Wait for a peer's next frame and return its header, with ROWS 0 if the header is wrong."""
    words = tl.arange(0, wait.HEADER_WORDS)
    wanted = tl.load(step_ptr + words)
    wanted = tl.where(words == wait.LAYER, layer, wanted)
    wanted = tl.where(words == wait.PART, part, wanted)
    wanted = tl.where(words == wait.PARTS, parts, wanted)
    wanted = tl.where(words == wait.INCARNATION, tl.load(incarnations_ptr + peer), wanted)
    awaited = tl.load(consumed_ptr) + 1
    header_ptr = wait.pointer(table_ptr, wait.HEADER, tl.int64)
    seen = wait.await_flag(header_ptr + wait.FLAG, awaited, peer, step_ptr, failed_ptr, control_ptr)
    tl.debug_barrier()
    found = tl.load(header_ptr + words)
    found = tl.where(words == wait.FLAG, seen, found)
    count = tl.sum(tl.where(words == wait.ROWS, found, 0), axis=0)
    wanted = tl.where(words == wait.ROWS, count, wanted)
    num_wrong = tl.sum(((found != wanted) & (words > wait.FLAG)).to(tl.int32), axis=0)
    is_right = (seen == awaited) & (num_wrong == 0) & (count >= 0) & (count <= bucket)
    if is_right == 0:
        if seen != awaited:
            wait.report_wait(control_ptr, failed_ptr, peer, micro_batch, layer, seen, awaited)
        elif num_wrong != 0:
            wait.report_header(control_ptr, failed_ptr, peer, micro_batch, layer, found, wanted)
        else:
            wait.report(
                control_ptr, failed_ptr, wait.TOO_MANY_ROWS, peer, micro_batch, layer,
                wait.ROWS, count, bucket,
            )  # fmt: skip
    return tl.where((words == wait.ROWS) & (is_right == 0), 0, found)


@triton.jit(do_not_specialize=["bucket", "micro_batch", "layer", "part", "parts"])
def await_request(
    table_ptr: tl.tensor,
    consumed_ptr: tl.tensor,
    incarnations_ptr: tl.tensor,
    step_ptr: tl.tensor,
    headers_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    control_ptr: tl.tensor,
    num_micro_batches: tl.tensor,
    bucket: tl.tensor,
    micro_batch: tl.tensor,
    layer: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
) -> None:
    """Wait for the frame of participant `place`; write its header to headers i64[M, 8].

    In a rehearsal (step 0) nothing is awaited, and there are no rows.
    """
    place = tl.program_id(0)
    peer = tl.load(step_ptr + wait.HEADER_WORDS + place)
    window = peer * num_micro_batches + micro_batch
    table_ptr += window * wait.NUM_COLUMNS
    header = tl.zeros((wait.HEADER_WORDS,), tl.int64)
    if tl.load(step_ptr + wait.STEP) != 0:
        header = _take_frame(
            table_ptr, consumed_ptr + window, incarnations_ptr, step_ptr, failed_ptr,
            control_ptr, peer, bucket, micro_batch, layer, part, parts,
        )  # fmt: skip
    tl.store(headers_ptr + place * wait.HEADER_WORDS + tl.arange(0, wait.HEADER_WORDS), header)


@triton.jit(do_not_specialize=["bucket", "micro_batch", "layer"])
def gather_row(
    table_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    step_ptr: tl.tensor,
    headers_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    control_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    H: tl.tensor,
    num_micro_batches: tl.tensor,
    bucket: tl.tensor,
    micro_batch: tl.tensor,
    layer: tl.tensor,
    WIRE: tl.constexpr,
    COMPUTE: tl.constexpr,
    COMPRESSED: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    H_PAD: tl.constexpr,
) -> None:
    """Copy row `row` of participant `place` to row place * bucket + row.

    limits i64[L]: the number of this node's slots in each layer. Runs after `await_request` on the
    same stream.
    """
    place, row = tl.program_id(0), tl.program_id(1)
    peer = tl.load(step_ptr + wait.HEADER_WORDS + place)
    table_ptr += (peer * num_micro_batches + micro_batch) * wait.NUM_COLUMNS
    words = tl.arange(0, wait.HEADER_WORDS)
    header = tl.load(headers_ptr + place * wait.HEADER_WORDS + words)
    count = tl.sum(tl.where(words == wait.ROWS, header, 0), axis=0)
    choices = tl.arange(0, K_PAD)
    slots = tl.full((K_PAD,), -1, tl.int32)
    pairs = (place * bucket + row).to(tl.int64) * K + choices
    if row < count:
        slots = tl.load(
            wait.pointer(table_ptr, wait.SLOTS, tl.int32) + row * K + choices,
            mask=choices < K,
            other=-1,
        )
        lowest, highest = tl.min(slots, axis=0), tl.max(slots, axis=0)
        limit = tl.load(limits_ptr + layer)
        if (lowest < -1) | (highest >= limit):
            wrong = tl.where(lowest < -1, lowest, highest)
            wait.report(
                control_ptr, failed_ptr, WRONG_SLOT, peer, micro_batch, layer, row, wrong, limit
            )
            slots = tl.full((K_PAD,), -1, tl.int32)
        weights = tl.load(
            wait.pointer(table_ptr, wait.WEIGHTS, tl.float32) + row * K + choices, mask=choices < K
        )
        tl.store(weights_ptr + pairs, weights, mask=choices < K)
        columns = tl.arange(0, H_PAD)
        inside = columns < H
        rows = wait.rows_pointer(table_ptr, wait.HIDDEN, WIRE) + row.to(tl.int64) * H + columns
        x = tl.load(rows, mask=inside, other=0.0).to(tl.float32)
        if COMPRESSED:
            x = x * tl.load(wait.pointer(table_ptr, wait.SCALES, tl.float32) + row)
        rows_out = hidden_ptr + (place * bucket + row).to(tl.int64) * H + columns
        tl.store(rows_out, rounded(x, COMPUTE), mask=inside)
    tl.store(slots_ptr + pairs, slots, mask=choices < K)


@triton.jit(do_not_specialize=["bucket", "micro_batch"])
def send_row(
    table_ptr: tl.tensor,
    consumed_ptr: tl.tensor,
    step_ptr: tl.tensor,
    identity_ptr: tl.tensor,
    headers_ptr: tl.tensor,
    done_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    H: tl.tensor,
    num_micro_batches: tl.tensor,
    partial_stride: tl.tensor,
    bucket: tl.tensor,
    micro_batch: tl.tensor,
    ANSWER: tl.constexpr,
    H_PAD: tl.constexpr,
) -> None:
    """Write the sums of row `row` of participant `place` into its answer window.

    consumed i64[M * micro-batches] is set to the sequence that was answered; identity i64[1]
    is this node's incarnation. A failed net sends no answers.
    """
    place, row = tl.program_id(0), tl.program_id(1)
    step = tl.load(step_ptr + wait.STEP)
    peer = tl.load(step_ptr + wait.HEADER_WORDS + place)
    window = peer * num_micro_batches + micro_batch
    table_ptr += window * wait.NUM_ANSWER_COLUMNS
    words = tl.arange(0, wait.HEADER_WORDS)
    header = tl.load(headers_ptr + place * wait.HEADER_WORDS + words)
    count = tl.sum(tl.where(words == wait.ROWS, header, 0), axis=0)
    if row < count:
        columns = tl.arange(0, H_PAD)
        inside = columns < H
        rows = partial_ptr + (place * bucket + row).to(tl.int64) * partial_stride + columns
        x = tl.load(rows, mask=inside, other=0.0).to(tl.float32)
        rows_out = (
            wait.rows_pointer(table_ptr, wait.ANSWER_HIDDEN, ANSWER)
            + row.to(tl.int64) * H
            + columns
        )
        tl.store(rows_out, rounded(x, ANSWER), mask=inside)
    tl.debug_barrier()
    if tl.atomic_add(done_ptr + place, 1, sem="acq_rel") == bucket - 1:
        tl.store(done_ptr + place, 0)
        if (step != 0) & (wait.is_set(failed_ptr) == 0):
            sequence = tl.sum(tl.where(words == wait.FLAG, header, 0), axis=0)
            tl.store(consumed_ptr + window, sequence)
            answer = tl.where(words == wait.INCARNATION, tl.load(identity_ptr), header)
            header_ptr = wait.pointer(table_ptr, wait.ANSWER_HEADER, tl.int64)
            tl.store(header_ptr + words, answer, mask=words > wait.FLAG)
            tl.debug_barrier()
            tl.atomic_xchg(header_ptr + wait.FLAG, sequence, sem="release", scope="sys")

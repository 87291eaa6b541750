"""Shared by M2N's kernels of both sides: waiting for a flag, and reporting faults.

A wait ends when the frame is there, at its deadline, when the host ends it (by the abort word or
the word of a lost peer, both in the host's memory), or when the net has failed before. The first
fault is kept: the program that sets `failed` first writes the host's words. Words are those of
`kernels.m2n_windows`. Called by the kernels alone.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl

from kernels import m2n_windows
from kernels.triton.runtime import INTERPRETED

HEADER_WORDS: tl.constexpr = tl.constexpr(m2n_windows.HEADER_WORDS)
FLAG: tl.constexpr = tl.constexpr(m2n_windows.FLAG)
ROWS: tl.constexpr = tl.constexpr(m2n_windows.ROWS)
STEP: tl.constexpr = tl.constexpr(m2n_windows.STEP)
LAYER: tl.constexpr = tl.constexpr(m2n_windows.LAYER)
PART: tl.constexpr = tl.constexpr(m2n_windows.PART)
PARTS: tl.constexpr = tl.constexpr(m2n_windows.PARTS)
INCARNATION: tl.constexpr = tl.constexpr(m2n_windows.INCARNATION)
PATIENCE: tl.constexpr = tl.constexpr(m2n_windows.PATIENCE)
LATE: tl.constexpr = tl.constexpr(m2n_windows.Fault.LATE.value)
GONE: tl.constexpr = tl.constexpr(m2n_windows.Fault.GONE.value)
ABORTED: tl.constexpr = tl.constexpr(m2n_windows.Fault.ABORTED.value)
STALE: tl.constexpr = tl.constexpr(m2n_windows.Fault.STALE.value)
WRONG_HEADER: tl.constexpr = tl.constexpr(m2n_windows.Fault.HEADER.value)
TOO_MANY_ROWS: tl.constexpr = tl.constexpr(m2n_windows.Fault.TOO_MANY_ROWS.value)

# Columns of a table of request windows, i64[N, 5], and of answer windows, i64[N, 2].
SLOTS: tl.constexpr = tl.constexpr(0)
WEIGHTS: tl.constexpr = tl.constexpr(1)
HIDDEN: tl.constexpr = tl.constexpr(2)
SCALES: tl.constexpr = tl.constexpr(3)
HEADER: tl.constexpr = tl.constexpr(4)
NUM_COLUMNS: tl.constexpr = tl.constexpr(5)
ANSWER_HIDDEN: tl.constexpr = tl.constexpr(0)
ANSWER_HEADER: tl.constexpr = tl.constexpr(1)
NUM_ANSWER_COLUMNS: tl.constexpr = tl.constexpr(2)

THREADS: tl.constexpr = tl.constexpr(128)
"""Threads of a waiting program: four warps."""
LOOKS_PER_CHECK: tl.constexpr = tl.constexpr(1 if INTERPRETED.value else 64)
"""Polls of a flag between reads of the clock and of the host's words, which are slow.

The interpreter's clock sleeps, so that the awaited process gets the core."""


@triton.jit
def pointer(table_ptr: tl.tensor, place: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return an address in a table as a pointer to `dtype`."""
    return tl.load(table_ptr + place).to(tl.pointer_type(dtype))


@triton.jit
def rows_pointer(table_ptr: tl.tensor, place: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the pointer to a window's hidden rows, which begin at a multiple of 16 bytes.

    (Only the operation that makes the pointer can carry this hint, not a call that returns it.)
    """
    return tl.multiple_of(tl.load(table_ptr + place).to(tl.pointer_type(dtype)), 16)


if INTERPRETED.value:

    @triton.jit
    def now(_: tl.tensor) -> tl.tensor:
        """Return the host's clock in nanoseconds; sleeps, so that the awaited process can run."""
        time.sleep(0.0005)
        return tl.full((), time.monotonic_ns(), tl.int64)

else:

    @triton.jit
    def now(_: tl.tensor) -> tl.tensor:
        """Return the device's clock in nanoseconds.

        Threads read different times, and a loop that they leave at different times never ends:
        the maximum of all readings is the same for all threads.
        """
        readings = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;",
            "=l,r",
            [tl.arange(0, THREADS)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
        return tl.max(readings, axis=0)


@triton.jit
def is_set(word_ptr: tl.tensor) -> tl.tensor:
    """Return a nonnegative word that others may write meanwhile: the same for all threads."""
    same = tl.zeros((THREADS,), tl.int32)
    return tl.max(tl.load(word_ptr + same, volatile=True), axis=0)


@triton.jit
def _is_over(peer: tl.tensor, failed_ptr: tl.tensor, control_ptr: tl.tensor) -> tl.tensor:
    """Return whether the wait for `peer` must end: the net failed or the host ended it."""
    abort_ptr = pointer(control_ptr, 1, tl.int64)
    return is_set(abort_ptr) + is_set(abort_ptr + 1 + peer) + is_set(failed_ptr)


@triton.jit
def await_flag(
    flag_ptr: tl.tensor,
    awaited: tl.tensor,
    peer: tl.tensor,
    step_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    control_ptr: tl.tensor,
) -> tl.tensor:
    """Wait until a flag is at least `awaited`, and return its newest value.

    A frame that a lost peer published before counts: its word is read before the flag.
    (Adding 0 is compiled to a load with that order.)
    """
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    if seen < awaited:
        end = now(seen) + tl.load(step_ptr + PATIENCE)
        is_over = is_set(failed_ptr).to(tl.int64)
        looks = tl.zeros((), tl.int64)
        while (seen < awaited) & (is_over == 0):
            looks += 1
            if looks % LOOKS_PER_CHECK == 0:
                is_late = (now(seen) >= end).to(tl.int64)
                is_over = _is_over(peer, failed_ptr, control_ptr) + is_late
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    return seen


@triton.jit
def report(
    control_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    code: tl.tensor,
    peer: tl.tensor,
    micro_batch: tl.tensor,
    layer: tl.tensor,
    place: tl.tensor,
    found: tl.tensor,
    wanted: tl.tensor,
) -> None:
    """Keep a fault, if it is the first one."""
    if tl.atomic_cas(failed_ptr, 0, 1) == 0:
        words_ptr = pointer(control_ptr, 0, tl.int64)
        tl.store(words_ptr + 1, peer)
        tl.store(words_ptr + 2, micro_batch)
        tl.store(words_ptr + 3, layer)
        tl.store(words_ptr + 4, place)
        tl.store(words_ptr + 5, found)
        tl.store(words_ptr + 6, wanted)
        # A reader that sees the code must see the words; a barrier orders them on this device only.
        tl.atomic_xchg(failed_ptr, 1, sem="acq_rel", scope="sys")
        tl.debug_barrier()
        tl.store(words_ptr, code)


@triton.jit
def report_wait(
    control_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    peer: tl.tensor,
    micro_batch: tl.tensor,
    layer: tl.tensor,
    seen: tl.tensor,
    awaited: tl.tensor,
) -> None:
    """Keep the fault of a wait that ended with another sequence than the one awaited."""
    abort_ptr = pointer(control_ptr, 1, tl.int64)
    code = tl.where(is_set(abort_ptr + 1 + peer) != 0, GONE, LATE)
    code = tl.where(is_set(abort_ptr) != 0, ABORTED, code)
    code = tl.where(seen > awaited, STALE, code)
    report(control_ptr, failed_ptr, code, peer, micro_batch, layer, FLAG, seen, awaited)


@triton.jit
def report_header(
    control_ptr: tl.tensor,
    failed_ptr: tl.tensor,
    peer: tl.tensor,
    micro_batch: tl.tensor,
    layer: tl.tensor,
    found: tl.tensor,
    wanted: tl.tensor,
) -> None:
    """Keep the first word in which header `found` differs from `wanted`."""
    words = tl.arange(0, HEADER_WORDS)
    is_wrong = (found != wanted) & (words > FLAG)
    place = tl.min(tl.where(is_wrong, words, HEADER_WORDS), axis=0)
    was = tl.sum(tl.where(words == place, found, 0), axis=0)
    should_be = tl.sum(tl.where(words == place, wanted, 0), axis=0)
    report(control_ptr, failed_ptr, WRONG_HEADER, peer, micro_batch, layer, place, was, should_be)

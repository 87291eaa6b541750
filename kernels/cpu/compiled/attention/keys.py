"""The places of a row piece's keys in the caches, for the kernel of attention.

Owns the arguments of that kernel, the words of its work, and the widening of caches in fp8, whose
heads are computed with in the queries' dtype. A key's number counts along the row's
branch; its position is that in the sequence (`kernels.cpu.attention_rows`), its slot is found in
the sequence's block table. Used by the kernels of `kernels.cpu.compiled`, inside
compiled functions.
"""

from __future__ import annotations

from typing import Final

from kernels.contracts import MAX_FP8_DIM
from kernels.cpu.compiled.runtime import inlined, offsets
from kernels.cpu.simd import fp8
from kernels.cpu.simd import lanes as simd

(
    Q, Q_STRIDE, OUT, OUT_STRIDE, K_CACHE, V_CACHE, BLOCK_SIZE, NUM_KV_HEADS, REPEAT, HEAD_DIM,
    IS_BF16, SCALE, WORK, CACHE_IS_FP8, SINKS, VALUE_DIM,
) = offsets(16)  # fmt: skip
"""The kernel's arguments. Strides are in bytes; WORK is the address of WorkWords, SINKS that of
f32[N], 0: there are none. Of latents VALUE_DIM is less than HEAD_DIM."""
NUM_ARGUMENTS: Final = 16

(
    PIECES, NUM_PIECES, MERGES, NUM_MERGES, PARTS, BRANCHES, TABLES, TABLE_STRIDE, GROUPS_PER_TASK,
    NUM_TILES,
) = range(0, 80, 8)  # fmt: skip
"""Offsets in WorkWords. The query heads of GROUPS_PER_TASK groups are divided into NUM_TILES."""


WIDENED_BYTES: Final = 4 * MAX_FP8_DIM * simd.LANES
"""Scratch memory for the widened heads of a run."""


@inlined
def bytes_of_head(block: int) -> int:
    """Return the bytes of a head of a query, and of a key as it is computed with."""
    size: int = simd.read_i64(block + HEAD_DIM) * (4 - 2 * simd.read_i64(block + IS_BF16))
    return size


@inlined
def bytes_of_value(block: int) -> int:
    """Return the bytes of a value as it is computed with, and of a head of the output."""
    size: int = simd.read_i64(block + VALUE_DIM) * (4 - 2 * simd.read_i64(block + IS_BF16))
    return size


@inlined
def bytes_in_cache(block: int) -> int:
    """Return the bytes of a head in the caches."""
    if simd.read_i64(block + CACHE_IS_FP8):
        size: int = simd.read_i64(block + HEAD_DIM)
        return size
    return bytes_of_head(block)


@inlined
def bytes_of_slot(block: int) -> int:
    size: int = simd.read_i64(block + NUM_KV_HEADS) * bytes_in_cache(block)
    return size


@inlined
def widened_pitch(block: int) -> int:
    """Return the distance in bytes of heads that widen_run or widen_listed has written."""
    rows = (simd.read_i64(block + HEAD_DIM) + fp8.ROW_MULTIPLE - 1) // fp8.ROW_MULTIPLE
    pitch: int = rows * fp8.ROW_MULTIPLE * (4 - 2 * simd.read_i64(block + IS_BF16))
    return pitch


@inlined
def widen_run(block: int, run: int, count: int, widened: int) -> None:
    """Widen the fp8 heads of `count` slots that lie one behind the other."""
    pitch, stride = widened_pitch(block), bytes_of_slot(block)
    size = simd.read_i64(block + HEAD_DIM)
    if simd.read_i64(block + IS_BF16):
        fp8.widen_bf16(widened, pitch, run, stride, count, size)
    else:
        fp8.widen_f32(widened, pitch, run, stride, count, size)


@inlined
def widen_listed(block: int, heads: int, listed: int, count: int, widened: int) -> None:
    """Widen `count` fp8 heads, whose offsets from `heads` are the i64 at `listed`."""
    pitch, size = widened_pitch(block), simd.read_i64(block + HEAD_DIM)
    if simd.read_i64(block + IS_BF16):
        fp8.widen_listed_bf16(widened, pitch, heads, listed, count, size)
    else:
        fp8.widen_listed_f32(widened, pitch, heads, listed, count, size)


@inlined
def branch_of(block: int, piece: int) -> int:
    """Return the address behind which the positions of a branch lie, 8 bytes per key."""
    work = simd.read_i64(block + WORK)
    address: int = simd.read_i64(work + BRANCHES) + 8 * simd.read_i64(piece + 48)
    return address


@inlined
def position_of(block: int, piece: int, key: int) -> int:
    """Return the position of a key in the piece's sequence."""
    if key < simd.read_i64(piece + 40):
        return key
    position: int = simd.read_i64(branch_of(block, piece) + 8 * key)
    return position


@inlined
def key_offset(block: int, piece: int, position: int) -> int:
    """Return the offset in bytes of a position's slot in either cache."""
    offset: int = slot_offset(block, simd.read_i64(piece + 8), position)
    return offset


@inlined
def slot_offset(block: int, seq_idx: int, position: int) -> int:
    """Return the offset in bytes of the slot of a sequence's position in either cache."""
    block_size = simd.read_i64(block + BLOCK_SIZE)
    index = position // block_size
    work = simd.read_i64(block + WORK)
    table = simd.read_i64(work + TABLES) + seq_idx * simd.read_i64(work + TABLE_STRIDE)
    slot = simd.read_i32(table + 4 * index) * block_size + position - index * block_size
    offset: int = slot * bytes_of_slot(block)
    return offset


@inlined
def run_length(block: int, piece: int, key: int, position: int, stop: int) -> int:
    """Count the keys from `key` on, at most 16, below `stop`, that lie one behind the other.

    The first of them is at `position`.
    """
    block_size = simd.read_i64(block + BLOCK_SIZE)
    most: int = min(block_size - position % block_size, stop - key, simd.LANES)
    first_listed: int = simd.read_i64(piece + 40)
    if key < first_listed:
        return min(most, first_listed - key)
    branch, count = branch_of(block, piece) + 8 * key, 1
    while count < most and simd.read_i64(branch + 8 * count) == position + count:
        count += 1
    return count


@inlined
def ask_for_run(block: int, cache: int, piece: int, key: int, stop: int, num_bytes: int) -> None:
    """Prefetch `num_bytes` of each key or value of the run that begins at `key`."""
    if key < stop:
        position = position_of(block, piece, key)
        count, stride = run_length(block, piece, key, position, stop), bytes_of_slot(block)
        run = cache + key_offset(block, piece, position)
        if num_bytes == stride:
            simd.prefetch(run, count * stride)
        else:
            for idx in range(count):
                simd.prefetch(run + idx * stride, num_bytes)

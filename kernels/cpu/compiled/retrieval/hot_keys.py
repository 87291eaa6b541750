"""Selected keys that are in a file: found among the copies in memory, or read, compiled.

A head of a sequence has entries for copies of its own. An entry that neither this search nor the
one before has used is given to the next key that is read; there are enough of them
(`kernels.contracts.HotKeys`). Knows no scores: `kernels.cpu.compiled.retrieval.search` calls this
for what it has selected, one task per head of a sequence, so that nothing here needs a lock.
"""

from __future__ import annotations

from kernels.contracts import CHECK_BYTES, CHECK_SUM
from kernels.cpu.compiled.attention.keys import (
    BLOCK_SIZE,
    K_CACHE,
    NUM_KV_HEADS,
    V_CACHE,
    WORK,
    bytes_in_cache,
    bytes_of_slot,
)
from kernels.cpu.compiled.attention.keys import TABLE_STRIDE as BLOCK_TABLE_STRIDE
from kernels.cpu.compiled.attention.keys import TABLES as BLOCK_TABLES
from kernels.cpu.compiled.retrieval.words import (
    HOT_CACHE_LAYERS,
    HOT_CLOCKS,
    HOT_COUNTS,
    HOT_ENTRIES,
    HOT_FILE,
    HOT_RECORDS,
    HOT_SLOTS,
    HOT_TOKENS,
    HOT_USED,
    LAYER,
    NUM_HOT_ENTRIES,
    NUM_HOT_TOKENS,
    SEQ_IDX,
)
from kernels.cpu.compiled.runtime import inlined
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.system import ask_file, read_file

_UNRESOLVED = -1


@inlined
def in_file(block: int, seq: int, position: int) -> int:
    """Say whether the block of a sequence's position has no place in the cache."""
    work = simd.read_i64(block + WORK)
    table = simd.read_i64(work + BLOCK_TABLES)
    table += simd.read_i64(seq + SEQ_IDX) * simd.read_i64(work + BLOCK_TABLE_STRIDE)
    return int(simd.read_i32(table + 4 * (position // simd.read_i64(block + BLOCK_SIZE))) < 0)


@inlined
def _head_of(block: int, group: int) -> int:
    """Return the number of a head of this layer in the tensors of HotKeys."""
    number: int = simd.read_i64(block + LAYER) * simd.read_i64(block + NUM_KV_HEADS) + group
    return number


@inlined
def _row_bytes(block: int) -> int:
    """Return the bytes of a key, its value and their sum in the file."""
    num_bytes: int = 2 * bytes_in_cache(block) + CHECK_BYTES
    return num_bytes


@inlined
def _offset_of(block: int, hot: int, group: int, position: int) -> int:
    """Return where the file has a key and its value."""
    block_size = simd.read_i64(block + BLOCK_SIZE)
    layer = simd.read_i64(simd.read_i64(hot + HOT_CACHE_LAYERS) + 8 * simd.read_i64(block + LAYER))
    row = (layer * simd.read_i64(block + NUM_KV_HEADS) + group) * block_size + position % block_size
    record = simd.read_i64(simd.read_i64(hot + HOT_RECORDS) + 8 * (position // block_size))
    offset: int = record + row * _row_bytes(block)
    return offset


@inlined
def begin_search(block: int, hot: int, group: int) -> None:
    """Count a search of a head's keys; before find_copy()."""
    clock = simd.read_i64(hot + HOT_CLOCKS) + 16 * _head_of(block, group)
    simd.write_i64(clock, simd.read_i64(clock) + 1)


@inlined
def find_copy(block: int, hot: int, group: int, position: int) -> int:
    """Return the offset in the caches of the copy of a key that is in the file; -1: none.

    The system is then asked to fetch the key, so that a disk has many to fetch at once.
    """
    head = _head_of(block, group)
    entries = simd.read_i64(hot + HOT_ENTRIES) + 4 * head * simd.read_i64(hot + NUM_HOT_TOKENS)
    entry = simd.read_i32(entries + 4 * position)
    if entry < 0:
        offset = _offset_of(block, hot, group, position)
        ask_file(simd.read_i64(hot + HOT_FILE), offset, _row_bytes(block))
        return _UNRESOLVED
    used = simd.read_i64(hot + HOT_USED) + 4 * head * simd.read_i64(hot + NUM_HOT_ENTRIES)
    now = simd.read_i64(simd.read_i64(hot + HOT_CLOCKS) + 16 * head)
    simd.write_i32(used + 4 * entry, now)
    found = simd.read_i64(hot + HOT_COUNTS) + 24 * head
    simd.write_i64(found, simd.read_i64(found) + 1)
    place: int = simd.read_i64(simd.read_i64(hot + HOT_SLOTS) + 8 * entry) * bytes_of_slot(block)
    return place


@inlined
def _take_entry(hot: int, head: int) -> int:
    """Return an entry that this search and the one before have not used."""
    num_entries = simd.read_i64(hot + NUM_HOT_ENTRIES)
    clock = simd.read_i64(hot + HOT_CLOCKS) + 16 * head
    used = simd.read_i64(hot + HOT_USED) + 4 * head * num_entries
    now: int = simd.read_i64(clock)
    entry: int = simd.read_i64(clock + 8)
    # After one round at least those of the search before are taken.
    for turn in range(2 * num_entries):
        if simd.read_i32(used + 4 * entry) < now - 1 + turn // num_entries:
            break
        entry = (entry + 1) % num_entries
    simd.write_i64(clock + 8, (entry + 1) % num_entries)
    simd.write_i32(used + 4 * entry, now)
    return entry


@inlined
def read_key(block: int, hot: int, group: int, position: int, scratch: int) -> int:
    """Read a key and its value to an entry; return its offset in the caches.

    `scratch` is memory for both and their sum. If they cannot be read, or have another sum, they
    are zeros, and that is counted.
    """
    head, head_bytes = _head_of(block, group), bytes_in_cache(block)
    entry = _take_entry(hot, head)
    entries = simd.read_i64(hot + HOT_ENTRIES) + 4 * head * simd.read_i64(hot + NUM_HOT_TOKENS)
    token = simd.read_i64(hot + HOT_TOKENS) + 4 * (head * simd.read_i64(hot + NUM_HOT_ENTRIES))
    token += 4 * entry
    before = simd.read_i32(token)
    if before >= 0:
        simd.write_i32(entries + 4 * before, -1)
    offset = _offset_of(block, hot, group, position)
    counts = simd.read_i64(hot + HOT_COUNTS) + 24 * head
    num_read = read_file(simd.read_i64(hot + HOT_FILE), scratch, _row_bytes(block), offset)
    total = CHECK_SUM
    for word in range(0, 2 * head_bytes, 8):
        total += simd.read_i64(scratch + word)
    if num_read == _row_bytes(block) and total == simd.read_i64(scratch + 2 * head_bytes):
        simd.write_i32(token, position)
        simd.write_i32(entries + 4 * position, entry)
        simd.write_i64(counts + 8, simd.read_i64(counts + 8) + 1)
    else:
        simd.write_i32(token, -1)
        simd.write_i64(counts + 16, simd.read_i64(counts + 16) + 1)
        for place in range(0, 2 * head_bytes, 8):
            simd.write_i64(scratch + place, 0)
    slot: int = simd.read_i64(simd.read_i64(hot + HOT_SLOTS) + 8 * entry) * bytes_of_slot(block)
    place = slot + group * head_bytes
    for word in range(0, head_bytes, 8):
        key, value = simd.read_i64(scratch + word), simd.read_i64(scratch + head_bytes + word)
        simd.write_i64(simd.read_i64(block + K_CACHE) + place + word, key)
        simd.write_i64(simd.read_i64(block + V_CACHE) + place + word, value)
    return slot

"""The search of a step's queries among coded keys, compiled; see `kernels.retrieval`.

Tasks in four phases: of each sequence's head the choice of the segments that it searches
(`kernels.cpu.compiled.retrieval.segments`), of each unit (`kernels.cpu.compiled.retrieval.words`)
the products of the query heads with the centroids, then the scores of its keys, with one scale for
all units of a sequence's head, then, of each sequence's head, the keys with the greatest scores and
the list of all keys that it attends to. Scores are i16 (`kernels.cpu.simd.retrieval`): of keys
whose scores differ by less than about a 500th of the greatest the lower position may win. The
result does not depend on the number of threads. A second launch reads what is in a file. Knows
nothing of attention, which follows as the last launch.
Used by `kernels.cpu.attention`.

Letters as in `kernels.contracts`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.contracts import (
    CHECK_BYTES,
    NUM_CENTROIDS,
    NUM_SUBSPACES,
    SEGMENT_KEYS,
    KeyCodes,
)
from kernels.cpu.compiled.attention.keys import (
    HEAD_DIM,
    IS_BF16,
    NUM_KV_HEADS,
    Q_STRIDE,
    REPEAT,
    Q,
    bytes_of_head,
    slot_offset,
)
from kernels.cpu.compiled.attention.rows import head_arguments
from kernels.cpu.compiled.retrieval.attention import attend_lists
from kernels.cpu.compiled.retrieval.hot_keys import begin_search, find_copy, in_file, read_key
from kernels.cpu.compiled.retrieval.segments import choose_segments, scratch_asked
from kernels.cpu.compiled.retrieval.words import (
    BOUNDS,
    CENTROIDS,
    CODED_END,
    CODES,
    CONTEXT_LEN,
    FIRST_LISTED,
    FIRST_POSITION,
    FIRST_ROW,
    FIRST_TABLE,
    FIRST_UNIT,
    HEAD_UNITS,
    HOT,
    LISTS,
    NUM_LISTED,
    NUM_ROWS,
    NUM_SELECTED,
    NUM_SEQS,
    NUM_SINKS,
    NUM_UNITS,
    POSITIONS,
    SCORES,
    SEARCH,
    SEQ_IDX,
    TABLES,
    UNIT_BYTES,
    UNIT_GROUP,
    UNIT_NUMBER,
    UNIT_PLACE,
    UNIT_SEQ,
    RetrievalWords,
    seq_of,
    unit_of,
)
from kernels.cpu.compiled.runtime import Kernel, inlined, launch
from kernels.cpu.simd import doubles, vectors
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import retrieval as inner
from kernels.cpu.simd.retrieval import (
    EXCLUDED,
    GREATEST,
    KEYS_AT_ONCE,
    PART_BYTES,
    TABLE_BYTES,
)
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks
from topspin.trace import Kind

HEAD_DIMS: Final = (16, 32, 64, 128, 256)
_SCORE_BYTES: Final = 2 * SEGMENT_KEYS
_CODES_BYTES: Final = NUM_SUBSPACES * SEGMENT_KEYS
_UNIT_MASKS: Final = SEGMENT_KEYS // KEYS_AT_ONCE


def can_search(codes: KeyCodes, k_cache: Tensor) -> bool:
    """Return whether attend_selected supports these codes, for a cache that attend_rows does."""
    num_groups, head_dim = k_cache.shape[2:]
    width = head_dim // NUM_SUBSPACES
    return (
        head_dim in HEAD_DIMS
        and codes.centroids.dtype == torch.bfloat16
        and codes.codes.dtype == torch.uint8
        and codes.summaries.dtype == torch.bfloat16
        and codes.centroids.shape[1:] == (num_groups, NUM_SUBSPACES, NUM_CENTROIDS, width)
        and codes.codes.shape[1:] == (num_groups, NUM_SUBSPACES, SEGMENT_KEYS)
        and codes.summaries.shape[1:] == (num_groups, 2, head_dim)
        and codes.centroids.is_contiguous()
        and codes.summaries.is_contiguous()
        and codes.codes.is_contiguous()
    )


def attend_selected(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    codes: KeyCodes,
    words: RetrievalWords,
    out: Tensor,
    *,
    scale: float,
    sinks: Tensor | None = None,
    ended: Callable[[Kind, int], None] | None = None,
) -> None:
    """Select keys, and write the rows of `words` of out [T, N, D]; all as in `paged_attention`.

    `ended` as in `kernels.contracts.Retrieval`.
    """
    arguments = (
        *head_arguments(q, k_cache, v_cache, words.work.address, out, scale=scale, sinks=sinks),
        codes.centroids.data_ptr(),
        codes.codes.data_ptr(),
        codes.summaries.data_ptr(),
        codes.layer,
        words.address,
    )
    if ended is not None:
        ended(Kind.ATTENTION, codes.layer)
    for kind, kernel in (
        (Kind.SEARCHED, _search),
        (Kind.READ, _read),
        (Kind.ATTENDED, attend_lists),
    ):
        if kernel is _read and not words.has_file:
            continue
        launch(kernel, arguments, num_threads=torch.get_num_threads())
        if ended is not None:
            ended(kind, codes.layer)


_scratch_centroids = simd.stack(HEAD_DIMS[-1] // NUM_SUBSPACES // 2 * PART_BYTES)
_scratch_peaks = simd.stack(4 * simd.LANES)
_scratch_tables = simd.stack(TABLE_BYTES // 2)
_scratch_count = simd.stack(8)
_scratch_copied = simd.stack(2 * 4 * HEAD_DIMS[-1] + CHECK_BYTES)


@inlined
def _first_unit(block: int, seq: int, group: int) -> int:
    """Return the first unit of a sequence's head."""
    unit: int = simd.read_i64(seq + FIRST_UNIT) + group * simd.read_i64(seq + HEAD_UNITS)
    return unit


@inlined
def _tables_of(block: int, seq: int, unit: int) -> int:
    """Return the address of the fp32 tables [n * N / G, M, C] of a sequence's unit."""
    heads = simd.read_i64(seq + NUM_ROWS) * simd.read_i64(block + REPEAT)
    first = simd.read_i64(seq + FIRST_TABLE) + (unit - simd.read_i64(seq + FIRST_UNIT)) * heads
    address: int = simd.read_i64(simd.read_i64(block + SEARCH) + TABLES) + first * TABLE_BYTES
    return address


@inlined
def _transpose(num_pairs: int, centroids: int, target: int) -> None:
    if num_pairs == 1:
        inner.transpose1(centroids, target)
    elif num_pairs == 2:
        inner.transpose2(centroids, target)
    elif num_pairs == 4:
        inner.transpose4(centroids, target)
    elif num_pairs == 8:
        inner.transpose8(centroids, target)
    else:
        inner.transpose16(centroids, target)


@inlined
def _place_of(block: int, task: int) -> int:
    """Return the number of the segment's head in KeyCodes that a task is about; -1: no task."""
    if task >= simd.read_i64(simd.read_i64(block + SEARCH) + NUM_UNITS):
        return -1
    unit, num_groups = unit_of(block, task), simd.read_i64(block + NUM_KV_HEADS)
    place: int = simd.read_i64(unit + UNIT_PLACE) * num_groups + simd.read_i64(unit + UNIT_GROUP)
    return place


@inlined
def _make_tables(block: int, task: int, following: int, transposed: int, peaks: int) -> None:
    """Write the tables of a unit and the bound of its scores.

    Prefetches the centroids of the unit that this thread does next.
    """
    search, repeat = simd.read_i64(block + SEARCH), simd.read_i64(block + REPEAT)
    group = simd.read_i64(unit_of(block, task) + UNIT_GROUP)
    seq = seq_of(block, simd.read_i64(unit_of(block, task) + UNIT_SEQ))
    num_pairs = simd.read_i64(block + HEAD_DIM) // (2 * NUM_SUBSPACES)
    part_bytes = num_pairs * PART_BYTES
    centroids = simd.read_i64(block + CENTROIDS)
    ask = centroids + _place_of(block, following) * NUM_SUBSPACES * part_bytes
    ask_bytes = part_bytes if _place_of(block, following) >= 0 else 0
    centroids += _place_of(block, task) * NUM_SUBSPACES * part_bytes
    head_bytes, row_bytes = bytes_of_head(block), simd.read_i64(block + Q_STRIDE)
    is_bf16 = simd.read_i64(block + IS_BF16)
    num_rows = simd.read_i64(seq + NUM_ROWS)
    query = simd.read_i64(block + Q) + simd.read_i64(seq + FIRST_ROW) * row_bytes
    query += group * repeat * head_bytes
    tables = _tables_of(block, seq, task)
    bound = np.float32(0)
    for part in range(NUM_SUBSPACES):
        _transpose(num_pairs, centroids + part * part_bytes, transposed)
        simd.prefetch(ask + part * part_bytes, ask_bytes)
        vectors.store_f32(peaks, vectors.splat(np.float32(0)))
        numbers = query + part * (head_bytes // NUM_SUBSPACES)
        for row in range(num_rows):
            for head in range(repeat):
                asked = numbers + row * row_bytes + head * head_bytes
                table = tables + (row * repeat + head) * TABLE_BYTES + part * PART_BYTES
                if is_bf16:
                    inner.products_bf16(asked, transposed, num_pairs, table, peaks)
                else:
                    inner.products_f32(asked, transposed, num_pairs, table, peaks)
        bound += np.float32(vectors.max_lanes(vectors.load_f32(peaks)))
    simd.write_f32(simd.read_i64(search + BOUNDS) + 4 * task, bound)


@inlined
def _score_unit(block: int, task: int, following: int, tables: int) -> None:
    """Write the scores of a unit's keys; EXCLUDED are those that are not searched.

    Prefetches the codes of the unit that this thread does next.
    """
    search, unit = simd.read_i64(block + SEARCH), unit_of(block, task)
    group, number = simd.read_i64(unit + UNIT_GROUP), simd.read_i64(unit + UNIT_NUMBER)
    seq = seq_of(block, simd.read_i64(unit + UNIT_SEQ))
    bounds = simd.read_i64(search + BOUNDS) + 4 * _first_unit(block, seq, group)
    bound = np.float32(0)
    for idx in range(simd.read_i64(seq + HEAD_UNITS)):
        bound = max(bound, np.float32(simd.read_f32(bounds + 4 * idx)))
    scale = np.float32(GREATEST) / bound
    scores = simd.read_i64(search + SCORES) + task * _SCORE_BYTES
    inner.clear_scores(scores, _UNIT_MASKS)
    begin = number * SEGMENT_KEYS
    num_keys = min(simd.read_i64(seq + CODED_END) - begin, SEGMENT_KEYS)
    codes = simd.read_i64(block + CODES) + _place_of(block, task) * _CODES_BYTES
    ask = simd.read_i64(block + CODES) + _place_of(block, following) * _CODES_BYTES
    table = _tables_of(block, seq, task)
    num_heads = simd.read_i64(seq + NUM_ROWS) * simd.read_i64(block + REPEAT)
    ask_bytes = _CODES_BYTES // num_heads if _place_of(block, following) >= 0 else 0
    for _ in range(num_heads):
        inner.quantise_table(table, scale, tables)
        inner.look_up(tables, codes, scores, (num_keys + KEYS_AT_ONCE - 1) // KEYS_AT_ONCE)
        simd.prefetch(ask, ask_bytes)
        ask += ask_bytes
        table += TABLE_BYTES
    for key in range(min(simd.read_i64(search + NUM_SINKS) - begin, num_keys)):
        inner.exclude(scores + 2 * key)
    for key in range(num_keys, SEGMENT_KEYS):
        inner.exclude(scores + 2 * key)


@inlined
def _limit_of(scores: int, num_masks: int, wanted: int, count: int) -> int:
    """Return the greatest limit that `wanted` scores reach; `count` is the address of an i64."""
    low, high = EXCLUDED + 1, -EXCLUDED - 1
    while low < high:
        middle = (low + high + 1) // 2
        inner.count_above(scores, num_masks, middle - 1, count)
        if simd.read_i64(count) >= wanted:
            low = middle
        else:
            high = middle - 1
    return low


@inlined
def _collect(
    scores: int, units: int, num_units: int, wanted: int, positions: int, count: int
) -> None:
    """Write the positions of the `wanted` greatest scores, ascending; of equals the lowest."""
    num_masks = num_units * _UNIT_MASKS
    limit = _limit_of(scores, num_masks, wanted, count)
    inner.count_above(scores, num_masks, limit, count)
    left = wanted - simd.read_i64(count)
    for idx in range(num_masks):
        place = scores + 2 * KEYS_AT_ONCE * idx
        chosen = inner.above(place, limit)
        if left > 0:
            even = inner.equal(place, limit)
            while even != 0 and left > 0:
                chosen |= even & -even
                even &= even - 1
                left -= 1
        number = simd.read_i64(units + idx // _UNIT_MASKS * UNIT_BYTES + UNIT_NUMBER)
        begin = number * SEGMENT_KEYS + idx % _UNIT_MASKS * KEYS_AT_ONCE
        while chosen != 0:
            simd.write_i32(positions, begin + doubles.first_bit(chosen))
            chosen &= chosen - 1
            positions += 4


@inlined
def _list_hot(
    block: int, seq: int, group: int, positions: int, place: int, num_selected: int
) -> None:
    """Write the offsets of the selected keys of a sequence of which some are in a file.

    Of those that are to be read less than 0.
    """
    hot, seq_idx = simd.read_i64(seq + HOT), simd.read_i64(seq + SEQ_IDX)
    begin_search(block, hot, group)
    # Copies that are there are marked as used before any is given up for another.
    for idx in range(num_selected):
        position = simd.read_i32(positions + 4 * idx)
        if in_file(block, seq, position):
            offset = find_copy(block, hot, group, position)
        else:
            offset = slot_offset(block, seq_idx, position)
        simd.write_i64(place + 8 * idx, offset)


@inlined
def _read_listed(block: int, seq: int, group: int, copied: int) -> None:
    """Read the selected keys of a head that are neither in the cache nor among its copies.

    `copied` is the address of memory for a key and its value.
    """
    search, hot = simd.read_i64(block + SEARCH), simd.read_i64(seq + HOT)
    num_selected = simd.read_i64(seq + NUM_SELECTED)
    first = simd.read_i64(seq + FIRST_POSITION) + group * num_selected
    positions = simd.read_i64(search + POSITIONS) + 4 * first
    listed = simd.read_i64(seq + FIRST_LISTED) + group * simd.read_i64(seq + NUM_LISTED)
    place = simd.read_i64(search + LISTS) + 8 * (listed + simd.read_i64(search + NUM_SINKS))
    for idx in range(num_selected):
        if simd.read_i64(place + 8 * idx) < 0:
            position = simd.read_i32(positions + 4 * idx)
            offset = read_key(block, hot, group, position, copied)
            simd.write_i64(place + 8 * idx, offset)


@inlined
def _select(block: int, seq: int, group: int, count: int) -> None:
    """Write what a sequence's head selects, and the list of all that it attends to.

    `count` is the address of an i64.
    """
    search = simd.read_i64(block + SEARCH)
    first_unit = _first_unit(block, seq, group)
    scores = simd.read_i64(search + SCORES) + first_unit * _SCORE_BYTES
    num_selected = simd.read_i64(seq + NUM_SELECTED)
    first = simd.read_i64(seq + FIRST_POSITION) + group * num_selected
    positions = simd.read_i64(search + POSITIONS) + 4 * first
    units, num_units = unit_of(block, first_unit), simd.read_i64(seq + HEAD_UNITS)
    _collect(scores, units, num_units, num_selected, positions, count)
    listed = simd.read_i64(seq + FIRST_LISTED) + group * simd.read_i64(seq + NUM_LISTED)
    place, seq_idx = simd.read_i64(search + LISTS) + 8 * listed, simd.read_i64(seq + SEQ_IDX)
    for position in range(simd.read_i64(search + NUM_SINKS)):
        simd.write_i64(place, slot_offset(block, seq_idx, position))
        place += 8
    hot = simd.read_i64(seq + HOT)
    if hot:
        _list_hot(block, seq, group, positions, place, num_selected)
        place += 8 * num_selected
    else:
        for idx in range(num_selected):
            position = simd.read_i32(positions + 4 * idx)
            simd.write_i64(place, slot_offset(block, seq_idx, position))
            place += 8
    for position in range(simd.read_i64(seq + CODED_END), simd.read_i64(seq + CONTEXT_LEN)):
        simd.write_i64(place, slot_offset(block, seq_idx, position))
        place += 8


@Kernel
def _search(block: int) -> None:
    transposed, peaks = _scratch_centroids(), _scratch_peaks()
    tables, count, asked = _scratch_tables(), _scratch_count(), scratch_asked()
    search, num_groups = simd.read_i64(block + SEARCH), simd.read_i64(block + NUM_KV_HEADS)
    num_units = simd.read_i64(search + NUM_UNITS)
    num_heads = simd.read_i64(search + NUM_SEQS) * num_groups
    task = claim_task(block, 0)
    while task < num_heads:
        seq = seq_of(block, task // num_groups)
        choose_segments(block, seq, task % num_groups, asked)
        finish_task(block, 0)
        task = claim_task(block, 0)
    wait_for_tasks(block, 0, num_heads)
    task = claim_task(block, 1)
    while task < num_units:
        following = claim_task(block, 1)
        _make_tables(block, task, following, transposed, peaks)
        finish_task(block, 1)
        task = following
    wait_for_tasks(block, 1, num_units)
    task = claim_task(block, 2)
    while task < num_units:
        following = claim_task(block, 2)
        _score_unit(block, task, following, tables)
        finish_task(block, 2)
        task = following
    wait_for_tasks(block, 2, num_units)
    task = claim_task(block, 3)
    while task < num_heads:
        seq = seq_of(block, task // num_groups)
        _select(block, seq, task % num_groups, count)
        finish_task(block, 3)
        task = claim_task(block, 3)
    wait_for_tasks(block, 3, num_heads)


@Kernel
def _read(block: int) -> None:
    copied, num_groups = _scratch_copied(), simd.read_i64(block + NUM_KV_HEADS)
    num_tasks = simd.read_i64(simd.read_i64(block + SEARCH) + NUM_SEQS) * num_groups
    task = claim_task(block, 0)
    while task < num_tasks:
        seq = seq_of(block, task // num_groups)
        if simd.read_i64(seq + HOT):
            _read_listed(block, seq, task % num_groups, copied)
        finish_task(block, 0)
        task = claim_task(block, 0)
    wait_for_tasks(block, 0, num_tasks)

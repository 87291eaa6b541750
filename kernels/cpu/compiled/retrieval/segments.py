"""The choice of the segments that are searched, by their summaries, compiled.

A head of a sequence chooses for itself (`kernels.retrieval.best_segments`), one task each, and
writes which units it searches; of segments with equal scores the first win. A summary is read as
one row, whose product with a query and its magnitudes is the score. Used by
`kernels.cpu.compiled.retrieval.search`, inside compiled functions.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kernels.cpu.compiled.attention.keys import (
    HEAD_DIM,
    IS_BF16,
    NUM_KV_HEADS,
    Q_STRIDE,
    REPEAT,
    Q,
    bytes_of_head,
)
from kernels.cpu.compiled.retrieval.words import (
    FIRST_PLACE,
    FIRST_ROW,
    FIRST_UNIT,
    HEAD_UNITS,
    KEPT,
    NUM_ROWS,
    PLACES,
    SEARCH,
    SUMMARIES,
    SUMMARISED,
    SUMMARY_SCORES,
    UNIT_BYTES,
    UNIT_NUMBER,
    UNIT_PLACE,
    unit_of,
)
from kernels.cpu.compiled.runtime import inlined
from kernels.cpu.simd import attention as inner
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors

# Behind a query and its magnitudes: where sixteen summaries lie.
_OFFSETS: Final = 2 * 2 * 256
scratch_asked = simd.stack(_OFFSETS + 8 * simd.LANES)
"""Memory of a thread for what a head asks."""


@inlined
def _write_asked(query: int, head_dim: int, is_bf16: int, asked: int) -> None:
    """Write the numbers of a query's head and their magnitudes as bf16[2, D]."""
    zeros = vectors.splat(np.float32(0))
    for idx in range(0, head_dim, simd.LANES):
        if is_bf16:
            numbers = vectors.load_bf16(query + 2 * idx)
        else:
            numbers = vectors.load_f32(query + 4 * idx)
        vectors.store_bf16(asked + 2 * idx, numbers)
        magnitudes = vectors.maximum(numbers, vectors.sub(zeros, numbers))
        vectors.store_bf16(asked + 2 * (head_dim + idx), magnitudes)


@inlined
def _score_summaries(block: int, seq: int, group: int, scores: int, asked: int) -> None:
    """Write the scores fp32 of a sequence's summaries."""
    head_dim, repeat = simd.read_i64(block + HEAD_DIM), simd.read_i64(block + REPEAT)
    num_groups, row_bytes = simd.read_i64(block + NUM_KV_HEADS), simd.read_i64(block + Q_STRIDE)
    head_bytes, summaries = bytes_of_head(block), simd.read_i64(block + SUMMARIES)
    first = simd.read_i64(seq + FIRST_PLACE)
    places = simd.read_i64(simd.read_i64(block + SEARCH) + PLACES) + 8 * first
    num_summaries, num_bytes = simd.read_i64(seq + SUMMARISED), 4 * head_dim
    for idx in range(num_summaries):
        place = simd.read_i64(places + 8 * idx) * num_groups + group
        simd.prefetch(summaries + place * num_bytes, num_bytes)
    query = simd.read_i64(block + Q) + simd.read_i64(seq + FIRST_ROW) * row_bytes
    query += group * repeat * head_bytes
    for number in range(simd.read_i64(seq + NUM_ROWS) * repeat):
        one = query + number // repeat * row_bytes + number % repeat * head_bytes
        _write_asked(one, head_dim, simd.read_i64(block + IS_BF16), asked)
        for begin in range(0, num_summaries, simd.LANES):
            count = min(num_summaries - begin, simd.LANES)
            for idx in range(count):
                place = simd.read_i64(places + 8 * (begin + idx)) * num_groups + group
                simd.write_i64(asked + _OFFSETS + 8 * idx, place * num_bytes)
            found = inner.listed_scores_bf16(asked, summaries, asked + _OFFSETS, count, num_bytes)
            if number > 0:
                found = vectors.maximum(vectors.load_f32(scores + 4 * begin), found)
            vectors.store_f32(scores + 4 * begin, found)


@inlined
def choose_segments(block: int, seq: int, group: int, asked: int) -> None:
    """Write which segments a sequence's head searches, if not all; `asked` is scratch memory."""
    num_summaries, num_kept = simd.read_i64(seq + SUMMARISED), simd.read_i64(seq + KEPT)
    if num_kept == num_summaries:
        return
    search, first = simd.read_i64(block + SEARCH), simd.read_i64(seq + FIRST_PLACE)
    pitch = (num_summaries + simd.LANES - 1) // simd.LANES * simd.LANES
    scores = simd.read_i64(search + SUMMARY_SCORES)
    scores += 4 * (first * simd.read_i64(block + NUM_KV_HEADS) + group * pitch)
    _score_summaries(block, seq, group, scores, asked)
    chosen = np.float32(np.inf)
    for idx in range(num_summaries):
        # What cannot be compared is taken only if nothing else is left.
        if not abs(simd.read_f32(scores + 4 * idx)) < chosen:
            simd.write_f32(scores + 4 * idx, -chosen)
    for _ in range(num_kept):
        best, greatest = -1, np.float32(0)
        for idx in range(num_summaries):
            score = np.float32(simd.read_f32(scores + 4 * idx))
            if score < chosen and (best < 0 or score > greatest):
                best, greatest = idx, score
        simd.write_f32(scores + 4 * best, chosen)
    places = simd.read_i64(search + PLACES) + 8 * first
    unit = unit_of(block, simd.read_i64(seq + FIRST_UNIT) + group * simd.read_i64(seq + HEAD_UNITS))
    for idx in range(num_summaries):
        if simd.read_f32(scores + 4 * idx) == chosen:
            simd.write_i64(unit + UNIT_NUMBER, idx)
            simd.write_i64(unit + UNIT_PLACE, simd.read_i64(places + 8 * idx))
            unit += UNIT_BYTES

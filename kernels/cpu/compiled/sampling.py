"""Chooses tokens from rows of scores, compiled: no row is sorted.

Per row: the greatest score, which is the token of a greedy row; else weights exp((score -
greatest) / temperature) in fp32 with their sum; then either the draw, or, for a nucleus, the few
tokens that can belong to it: all whose weight is at least a bound, the greatest of a few bounds
above which the weights suffice. (Tokens that weigh less than (1 - top_p) * sum / V have less than
1 - top_p together, so that is always a bound.) A task is a row, and depends on nothing else.
Knows no requests; used by `kernels.sampling`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.compiled.runtime import Kernel, inlined, launch, offsets
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks
from kernels.sampling import MIN_TEMPERATURE

(
    SCORES,
    SCORES_STRIDE,
    VOCAB,
    NUM_ROWS,
    TEMPERATURES,
    TOP_KS,
    MIN_PS,
    TOP_PS,
    UNIFORMS,
    RESULTS,
    SUMS,
    HEAPS,
    HEAP_BYTES,
    IDS,
) = offsets(14)
"""The arguments of `_choose`."""

# A row's results, f64.
BEST, REST, COUNT, TOKEN, _RESULT_BYTES = range(0, 40, 8)
# Weights that bound a nucleus, greatest first: e^-2 to e^-13.
BOUNDS: Final = tuple(np.float32(np.exp(-x)) for x in (2, 4, 6, 8, 10, 13))


class Chosen(NamedTuple):
    """The results of rows, f64[R] each except the ids."""

    best: NDArray[np.float64]
    """The greatest score; the row is invalid if that is not finite (NaN if a score is)."""
    rest: NDArray[np.float64]
    """The weight of all tokens that are kept but are not among the ids."""
    counts: NDArray[np.float64]
    """The number of ids; 0 where a token was chosen."""
    tokens: NDArray[np.float64]
    """The tokens chosen; 0 in invalid rows and where there are ids."""
    ids: NDArray[np.int32]
    """i32[R, V], ascending: the candidates for a nucleus; only the first `counts` are defined.

    i32[R, 0] if top_p is 1 in all rows.
    """


def choose_rows(
    scores: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    min_p: Tensor,
    top_p: Tensor,
    uniforms: Tensor,
) -> Chosen:
    """Choose a token from each row of scores f32[R, V], or return its nucleus's candidates.

    By row: temperature, min_p and top_p f32[R], top_k i64[R], uniforms f64[R]. At a temperature
    below MIN_TEMPERATURE the token is the first of the greatest. Else scores below the `top_k`-th
    greatest (0: of none), or that weigh less than `min_p`, are not kept. If top_p is 1 the token
    is drawn: the first at which the sum of the weights, by ascending ids, passes `uniforms` times
    the whole sum.
    """
    num_rows, vocab = scores.shape
    assert scores.dtype == torch.float32
    assert scores.stride(1) == 1
    given = [each.contiguous() for each in (temperature, top_k, min_p, top_p, uniforms)]
    assert [each.itemsize for each in given] == [4, 8, 4, 4, 8]
    # Lists: reductions of small tensors take longer.
    heap_size = min(max(top_k.tolist(), default=0), vocab)
    has_nucleus = min(top_p.tolist(), default=1.0) < 1
    num_sums = -(-vocab // simd.LANES)
    results = np.empty((num_rows, _RESULT_BYTES // 8))
    scratch = torch.empty(num_rows * (num_sums + heap_size))
    ids = torch.empty(num_rows, vocab if has_nucleus else 0, dtype=torch.int32)
    arguments = (
        scores.data_ptr(),
        4 * scores.stride(0),
        vocab,
        num_rows,
        *(each.data_ptr() for each in given),
        results.ctypes.data,
        scratch.data_ptr(),
        scratch.data_ptr() + 4 * num_rows * num_sums,
        4 * heap_size,
        ids.data_ptr(),
    )
    launch(_choose, arguments, num_threads=min(torch.get_num_threads(), num_rows))
    best, rest, counts, tokens = results.T
    return Chosen(best, rest, counts, tokens, ids.numpy())


_COLDEST: Final = np.float32(MIN_TEMPERATURE)
_buffer = simd.stack(4 * simd.LANES)


@inlined
def _greatest(scores: int, vocab: int) -> np.float32:
    """Return the greatest score; NaN if a score is NaN, or both infinities occur."""
    lowest = np.float32(-np.inf)
    greatest = vectors.splat(lowest)
    whole = vocab // simd.LANES * simd.LANES
    for begin in range(0, whole, simd.LANES):
        greatest = vectors.maximum(greatest, vectors.load_f32(scores + 4 * begin))
    if whole < vocab:
        left = vocab - whole
        number = vectors.keep_first(vectors.load_first_f32(scores + 4 * whole, left), left, lowest)
        greatest = vectors.maximum(greatest, number)
    total = vectors.sum_lanes(greatest)
    if total != total:
        return np.float32(np.nan)
    best: np.float32 = vectors.max_lanes(greatest)
    return best


@inlined
def _first_of(scores: int, vocab: int, best: np.float32) -> int:
    """Return the first token with the greatest score."""
    begin, whole = 0, vocab // simd.LANES * simd.LANES
    while begin < whole and vectors.max_lanes(vectors.load_f32(scores + 4 * begin)) < best:
        begin += simd.LANES
    while simd.read_f32(scores + 4 * begin) < best:
        begin += 1
    return begin


@inlined
def _kth_score(scores: int, vocab: int, k: int, heap: int) -> np.float32:
    """Return the k-th greatest score, 0 < k < vocab; `heap` has room for k."""
    lowest = np.float32(-np.inf)
    for idx in range(k):
        simd.write_f32(heap + 4 * idx, lowest)
    for begin in range(0, vocab, simd.LANES):
        score = vectors.load_first_f32(scores + 4 * begin, vocab - begin)
        greatest = vectors.max_lanes(vectors.keep_first(score, vocab - begin, lowest))
        if greatest > simd.read_f32(heap):
            for idx in range(begin, min(begin + simd.LANES, vocab)):
                _keep_greater(heap, k, simd.read_f32(scores + 4 * idx))
    return np.float32(simd.read_f32(heap))


@inlined
def _keep_greater(heap: int, size: int, score: np.float32) -> None:
    """Replace the least number of a heap, its first, by a greater score."""
    if score <= simd.read_f32(heap):
        return
    hole, child = 0, 1
    while child < size:
        lesser = simd.read_f32(heap + 4 * child)
        if child + 1 < size and simd.read_f32(heap + 4 * child + 4) < lesser:
            child += 1
            lesser = simd.read_f32(heap + 4 * child)
        if lesser >= score:
            break
        simd.write_f32(heap + 4 * hole, lesser)
        hole, child = child, 2 * child + 1
    simd.write_f32(heap + 4 * hole, score)


@inlined
def _weights(scores: int, count: int, shift: Any, inverse: Any, limit: Any) -> Any:
    """Return the weights of the first `count` of sixteen scores; 0 below `limit`."""
    score = vectors.load_first_f32(scores, count)
    weight = vectors.exp(vectors.mul(vectors.sub(score, shift), inverse))
    return vectors.keep_first(vectors.keep_from(weight, score, limit), count, np.float32(0))


@inlined
def _weigh(scores: int, vocab: int, shift: Any, inverse: Any, limit: Any, sums: int) -> float:
    """Write the sum of each sixteen weights to `sums`; return that of all."""
    total = 0.0
    whole = vocab // simd.LANES * simd.LANES
    for begin in range(0, whole, simd.LANES):
        weight = _weights(scores + 4 * begin, simd.LANES, shift, inverse, limit)
        together = vectors.sum_lanes(weight)
        simd.write_f32(sums + begin // simd.LANES * 4, together)
        total += together
    if whole < vocab:
        weight = _weights(scores + 4 * whole, vocab - whole, shift, inverse, limit)
        together = vectors.sum_lanes(weight)
        simd.write_f32(sums + whole // simd.LANES * 4, together)
        total += together
    return total


@inlined
def _invert(
    scores: int,
    vocab: int,
    shift: Any,
    inverse: Any,
    limit: Any,
    sums: int,
    target: float,
    buffer: int,
) -> int:
    """Return the first token at which the sum of the weights passes `target`.

    If by rounding none passes it, the last token with a weight.
    """
    passed, before, found = 0.0, 0.0, 0
    for begin in range(0, vocab, simd.LANES):
        together = simd.read_f32(sums + begin // simd.LANES * 4)
        if together > 0:
            found, before = begin, passed
            passed += together
            if passed > target:
                break
    vectors.store_f32(buffer, _weights(scores + 4 * found, vocab - found, shift, inverse, limit))
    last = found
    for lane in range(simd.LANES):
        weight = simd.read_f32(buffer + 4 * lane)
        if weight > 0:
            before += weight
            last = found + lane
            if before > target:
                break
    return last


@inlined
def _collect(
    scores: int,
    vocab: int,
    shift: Any,
    inverse: Any,
    limit: Any,
    bound: np.float32,
    sums: int,
    ids: int,
    buffer: int,
) -> tuple[int, float]:
    """Write the ids of weights >= `bound`; return their number and the sum of the weights."""
    count, together = 0, 0.0
    for begin in range(0, vocab, simd.LANES):
        # No sum is less than its greatest term, rounded or not.
        if simd.read_f32(sums + begin // simd.LANES * 4) < bound:
            continue
        weights = _weights(scores + 4 * begin, vocab - begin, shift, inverse, limit)
        vectors.store_f32(buffer, weights)
        for lane in range(min(simd.LANES, vocab - begin)):
            weight = simd.read_f32(buffer + 4 * lane)
            if weight > 0 and weight >= bound:
                simd.write_i32(ids + 4 * count, begin + lane)
                count += 1
                together += weight
    return count, together


@Kernel
def _choose(block: int) -> None:
    buffer = _buffer()
    vocab, num_rows = simd.read_i64(block + VOCAB), simd.read_i64(block + NUM_ROWS)
    num_sums = (vocab + simd.LANES - 1) // simd.LANES
    row = claim_task(block, 0)
    while row < num_rows:
        scores = simd.read_i64(block + SCORES) + row * simd.read_i64(block + SCORES_STRIDE)
        sums = simd.read_i64(block + SUMS) + 4 * row * num_sums
        result = simd.read_i64(block + RESULTS) + row * _RESULT_BYTES
        best = _greatest(scores, vocab)
        given = simd.read_f32(simd.read_i64(block + TEMPERATURES) + 4 * row)
        temperature = np.float64(given)
        top_p = np.float64(simd.read_f32(simd.read_i64(block + TOP_PS) + 4 * row))
        rest, count, token = 0.0, 0, 0
        if not np.isfinite(best):
            pass
        elif given < _COLDEST:
            token = _first_of(scores, vocab, best)
        else:
            # The logarithm of 0 is -inf, which keeps all.
            min_p = np.float64(simd.read_f32(simd.read_i64(block + MIN_PS) + 4 * row))
            lowest = best + temperature * np.log(min_p)
            k = simd.read_i64(simd.read_i64(block + TOP_KS) + 8 * row)
            if 0 < k < vocab:
                heap = simd.read_i64(block + HEAPS) + row * simd.read_i64(block + HEAP_BYTES)
                lowest = max(np.float64(_kth_score(scores, vocab, k, heap)), lowest)
            shift, limit = vectors.splat(best), vectors.splat(np.float32(lowest))
            inverse = vectors.splat(np.float32(1 / temperature))
            total = _weigh(scores, vocab, shift, inverse, limit, sums)
            if top_p < 1:
                ids = simd.read_i64(block + IDS) + 4 * row * vocab
                together = 0.0
                for idx in range(len(BOUNDS) + 1):
                    bound = np.float32(min((1 - top_p) * total / vocab / 2, 1.0))
                    if idx < len(BOUNDS):
                        bound = max(BOUNDS[idx], bound)
                    count, together = _collect(
                        scores, vocab, shift, inverse, limit, bound, sums, ids, buffer
                    )
                    # The rounding of the sums is less than this.
                    if together > (top_p + 1e-4) * total:
                        break
                rest = max(total - together, 0.0)
            else:
                target = total * simd.read_f64(simd.read_i64(block + UNIFORMS) + 8 * row)
                token = _invert(scores, vocab, shift, inverse, limit, sums, target, buffer)
        simd.write_f64(result + BEST, np.float64(best))
        simd.write_f64(result + REST, rest)
        simd.write_f64(result + COUNT, np.float64(count))
        simd.write_f64(result + TOKEN, np.float64(token))
        finish_task(block, 0)
        row = claim_task(block, 0)
    wait_for_tasks(block, 0, num_rows)

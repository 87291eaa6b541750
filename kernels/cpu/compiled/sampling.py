"""Draws from rows of scores, compiled: no row is sorted, and each is read three times.

Per row: the greatest score; weights exp((score - greatest) / temperature) in fp32 with their sum;
then either the draw, or, for a nucleus, the few tokens that can belong to it: all whose weight
is at least a bound, the greatest of a few bounds above which the weights suffice. (Tokens that
weigh less than (1 - top_p) * sum / V have less than 1 - top_p together, so that is always a
bound.) A task is a row, and depends on nothing else. Knows no requests; used by
`kernels.sampling`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.compiled.runtime import Kernel, inlined, launch, offsets
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd import vectors
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks

SCORES, SCORES_STRIDE, VOCAB, NUM_ROWS, PARAMETERS, RESULTS, SUMS, IDS = offsets(8)
"""The arguments of `_draw`."""

_PARAMETER_BYTES: Final = 40
_RESULT_BYTES: Final = 32
# Weights that bound a nucleus, greatest first: e^-2 to e^-13.
BOUNDS: Final = tuple(np.float32(np.exp(-x)) for x in (2, 4, 6, 8, 10, 13))


class Drawn(NamedTuple):
    """The results of rows, f64[R] each except the ids."""

    best: Tensor
    """The greatest score; the row is invalid if that is not finite (NaN if a score is)."""
    rest: Tensor
    """The weight of all tokens that are kept by `lowest` but are not among the ids."""
    counts: Tensor
    """The number of ids; 0 where a token was drawn."""
    tokens: Tensor
    """The tokens drawn; 0 in invalid rows and where there are ids."""
    ids: Tensor
    """i32[R, V], ascending: the candidates for a nucleus; only the first `counts` are defined."""


def draw_rows(
    scores: Tensor,
    *,
    temperature: Tensor,
    lowest: Tensor,
    relative: Tensor,
    top_p: Tensor,
    uniforms: Tensor,
) -> Drawn:
    """Draw a token from each row of scores f32[R, V], or return its nucleus's candidates.

    Parameters are f64[R]. Scores below `lowest`, or below the greatest plus `relative`, are not
    kept (-inf: all are). If top_p is 1 the token is drawn: the first at which the sum of
    the weights, by ascending ids, passes `uniforms` times the whole sum.
    """
    num_rows, vocab = scores.shape
    assert scores.dtype == torch.float32
    assert scores.stride(1) == 1
    parameters = torch.stack((temperature, lowest, relative, top_p, uniforms), dim=1).contiguous()
    assert parameters.dtype == torch.float64
    results = torch.empty(num_rows, 4, dtype=torch.float64)
    sums = torch.empty(num_rows, -(-vocab // simd.LANES))
    ids = torch.empty(num_rows, vocab, dtype=torch.int32)
    arguments = (
        scores.data_ptr(),
        4 * scores.stride(0),
        vocab,
        num_rows,
        parameters.data_ptr(),
        results.data_ptr(),
        sums.data_ptr(),
        ids.data_ptr(),
    )
    launch(_draw, arguments, num_threads=min(torch.get_num_threads(), num_rows))
    best, rest, counts, tokens = results.unbind(1)
    return Drawn(best, rest, counts, tokens, ids)


_buffer = simd.stack(4 * simd.LANES)
_above = simd.stack(4 * len(BOUNDS))


@inlined
def _greatest(scores: int, vocab: int) -> np.float32:
    """Return the greatest score; NaN if a score is NaN, or both infinities occur."""
    lowest = np.float32(-np.inf)
    greatest = vectors.splat(lowest)
    for begin in range(0, vocab, simd.LANES):
        left = vocab - begin
        number = vectors.keep_first(vectors.load_first_f32(scores + 4 * begin, left), left, lowest)
        greatest = vectors.maximum(greatest, number)
    total = vectors.sum_lanes(greatest)
    if total != total:
        return np.float32(np.nan)
    best: np.float32 = vectors.max_lanes(greatest)
    return best


@inlined
def _weights(scores: int, count: int, shift: Any, inverse: Any, limit: Any) -> Any:
    """Return the weights of the first `count` of sixteen scores; 0 below `limit`."""
    score = vectors.load_first_f32(scores, count)
    weight = vectors.exp(vectors.mul(vectors.sub(score, shift), inverse))
    return vectors.keep_first(vectors.keep_from(weight, score, limit), count, np.float32(0))


@inlined
def _weigh(
    scores: int, vocab: int, shift: Any, inverse: Any, limit: Any, sums: int, above: int
) -> float:
    """Write the sum of each sixteen weights to `sums`; return that of all.

    Writes to `above`, per bound, the sum of the weights that reach it (fp32).
    """
    zeros = vectors.splat(np.float32(0))
    b0, b1, b2 = vectors.splat(BOUNDS[0]), vectors.splat(BOUNDS[1]), vectors.splat(BOUNDS[2])
    b3, b4, b5 = vectors.splat(BOUNDS[3]), vectors.splat(BOUNDS[4]), vectors.splat(BOUNDS[5])
    m0, m1, m2, m3, m4, m5 = zeros, zeros, zeros, zeros, zeros, zeros
    total = 0.0
    for begin in range(0, vocab, simd.LANES):
        weight = _weights(scores + 4 * begin, vocab - begin, shift, inverse, limit)
        m0 = vectors.add(m0, vectors.keep_from(weight, weight, b0))
        m1 = vectors.add(m1, vectors.keep_from(weight, weight, b1))
        m2 = vectors.add(m2, vectors.keep_from(weight, weight, b2))
        m3 = vectors.add(m3, vectors.keep_from(weight, weight, b3))
        m4 = vectors.add(m4, vectors.keep_from(weight, weight, b4))
        m5 = vectors.add(m5, vectors.keep_from(weight, weight, b5))
        together = vectors.sum_lanes(weight)
        simd.write_f32(sums + begin // simd.LANES * 4, together)
        total += together
    simd.write_f32(above, vectors.sum_lanes(m0))
    simd.write_f32(above + 4, vectors.sum_lanes(m1))
    simd.write_f32(above + 8, vectors.sum_lanes(m2))
    simd.write_f32(above + 12, vectors.sum_lanes(m3))
    simd.write_f32(above + 16, vectors.sum_lanes(m4))
    simd.write_f32(above + 20, vectors.sum_lanes(m5))
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
def _bound(total: float, top_p: float, vocab: int, above: int) -> np.float32:
    """Return a lower bound of the weights of the nucleus."""
    for idx in range(len(BOUNDS)):
        # The rounding of fp32 sums is less than this.
        if simd.read_f32(above + 4 * idx) > (top_p + 1e-4) * total:
            return BOUNDS[idx]
    return np.float32(min((1 - top_p) * total / vocab / 2, 1.0))


@inlined
def _collect(
    scores: int,
    vocab: int,
    shift: Any,
    inverse: Any,
    limit: Any,
    bound: np.float32,
    low: np.float32,
    ids: int,
    buffer: int,
) -> tuple[int, float]:
    """Write the ids of weights >= `bound`; return their number and the sum of the weights.

    Scores below `low` weigh less than `bound`.
    """
    count, together, lowest = 0, 0.0, np.float32(-np.inf)
    for begin in range(0, vocab, simd.LANES):
        score = vectors.load_first_f32(scores + 4 * begin, vocab - begin)
        if vectors.max_lanes(vectors.keep_first(score, vocab - begin, lowest)) < low:
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
def _draw(block: int) -> None:
    buffer, above = _buffer(), _above()
    vocab, num_rows = simd.read_i64(block + VOCAB), simd.read_i64(block + NUM_ROWS)
    num_sums = (vocab + simd.LANES - 1) // simd.LANES
    row = claim_task(block, 0)
    while row < num_rows:
        scores = simd.read_i64(block + SCORES) + row * simd.read_i64(block + SCORES_STRIDE)
        sums = simd.read_i64(block + SUMS) + 4 * row * num_sums
        given = simd.read_i64(block + PARAMETERS) + row * _PARAMETER_BYTES
        result = simd.read_i64(block + RESULTS) + row * _RESULT_BYTES
        best = _greatest(scores, vocab)
        rest, count, token = 0.0, 0, 0
        if np.isfinite(best):
            lowest = max(simd.read_f64(given + 8), best + simd.read_f64(given + 16))
            shift, limit = vectors.splat(best), vectors.splat(np.float32(lowest))
            inverse = vectors.splat(np.float32(1 / simd.read_f64(given)))
            total = _weigh(scores, vocab, shift, inverse, limit, sums, above)
            top_p = simd.read_f64(given + 24)
            if top_p < 1:
                bound = _bound(total, top_p, vocab, above)
                ids = simd.read_i64(block + IDS) + 4 * row * vocab
                # A little less than the score of weight `bound`, because of rounding.
                low = np.float32(best + (np.log(bound) - 1e-4) * simd.read_f64(given))
                low -= np.float32(abs(best)) * np.float32(1e-6)
                count, together = _collect(
                    scores, vocab, shift, inverse, limit, bound, low, ids, buffer
                )
                rest = max(total - together, 0.0)
            else:
                target = total * simd.read_f64(given + 32)
                token = _invert(scores, vocab, shift, inverse, limit, sums, target, buffer)
        simd.write_f64(result, np.float64(best))
        simd.write_f64(result + 8, rest)
        simd.write_f64(result + 16, np.float64(count))
        simd.write_f64(result + 24, np.float64(token))
        finish_task(block, 0)
        row = claim_task(block, 0)
    wait_for_tasks(block, 0, num_rows)

"""Chooses tokens from rows of logits, compiled: one call per step, and no row is sorted.

Per row: penalties, bias, bans and mask, on a copy; the greatest score, which is the token of a
greedy row; else the least score that is kept, by min_p, top_k and then top_p, and the draw among
the kept by inversion. Weights exp((score - greatest) / temperature) and their sums are fp64, as in
`kernels.sampling`, where each of these steps is defined.

The least score of a nucleus is found by the weight in each of some intervals of scores:
only the tokens of the interval where the sum from above reaches top_p are looked at one by one, or,
if they are many, are divided again.

A task is a row, and depends on nothing else. Log-probabilities are a second call. Knows no
requests; used by `kernels.cpu.sampling`.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kernels.cpu.compiled.runtime import Kernel, inlined, offsets
from kernels.cpu.simd import doubles, vectors
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks
from kernels.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, Purpose
from kernels.sampling import MIN_TEMPERATURE

(
    LOGITS, LOGITS_STRIDE, VOCAB, NUM_ROWS, TEMPERATURES, TOP_KS, MIN_PS, TOP_PS, SEEDS, CHOICES,
    POSITIONS, TOKENS, VALID, IS_NUMBER, SCRATCH, SCRATCH_BYTES, IS_PROCESSED, PRESENCES,
    FREQUENCIES, REPETITIONS, HISTORY, HISTORY_BOUNDS, NUM_BIASES, BIAS_ROWS, BIAS_IDS, BIASES,
    NUM_BANS, BAN_ROWS, BAN_IDS, MASKS,
) = offsets(30)  # fmt: skip
"""The arguments of `choose`.

By row: LOGITS f32 at any stride in bytes; TEMPERATURES, MIN_PS and TOP_PS f32; TOP_KS, SEEDS,
CHOICES and POSITIONS i64; results: TOKENS i64, VALID and IS_NUMBER bytes, as in
`kernels.sampling.SampleResult`. SCRATCH has SCRATCH_BYTES for each thread: scratch_bytes().

Only if IS_PROCESSED: the penalties, f32; HISTORY i32, of each row the prompt and the output, which
begin and end at the row's HISTORY_BOUNDS (i64, 3 numbers); biases f32 and bans, with their rows and
ids i64; MASKS i64, of each row the address of its mask (words i32 as in
`kernels.sampling.AllowedTokens`), or 0.
"""

(
    SCORED, SCORED_STRIDE, SCORED_VOCAB, NUM_SCORED, CHOSEN, CHOSEN_LOGPROBS, NUM_TOP, TOP_IDS,
    TOP_LOGPROBS,
) = offsets(9)  # fmt: skip
"""The arguments of `find_logprobs`: rows f32 and their tokens i64; results f32, the ids i64."""


def scratch_bytes(vocab: int) -> int:
    """Return the bytes that a thread needs: of each token a weight, a score and a count."""
    return -(-vocab // simd.LANES) * simd.LANES * (8 + 4 + 4)


# Intervals of scores into which a nucleus is divided, and tokens that are looked at one by one.
NUM_BINS: Final = 1024
MAX_SINGLE: Final = 64

_WORD: Final = 0xFFFFFFFF
_FIRST_FACTOR, _SECOND_FACTOR = MULTIPLIERS
_FIRST_STEP, _SECOND_STEP = KEY_STEPS
_PURPOSE: Final = int(Purpose.TOKEN)
_COLDEST: Final = np.float32(MIN_TEMPERATURE)
_LOWEST: Final = np.float32(-np.inf)
_INFINITY: Final = np.float32(np.inf)
_LEAST: Final = np.float32(np.finfo(np.float32).min)
_numbers = simd.stack(8 * simd.LANES)
_places = simd.stack(4 * simd.LANES)
_bins = simd.stack(8 * NUM_BINS)
_single_scores = simd.stack(4 * MAX_SINGLE)
_single_weights = simd.stack(8 * MAX_SINGLE)


@inlined
def _padded(vocab: int) -> int:
    return (vocab + simd.LANES - 1) // simd.LANES * simd.LANES


@inlined
def _uniform(seed: int, choice: int, position: int, purpose: int) -> float:
    """Return what `kernels.philox.uniforms` does.

    Words are in i64: the lower 64 bits of a product have no sign.
    """
    key0, key1 = seed & _WORD, seed >> 32 & _WORD
    even0, odd0 = position & _WORD, position >> 32 & _WORD
    even1, odd1 = choice & _WORD, purpose
    for _ in range(ROUNDS):
        first, second = even0 * _FIRST_FACTOR, even1 * _SECOND_FACTOR
        even0, even1 = (second >> 32 & _WORD) ^ odd0 ^ key0, (first >> 32 & _WORD) ^ odd1 ^ key1
        odd0, odd1 = second & _WORD, first & _WORD
        key0, key1 = (key0 + _FIRST_STEP) & _WORD, (key1 + _SECOND_STEP) & _WORD
    return np.float64(even0 >> 5 << 26 | odd0 >> 6) * 2.0**-53


@inlined
def _greatest(scores: int, vocab: int) -> np.float32:
    """Return the greatest score; NaN if a score is NaN, or both infinities occur."""
    greatest = vectors.splat(_LOWEST)
    whole = vocab // simd.LANES * simd.LANES
    for begin in range(0, whole, simd.LANES):
        greatest = vectors.maximum(greatest, vectors.load_f32(scores + 4 * begin))
    if whole < vocab:
        left = vocab - whole
        number = vectors.keep_first(vectors.load_first_f32(scores + 4 * whole, left), left, _LOWEST)
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
def _copy(source: int, target: int, count: int, mask: int) -> None:
    """Copy scores; those that a mask, if there is one, does not allow become -inf, and stay so."""
    for begin in range(0, count, simd.LANES):
        left = count - begin
        number = vectors.load_first_f32(source + 4 * begin, left)
        if mask:
            bits = simd.read_i32(mask + 4 * (begin // 32)) >> begin % 32
            number = vectors.keep_bits(number, bits, _LOWEST)
        vectors.store_first_f32(target + 4 * begin, number, left)


@inlined
def _penalise(block: int, row: int, scores: int, counts: int) -> None:
    """Apply a row's penalties; of `counts` only the tokens of its history are used."""
    frequency = np.float32(simd.read_f32(simd.read_i64(block + FREQUENCIES) + 4 * row))
    presence = np.float32(simd.read_f32(simd.read_i64(block + PRESENCES) + 4 * row))
    repetition = np.float32(simd.read_f32(simd.read_i64(block + REPETITIONS) + 4 * row))
    bounds = simd.read_i64(block + HISTORY_BOUNDS) + 24 * row
    history = simd.read_i64(block + HISTORY)
    prompt, output = history + 4 * simd.read_i64(bounds), history + 4 * simd.read_i64(bounds + 8)
    end = history + 4 * simd.read_i64(bounds + 16)
    if repetition != np.float32(1):
        for at in range(prompt, end, 4):
            simd.write_i32(counts + 4 * simd.read_i32(at), 1)
        for at in range(prompt, end, 4):
            token = simd.read_i32(at)
            if simd.read_i32(counts + 4 * token):
                simd.write_i32(counts + 4 * token, 0)
                score = np.float32(simd.read_f32(scores + 4 * token))
                changed = score / repetition if score > 0 else score * repetition
                simd.write_f32(scores + 4 * token, changed)
    if frequency != 0 or presence != 0:
        for at in range(output, end, 4):
            simd.write_i32(counts + 4 * simd.read_i32(at), 0)
        for at in range(output, end, 4):
            count = counts + 4 * simd.read_i32(at)
            simd.write_i32(count, simd.read_i32(count) + 1)
        for at in range(output, end, 4):
            token = simd.read_i32(at)
            count = simd.read_i32(counts + 4 * token)
            if count:
                simd.write_i32(counts + 4 * token, 0)
                score = np.float32(simd.read_f32(scores + 4 * token))
                score = np.float32(score - frequency * np.float32(count))
                simd.write_f32(scores + 4 * token, score - presence)


@inlined
def _process(block: int, row: int, logits: int, scores: int) -> None:
    """Write the scores of a row's logits; behind them there is room for counts."""
    vocab = simd.read_i64(block + VOCAB)
    _copy(logits, scores, vocab, simd.read_i64(simd.read_i64(block + MASKS) + 8 * row))
    _penalise(block, row, scores, scores + 4 * _padded(vocab))
    for idx in range(simd.read_i64(block + NUM_BIASES)):
        if simd.read_i64(simd.read_i64(block + BIAS_ROWS) + 8 * idx) == row:
            score = scores + 4 * simd.read_i64(simd.read_i64(block + BIAS_IDS) + 8 * idx)
            bias = simd.read_f32(simd.read_i64(block + BIASES) + 4 * idx)
            simd.write_f32(score, simd.read_f32(score) + bias)
    for idx in range(simd.read_i64(block + NUM_BANS)):
        if simd.read_i64(simd.read_i64(block + BAN_ROWS) + 8 * idx) == row:
            token = simd.read_i64(simd.read_i64(block + BAN_IDS) + 8 * idx)
            simd.write_f32(scores + 4 * token, _LOWEST)


@inlined
def _weigh(
    scores: int, vocab: int, best: float, inverse: float, limit: np.float32, weights: int
) -> float:
    """Write the weights of scores >= `limit`, and return their sum.

    Weights of lower scores are 0 or not written. `weights` has room for whole vectors.
    """
    total = 0.0
    for begin in range(0, vocab, simd.LANES):
        left = vocab - begin
        score = vectors.load_first_f32(scores + 4 * begin, left)
        if doubles.between(score, limit, _INFINITY, left):
            weight = doubles.exp(doubles.scaled(doubles.distances(score, best), inverse))
            weight = doubles.keep(weight, score, limit, _INFINITY, left)
            doubles.store_f64(weights + 8 * begin, weight)
            total += doubles.sum_lanes(weight)
    return total


@inlined
def _invert(scores: int, vocab: int, limit: np.float32, weights: int, target: float) -> int:
    """Return the first token at which the sum of the weights of scores >= `limit` passes `target`.

    If by rounding none passes it, the last token with a weight.
    """
    passed, before, found = 0.0, 0.0, 0
    for begin in range(0, vocab, simd.LANES):
        left = vocab - begin
        score = vectors.load_first_f32(scores + 4 * begin, left)
        if doubles.between(score, limit, _INFINITY, left):
            weight = doubles.load_f64(weights + 8 * begin)
            together = doubles.sum_lanes(doubles.keep(weight, score, limit, _INFINITY, left))
            if together > 0:
                found, before = begin, passed
                passed += together
                if passed > target:
                    break
    last = found
    for token in range(found, min(found + simd.LANES, vocab)):
        weight = simd.read_f64(weights + 8 * token)
        if weight > 0 and simd.read_f32(scores + 4 * token) >= limit:
            before += weight
            last = token
            if before > target:
                break
    return last


@inlined
def _least_from(scores: int, vocab: int, limit: np.float32) -> np.float32:
    """Return the least score that is finite and not below `limit`; there is one."""
    limits = vectors.splat(max(limit, _LEAST))
    least = vectors.splat(_INFINITY)
    for begin in range(0, vocab, simd.LANES):
        left = vocab - begin
        score = vectors.keep_first(
            vectors.load_first_f32(scores + 4 * begin, left), left, _INFINITY
        )
        least = vectors.minimum_from(least, score, limits)
    negated = vectors.mul(least, vectors.splat(np.float32(-1)))
    return np.float32(-vectors.max_lanes(negated))


@inlined
def _bins_of(score: Any, origin: float, scale: float) -> Any:
    """Return the bins of sixteen scores <= origin."""
    return doubles.truncated(
        doubles.scaled(doubles.distances(score, origin), -scale), np.float64(NUM_BINS - 1)
    )


@inlined
def _tally(
    scores: int,
    vocab: int,
    low: np.float32,
    high: np.float32,
    origin: float,
    scale: float,
    weights: int,
    bins: int,
) -> None:
    """Add the weights of scores from `low` to `high` to the bins of their distances to `origin`."""
    places, numbers = _places(), _numbers()
    for idx in range(NUM_BINS):
        simd.write_f64(bins + 8 * idx, 0.0)
    for begin in range(0, vocab, simd.LANES):
        left = vocab - begin
        score = vectors.load_first_f32(scores + 4 * begin, left)
        if doubles.between(score, low, high, left):
            weight = doubles.splat(1.0)
            if weights:
                weight = doubles.load_f64(weights + 8 * begin)
            doubles.store_f64(numbers, doubles.keep(weight, score, low, high, left))
            doubles.store_i32(places, _bins_of(score, origin, scale))
            # All lanes: adding 0 takes less time than a jump that is not foreseen.
            for lane in range(simd.LANES):
                place = bins + 8 * simd.read_i32(places + 4 * lane)
                total = simd.read_f64(place) + simd.read_f64(numbers + 8 * lane)
                simd.write_f64(place, total)


@inlined
def _find_limit(
    scores: int, vocab: int, low: np.float32, high: np.float32, wanted: float, weights: int
) -> tuple[np.float32, float]:
    """Return the greatest score from which on the weights are at least `wanted`, and their sum.

    It is between `low` and `high`, the greatest of all; both occur. If `weights` is 0, each token
    weighs 1.
    """
    bins, single_scores, single_weights = _bins(), _single_scores(), _single_weights()
    above = 0.0
    while low < high:
        origin, bottom = np.float64(high), np.float64(low)
        width = (origin - bottom) / NUM_BINS
        _tally(scores, vocab, low, high, origin, 1 / width, weights, bins)
        # If by rounding none reaches it, the last bin with a weight.
        found, before, passed = 0, above, above
        for idx in range(NUM_BINS):
            weight = simd.read_f64(bins + 8 * idx)
            if weight > 0:
                found, before = idx, passed
                passed += weight
                if passed >= wanted:
                    break
        above = before
        # Rounding may have put a score into this bin that belongs to the next.
        low = max(low, np.float32(origin - (found + 2) * width))
        high = min(high, np.float32(origin - (found - 1) * width))
        num_singles, greatest, least = 0, _LOWEST, high
        for begin in range(0, vocab, simd.LANES):
            left = vocab - begin
            score = vectors.load_first_f32(scores + 4 * begin, left)
            mask = doubles.between(score, low, high, left)
            if mask:
                mask &= doubles.equal_to(_bins_of(score, origin, 1 / width), found)
            while mask:
                token = begin + doubles.first_bit(mask)
                mask &= mask - 1
                single = np.float32(simd.read_f32(scores + 4 * token))
                if num_singles < MAX_SINGLE:
                    weight = simd.read_f64(weights + 8 * token) if weights else 1.0
                    _insert(single_scores, single_weights, num_singles, single, weight)
                num_singles += 1
                greatest, least = max(greatest, single), min(least, single)
        if num_singles <= MAX_SINGLE:
            idx = 0
            while idx < num_singles:
                limit = np.float32(simd.read_f32(single_scores + 4 * idx))
                # Equal scores are kept together.
                while idx < num_singles and simd.read_f32(single_scores + 4 * idx) == limit:
                    above += simd.read_f64(single_weights + 8 * idx)
                    idx += 1
                if above >= wanted:
                    break
            return limit, above
        low, high = least, greatest
    for begin in range(0, vocab, simd.LANES):
        left = vocab - begin
        score = vectors.load_first_f32(scores + 4 * begin, left)
        if doubles.between(score, high, high, left):
            weight = doubles.load_f64(weights + 8 * begin) if weights else doubles.splat(1.0)
            above += doubles.sum_lanes(doubles.keep(weight, score, high, high, left))
    return high, above


@inlined
def _insert(scores: int, weights: int, count: int, score: np.float32, weight: float) -> None:
    """Insert a score and its weight into `count` of each, sorted by descending scores."""
    place = count
    while place > 0 and simd.read_f32(scores + 4 * place - 4) < score:
        simd.write_f32(scores + 4 * place, simd.read_f32(scores + 4 * place - 4))
        simd.write_f64(weights + 8 * place, simd.read_f64(weights + 8 * place - 8))
        place -= 1
    simd.write_f32(scores + 4 * place, score)
    simd.write_f64(weights + 8 * place, weight)


@inlined
def _draw(block: int, row: int, scores: int, best: np.float32, weights: int) -> int:
    """Return the token drawn from a row's scores, whose greatest is finite."""
    vocab = simd.read_i64(block + VOCAB)
    temperature = np.float64(simd.read_f32(simd.read_i64(block + TEMPERATURES) + 4 * row))
    min_p = np.float64(simd.read_f32(simd.read_i64(block + MIN_PS) + 4 * row))
    top_p = np.float64(simd.read_f32(simd.read_i64(block + TOP_PS) + 4 * row))
    k = simd.read_i64(simd.read_i64(block + TOP_KS) + 8 * row)
    # The logarithm of 0 is -inf, which keeps all.
    limit = np.float32(best + temperature * np.log(min_p))
    if 0 < k < vocab:
        least = _least_from(scores, vocab, limit)
        limit, _ = _find_limit(scores, vocab, least, best, np.float64(k), 0)
    total = _weigh(scores, vocab, np.float64(best), 1 / temperature, limit, weights)
    if top_p < 1:
        # Tokens that weigh less than this have less than 1 - top_p together.
        depth = np.log((1 - top_p) * total / vocab) - 1
        lowest = np.float32(max(best + temperature * depth, np.float64(_LEAST)))
        least = _least_from(scores, vocab, max(limit, lowest))
        limit, total = _find_limit(scores, vocab, least, best, top_p * total, weights)
    seed = simd.read_i64(simd.read_i64(block + SEEDS) + 8 * row)
    choice = simd.read_i64(simd.read_i64(block + CHOICES) + 8 * row)
    position = simd.read_i64(simd.read_i64(block + POSITIONS) + 8 * row)
    target = total * _uniform(seed, choice, position, _PURPOSE)
    return int(_invert(scores, vocab, limit, weights, target))


@Kernel
def choose(block: int) -> None:
    """Choose a token of each row; 0 in a row without a finite greatest score."""
    vocab, num_rows = simd.read_i64(block + VOCAB), simd.read_i64(block + NUM_ROWS)
    scratch = simd.read_i64(block + SCRATCH)
    # Phase 1 numbers the threads.
    scratch += claim_task(block, 1) * simd.read_i64(block + SCRATCH_BYTES)
    processed = scratch + 8 * _padded(vocab)
    row = claim_task(block, 0)
    while row < num_rows:
        scores = simd.read_i64(block + LOGITS) + row * simd.read_i64(block + LOGITS_STRIDE)
        best = _greatest(scores, vocab)
        is_number = np.isfinite(best)
        if simd.read_i64(block + IS_PROCESSED):
            _process(block, row, scores, processed)
            scores = processed
            best = _greatest(scores, vocab)
        is_valid = is_number and np.isfinite(best)
        token = 0
        if is_valid:
            if simd.read_f32(simd.read_i64(block + TEMPERATURES) + 4 * row) < _COLDEST:
                token = _first_of(scores, vocab, best)
            else:
                token = _draw(block, row, scores, best, scratch)
        simd.write_i64(simd.read_i64(block + TOKENS) + 8 * row, token)
        simd.write_i8(simd.read_i64(block + VALID) + row, int(is_valid))
        simd.write_i8(simd.read_i64(block + IS_NUMBER) + row, int(is_number))
        finish_task(block, 0)
        row = claim_task(block, 0)
    wait_for_tasks(block, 0, num_rows)


@inlined
def _collect_best(logits: int, vocab: int, count: int, ids: int, found: int) -> None:
    """Write the `count` greatest logits and their ids; of equal ones the lower id comes first."""
    for begin in range(0, vocab, simd.LANES):
        left = vocab - begin
        score = vectors.load_first_f32(logits + 4 * begin, left)
        mask = doubles.between(score, _LOWEST, _INFINITY, left)
        if begin >= count:
            least = np.float32(simd.read_f32(found + 4 * count - 4))
            mask = doubles.between(score, least, _INFINITY, left)
        while mask:
            lane = doubles.first_bit(mask)
            mask &= mask - 1
            single = np.float32(simd.read_f32(logits + 4 * (begin + lane)))
            place = min(begin + lane, count)
            if place == count:
                place -= 1
                if single <= simd.read_f32(found + 4 * place):
                    continue
            while place > 0 and simd.read_f32(found + 4 * place - 4) < single:
                simd.write_f32(found + 4 * place, simd.read_f32(found + 4 * place - 4))
                simd.write_i64(ids + 8 * place, simd.read_i64(ids + 8 * place - 8))
                place -= 1
            simd.write_f32(found + 4 * place, single)
            simd.write_i64(ids + 8 * place, begin + lane)


@Kernel
def find_logprobs(block: int) -> None:
    """Find the log-probabilities of each row's token and best tokens; a task is a row."""
    vocab, num_rows = simd.read_i64(block + SCORED_VOCAB), simd.read_i64(block + NUM_SCORED)
    num_top = simd.read_i64(block + NUM_TOP)
    row = claim_task(block, 0)
    while row < num_rows:
        logits = simd.read_i64(block + SCORED) + row * simd.read_i64(block + SCORED_STRIDE)
        best = np.float64(_greatest(logits, vocab))
        total = 0.0
        for begin in range(0, vocab, simd.LANES):
            left = vocab - begin
            score = vectors.load_first_f32(logits + 4 * begin, left)
            weight = doubles.exp(doubles.distances(score, best))
            total += doubles.sum_lanes(doubles.keep(weight, score, _LOWEST, _INFINITY, left))
        norm = best + np.log(total)
        token = simd.read_i64(simd.read_i64(block + CHOSEN) + 8 * row)
        chosen = np.float64(simd.read_f32(logits + 4 * token)) - norm
        simd.write_f32(simd.read_i64(block + CHOSEN_LOGPROBS) + 4 * row, np.float32(chosen))
        ids = simd.read_i64(block + TOP_IDS) + 8 * row * num_top
        found = simd.read_i64(block + TOP_LOGPROBS) + 4 * row * num_top
        for idx in range(num_top):
            simd.write_i64(ids + 8 * idx, idx)
            simd.write_f32(found + 4 * idx, np.float32(np.nan))
        if num_top and np.isfinite(best):
            _collect_best(logits, vocab, num_top, ids, found)
        for idx in range(num_top):
            logprob = np.float64(simd.read_f32(found + 4 * idx)) - norm
            simd.write_f32(found + 4 * idx, np.float32(logprob))
        finish_task(block, 0)
        row = claim_task(block, 0)
    wait_for_tasks(block, 0, num_rows)

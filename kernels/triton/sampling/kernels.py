"""Triton kernels that turn logits into tokens: penalties, filters, and the inverse CDF.

A row of V scores is cut into splits, one program each; the next kernel joins their results in a
fixed order, so there are no atomics on floating-point numbers and a row's token depends only on
the row. Nothing is decided on the host. The filters top_k and top_p are in
`kernels.triton.sampling.filters`. Launched by `kernels.triton.sampling.launches`, whose
`SamplingPlan` has the columns of `ints` and `reals`.
"""

from __future__ import annotations

import triton
import triton.language as tl

WORD: tl.constexpr = tl.constexpr(0xFFFFFFFF)
IN_PROMPT: tl.constexpr = tl.constexpr(1 << 30)

# Columns of ints i64[.., R].
SEED: tl.constexpr = tl.constexpr(0)
CHOICE: tl.constexpr = tl.constexpr(1)
POSITION: tl.constexpr = tl.constexpr(2)
TOP_K: tl.constexpr = tl.constexpr(3)
DRAWN: tl.constexpr = tl.constexpr(4)
HISTORY_ROW: tl.constexpr = tl.constexpr(5)
# Columns of reals f64[.., R].
TEMPERATURE: tl.constexpr = tl.constexpr(0)
TOP_P: tl.constexpr = tl.constexpr(1)
MIN_P: tl.constexpr = tl.constexpr(2)
PRESENCE: tl.constexpr = tl.constexpr(3)
FREQUENCY: tl.constexpr = tl.constexpr(4)
REPETITION: tl.constexpr = tl.constexpr(5)


@triton.jit(do_not_specialize=["num_histories"], do_not_specialize_on_alignment=["tokens_ptr"])
def count_history(
    tokens_ptr: tl.tensor,
    bounds_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    V: tl.tensor,
    num_histories: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Count a history's outputs in seen i32[histories, V], and mark its prompt's tokens.

    History h is tokens[bounds[h] : bounds[h + 1]], of which the first bounds[n + 1 + h] are
    the prompt, n histories in all. Adding integers is the same in any order.
    """
    history = tl.program_id(0)
    begin = tl.load(bounds_ptr + history)
    end = tl.load(bounds_ptr + history + 1)
    num_prompt = tl.load(bounds_ptr + num_histories + 1 + history)
    places = begin + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tokens = tl.load(tokens_ptr + places, mask=places < end, other=0)
    targets = seen_ptr + history.to(tl.int64) * V + tokens
    is_prompt = places < begin + num_prompt
    tl.atomic_or(targets, IN_PROMPT, mask=is_prompt & (places < end))
    tl.atomic_add(targets, 1, mask=(places >= begin + num_prompt) & (places < end))


@triton.jit(do_not_specialize=["R"])
def penalise_block(
    logits_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    seen_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    reals_ptr: tl.tensor,
    R: tl.tensor,
    V: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write scores f32[R, V]: the logits after repetition, frequency and presence penalties.

    To be compiled without fused multiply-add, which rounds once where the CPU rounds twice.
    """
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = ids < V
    scores = tl.load(logits_ptr + row * row_stride + ids, mask=is_real, other=0.0).to(tl.float32)
    history = tl.load(ints_ptr + HISTORY_ROW * R + row)
    if history >= 0:
        seen = tl.load(seen_ptr + history * V + ids, mask=is_real, other=0)
        repetition = tl.load(reals_ptr + REPETITION * R + row).to(tl.float32)
        frequency = tl.load(reals_ptr + FREQUENCY * R + row).to(tl.float32)
        presence = tl.load(reals_ptr + PRESENCE * R + row).to(tl.float32)
        factors = tl.zeros_like(scores) + repetition
        repeated = tl.where(scores > 0, tl.div_rn(scores, factors), scores * factors)
        # Without this penalty the factor is 1.
        scores = tl.where(seen != 0, repeated, scores)
        count = (seen & (IN_PROMPT - 1)).to(tl.float32)
        scores = tl.where(count > 0, scores - frequency * count - presence, scores)
    tl.store(scores_ptr + row * V + ids, scores, mask=is_real)


@triton.jit
def mask_block(
    scores_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    V: tl.tensor,
    num_words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Set the scores f32[R, V] of tokens whose bit in i32[G, words] is 0 to -inf, in G rows."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(bits_ptr + place * num_words + ids // 32, mask=ids < V, other=-1)
    is_allowed = ((words >> (ids % 32)) & 1) != 0
    tl.store(scores_ptr + row * V + ids, float("-inf"), mask=(ids < V) & ~is_allowed)


@triton.jit
def survey_split(
    scores_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    places_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    V: tl.tensor,
    row_stride: tl.tensor,
    split_size: tl.tensor,
    SUM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write a split's greatest score (NaN if one is), its lowest id, and sum exp(x - greatest)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = split * split_size
    end = tl.minimum(begin + split_size, V)
    best = float("-inf")
    place = begin
    num_nan = 0
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(begin, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scores = tl.load(
            scores_ptr + row * row_stride + ids, mask=ids < end, other=float("-inf")
        ).to(tl.float32)
        num_nan += tl.sum((scores != scores).to(tl.int32), axis=0)
        scores = tl.where(scores == scores, scores, float("-inf"))
        here = tl.max(scores, axis=0)
        first = tl.min(tl.where(scores == here, ids, V), axis=0)
        place = tl.where(here > best, first, place)
        if SUM:
            greatest = tl.maximum(best, here)
            # inf - inf is NaN: then the row is invalid, or the sum is still 0.
            shift = tl.where(tl.abs(greatest) < float("inf"), greatest, 0.0)
            sums = sums * tl.exp(best - shift) + tl.exp(scores - shift)
        best = tl.maximum(best, here)
    output = row * tl.num_programs(1) + split
    tl.store(maxima_ptr + output, tl.where(num_nan > 0, float("nan"), best))
    tl.store(places_ptr + output, place)
    if SUM:
        tl.store(sums_ptr + output, tl.sum(sums, axis=0))


@triton.jit
def _join_maxima(
    maxima_ptr: tl.tensor, row: tl.tensor, S: tl.tensor, S_PAD: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the splits' maxima, the greatest of them, and whether it is finite."""
    splits = tl.arange(0, S_PAD)
    maxima = tl.load(maxima_ptr + row * S + splits, mask=splits < S, other=float("-inf"))
    num_nan = tl.sum((maxima != maxima).to(tl.int32), axis=0)
    maxima = tl.where(maxima == maxima, maxima, float("-inf"))
    best = tl.max(maxima, axis=0)
    return maxima, best, (num_nan == 0) & (tl.abs(best) < float("inf"))


@triton.jit
def _uniform(ints_ptr: tl.tensor, row: tl.tensor, R: tl.tensor) -> tl.tensor:
    """Return the row's uniform in fp64: Philox4x32-10, as `kernels.philox.uniforms` for tokens."""
    seed = tl.load(ints_ptr + SEED * R + row)
    position = tl.load(ints_ptr + POSITION * R + row)
    c0, c1 = position & WORD, (position >> 32) & WORD
    c2 = tl.load(ints_ptr + CHOICE * R + row) & WORD
    c3 = c2 * 0
    k0, k1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(10):
        even, odd = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        high, low = (even >> 32).to(tl.int64), (even & WORD).to(tl.int64)
        c0 = (odd >> 32).to(tl.int64) ^ c1 ^ k0
        c1 = (odd & WORD).to(tl.int64)
        c2 = high ^ c3 ^ k1
        c3 = low
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    bits = ((c0 >> 5) << 26) | (c1 >> 6)
    return bits.to(tl.float64) * 1.1102230246251565e-16


@triton.jit(do_not_specialize=["R"])
def settle_row(
    maxima_ptr: tl.tensor,
    places_ptr: tl.tensor,
    raw_maxima_ptr: tl.tensor,
    raw_sums_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    reals_ptr: tl.tensor,
    best_ptr: tl.tensor,
    lowest_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    R: tl.tensor,
    S: tl.tensor,
    NORM: tl.constexpr,
    S_PAD: tl.constexpr,
) -> None:
    """Join a row's splits: its best token, validity, lowest score by min_p, uniform, and norm.

    The norm is log sum exp of the logits, for log-probabilities.
    """
    row = tl.program_id(0)
    splits = tl.arange(0, S_PAD)
    maxima, best, is_valid = _join_maxima(maxima_ptr, row, S, S_PAD)
    raw_maxima, raw_best, is_raw_valid = _join_maxima(raw_maxima_ptr, row, S, S_PAD)
    places = tl.load(places_ptr + row * S + splits, mask=splits < S, other=0)
    first = tl.min(tl.where((maxima == best) & (splits < S), splits, S_PAD), axis=0)
    token = tl.sum(tl.where(splits == first, places, 0), axis=0)
    min_p = tl.load(reals_ptr + MIN_P * R + row)
    temperature = tl.load(reals_ptr + TEMPERATURE * R + row)
    logarithm = tl.log(tl.where(min_p > 0, min_p, 1.0))
    lowest = (best.to(tl.float64) + temperature * logarithm).to(tl.float32)
    tl.store(lowest_ptr + row, tl.where(min_p > 0, lowest, float("-inf")))
    tl.store(best_ptr + row, best)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(valid_ptr + row, is_valid & is_raw_valid)
    tl.store(uniform_ptr + row, _uniform(ints_ptr, row, R))
    if NORM:
        sums = tl.load(raw_sums_ptr + row * S + splits, mask=splits < S, other=0.0)
        shift = tl.where(is_raw_valid, raw_best, 0.0)
        total = tl.sum(sums * tl.exp(raw_maxima - shift), axis=0)
        tl.store(norm_ptr + row, shift + tl.log(total))


@triton.jit
def weights_of(
    scores: tl.tensor, is_kept: tl.tensor, best: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    """Return exp((score - best) / temperature) in fp64, 0 for scores that are not kept."""
    exponents = (scores.to(tl.float64) - best.to(tl.float64)) / temperature
    return tl.where(is_kept, tl.exp(exponents), 0.0)


@triton.jit(do_not_specialize=["R"])
def weigh_split(
    scores_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    reals_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    best_ptr: tl.tensor,
    lowest_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    R: tl.tensor,
    V: tl.tensor,
    row_stride: tl.tensor,
    split_size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the weight of the kept scores of a split, f64[R, S]."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if (tl.load(ints_ptr + DRAWN * R + row) == 0) | (tl.load(valid_ptr + row) == 0):
        return
    best, lowest = tl.load(best_ptr + row), tl.load(lowest_ptr + row)
    temperature = tl.load(reals_ptr + TEMPERATURE * R + row)
    mass = tl.zeros((BLOCK,), tl.float64)
    begin = split * split_size
    end = tl.minimum(begin + split_size, V)
    for start in range(begin, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scores = tl.load(scores_ptr + row * row_stride + ids, mask=ids < end, other=0.0)
        scores = scores.to(tl.float32)
        mass += weights_of(scores, (ids < end) & (scores >= lowest), best, temperature)
    tl.store(masses_ptr + row * tl.num_programs(1) + split, tl.sum(mass, axis=0))


@triton.jit(do_not_specialize=["R"])
def invert_row(
    scores_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    reals_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    best_ptr: tl.tensor,
    lowest_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    R: tl.tensor,
    V: tl.tensor,
    S: tl.tensor,
    row_stride: tl.tensor,
    split_size: tl.tensor,
    S_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the first token at which the CDF, by ascending ids, passes the row's uniform."""
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(ints_ptr + DRAWN * R + row) == 0) | (tl.load(valid_ptr + row) == 0):
        return
    splits = tl.arange(0, S_PAD)
    masses = tl.load(masses_ptr + row * S + splits, mask=splits < S, other=0.0)
    sums = tl.cumsum(masses, axis=0)
    target = tl.max(sums, axis=0) * tl.load(uniform_ptr + row)
    split = tl.min(tl.where((sums > target) & (masses > 0), splits, S_PAD), axis=0)
    # By rounding no split may pass the uniform: then the last one with any weight is taken.
    split = tl.minimum(split, tl.max(tl.where(masses > 0, splits, 0), axis=0))
    passed = tl.sum(tl.where(splits < split, masses, 0.0), axis=0)
    best, lowest = tl.load(best_ptr + row), tl.load(lowest_ptr + row)
    temperature = tl.load(reals_ptr + TEMPERATURE * R + row)
    begin = split * split_size
    end = tl.minimum(begin + split_size, V)
    found, last = V, begin
    for start in range(begin, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scores = tl.load(scores_ptr + row * row_stride + ids, mask=ids < end, other=0.0)
        scores = scores.to(tl.float32)
        weights = weights_of(scores, (ids < end) & (scores >= lowest), best, temperature)
        cdf = passed + tl.cumsum(weights, axis=0)
        above = (cdf > target) & (weights > 0)
        found = tl.minimum(found, tl.min(tl.where(above, ids, V), axis=0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, begin), axis=0))
        passed += tl.sum(weights, axis=0)
    tl.store(tokens_ptr + row, tl.where(found < V, found, last).to(tl.int64))

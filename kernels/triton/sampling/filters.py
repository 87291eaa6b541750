"""Triton kernels of the filters top_k and top_p: the lowest score that they keep.

A filter keeps the top part of the scores, so one number describes it, and equal scores are kept
or dropped together. It is found without sorting: each pass over the scores finds four bits of
its fp32 pattern, eight passes in all, by counts for top_k and by fp64 weights for top_p. A pass
is split among programs; each writes a tally per digit, and the next pass begins by joining them.
Launched by `kernels.triton.sampling.launches`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling.kernels import DRAWN, TEMPERATURE, TOP_K, TOP_P, weights_of

BINS: tl.constexpr = tl.constexpr(16)
DIGIT_BITS: tl.constexpr = tl.constexpr(4)
PASSES: tl.constexpr = tl.constexpr(8)


@triton.jit
def _ordered(scores: tl.tensor) -> tl.tensor:
    """Return numbers i64 below 2**32 in the order of fp32 scores."""
    bits = scores.to(tl.int32, bitcast=True)
    signed = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return signed.to(tl.int64) + 2147483648


@triton.jit
def _is_searched(
    ints_ptr: tl.tensor,
    reals_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    row: tl.tensor,
    R: tl.tensor,
    MASS: tl.constexpr,
) -> tl.tensor:
    """Return whether the filter, top_p if MASS and else top_k, applies to a row."""
    if MASS:
        applies = tl.load(reals_ptr + TOP_P * R + row) < 1.0
    else:
        applies = tl.load(ints_ptr + TOP_K * R + row) > 0
    is_drawn = tl.load(ints_ptr + DRAWN * R + row) > 0
    return applies & is_drawn & (tl.load(valid_ptr + row) != 0)


@triton.jit
def _resolve_digit(
    tallies_ptr: tl.tensor,
    prefixes_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    reals_ptr: tl.tensor,
    step: tl.tensor,
    row: tl.tensor,
    R: tl.tensor,
    S: tl.tensor,
    MASS: tl.constexpr,
    S_PAD: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Join the tallies of pass `step`; return the prefix, the tally above it, and the target.

    The digit is the greatest at which the tally from it on reaches the target.
    """
    splits = tl.arange(0, S_PAD)[:, None]
    bins = tl.arange(0, BINS)
    places = (step % 2 * R + row) * S * BINS + splits * BINS + bins[None, :]
    tally = tl.sum(tl.load(tallies_ptr + places, mask=splits < S, other=0.0), axis=0)
    is_above = bins[:, None] > bins[None, :]
    above_bins = tl.sum(tl.where(is_above, tally[:, None], 0.0), axis=0)
    prefix = tl.zeros((), tl.int64)
    above = tl.zeros((), tl.float64)
    if step == 0:
        if MASS:
            target = tl.load(reals_ptr + TOP_P * R + row) * tl.sum(tally, axis=0)
        else:
            target = tl.load(ints_ptr + TOP_K * R + row).to(tl.float64)
    else:
        prefix = tl.load(prefixes_ptr + step % 2 * R + row)
        above = tl.load(sums_ptr + step % 2 * 2 * R + row)
        target = tl.load(sums_ptr + (step % 2 * 2 + 1) * R + row)
    reaches = (tally > 0) & (above + above_bins + tally >= target)
    digit = tl.max(tl.where(reaches, bins, -1), axis=0)
    # By rounding, the sum of a bin's parts may be less than the bin.
    last = tl.min(tl.where(tally > 0, bins, BINS - 1), axis=0)
    digit = tl.where(digit < 0, last, digit)
    above += tl.sum(tl.where(bins == digit, above_bins, 0.0), axis=0)
    return prefix * BINS + digit, above, target


@triton.jit(do_not_specialize=["step", "R"])
def tally_digit(
    scores_ptr: tl.tensor,
    ints_ptr: tl.tensor,
    reals_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    best_ptr: tl.tensor,
    lowest_ptr: tl.tensor,
    tallies_ptr: tl.tensor,
    prefixes_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    step: tl.tensor,
    R: tl.tensor,
    V: tl.tensor,
    row_stride: tl.tensor,
    split_size: tl.tensor,
    MASS: tl.constexpr,
    S_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Resolve the previous pass's digit, and tally the next digit of scores with the prefix.

    Tallies f64[2, R, S, BINS], prefixes i64[2, R] and sums f64[2, 2, R] alternate by pass, since
    some programs of a row may still read them when others write.
    """
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if not _is_searched(ints_ptr, reals_ptr, valid_ptr, row, R, MASS):
        return
    S = tl.num_programs(1)
    prefix = tl.zeros((), tl.int64)
    if step > 0:
        prefix, above, target = _resolve_digit(
            tallies_ptr, prefixes_ptr, sums_ptr, ints_ptr, reals_ptr, step - 1, row, R, S, MASS,
            S_PAD,
        )  # fmt: skip
        if split == 0:
            tl.store(prefixes_ptr + step % 2 * R + row, prefix)
            tl.store(sums_ptr + step % 2 * 2 * R + row, above)
            tl.store(sums_ptr + (step % 2 * 2 + 1) * R + row, target)
    best, lowest = tl.load(best_ptr + row), tl.load(lowest_ptr + row)
    temperature = tl.load(reals_ptr + TEMPERATURE * R + row)
    bins = tl.arange(0, BINS)[:, None]
    tally = tl.zeros((BINS, BLOCK), tl.float64)
    shift = 32 - DIGIT_BITS * (step + 1)
    begin = split * split_size
    end = tl.minimum(begin + split_size, V)
    for start in range(begin, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scores = tl.load(scores_ptr + row * row_stride + ids, mask=ids < end, other=0.0)
        scores = scores.to(tl.float32)
        ordered = _ordered(scores) >> shift
        is_counted = (ids < end) & (ordered // BINS == prefix)
        if MASS:
            is_counted = is_counted & (scores >= lowest)
        # After the first passes few blocks have counted scores.
        if tl.max(is_counted.to(tl.int32), axis=0) > 0:
            if MASS:
                weights = weights_of(scores, is_counted, best, temperature)
            else:
                weights = is_counted.to(tl.float64)
            tally += tl.where((ordered % BINS)[None, :] == bins, weights[None, :], 0.0)
    output = (step % 2 * R + row) * S * BINS + split * BINS + tl.arange(0, BINS)
    tl.store(tallies_ptr + output, tl.sum(tally, axis=1))


@triton.jit(do_not_specialize=["R"])
def finish_search(
    ints_ptr: tl.tensor,
    reals_ptr: tl.tensor,
    valid_ptr: tl.tensor,
    lowest_ptr: tl.tensor,
    tallies_ptr: tl.tensor,
    prefixes_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    R: tl.tensor,
    S: tl.tensor,
    MASS: tl.constexpr,
    S_PAD: tl.constexpr,
) -> None:
    """Raise a row's lowest kept score to the one found by the passes."""
    row = tl.program_id(0).to(tl.int64)
    if not _is_searched(ints_ptr, reals_ptr, valid_ptr, row, R, MASS):
        return
    found, _, _ = _resolve_digit(
        tallies_ptr, prefixes_ptr, sums_ptr, ints_ptr, reals_ptr, PASSES - 1, row, R, S, MASS, S_PAD
    )
    signed = (found - 2147483648).to(tl.int32)
    bits = signed ^ ((signed >> 31) & 0x7FFFFFFF)
    lowest = tl.maximum(tl.load(lowest_ptr + row), bits.to(tl.float32, bitcast=True))
    tl.store(lowest_ptr + row, lowest)

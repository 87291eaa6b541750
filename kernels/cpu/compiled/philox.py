"""The uniforms of `kernels.philox`, compiled: a row takes nanoseconds instead of many numpy calls.

Knows no requests; used by `kernels.sampling`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.compiled.runtime import Kernel, launch, offsets
from kernels.cpu.simd import lanes as simd
from kernels.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, Purpose

SEEDS, CHOICES, POSITIONS, NUM_ROWS, PURPOSE, RESULTS = offsets(6)
"""The arguments of `_uniforms`."""

_WORD: Final = 0xFFFFFFFF
_FIRST_FACTOR, _SECOND_FACTOR = MULTIPLIERS
_FIRST_STEP, _SECOND_STEP = KEY_STEPS


def uniforms(seeds: Tensor, choices: Tensor, positions: Tensor, *, purpose: Purpose) -> Tensor:
    """Return what `kernels.philox.uniforms` does, f64[R], of names i64[R]; seeds in signed form."""
    names = (seeds, choices, positions)
    assert all(each.is_contiguous() and each.dtype == torch.int64 for each in names)
    results = torch.empty(len(seeds), dtype=torch.float64)
    addresses = (each.data_ptr() for each in names)
    arguments = (*addresses, len(seeds), int(purpose), results.data_ptr())
    launch(_uniforms, arguments, num_threads=1)
    return results


@Kernel
def _uniforms(block: int) -> None:
    """Compute all rows. Words are in i64: the lower 64 bits of a product have no sign."""
    for row in range(simd.read_i64(block + NUM_ROWS)):
        seed = simd.read_i64(simd.read_i64(block + SEEDS) + 8 * row)
        choice = simd.read_i64(simd.read_i64(block + CHOICES) + 8 * row)
        position = simd.read_i64(simd.read_i64(block + POSITIONS) + 8 * row)
        key0, key1 = seed & _WORD, seed >> 32 & _WORD
        even0, odd0 = position & _WORD, position >> 32 & _WORD
        even1, odd1 = choice & _WORD, simd.read_i64(block + PURPOSE)
        for _ in range(ROUNDS):
            first, second = even0 * _FIRST_FACTOR, even1 * _SECOND_FACTOR
            even0, even1 = (second >> 32 & _WORD) ^ odd0 ^ key0, (first >> 32 & _WORD) ^ odd1 ^ key1
            odd0, odd1 = second & _WORD, first & _WORD
            key0, key1 = (key0 + _FIRST_STEP) & _WORD, (key1 + _SECOND_STEP) & _WORD
        bits = even0 >> 5 << 26 | odd0 >> 6
        uniform = np.float64(bits) * 2.0**-53
        simd.write_f64(simd.read_i64(block + RESULTS) + 8 * row, uniform)

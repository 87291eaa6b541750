"""The uniforms of `kernels.philox`, compiled: a row takes nanoseconds instead of many numpy calls.

Knows no requests; used by `kernels.sampling`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.compiled.runtime import Kernel, launch, offsets
from kernels.cpu.simd import lanes as simd
from kernels.philox import KEY_STEPS, MULTIPLIERS, ROUNDS, Purpose

NAMES, NUM_ROWS, PURPOSE, RESULTS = offsets(4)
"""The arguments of `_uniforms`."""

_NAME_BYTES: Final = 24
_WORD: Final = 0xFFFFFFFF
_FIRST_FACTOR, _SECOND_FACTOR = MULTIPLIERS
_FIRST_STEP, _SECOND_STEP = KEY_STEPS


def uniforms(
    seeds: NDArray[np.int64],
    choices: NDArray[np.int64],
    positions: NDArray[np.int64],
    *,
    purpose: Purpose,
) -> NDArray[np.float64]:
    """Return what `kernels.philox.uniforms` does, of seeds in signed form."""
    names = np.stack((seeds, choices, positions), axis=1)
    results = np.empty(len(names))
    arguments = (names.ctypes.data, len(names), int(purpose), results.ctypes.data)
    launch(_uniforms, arguments, num_threads=1)
    return results


@Kernel
def _uniforms(block: int) -> None:
    """Compute all rows. Words are in i64: the lower 64 bits of a product have no sign."""
    names, results = simd.read_i64(block + NAMES), simd.read_i64(block + RESULTS)
    for row in range(simd.read_i64(block + NUM_ROWS)):
        name = names + _NAME_BYTES * row
        seed, position = simd.read_i64(name), simd.read_i64(name + 16)
        key0, key1 = seed & _WORD, seed >> 32 & _WORD
        even0, odd0 = position & _WORD, position >> 32 & _WORD
        even1, odd1 = simd.read_i64(name + 8) & _WORD, simd.read_i64(block + PURPOSE)
        for _ in range(ROUNDS):
            first, second = even0 * _FIRST_FACTOR, even1 * _SECOND_FACTOR
            even0, even1 = (second >> 32 & _WORD) ^ odd0 ^ key0, (first >> 32 & _WORD) ^ odd1 ^ key1
            odd0, odd1 = second & _WORD, first & _WORD
            key0, key1 = (key0 + _FIRST_STEP) & _WORD, (key1 + _SECOND_STEP) & _WORD
        bits = even0 >> 5 << 26 | odd0 >> 6
        simd.write_f64(results + 8 * row, np.float64(bits) * 2.0**-53)

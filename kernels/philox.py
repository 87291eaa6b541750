"""Counter-based randomness: one uniform per (seed, choice, position, purpose).

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011,
section 3.3) over arrays of names, so that a draw is a pure function of its name: the
same on every node and device, in any batch, after any replay. Has no state and needs
no torch. Called by `kernels.sampling` and by drafting.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
WORD: Final = np.uint64(0xFFFFFFFF)
WORD_BITS: Final = np.uint64(32)


class Purpose(IntEnum):
    """The use of a uniform; draws of different purposes are independent."""

    TOKEN = 0
    DRAFT = 1


def philox(counters: Words, keys: Words) -> Words:
    """Return the Philox4x32-10 blocks [4, R] of counters [4, R] and keys [2, R].

    All words are 32-bit values held in uint64.
    """
    factors = np.array(MULTIPLIERS, dtype=np.uint64)[:, None]
    steps = np.array(KEY_STEPS, dtype=np.uint64)[:, None]
    rounds = np.arange(ROUNDS, dtype=np.uint64)[:, None, None]
    even, odd = counters[0::2], counters[1::2]
    for round_key in (keys + rounds * steps) & WORD:
        product = even * factors
        even = (product >> WORD_BITS)[::-1] ^ odd ^ round_key
        odd = (product & WORD)[::-1]
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(
    seeds: NDArray[np.uint64],
    choices: NDArray[np.int64],
    positions: NDArray[np.int64],
    *,
    purpose: Purpose,
) -> NDArray[np.float64]:
    """Return one uniform in [0, 1), a multiple of 2**-53, for each of R names.

    Choices are below 2**32, positions are not negative. The key is the seed; the counter
    is (position low, position high, choice, purpose). The uniform is the upper 27 bits of
    the first word of the block, followed by the upper 26 of the second.
    """
    places = positions.astype(np.uint64)
    purposes = np.full_like(places, int(purpose))
    counters = np.stack(
        (places & WORD, places >> WORD_BITS, choices.astype(np.uint64) & WORD, purposes)
    )
    words = philox(counters, np.stack((seeds & WORD, seeds >> WORD_BITS)))
    bits = ((words[0] >> np.uint64(5)) << np.uint64(26)) | (words[1] >> np.uint64(6))
    fractions: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return fractions

"""Philox4x32-10 against published vectors, and the uniform numbers that are made of its blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.philox import Purpose, philox, uniforms

# Known answers of the authors' Random123 library: counter, key, block.
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def test_known_vectors() -> None:
    counters = np.array([c for c, _, _ in KNOWN], dtype=np.uint64).T
    keys = np.array([k for _, k, _ in KNOWN], dtype=np.uint64).T
    assert philox(counters, keys).T.tolist() == [list(block) for _, _, block in KNOWN]


def draw(
    seed: int = 7, choice: int = 0, position: int = 0, purpose: Purpose = Purpose.TOKEN
) -> float:
    values = uniforms(
        np.array([seed], dtype=np.uint64),
        np.array([choice]),
        np.array([position]),
        purpose=purpose,
    )
    return float(values[0])


@pytest.mark.parametrize("purpose", list(Purpose))
def test_the_uniform_of_a_name(purpose: Purpose) -> None:
    seed, choice, position = 0xFEDCBA9876543210, 3, (5 << 32) + 17
    counter, key = [17, 5, choice, int(purpose)], [seed & (2**32 - 1), seed >> 32]
    words = philox(*(np.array(each, dtype=np.uint64)[:, None] for each in (counter, key)))
    words = words[:, 0].tolist()
    wanted = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53
    assert draw(seed, choice, position, purpose) == wanted


def test_uniforms_lie_in_the_unit_interval_evenly() -> None:
    positions = np.arange(20_000)
    values = uniforms(
        np.full(20_000, 3, dtype=np.uint64),
        np.zeros(20_000, dtype=np.int64),
        positions,
        purpose=Purpose.TOKEN,
    )
    assert values.min() >= 0.0
    assert values.max() < 1.0
    assert np.array_equal(values, np.floor(values * 2**53) / 2**53)
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    # 49 degrees of freedom; 95.8 is exceeded with probability 1e-4.
    assert ((counts - 400) ** 2 / 400).sum() < 95.8

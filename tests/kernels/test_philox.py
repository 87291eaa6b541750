"""Philox4x32-10 against published vectors and, through a generic form of it, against numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from kernels.philox import Purpose, as_signed, philox, uniforms

# Known answers of the authors' Random123 library: counter, key, block.
KNOWN = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


class Variant(NamedTuple):
    """Constants of Philox4xW."""

    bits: int
    multipliers: tuple[int, int]
    steps: tuple[int, int]


NARROW = Variant(32, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85))
WIDE = Variant(
    64, (0xD2E7470EE14C6C93, 0xCA5A826395121157), (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
)


def by_hand(counter: list[int], key: list[int], variant: Variant) -> list[int]:
    """One block with unbounded Python integers, for either width."""
    mask = (1 << variant.bits) - 1
    for _ in range(10):
        first, second = counter[0] * variant.multipliers[0], counter[2] * variant.multipliers[1]
        counter = [
            (second >> variant.bits) ^ counter[1] ^ key[0],
            second & mask,
            (first >> variant.bits) ^ counter[3] ^ key[1],
            first & mask,
        ]
        key = [(k + step) & mask for k, step in zip(key, variant.steps, strict=True)]
    return counter


def test_known_vectors() -> None:
    counters = np.array([c for c, _, _ in KNOWN], dtype=np.uint64).T
    keys = np.array([k for _, k, _ in KNOWN], dtype=np.uint64).T
    assert philox(counters, keys).T.tolist() == [list(block) for _, _, block in KNOWN]


def test_the_generic_form_is_numpys_for_64_bits() -> None:
    """numpy increments the counter before it draws a block."""
    for start, key in ((0, 5), (12345 << 100, 2**127 + 9)):
        generator = np.random.Philox(counter=start, key=key)
        counter = [(start + 1 >> 64 * word) & (2**64 - 1) for word in range(4)]
        wanted = by_hand(counter, [key & (2**64 - 1), key >> 64], WIDE)
        assert generator.random_raw(4).tolist() == wanted


def test_many_blocks_against_the_generic_form() -> None:
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 1 << 32, (4, 200), dtype=np.uint64)
    keys = rng.integers(0, 1 << 32, (2, 200), dtype=np.uint64)
    blocks = philox(counters, keys)
    for row in range(200):
        wanted = by_hand(counters[:, row].tolist(), keys[:, row].tolist(), NARROW)
        assert blocks[:, row].tolist() == wanted


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
    words = by_hand([17, 5, choice, int(purpose)], [seed & (2**32 - 1), seed >> 32], NARROW)
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


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_as_signed_keeps_the_bits(seed: int) -> None:
    assert int(np.array([as_signed(seed)], dtype=np.int64).view(np.uint64)[0]) == seed


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_as_signed_refuses_other_numbers(seed: int) -> None:
    with pytest.raises(AssertionError, match="unsigned 64-bit"):
        as_signed(seed)

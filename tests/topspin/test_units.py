"""Sizes: what people write and what is printed back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topspin.errors import ConfigError
from topspin.units import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("1000000", 1_000_000),
        ("2GiB", 2 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("512 mib", 512 * 1024**2),
        ("3KiB", 3072),
        ("1TiB", 1024**4),
        ("2GB", 2_000_000_000),
        ("1.5k", 1500),
        (".5MiB", 512 * 1024),
        (" 4m ", 4_000_000),
    ],
)
def test_sizes_people_write(text: str, size_bytes: int) -> None:
    assert parse_size(text, option="--x") == size_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "1.2.3", "1 2", "2XiB", "0", "0GiB", "nan", "1e9"]
)
def test_no_size_names_the_option_and_the_text(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory") as raised:
        parse_size(text, option="--kv-cache-memory")
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (256 * 2**20, "256.0 MiB"),
        (5 * 2**29, "2.5 GiB"),
        (2**40, "1.0 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_sizes_are_printed_in_the_largest_whole_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(min_value=1, max_value=2**50))
def test_a_printed_size_reads_back_to_a_twentieth_of_its_unit(size_bytes: int) -> None:
    again = parse_size(format_size(size_bytes), option="--x")
    assert abs(again - size_bytes) <= 0.051 * max(1024, size_bytes)

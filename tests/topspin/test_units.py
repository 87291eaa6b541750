"""Sizes: accepted input and printed output."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topspin.errors import ConfigError
from topspin.units import format_size, parse_object, parse_origins, parse_size, parse_switch


def test_sizes_people_write() -> None:
    cases: list[tuple[str, int]] = [
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
    ]
    for text, size_bytes in cases:
        assert parse_size(text) == size_bytes


def test_no_size_names_the_text() -> None:
    cases: list[str] = ["", "GiB", "-1GiB", "1.2.3", "1 2", "2XiB", "0", "0GiB", "nan", "1e9"]
    for text in cases:
        with pytest.raises(ConfigError) as raised:
            parse_size(text)
        assert repr(text) in str(raised.value)


def test_sizes_are_printed_in_the_largest_whole_unit() -> None:
    cases: list[tuple[int, str]] = [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (256 * 2**20, "256.0 MiB"),
        (5 * 2**29, "2.5 GiB"),
        (2**40, "1.0 TiB"),
        (2**52, "4096.0 TiB"),
    ]
    for size_bytes, text in cases:
        assert format_size(size_bytes) == text


@given(st.integers(min_value=1, max_value=2**50))
def test_a_printed_size_reads_back_to_a_twentieth_of_its_unit(size_bytes: int) -> None:
    again = parse_size(format_size(size_bytes))
    assert abs(again - size_bytes) <= 0.051 * max(1024, size_bytes)


def test_a_switch_is_on_or_off() -> None:
    assert (parse_switch("on"), parse_switch("off")) == (True, False)
    with pytest.raises(ConfigError, match="'yes' is neither on nor off"):
        parse_switch("yes")


def test_what_no_browser_sends_as_an_origin_is_refused() -> None:
    for text in ("", "ui.test", "https://ui.test/", "https://UI.test", '["*"', "[1]", "*,"):
        with pytest.raises(ConfigError):
            parse_origins(text)


def test_an_object_is_json_with_braces() -> None:
    assert parse_object('{"a": {"b": 1.5}}') == {"a": {"b": 1.5}}
    for text in ("", "a", "[1]", '{"a": }', "{1: 2}"):
        with pytest.raises(ConfigError, match="; it must be a JSON object"):
            parse_object(text)

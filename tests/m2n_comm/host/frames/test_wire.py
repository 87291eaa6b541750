"""The frame header: fields are preserved, and on networks damage is noticed."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import m2n_windows
from kernels.frame_header import FrameHeader, word
from m2n_comm.host.frames.wire import (
    ANSWER,
    HEADER_BYTES,
    REQUEST,
    answer_to,
    check_header,
    check_seal,
    check_size,
    payload_code,
    read_header,
    seal,
    write_header,
)
from topspin.errors import ConfigError, FrameError, StaleFrame

NOT_COMPARED = FrameHeader._fields[FrameHeader._fields.index("payload_bytes") :]
STALE = ("incarnation", "reader_incarnation", "step", "table_version", "sequence")


def make_header(**changes: Any) -> FrameHeader:
    values = {name: number for number, name in enumerate(FrameHeader._fields, start=1)}
    return FrameHeader(**(values | {"kind": REQUEST} | changes))


def sealed(header: FrameHeader) -> bytes:
    buffer = bytearray(HEADER_BYTES)
    write_header(memoryview(buffer), header)
    seal(memoryview(buffer))
    return bytes(buffer)


headers = st.builds(
    FrameHeader, **{name: st.integers(0, 2**64 - 1) for name in FrameHeader._fields}
)


@given(headers)
def test_a_header_round_trips(header: FrameHeader) -> None:
    buffer = bytearray(HEADER_BYTES)
    write_header(memoryview(buffer), header)
    assert read_header(buffer) == header
    assert struct.unpack("<21Q", buffer) == tuple(header)


def test_kernels_know_the_first_words() -> None:
    words = m2n_windows.FLAG, m2n_windows.ROWS, m2n_windows.STEP, m2n_windows.VERSION
    assert words == tuple(map(word, ("sequence", "rows", "step", "table_version")))
    words = m2n_windows.LAYER, m2n_windows.PART, m2n_windows.PARTS, m2n_windows.INCARNATION
    assert words == tuple(map(word, ("layer", "part", "num_parts", "incarnation")))
    assert m2n_windows.HEADER_WORDS == 8  # a power of two, as Triton needs


def test_the_seal_is_a_checksum_of_the_words_before_it() -> None:
    raw = sealed(make_header())
    body = struct.pack("<19Q", *make_header()[:-2])
    assert raw == body + struct.pack("<QQ", zlib.crc32(body), 0)
    check_seal(raw)


@given(st.integers(0, HEADER_BYTES * 8 - 1))
@settings(max_examples=200)
def test_every_flipped_bit_is_noticed(bit: int) -> None:
    raw = bytearray(sealed(make_header()))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        check_seal(raw)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_random_bytes_are_frame_errors(raw: bytes) -> None:
    with pytest.raises(FrameError):
        check_seal(raw)


def test_an_answer_repeats_its_request_the_other_way() -> None:
    request = make_header()
    answer = answer_to(request, payload=9)
    assert (answer.kind, answer.payload) == (ANSWER, 9)
    assert answer.incarnation == request.reader_incarnation
    assert answer.reader_incarnation == request.incarnation
    changed = ("kind", "payload", "incarnation", "reader_incarnation")
    for name in FrameHeader._fields:
        if name not in changed:
            assert getattr(answer, name) == getattr(request, name)


def test_sizes_times_and_checksums_are_not_compared() -> None:
    expected = make_header()
    got = expected._replace(**dict.fromkeys(NOT_COMPARED, 77))
    check_header(got, expected, origin="expert 1")


def test_every_other_field_is_compared_and_named() -> None:
    for field in FrameHeader._fields:
        if field in NOT_COMPARED:
            continue
        error = StaleFrame if field in STALE else FrameError
        with pytest.raises(error, match=rf"frame of expert 1, layer 5, .*: {field} is 77"):
            check_header(make_header(**{field: 77}), make_header(), origin="expert 1")


def test_a_frame_of_a_past_life_is_stale_whatever_else_differs() -> None:
    got = make_header(incarnation=77, rows=77, step=77)
    with pytest.raises(StaleFrame, match=": incarnation"):
        check_header(got, make_header(), origin="attention 0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 9, "payload_bytes": 90}, "9 rows, a window has 8"),
        ({"part": 2, "num_parts": 2}, "part 2 of 2"),
        ({"part": 0, "num_parts": 0}, "part 0 of 0"),
        ({"num_parts": 2**20 + 1}, "part 0 of 1048577"),
        ({"payload_bytes": 79}, "payload_bytes is 79, expected 8 rows of 10"),
    ],
)
def test_sizes_are_checked(changes: dict[str, int], message: str) -> None:
    good = {"rows": 8, "part": 0, "num_parts": 1, "payload_bytes": 80}
    check_size(make_header(**good), window_rows=8, row_bytes=10, origin="attention 0")
    with pytest.raises(FrameError, match=message):
        check_size(
            make_header(**(good | changes)), window_rows=8, row_bytes=10, origin="attention 0"
        )


def test_a_payload_that_has_no_code_is_refused() -> None:
    assert payload_code(torch.float32) != payload_code(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"torch\.float16"):
        payload_code(torch.float16)

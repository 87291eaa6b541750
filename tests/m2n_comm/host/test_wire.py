"""The frame header: what goes in comes out, and nothing damaged is believed."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2n_comm.host.wire import (
    HEADER_BYTES,
    REQUEST,
    FrameHeader,
    check_header,
    check_size,
    payload_code,
    read_header,
    set_payload_crc,
    write_header,
)
from topspin.errors import ConfigError, FrameError, StaleFrame

_BITS = {
    **dict.fromkeys(("kind", "payload"), 8),
    **dict.fromkeys(("attention", "expert", "micro_batch", "layer"), 16),
    **dict.fromkeys(("part", "num_parts", "rows", "hidden_size", "payload_crc"), 32),
    **dict.fromkeys(("compute_ns", "idle_ns"), 32),
}

NOT_COMPARED = ("payload_bytes", "deliver_ns", "payload_crc", "compute_ns", "idle_ns")


def make_header(**changes: Any) -> FrameHeader:
    values = dict(zip(FrameHeader._fields, range(1, 21), strict=True))
    return FrameHeader(**(values | {"kind": REQUEST} | changes))


def packed(header: FrameHeader) -> bytes:
    buffer = bytearray(HEADER_BYTES)
    write_header(memoryview(buffer), header)
    return bytes(buffer)


headers = st.builds(
    FrameHeader,
    **{name: st.integers(0, 2 ** _BITS.get(name, 64) - 1) for name in FrameHeader._fields},
)


@given(headers)
def test_a_header_round_trips(header: FrameHeader) -> None:
    assert read_header(packed(header)) == header


def test_golden_bytes() -> None:
    body = b"TSM2" + struct.pack(
        "<HBB 4H 4I 7Q 3I", 1, 1, 2, 3, 4, 5, 6, *range(7, 11), *range(11, 18), 18, 19, 20
    )
    assert packed(make_header()) == body + struct.pack("<I", zlib.crc32(body))


@given(st.integers(0, HEADER_BYTES * 8 - 1))
@settings(max_examples=200)
def test_every_flipped_bit_is_noticed(bit: int) -> None:
    raw = bytearray(packed(make_header()))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        read_header(raw)


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_frame_errors(raw: bytes) -> None:
    with pytest.raises(FrameError):
        read_header(raw)


def test_another_protocol_is_named() -> None:
    raw = bytearray(packed(make_header()))
    raw[4:6] = (9).to_bytes(2, "little")
    raw[-4:] = zlib.crc32(raw[:-4]).to_bytes(4, "little")
    with pytest.raises(FrameError, match="protocol is 9, expected 1"):
        read_header(raw)


def test_the_payload_crc_is_set_in_place() -> None:
    buffer = bytearray(packed(make_header()))
    set_payload_crc(memoryview(buffer), 12345)
    assert read_header(buffer) == make_header(payload_crc=12345)


def test_the_last_three_fields_are_not_compared() -> None:
    expected = make_header()
    got = expected._replace(**dict.fromkeys(NOT_COMPARED, 77))
    check_header(got, expected, origin="expert 1")


@pytest.mark.parametrize(
    "field", [name for name in FrameHeader._fields if name not in NOT_COMPARED]
)
def test_every_other_field_is_compared_and_named(field: str) -> None:
    stale = ("attention_incarnation", "expert_incarnation", "step", "table_version", "sequence")
    error = StaleFrame if field in stale else FrameError
    with pytest.raises(error, match=rf"frame of expert 1, layer 6, .*: {field} is 77"):
        check_header(make_header(**{field: 77}), make_header(), origin="expert 1")


def test_a_frame_of_a_past_life_is_stale_whatever_else_differs() -> None:
    got = make_header(attention_incarnation=77, rows=77, step=77)
    with pytest.raises(StaleFrame, match="attention_incarnation"):
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

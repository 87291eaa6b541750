"""The frame header: a fixed little-endian record before every window's payload.

Owns its fields, their packing, and the checks that need no connection (magic, protocol,
checksum, ranges) as well as the comparison with what a reader expects. Knows no sockets
and no memory: both sides write and read it through a memoryview or bytes.

Stale fields (incarnations, table version, step, sequence) raise StaleFrame, because the
frame was right once; every other difference raises FrameError.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import torch

from topspin.errors import ConfigError, FrameError, StaleFrame

PROTOCOL = 1
REQUEST = 1
ANSWER = 2
MAX_PARTS = 2**20

_MAGIC = b"TSM2"
_BODY = struct.Struct("<4sHBBHHHHIIIIQQQQQQQIII")
_CRC = struct.Struct("<I")
_TIME = struct.Struct("<Q")
_WHOLE = struct.Struct(_BODY.format + "I")
HEADER_BYTES = _WHOLE.size
_PAYLOAD_CRC_AT = _BODY.size - 12
_DELIVER_NS_AT = _PAYLOAD_CRC_AT - _TIME.size
MAX_MEASURED_NS = 2**32 - 1
# Where these fields are in a header read as 64-bit numbers; the two times are halves, the
# upper of COMPUTE_WORD and the lower of IDLE_WORD.
DELIVER_WORD, COMPUTE_WORD, IDLE_WORD = 10, 11, 12

_PAYLOAD_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3, torch.int8: 4}


class FrameHeader(NamedTuple):
    """What one frame says about itself; the fields from `payload_bytes` on are not compared.

    `sequence` counts the frames of one (pair, micro-batch), from 1; an answer carries the
    sequence of its request. `deliver_ns` is the CLOCK_MONOTONIC time before which an
    emulated link has not delivered the frame; 0 on a real one. In an answer `compute_ns` is
    what the expert node took from having the rows to replying, `idle_ns` how long it had
    waited for them (0: they had waited for it); both are capped at MAX_MEASURED_NS.
    """

    kind: int
    payload: int
    attention: int
    expert: int
    micro_batch: int
    layer: int
    part: int
    num_parts: int
    rows: int
    hidden_size: int
    attention_incarnation: int
    expert_incarnation: int
    table_version: int
    step: int
    sequence: int
    payload_bytes: int
    deliver_ns: int
    payload_crc: int
    compute_ns: int = 0
    idle_ns: int = 0


NUM_COMPARED = FrameHeader._fields.index("payload_bytes")
_STALE_FIELDS = (
    "attention_incarnation",
    "expert_incarnation",
    "step",
    "table_version",
    "sequence",
)


def payload_code(dtype: torch.dtype) -> int:
    """Return the wire code of `dtype`; raises ConfigError if hidden rows cannot have it."""
    code = _PAYLOAD_CODES.get(dtype)
    if code is None:
        known = ", ".join(str(known) for known in _PAYLOAD_CODES)
        raise ConfigError(f"payload {dtype} is not supported between nodes; use one of {known}")
    return code


def first_word(kind: int, payload: int) -> int:
    """Return the first 8 bytes of a header of that kind and payload code, as one number."""
    return int.from_bytes(_BODY.pack(_MAGIC, PROTOCOL, kind, payload, *[0] * 18)[:8], "little")


def write_header(buffer: memoryview, header: FrameHeader) -> None:
    """Pack `header` into the first HEADER_BYTES of `buffer`, with its checksum."""
    _BODY.pack_into(buffer, 0, _MAGIC, PROTOCOL, *header)
    _CRC.pack_into(buffer, _BODY.size, zlib.crc32(buffer[: _BODY.size]))


def set_deliver_ns(buffer: memoryview, deliver_ns: int) -> None:
    """Put the time at which an emulated link has delivered the frame into a packed header."""
    _TIME.pack_into(buffer, _DELIVER_NS_AT, deliver_ns)
    _CRC.pack_into(buffer, _BODY.size, zlib.crc32(buffer[: _BODY.size]))


def set_payload_crc(buffer: memoryview, payload_crc: int) -> None:
    """Put the checksum of the payload into a packed header."""
    _CRC.pack_into(buffer, _PAYLOAD_CRC_AT, payload_crc)
    _CRC.pack_into(buffer, _BODY.size, zlib.crc32(buffer[: _BODY.size]))


def read_header(raw: bytes | bytearray) -> FrameHeader:
    """Return the header in `raw`; raises FrameError if it is damaged or of another protocol."""
    if len(raw) != HEADER_BYTES:
        raise FrameError(f"frame header: {len(raw)} bytes, expected {HEADER_BYTES}")
    values = _WHOLE.unpack(raw)
    if values[0] != _MAGIC:
        raise FrameError("frame header: magic is wrong, this is not a frame")
    if values[-1] != zlib.crc32(raw[: _BODY.size]):
        raise FrameError("frame header: checksum is wrong")
    if values[1] != PROTOCOL:
        raise FrameError(f"frame header: protocol is {values[1]}, expected {PROTOCOL}")
    return FrameHeader._make(values[2:-1])


def check_header(header: FrameHeader, expected: FrameHeader, *, origin: str) -> None:
    """Compare every field before `payload_bytes`; raises StaleFrame or FrameError naming one."""
    if header[:NUM_COMPARED] == expected[:NUM_COMPARED]:
        return
    others = [name for name in FrameHeader._fields[:NUM_COMPARED] if name not in _STALE_FIELDS]
    for names, error in ((_STALE_FIELDS, StaleFrame), (tuple(others), FrameError)):
        for name in names:
            got, want = getattr(header, name), getattr(expected, name)
            if got != want:
                raise error(
                    f"frame of {origin}, layer {expected.layer}, micro-batch "
                    f"{expected.micro_batch}: {name} is {got}, expected {want}"
                )


def check_size(header: FrameHeader, *, window_rows: int, row_bytes: int, origin: str) -> None:
    """Raise FrameError unless rows, parts and payload size fit one window and each other.

    Called before a byte of the payload is read or trusted.
    """
    if header.rows > window_rows:
        raise FrameError(f"frame of {origin}: {header.rows} rows, a window has {window_rows}")
    if not 1 <= header.num_parts <= MAX_PARTS or header.part >= header.num_parts:
        raise FrameError(f"frame of {origin}: part {header.part} of {header.num_parts}")
    if header.payload_bytes != header.rows * row_bytes:
        raise FrameError(
            f"frame of {origin}: payload_bytes is {header.payload_bytes}, "
            f"expected {header.rows} rows of {row_bytes}"
        )

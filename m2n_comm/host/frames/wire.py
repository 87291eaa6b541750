"""The frame header in the host's memory, before every window's payload.

Owns its packing, its seal on networks, and the comparison with the header that a reader expects;
its fields are kernels.frame_header's. Knows no sockets and no memory: both sides write and read it
through a memoryview or bytes.

Stale fields (incarnations, table version, step, sequence) raise StaleFrame, because the frame was
once valid; every other difference raises FrameError.
"""

from __future__ import annotations

import struct
import zlib

import torch

from kernels.frame_header import NUM_WORDS, FrameHeader, word
from topspin.errors import ConfigError, FrameError, StaleFrame

REQUEST = 1
ANSWER = 2
MAX_PARTS = 2**20

WORD_BYTES = 8
HEADER_BYTES = NUM_WORDS * WORD_BYTES
DELIVER_WORD, COMPUTE_WORD, IDLE_WORD = map(word, ("deliver_ns", "compute_ns", "idle_ns"))
_WORDS = struct.Struct(f"<{NUM_WORDS}Q")
# The seal is the header's last words; it covers those before it.
SEAL_AT = word("seal") * WORD_BYTES
_CHECKSUM = struct.Struct("<QQ")

_PAYLOAD_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3, torch.int8: 4}
NUM_COMPARED = FrameHeader._fields.index("payload_bytes")
_STALE_FIELDS = ("incarnation", "reader_incarnation", "step", "table_version", "sequence")


def payload_code(dtype: torch.dtype) -> int:
    """Return the wire code of `dtype`; raises ConfigError if hidden rows do not support it."""
    code = _PAYLOAD_CODES.get(dtype)
    if code is None:
        known = ", ".join(str(known) for known in _PAYLOAD_CODES)
        raise ConfigError(f"payload {dtype} is not supported between nodes; use one of {known}")
    return code


def write_header(buffer: memoryview, header: FrameHeader) -> None:
    """Pack `header` into the first HEADER_BYTES of `buffer`."""
    _WORDS.pack_into(buffer, 0, *header)


def read_header(raw: bytes | bytearray | memoryview) -> FrameHeader:
    """Return the header in `raw`."""
    return FrameHeader._make(_WORDS.unpack(raw))


def answer_to(request: FrameHeader, *, payload: int) -> FrameHeader:
    """Return the header of the answer to `request`; only the compared fields are valid."""
    return request._replace(
        kind=ANSWER,
        payload=payload,
        incarnation=request.reader_incarnation,
        reader_incarnation=request.incarnation,
    )


def seal(buffer: memoryview) -> None:
    """Write the checksum of a packed header into it."""
    buffer[SEAL_AT:] = _checksum(buffer)


def check_seal(raw: bytes | bytearray) -> None:
    """Raise FrameError if a header from a network is damaged or not a header."""
    if raw[SEAL_AT:] != _checksum(memoryview(raw)):
        raise FrameError("frame header: checksum is wrong")


def _checksum(header: memoryview) -> bytes:
    return _CHECKSUM.pack(zlib.crc32(header[:SEAL_AT]), 0)


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

    Called before any of the payload is read or trusted.
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

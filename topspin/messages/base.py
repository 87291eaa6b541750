"""The parts of every control message: the root class, roles, packed integers.

Knows no message. Imported by the modules that define them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from topspin.errors import ProtocolError

PROTOCOL_VERSION = 12

Role = Literal["attention", "stage", "expert", "draft", "gateway"]
FinishReason = Literal["stop", "length", "abort"]
ProgressState = Literal["working", "waiting", "done"]


def pack_ints(values: Iterable[int]) -> bytes:
    """Return `values` as little-endian int32 bytes."""
    packed = array("i", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ints(data: bytes) -> Sequence[int]:
    """Return the int32 values in `data`; ProtocolError unless its size is a multiple of 4."""
    if len(data) % 4:
        raise ProtocolError(f"packed integers: {len(data)} bytes is not a multiple of 4")
    values = array("i")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


class Message(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    tag_field="type",
    tag=True,
    forbid_unknown_fields=True,
):
    """Root of all control messages."""

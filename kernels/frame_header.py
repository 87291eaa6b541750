"""The header of every M2N frame: one table of 64-bit fields, the same for all transports.

Owns the order of the fields. Knows no transport: in m2n_comm.host.frames, wire.py packs and
compares headers in Python, native.py in compiled code; kernels.m2n_windows gives its first fields
to kernels on GPUs, which use no others.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class FrameHeader(NamedTuple):
    """The sender's description of one frame. Each field is a 64-bit word, in this order.

    `sequence` counts the frames of one (pair, micro-batch), from 1; an answer carries the
    sequence of its request. `part` of `num_parts` counts the windows that one dispatch takes.
    `incarnation` is of the frame's writer. GPUs use only the fields up to here. `kind` and
    `payload` are codes of that wire.py. The fields from `payload_bytes` on are not compared.
    `deliver_ns` is the CLOCK_MONOTONIC time at which an emulated link delivers the frame; 0 on a
    real link. In an answer `compute_ns` is the expert node's time from having the rows to
    replying, `idle_ns` how long it had waited for them (0: the rows were there first). The seal
    is only set where a network carries the frame: a checksum of the header, or, between nodes with
    keys, the authentication code of the whole frame.
    """

    sequence: int
    rows: int
    step: int
    table_version: int
    layer: int
    part: int
    num_parts: int
    incarnation: int
    reader_incarnation: int
    kind: int
    payload: int
    attention: int
    expert: int
    micro_batch: int
    hidden_size: int
    payload_bytes: int
    deliver_ns: int = 0
    compute_ns: int = 0
    idle_ns: int = 0
    seal: int = 0
    seal_high: int = 0


NUM_WORDS: Final = len(FrameHeader._fields)


def word(name: str) -> int:
    """Return the index of a field's word."""
    return FrameHeader._fields.index(name)


NUM_DEVICE_WORDS: Final = word("incarnation") + 1
"""The number of words that kernels on GPUs write and compare."""

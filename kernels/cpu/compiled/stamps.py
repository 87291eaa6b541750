"""Stamps of the flight recorder in a recorded step.

`RecordedRing` stamps a `topspin.trace.Ring`; while its thread records, the program will stamp
at that place too. Knows no kinds of stamps.
"""

from __future__ import annotations

from ctypes import addressof, c_char
from struct import Struct

from kernels.cpu.compiled.runtime import Kernel, offsets, record
from kernels.cpu.simd import lanes as simd
from kernels.cpu.simd.system import now_ns
from kernels.cpu.simd.tasks import claim_task, finish_task, wait_for_tasks
from topspin.trace import RECORD_BYTES, Ring

WORDS, BUFFER, CAPACITY, KIND_AND_PLACE = offsets(4)
"""The arguments of `stamp`: addresses of a ring's words and buffer; a record's last 8 bytes."""


_PLACE, _SIGNED = Struct("<HHHH"), Struct("<q")


class RecordedRing:
    """A ring whose stamps are part of recordings."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._buffer = addressof(c_char.from_buffer(ring.buffer))

    @property
    def step(self) -> int:
        """The step of the next stamps."""
        return self._ring.step

    @step.setter
    def step(self, step: int) -> None:
        self._ring.step = step

    def stamp(self, kind: int, layer: int = 0, micro_batch: int = 0, peer: int = 0) -> None:
        """Record that an event of the current `step` has ended now."""
        ring = self._ring
        ring.stamp(kind, layer, micro_batch, peer)
        (place,) = _SIGNED.unpack(_PLACE.pack(kind, layer, micro_batch, peer))
        record(stamp, (ring.words.buffer_info()[0], self._buffer, ring.capacity, place))


@Kernel
def stamp(block: int) -> None:
    """Write one record; one task."""
    if claim_task(block, 0) == 0:
        words = simd.read_i64(block + WORDS)
        count = simd.read_i64(words)
        place = count % simd.read_i64(block + CAPACITY) * RECORD_BYTES
        record_at = simd.read_i64(block + BUFFER) + place
        simd.write_i64(record_at, now_ns())
        simd.write_i64(record_at + 8, simd.read_i64(words + 8))
        simd.write_i64(record_at + 16, simd.read_i64(block + KIND_AND_PLACE))
        simd.write_i64(words, count + 1)
        finish_task(block, 0)
    wait_for_tasks(block, 0, 1)

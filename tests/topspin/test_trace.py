"""The flight recorder: stamps come back in order, and only the newest stay."""

from __future__ import annotations

import struct
import time

import pytest

from topspin.errors import ProtocolError
from topspin.trace import RECORD_BYTES, Kind, Ring, read_stamps


def test_stamps_come_out_as_they_went_in() -> None:
    ring = Ring(8)
    before_ns = time.monotonic_ns()
    ring.step = 7
    ring.stamp(Kind.ARRIVED, 31, 3, 65535)
    ring.step = 2**63
    ring.stamp(Kind.STEP_ENDED)
    first, second = read_stamps(ring.dump())
    assert first[1:] == (7, Kind.ARRIVED, 31, 3, 65535)
    assert second[1:] == (2**63, Kind.STEP_ENDED, 0, 0, 0)
    assert before_ns <= first.t_ns <= second.t_ns <= time.monotonic_ns()


def test_a_full_ring_keeps_the_newest_in_order() -> None:
    cases: list[int] = [0, 1, 4, 5, 6, 23]
    for num_stamps in cases:
        ring = Ring(5)
        for number in range(num_stamps):
            ring.stamp(Kind.ATTENTION, number)
        stamps = read_stamps(ring.dump())
        assert [stamp.layer for stamp in stamps] == list(range(num_stamps))[-5:]
        assert not stamps or ring.newest_ns == stamps[-1].t_ns


def test_a_dump_begins_where_asked() -> None:
    ring = Ring(6)
    for number in range(9):
        ring.stamp(Kind.ATTENTION, number)
    times = [stamp.t_ns for stamp in read_stamps(ring.dump())]
    for idx, since_ns in enumerate(times):
        assert [s.t_ns for s in read_stamps(ring.dump(since_ns))] == times[idx:]
    assert ring.dump(times[-1] + 1) == b""


@pytest.mark.parametrize("capacity", [7, 12, 64])
def test_the_records_of_a_step_come_with_the_one_before(capacity: int) -> None:
    ring = Ring(capacity)
    # The next step begins before the one before has ended.
    steps = [1, 1, 2, 2, 3, 2, 3, 3, 4, 3, 4, 4]
    for layer, step in enumerate(steps):
        ring.step = step
        ring.stamp(Kind.ATTENTION, layer)
    for step in range(6):
        kept = list(enumerate(steps))[-capacity:]
        own = [layer for layer, number in kept if number == step]
        first = max(own[0] - 1, kept[0][0]) if own else 0
        expected = range(first, own[-1] + 1) if own else range(0)
        assert [each.layer for each in read_stamps(ring.of_step(step))] == list(expected)


def test_golden_bytes_of_a_record() -> None:
    ring = Ring(1)
    ring.step = 9
    ring.stamp(Kind.DISPATCHED, 1, 2, 3)
    data = ring.dump()
    assert len(data) == RECORD_BYTES == 24
    assert data[8:] == struct.pack("<QHHHH", 9, 4, 1, 2, 3)


def test_a_torn_record_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="25 bytes"):
        read_stamps(b"\0" * 25)

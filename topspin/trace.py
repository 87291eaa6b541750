"""The flight recorder of one node: a ring of stamps, written at near-zero cost.

Owns the kinds of stamps, the record's form and the ring. A stamp is one clock call and one pack
into memory allocated at start; a node that does not record has None for a ring and pays one test.
Knows no messages (topspin.processes.trace_node answers queries) and no analysis
(app.cli.trace.report). Written by the node's one busy thread; in a process that runs several nodes
another thread may dump it: a record counts once it is written.

A stamp marks the *end* of an event: the time since the node's previous stamp belongs to it. So a
node's timeline has no holes, and waits end in ARRIVED, GATHERED or PLAN_RECEIVED.
"""

from __future__ import annotations

import enum
import struct
from array import array
from bisect import bisect_left, bisect_right
from time import monotonic_ns
from typing import NamedTuple, Protocol

from topspin.errors import ProtocolError

_RECORD = struct.Struct("<QQHHHH")
_PACK = _RECORD.pack_into
RECORD_BYTES = _RECORD.size
DEFAULT_CAPACITY = 2**17


class Kind(enum.IntEnum):
    """The kind of event that has just ended. `peer` is an attention node for experts and scheduler,
    an expert node for attention nodes. Layers of ATTENTION, LOCAL and the parts of ATTENTION with
    selected keys count decoder layers, all others MoE layers. Such a layer has ATTENTION twice:
    before its search, and at its end."""

    PLAN_RECEIVED = 1  # attention: the wait for the next plan
    STEP_BEGAN = 2  # attention: the plan was turned into inputs; expert: the ticket was read
    ATTENTION = 3  # attention: norms, attention half and router of one layer
    DISPATCHED = 4  # attention: rows are on their way to every expert node
    LOCAL = 5  # attention: shared expert or dense layer
    ARRIVED = 6  # attention: the wait for the answer of expert `peer`
    COMBINED = 7  # attention: partials were added
    RALLIED = 8  # attention: all layers of all micro-batches are done
    STEP_ENDED = 9  # attention: tokens are sampled, the result is ready
    GATHERED = 10  # expert: the wait for the frame of attention node `peer`
    JOINED = 11  # expert: headers are checked, rows joined
    COMPUTED = 12  # expert: the grouped MLP
    REPLIED = 13  # expert: answers are on their way
    PLAN_SENT = 14  # scheduler: the plan of `peer` was sent
    RESULT_RECEIVED = 15  # scheduler: the result of `peer` has come
    VERDICTS_RECEIVED = 16  # draft: the wait for verdicts
    DRAFTED = 17  # draft: a pass of the draft model
    OFFERED = 18  # draft: an attention node's verdicts were taken in and answered
    FETCHED = 19  # attention: keys that the step attends to whole are in memory
    CODED = 20  # attention: keys that are committed are coded
    SEARCHED = 21  # attention: a layer's queries have selected keys by their codes
    READ = 22  # attention: those of them that were in a file are read
    ATTENDED = 23  # attention: queries have attended to the selected keys
    EXPERTS = 24  # attention: routed experts of a layer that is local


WHOLE_STEPS = frozenset(
    {
        Kind.FETCHED,
        Kind.STEP_BEGAN,
        Kind.RALLIED,
        Kind.CODED,
        Kind.STEP_ENDED,
        Kind.DRAFTED,
        Kind.OFFERED,
    }
)
"""Events of a step, which are of no layer and no micro-batch."""
WAITS = frozenset({Kind.PLAN_RECEIVED, Kind.ARRIVED, Kind.GATHERED, Kind.VERDICTS_RECEIVED})


class Stamp(NamedTuple):
    """One record. `t_ns` is CLOCK_MONOTONIC of the node's host."""

    t_ns: int
    step: int
    kind: int
    layer: int
    micro_batch: int
    peer: int


class Stamps(Protocol):
    """Something that takes stamps: a Ring, or what records stamps into a program."""

    step: int

    def stamp(self, kind: int, layer: int = 0, micro_batch: int = 0, peer: int = 0) -> None:
        """Record that an event of the current `step` has ended now."""


class NoStamps:
    """Takes stamps and records nothing: a node's trace where none is wanted."""

    step = 0

    def stamp(self, kind: int, layer: int = 0, micro_batch: int = 0, peer: int = 0) -> None:
        """Do nothing."""


class Ring:
    """The last `capacity` stamps. Invariant: times ascend from the oldest to the newest.

    `words` are the number of stamps so far and the current step: compiled code stamps too.
    """

    __slots__ = ("buffer", "capacity", "words")

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        assert capacity > 0
        self.capacity = capacity
        self.buffer = bytearray(capacity * RECORD_BYTES)
        self.words = array("Q", (0, 0))

    @property
    def step(self) -> int:
        """The step of the next stamps."""
        return self.words[1]

    @step.setter
    def step(self, step: int) -> None:
        self.words[1] = step

    def stamp(self, kind: int, layer: int = 0, micro_batch: int = 0, peer: int = 0) -> None:
        """Record that an event of the current `step` has ended now."""
        count, step = self.words
        at = count % self.capacity * RECORD_BYTES
        _PACK(self.buffer, at, monotonic_ns(), step, kind, layer, micro_batch, peer)
        self.words[0] = count + 1

    @property
    def newest_ns(self) -> int:
        """Return the time of the last stamp; there must be one."""
        return self._field(self.words[0] - 1, 0)

    def dump(self, since_ns: int = 0) -> bytes:
        """Return the records from `since_ns` on, oldest first."""
        numbers = self._numbers()
        first = bisect_left(numbers, since_ns, key=lambda number: self._field(number, 0))
        return self._copy(numbers[first:])

    def of_step(self, step: int) -> bytes:
        """Return the records from the first to the last of `step`, with the one before the first.

        A node may begin a step before it ends the one before.
        """
        numbers = self._numbers()

        def step_of(number: int) -> int:
            return self._field(number, 8)

        near = numbers[bisect_left(numbers, step - 2, key=step_of) :]
        near = near[: bisect_right(near, step + 2, key=step_of)]
        own = [number for number in near if step_of(number) == step]
        return self._copy(range(max(numbers.start, own[0] - 1), own[-1] + 1)) if own else b""

    def _numbers(self) -> range:
        """Return the numbers of the records that are there, from the oldest on."""
        count = self.words[0]
        return range(max(0, count - self.capacity), count)

    def _field(self, number: int, at: int) -> int:
        begin = number % self.capacity * RECORD_BYTES + at
        return int.from_bytes(self.buffer[begin : begin + 8], "little")

    def _copy(self, numbers: range) -> bytes:
        if not numbers:
            return b""
        begin = numbers.start % self.capacity * RECORD_BYTES
        end = begin + len(numbers) * RECORD_BYTES
        return bytes(self.buffer[begin:end]) + bytes(self.buffer[: max(0, end - len(self.buffer))])


def read_stamps(records: bytes) -> list[Stamp]:
    """Return the stamps of a dump(); raises ProtocolError for a torn record."""
    if len(records) % RECORD_BYTES:
        raise ProtocolError(f"trace: {len(records)} bytes is not a multiple of {RECORD_BYTES}")
    return [Stamp._make(fields) for fields in _RECORD.iter_unpack(records)]

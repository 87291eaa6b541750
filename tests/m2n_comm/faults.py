"""Injects faults at the frame boundary of any transport, for tests.

Owns a script of faults by frame number and the wrapper that applies them to the frames that a node
sends. Knows no transport. Each fault must end in a correct result or a typed error, never in a
wrong sum.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from m2n_comm.host.attention_side import AttentionSide
from m2n_comm.host.expert_side import ExpertSide
from m2n_comm.host.frames.records import FramePort
from m2n_comm.host.frames.windows import FrameWindow
from m2n_comm.host.frames.wire import read_header, write_header
from m2n_comm.host.lines import PairLines
from m2n_comm.waits import Hop
from topspin.messages import StepTicket


@dataclass(frozen=True, slots=True)
class Drop:
    """The frame is never sent."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The frame is sent twice."""


@dataclass(frozen=True, slots=True)
class Reorder:
    """The frame is sent after the next one of this node."""


@dataclass(frozen=True, slots=True)
class Delay:
    """The frame is delivered `delay_s` late, without holding up the sender."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class Change:
    """Header field `field` becomes `value`."""

    field: str
    value: int


@dataclass(frozen=True, slots=True)
class Damage:
    """Bit 0 of byte `offset` of the header flips before a network's checksum is made."""

    offset: int


Fault = Drop | Duplicate | Reorder | Delay | Change | Damage


class FaultInjector:
    """The faults of the frames 0, 1, 2... that a node sends; other frames pass unchanged."""

    def __init__(self, faults: dict[int, Fault]) -> None:
        self._faults = dict(faults)
        self._num_frames = 0

    @property
    def remaining(self) -> int:
        """Return the number of faults still to come."""
        return len(self._faults)

    def next_fault(self) -> Fault | None:
        """Return the fault of the next frame, if any."""
        fault = self._faults.pop(self._num_frames, None)
        self._num_frames += 1
        return fault

    def attach(self, net: AttentionSide | ExpertSide) -> None:
        """Inject into every frame that `net` sends from now on."""
        net.use(FaultyLines(net.lines, self))


class FaultyLines:
    """Lines whose send() applies the injector's script; other calls are passed on."""

    def __init__(self, inner: PairLines, injector: FaultInjector) -> None:
        self._inner = inner
        self._injector = injector
        self._held: list[tuple[Hop, int, int]] = []

    @property
    def registered_bytes(self) -> int:
        """Return the inner lines' bytes."""
        return self._inner.registered_bytes

    def outbox(self, peer: int, micro_batch: int) -> FrameWindow:
        """Return the inner window."""
        return self._inner.outbox(peer, micro_batch)

    def inbox(self, peer: int, micro_batch: int) -> FrameWindow:
        """Return the inner window."""
        return self._inner.inbox(peer, micro_batch)

    def begin(self, ticket: StepTicket) -> None:
        """Pass the ticket on."""
        self._inner.begin(ticket)

    def send(self, hop: Hop, rows: int, sequence: int) -> None:
        """Send the frame with its scripted fault."""
        fault = self._injector.next_fault()
        held, self._held = self._held, []
        header = self._inner.outbox(hop.peer, hop.micro_batch).header
        match fault:
            case Drop():
                pass
            case Reorder():
                self._held = [(hop, rows, sequence)]
            case Delay(delay_s):
                deliver_ns = time.monotonic_ns() + round(delay_s * 1e9)
                frame = read_header(bytes(header))
                write_header(header, frame._replace(deliver_ns=deliver_ns))
                self._inner.send(hop, rows, sequence)
            case Change(field, value):
                frame = read_header(bytes(header))
                write_header(header, frame._replace(**{field: value}))
                self._inner.send(hop, rows, sequence)
            case Damage(offset):
                header[offset] ^= 1
                self._inner.send(hop, rows, sequence)
            case _:
                self._inner.send(hop, rows, sequence)
        if isinstance(fault, Duplicate):
            self._inner.send(hop, rows, sequence)
        for frame_held in held:
            self._inner.send(*frame_held)

    def receive(self, hop: Hop, awaited: tuple[int, ...]) -> bytes:
        """Receive from the inner lines."""
        return self._inner.receive(hop, awaited)

    def arrived(self, peer: int, micro_batch: int) -> bool:
        """Ask the inner lines."""
        return self._inner.arrived(peer, micro_batch)

    def port(self, peer: int, micro_batch: int) -> FramePort:
        """Return an empty port: every frame must pass send()."""
        return FramePort()

    def close(self) -> None:
        """Close the inner lines; a frame held back is never sent."""
        self._held = []
        self._inner.close()

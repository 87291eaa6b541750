"""tcp between nodes with keys: whatever somebody between them does to frames is noticed."""

from __future__ import annotations

import contextlib
import socket
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m2n_comm.host.frames.windows import PairLayout
from m2n_comm.host.frames.wire import HEADER_BYTES, SEAL_AT, read_header, seal, write_header
from m2n_comm.host.tcp import TcpLines, TcpPair
from m2n_comm.net import NetShape
from m2n_comm.pairing.session import Session
from m2n_comm.waits import Waits
from tests.m2n_comm.harness import make_shape
from tests.m2n_comm.host.test_tcp import connected, fill, hop
from tests.m2n_comm.pairing.test_session import agreed
from topspin.errors import DeadlineExceeded, FrameError, PeerLost, StaleFrame

ROWS = 3
REFUSED = (FrameError, StaleFrame, PeerLost, DeadlineExceeded)


def lines_of(shape: NetShape, role: str, sock: socket.socket, session: Session | None) -> TcpLines:
    return TcpLines(
        PairLayout(shape),
        "attention" if role == "attention" else "expert",
        pairs={0: TcpPair(sock, session)},
        waits=Waits(timeout_s=10.0),
    )


@dataclass
class Between:
    """An attention node, an expert node, and somebody between them who passes on what is sent."""

    sender: TcpLines
    taken: socket.socket
    passed_on: socket.socket
    reader: TcpLines
    shape: NetShape

    def frame(self, *, mb: int = 0, sequence: int = 1, rows: int = ROWS) -> bytes:
        """Let the attention node send a frame, and return it."""
        fill(self.sender, self.shape, rows, mb=mb, sequence=sequence)
        self.sender.send(hop(0, mb), rows, sequence)
        size = HEADER_BYTES + rows * PairLayout(self.shape).request_row_bytes
        return self.taken.recv(size, socket.MSG_WAITALL)

    def receive(self, data: bytes, mb: int = 0, *, timeout_s: float = 10.0) -> bytes:
        """Pass `data` on and let the expert node wait for a frame."""
        self.passed_on.sendall(data)
        return self.reader.receive(hop(0, mb, timeout_s=timeout_s), (0,))


@contextlib.contextmanager
def between(*, keyed: bool = True) -> Iterator[Between]:
    shape = make_shape()
    ours, theirs = agreed() if keyed else (None, None)
    with connected() as (left, taken), connected() as (passed_on, right):
        sender = lines_of(shape, "attention", left, ours)
        reader = lines_of(shape, "expert", right, theirs)
        yield Between(sender, taken, passed_on, reader, shape)


def test_frames_with_their_codes_are_received_both_ways() -> None:
    with between() as wire:
        for sequence in (1, 2, 3):
            frame = wire.frame(sequence=sequence)
            assert read_header(wire.receive(frame)).sequence == sequence
            window = wire.reader.inbox(0, 0)
            assert torch.equal(window.hidden[:ROWS], wire.sender.outbox(0, 0).hidden[:ROWS])
            answer = wire.reader.outbox(0, 0)
            answer.hidden[:ROWS] = window.hidden[:ROWS] * 2
            header = read_header(frame[:HEADER_BYTES])
            size = ROWS * PairLayout(wire.shape).answer_row_bytes
            write_header(answer.header, header._replace(payload_bytes=size))
            wire.reader.send(hop(), ROWS, sequence)
            wire.taken.sendall(wire.passed_on.recv(HEADER_BYTES + size, socket.MSG_WAITALL))
            assert read_header(wire.sender.receive(hop(), (0,))).sequence == sequence
            assert torch.equal(wire.sender.inbox(0, 0).hidden[:ROWS], answer.hidden[:ROWS])


def test_every_flipped_bit_of_a_frame_is_noticed() -> None:
    """Of its header, its code, and every field of its payload."""
    with between() as wire:
        size = len(wire.frame())
    places = [
        *range(0, HEADER_BYTES, 3),
        *range(SEAL_AT, HEADER_BYTES),
        *range(HEADER_BYTES, size, 37),
    ]
    for place in [*places, size - 1]:
        with between() as wire:
            frame = bytearray(wire.frame())
            frame[place] ^= 1 << place % 8
            with pytest.raises(REFUSED):
                wire.receive(frame, timeout_s=0.05)
            assert not wire.reader.arrived(0, 0)


def resealed(frame: bytes, **changes: int) -> bytes:
    """Return `frame` with other header fields, and a checksum as between nodes without keys."""
    changed = bytearray(frame)
    view = memoryview(changed)[:HEADER_BYTES]
    write_header(view, read_header(view)._replace(**changes))
    seal(view)
    return bytes(changed)


CODE_IS_WRONG = "layer 5, micro-batch 0: its authentication code is wrong"


@pytest.mark.parametrize(
    ("forge", "error", "message"),
    [
        (lambda wire: resealed(wire.frame()), FrameError, CODE_IS_WRONG),
        (lambda wire: wire.frame()[:SEAL_AT] + bytes(16) + bytes(400), FrameError, CODE_IS_WRONG),
        (lambda wire: resealed(wire.frame(), rows=9), FrameError, "9 rows, a window has 8"),
        (lambda wire: [wire.frame(), wire.frame(mb=1)][1], FrameError, "code is wrong"),
        (lambda wire: wire.frame(mb=1) + wire.frame(mb=1), StaleFrame, "sequence is 1, expected 2"),
    ],
    ids=["without a code", "zero", "size", "dropped", "replayed"],
)
def test_a_forged_frame_is_refused(
    forge: Callable[[Between], bytes], error: type[Exception], message: str
) -> None:
    with between() as wire, pytest.raises(error, match=message):
        wire.receive(forge(wire))


def test_frames_out_of_order_are_refused_though_each_is_genuine() -> None:
    """Frames of different micro-batches have sequences of their own, and one order of codes."""
    with between() as wire:
        first, second = wire.frame(mb=0), wire.frame(mb=1)
        with pytest.raises(FrameError, match="micro-batch 1: its authentication code is wrong"):
            wire.receive(second + first)


def test_a_frame_that_is_cut_off_is_never_received() -> None:
    with between() as wire:
        frame = wire.frame()
        with pytest.raises(DeadlineExceeded):
            wire.receive(frame[:-1], timeout_s=0.05)
        wire.passed_on.close()
        with pytest.raises(PeerLost):
            wire.reader.receive(hop(), (0,))


def test_a_frame_of_another_connection_is_refused() -> None:
    with between() as one, between() as other, pytest.raises(FrameError, match="code is wrong"):
        other.receive(one.frame())


@pytest.mark.parametrize("keyed", [True, False])
def test_rows_in_use_are_not_overwritten_by_a_frame_that_never_ends(keyed: bool) -> None:
    """The code is checked at a frame's end; until then its rows may only go where none are."""
    with between(keyed=keyed) as wire:
        wire.receive(wire.frame())
        rows = wire.reader.inbox(0, 0).hidden[:ROWS].clone()
        forged = resealed(wire.frame(sequence=2), sequence=2)
        with pytest.raises(StaleFrame, match="none before the last one is answered"):
            wire.receive(forged[:-1], mb=1)
        assert torch.equal(wire.reader.inbox(0, 0).hidden[:ROWS], rows)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=2000), keyed=st.booleans())
def test_random_bytes_are_refused(data: bytes, keyed: bool) -> None:
    with between(keyed=keyed) as wire:
        wire.passed_on.sendall(data)
        wire.passed_on.close()
        with pytest.raises(REFUSED):
            wire.reader.receive(hop(), (0,))


@settings(max_examples=60, deadline=None)
@given(
    fields=st.dictionaries(
        st.sampled_from(["rows", "payload_bytes", "micro_batch", "sequence", "part", "num_parts"]),
        st.sampled_from([0, 1, 2, 3, 7, 8, 9, 2**31, 2**32 - 1, 2**63, 2**64 - 1]),
        min_size=1,
    ),
    keyed=st.booleans(),
)
def test_random_headers_take_no_more_memory_than_a_window(
    fields: dict[str, int], keyed: bool
) -> None:
    with between(keyed=keyed) as wire:
        frame = wire.frame()
        changed = resealed(frame, **fields)
        wire.passed_on.sendall(changed)
        wire.passed_on.close()
        tracemalloc.start()
        try:
            wire.reader.receive(hop(), (0,))
        except REFUSED:
            pass
        else:
            assert not keyed  # what changed nothing that is checked here
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 200_000

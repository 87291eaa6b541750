"""Lines over tcp without a handshake, and somebody between two of them who passes frames on."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.frame_header import FrameHeader
from m2n_comm.host.frames.windows import FrameWindow, PairLayout
from m2n_comm.host.frames.wire import HEADER_BYTES, REQUEST, read_header, seal, write_header
from m2n_comm.host.tcp import TcpLines, TcpPair
from m2n_comm.net import NetShape
from m2n_comm.pairing.addresses import tune_socket
from m2n_comm.pairing.hello import NodeRole
from m2n_comm.pairing.session import Session
from m2n_comm.waits import Hop, Waits
from tests.m2n_comm.harness import make_shape
from tests.m2n_comm.pairing.test_session import agreed

ROWS = 3


@contextlib.contextmanager
def connected(buffer_bytes: int = 2**20) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of one loopback connection."""
    with socket.socket() as listener, socket.socket() as left:
        tune_socket(listener, buffer_bytes)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        tune_socket(left, buffer_bytes)
        left.connect(listener.getsockname())
        right, _ = listener.accept()
        with right:
            tune_socket(right, buffer_bytes)
            yield left, right


def lines_of(
    shape: NetShape, role: NodeRole, *socks: socket.socket, session: Session | None = None
) -> TcpLines:
    pairs = {peer: TcpPair(sock, session) for peer, sock in enumerate(socks)}
    return TcpLines(PairLayout(shape), role, pairs=pairs, waits=Waits(timeout_s=10.0))


def hop(peer: int = 0, micro_batch: int = 0, *, timeout_s: float = 10.0) -> Hop:
    return Hop(peer, micro_batch, 5, time.monotonic() + timeout_s)


def fill(
    lines: TcpLines, shape: NetShape, rows: int, *, mb: int = 0, sequence: int = 1
) -> FrameWindow:
    """Write a frame of `rows` rows into the outbox."""
    window = lines.outbox(0, mb)
    generator = torch.Generator().manual_seed(mb + sequence)
    layout, row_bytes = PairLayout(shape), PairLayout(shape).answer_row_bytes
    window.hidden[:rows].normal_(generator=generator)
    if window.slots is not None and window.weights is not None:
        window.slots[:rows].random_(0, 5, generator=generator)
        window.weights[:rows].uniform_(generator=generator)
        row_bytes = layout.request_row_bytes
    header = FrameHeader(
        sequence=sequence,
        rows=rows,
        step=9,
        table_version=1,
        layer=5,
        part=0,
        num_parts=1,
        incarnation=2,
        reader_incarnation=3,
        kind=REQUEST,
        payload=1,
        attention=0,
        expert=0,
        micro_batch=mb,
        hidden_size=shape.hidden_size,
        payload_bytes=rows * row_bytes,
    )
    write_header(window.header, header)
    return window


def resealed(frame: bytes, **changes: int) -> bytes:
    """Return `frame` with other header fields, and a checksum as between nodes without keys."""
    changed = bytearray(frame)
    view = memoryview(changed)[:HEADER_BYTES]
    write_header(view, read_header(view)._replace(**changes))
    seal(view)
    return bytes(changed)


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

    def receive(self, data: bytes, mb: int = 0, *, timeout_s: float = 10.0) -> FrameHeader:
        """Pass `data` on and let the expert node wait for a frame."""
        self.passed_on.sendall(data)
        return read_header(self.reader.receive(hop(0, mb, timeout_s=timeout_s), (0,)))

    def check_rows(self, rows: int = ROWS, mb: int = 0) -> None:
        """Compare the rows that were sent last with those that came."""
        sent, got = self.sender.outbox(0, mb), self.reader.inbox(0, mb)
        assert list(map(bytes, got.payload(rows))) == list(map(bytes, sent.payload(rows)))


@contextlib.contextmanager
def between(*, keyed: bool = False, shape: NetShape | None = None) -> Iterator[Between]:
    shape = shape or make_shape()
    ours, theirs = agreed() if keyed else (None, None)
    with connected() as (left, taken), connected() as (passed_on, right):
        sender = lines_of(shape, "attention", left, session=ours)
        reader = lines_of(shape, "expert", right, session=theirs)
        yield Between(sender, taken, passed_on, reader, shape)

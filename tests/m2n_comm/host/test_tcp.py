"""Features of tcp alone: partial frames, full kernel buffers."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from kernels.frame_header import FrameHeader
from m2n_comm.host.frames.windows import PairLayout, Window
from m2n_comm.host.frames.wire import HEADER_BYTES, REQUEST, read_header, seal, write_header
from m2n_comm.host.lines import bytes_of
from m2n_comm.host.tcp import TcpLines, TcpPair
from m2n_comm.net import NetShape
from m2n_comm.pairing.addresses import tune_socket
from m2n_comm.waits import Hop, Waits
from tests.m2n_comm.harness import make_shape
from topspin.errors import DeadlineExceeded, FrameError, PeerLost, StaleFrame


@contextlib.contextmanager
def connected(buffer_bytes: int = 2**20) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of one loopback connection."""
    with socket.socket() as listener:
        tune_socket(listener, buffer_bytes)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        with socket.socket() as left:
            tune_socket(left, buffer_bytes)
            left.connect(listener.getsockname())
            right, _ = listener.accept()
            with right:
                tune_socket(right, buffer_bytes)
                yield left, right


def lines_of(shape: NetShape, role: str, *socks: socket.socket) -> TcpLines:
    return TcpLines(
        PairLayout(shape),
        "attention" if role == "attention" else "expert",
        pairs={peer: TcpPair(sock) for peer, sock in enumerate(socks)},
        waits=Waits(timeout_s=10.0),
    )


def request_header(rows: int, row_bytes: int, **changes: int) -> FrameHeader:
    """Return the header of a request of `rows` rows."""
    header = FrameHeader(
        sequence=1,
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
        micro_batch=0,
        hidden_size=24,
        payload_bytes=rows * row_bytes,
    )
    return header._replace(**changes)


def hop(peer: int = 0, micro_batch: int = 0, *, timeout_s: float = 10.0) -> Hop:
    return Hop(peer, micro_batch, 5, time.monotonic() + timeout_s)


def fill(lines: TcpLines, shape: NetShape, rows: int, *, mb: int = 0, sequence: int = 1) -> Window:
    """Write a request of `rows` rows into the outbox."""
    window = lines.outbox(0, mb)
    assert window.slots is not None
    assert window.weights is not None
    generator = torch.Generator().manual_seed(mb + sequence)
    window.hidden[:rows].normal_(generator=generator)
    window.slots[:rows].random_(0, 5, generator=generator)
    window.weights[:rows].uniform_(generator=generator)
    row_bytes = (
        PairLayout(shape).request_row_bytes
        if len(window.fields) == 3
        else PairLayout(shape).answer_row_bytes
    )
    write_header(window.header, request_header(rows, row_bytes, micro_batch=mb, sequence=sequence))
    return window


def wire_bytes(shape: NetShape, rows: int, *, mb: int = 0, sequence: int = 1) -> bytes:
    """Return the bytes that an attention node sends for one request."""
    with connected() as (left, right):
        lines = lines_of(shape, "attention", left)
        fill(lines, shape, rows, mb=mb, sequence=sequence)
        lines.send(hop(0, mb), rows, sequence)
        data = b""
        size = HEADER_BYTES + rows * PairLayout(shape).request_row_bytes
        while len(data) < size:
            data += right.recv(size - len(data))
        lines.close()
    return data


def test_a_frame_arrives_whatever_pieces_it_comes_in() -> None:
    shape = make_shape(hidden_size=3, top_k=1)
    data = wire_bytes(shape, 2)
    with connected() as (left, right):
        reader = lines_of(shape, "expert", right)
        sender = lines_of(shape, "attention", left)
        want = fill(sender, shape, 2)
        for position in range(len(data) - 1):
            left.sendall(data[position : position + 1])
            with pytest.raises(DeadlineExceeded):
                reader.receive(hop(timeout_s=0.0), (0,))
        left.sendall(data[-1:])
        header = read_header(reader.receive(hop(), (0,)))
        got = reader.inbox(0, 0)
        assert header.rows == 2
        assert torch.equal(got.hidden[:2], want.hidden[:2])
        assert got.slots is not None
        assert got.weights is not None
        assert want.slots is not None
        assert want.weights is not None
        assert torch.equal(got.slots[:2], want.slots[:2])
        assert torch.equal(got.weights[:2], want.weights[:2])


def test_frames_of_other_micro_batches_go_to_their_own_windows() -> None:
    shape = make_shape()
    with connected() as (left, right):
        sender, reader = lines_of(shape, "attention", left), lines_of(shape, "expert", right)
        windows = {}
        for mb in (2, 0, 3):
            windows[mb] = fill(sender, shape, 4 + mb, mb=mb)
            sender.send(hop(0, mb), 4 + mb, 1)
        for mb in (3, 0, 2):
            assert read_header(reader.receive(hop(0, mb), (0,))).micro_batch == mb
            rows = 4 + mb
            assert torch.equal(reader.inbox(0, mb).hidden[:rows], windows[mb].hidden[:rows])
        assert not reader.arrived(0, 1)


def test_a_damaged_header_is_a_frame_error() -> None:
    shape = make_shape()
    data = wire_bytes(shape, 3)
    for offset in range(0, HEADER_BYTES, 7):
        damaged = bytearray(data)
        damaged[offset] ^= 1
        with connected() as (left, right):
            reader = lines_of(shape, "expert", right)
            left.sendall(damaged)
            with pytest.raises(FrameError, match="frame header: checksum is wrong"):
                reader.receive(hop(), (0,))


def rewritten(data: bytes, **changes: int) -> bytes:
    """Return `data` with other header fields and a correct header checksum."""
    buffer = bytearray(data)
    header = read_header(bytes(buffer[:HEADER_BYTES]))
    view = memoryview(buffer)[:HEADER_BYTES]
    write_header(view, header._replace(**changes))
    seal(view)
    return bytes(buffer)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows": 9, "payload_bytes": 9 * 120}, FrameError, "9 rows, a window has 8"),
        ({"rows": 2**32 - 1, "payload_bytes": 2**63}, FrameError, "a window has 8"),
        ({"payload_bytes": 2**63}, FrameError, "payload_bytes is"),
        ({"micro_batch": 4}, FrameError, "micro_batch is 4"),
        ({"sequence": 2}, StaleFrame, "sequence is 2, expected 1"),
        ({"sequence": 0}, StaleFrame, "sequence is 0, expected 1"),
    ],
)
def test_a_header_is_judged_before_its_payload_is_read(
    changes: dict[str, int], error: type[Exception], message: str
) -> None:
    shape = make_shape()
    data = rewritten(wire_bytes(shape, 3), **changes)
    with connected() as (left, right):
        reader = lines_of(shape, "expert", right)
        left.sendall(data[:HEADER_BYTES])
        with pytest.raises(error, match=message):
            reader.receive(hop(), (0,))


def test_rows_are_sent_from_where_they_are() -> None:
    """The bytes on the wire are those of rows that were first written into the window."""
    shape = make_shape()
    want = wire_bytes(shape, 5)
    with connected() as (left, right):
        sender = lines_of(shape, "attention", left)
        window = fill(sender, shape, 5)
        rows = window.hidden[:5].clone()
        window.hidden.fill_(float("nan"))
        data, size = bytes_of(rows), rows.nbytes // 5
        sender.send_from(hop(), 5, 1, [data[: 2 * size], data[2 * size :]])
        rows.zero_()
        assert right.recv(len(want), socket.MSG_WAITALL) == want


def test_a_second_frame_before_the_first_was_consumed_is_stale() -> None:
    shape = make_shape()
    with connected() as (left, right):
        reader = lines_of(shape, "expert", right)
        first = wire_bytes(shape, 3, mb=1, sequence=1)
        left.sendall(first + rewritten(first, sequence=2))
        with pytest.raises(StaleFrame, match="none before the last one is answered"):
            reader.receive(hop(0, 0), (0,))


def test_a_connection_that_ends_within_a_frame_is_lost() -> None:
    shape = make_shape()
    data = wire_bytes(shape, 3)
    for size in (0, 10, HEADER_BYTES, HEADER_BYTES + 7):
        with connected() as (left, right):
            reader = lines_of(shape, "expert", right)
            left.sendall(data[:size])
            left.close()
            with pytest.raises(PeerLost, match=r"attention 0 closed .*layer 5, micro-batch 0"):
                reader.receive(hop(), (0,))


def test_what_was_sent_before_the_end_is_received() -> None:
    shape = make_shape()
    data = wire_bytes(shape, 3)
    with connected() as (left, right):
        reader = lines_of(shape, "expert", right)
        left.sendall(data)
        left.close()
        assert read_header(reader.receive(hop(), (0,))).rows == 3
        with pytest.raises(PeerLost):
            reader.receive(hop(), (0,))


def test_another_awaited_peer_that_ends_is_lost_at_once() -> None:
    shape = make_shape()
    with connected() as (left_0, right_0), connected() as (left_1, right_1):
        reader = lines_of(shape, "expert", right_0, right_1)
        left_1.close()
        with pytest.raises(PeerLost, match="attention 1"):
            reader.receive(hop(0), (0, 1))
        with pytest.raises(DeadlineExceeded, match="attention 0"):
            reader.receive(hop(0, timeout_s=0.05), (0,))
        del left_0


def test_two_ends_that_send_large_frames_to_each_other_both_come_through() -> None:
    """Each frame is many times the kernel's buffers, and both send before they receive."""
    shape = make_shape(hidden_size=1024, window_rows=512, num_micro_batches=1)
    with connected(buffer_bytes=4096) as (left, right):
        ends = {
            "attention": lines_of(shape, "attention", left),
            "expert": lines_of(shape, "expert", right),
        }
        rows = shape.window_rows
        sent = {}
        for name, lines in ends.items():
            window = lines.outbox(0, 0)
            window.hidden.normal_()
            layout = PairLayout(shape)
            row_bytes = layout.request_row_bytes if name == "attention" else layout.answer_row_bytes
            write_header(window.header, request_header(rows, row_bytes))
            sent[name] = window.hidden
        failures: list[BaseException] = []
        both_in_send = threading.Barrier(2, timeout=10)

        def exchange(lines: TcpLines) -> None:
            try:
                both_in_send.wait()
                lines.send(hop(timeout_s=15.0), rows, 1)
                lines.receive(hop(timeout_s=15.0), (0,))
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=exchange, args=(lines,), daemon=True) for lines in ends.values()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert failures == []
        assert torch.equal(ends["expert"].inbox(0, 0).hidden, sent["attention"])
        assert torch.equal(ends["attention"].inbox(0, 0).hidden, sent["expert"])


def test_a_peer_that_never_reads_is_a_deadline_and_one_that_ends_is_lost() -> None:
    shape = make_shape(hidden_size=1024, window_rows=2048, num_micro_batches=1)
    rows = shape.window_rows
    for ends in (False, True):
        with connected(buffer_bytes=4096) as (left, right):
            lines = lines_of(shape, "attention", left)
            fill(lines, shape, rows)
            if ends:
                threading.Timer(0.05, right.shutdown, (socket.SHUT_RDWR,)).start()
                with pytest.raises(PeerLost, match="expert 0"):
                    lines.send(hop(), rows, 1)
            else:
                with pytest.raises(DeadlineExceeded, match="could not send to expert 0"):
                    lines.send(hop(timeout_s=0.1), rows, 1)


@pytest.mark.parametrize("num_peers", [1, 2])
def test_rows_read_ahead_land_where_they_belong(num_peers: int) -> None:
    """With changing sizes and order of frames, reading ahead guesses right, wrong, and too far."""
    shape = make_shape()
    draw = random.Random(num_peers)
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(connected()) for _ in range(num_peers)]
        senders = [lines_of(shape, "attention", left) for left, _ in ends]
        reader = lines_of(shape, "expert", *[right for _, right in ends])
        counts: Counter[tuple[int, int]] = Counter()
        for _ in range(60):
            sent = {}
            for peer, sender in enumerate(senders):
                for mb in draw.sample(range(4), draw.randint(1, 4)):
                    rows = draw.choice([0, 3, 3, 3, 8])
                    counts[peer, mb] += 1
                    sequence = counts[peer, mb]
                    sent[peer, mb] = rows, fill(sender, shape, rows, mb=mb, sequence=sequence)
                    sender.send(hop(0, mb), rows, sequence)
            for peer, mb in draw.sample(sorted(sent), len(sent)):
                rows, window = sent[peer, mb]
                assert read_header(reader.receive(hop(peer, mb), (peer,))).rows == rows
                got = reader.inbox(peer, mb)
                for ours, theirs in zip(window.payload(rows), got.payload(rows), strict=True):
                    assert ours == theirs
                reader.send(hop(peer, mb), 0, counts[peer, mb])  # else the window stays in use

"""Features of tcp alone: partial frames, full kernel buffers, rows read ahead."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from m2n_comm.host.frames.wire import HEADER_BYTES, read_header
from m2n_comm.host.lines import bytes_of
from m2n_comm.host.tcp import TcpLines
from tests.m2n_comm.harness import make_shape
from tests.m2n_comm.host.wires import between, connected, fill, hop, lines_of, resealed
from topspin.errors import DeadlineExceeded, FrameError, PeerLost, StaleFrame


def test_a_frame_arrives_whatever_pieces_it_comes_in() -> None:
    with between(shape=make_shape(hidden_size=3, top_k=1)) as wire:
        data = wire.frame(rows=2)
        for position in range(len(data) - 1):
            with pytest.raises(DeadlineExceeded):
                wire.receive(data[position : position + 1], timeout_s=0.0)
        assert wire.receive(data[-1:]).rows == 2
        wire.check_rows(2)


def test_frames_of_other_micro_batches_go_to_their_own_windows() -> None:
    with between() as wire:
        for mb in (2, 0, 3):
            wire.passed_on.sendall(wire.frame(mb=mb, rows=4 + mb))
        for mb in (3, 0, 2):
            assert wire.receive(b"", mb).micro_batch == mb
            wire.check_rows(4 + mb, mb)
        assert not wire.reader.arrived(0, 1)


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
    with between() as wire, pytest.raises(error, match=message):
        wire.receive(resealed(wire.frame(), **changes)[:HEADER_BYTES])


def test_a_second_frame_before_the_first_was_consumed_is_stale() -> None:
    with between() as wire:
        first = wire.frame(mb=1)
        with pytest.raises(StaleFrame, match="none before the last one is answered"):
            wire.receive(first + resealed(first, sequence=2))


def test_rows_are_sent_from_where_they_are() -> None:
    """The bytes on the wire are those of rows that were first written into the window."""
    with between() as wire:
        want = wire.frame(rows=5)
        window = wire.sender.outbox(0, 0)
        rows = window.hidden[:5].clone()
        window.hidden.fill_(float("nan"))
        data, size = bytes_of(rows), rows.nbytes // 5
        wire.sender.send_from(hop(), 5, 1, [data[: 2 * size], data[2 * size :]])
        rows.zero_()
        assert wire.taken.recv(len(want), socket.MSG_WAITALL) == want


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, HEADER_BYTES + 7, None])
def test_a_connection_that_ends_is_lost_after_the_frames_that_came_before(size: int | None) -> None:
    with between() as wire:
        wire.passed_on.sendall(wire.frame()[:size])
        wire.passed_on.close()
        if size is None:
            wire.reader.receive(hop(), (0,))
            wire.check_rows()
        with pytest.raises(PeerLost, match=r"attention 0 closed .*layer 5, micro-batch 0"):
            wire.reader.receive(hop(), (0,))


def test_another_awaited_peer_that_ends_is_lost_at_once() -> None:
    with connected() as (left_0, right_0), connected() as (left_1, right_1):
        reader = lines_of(make_shape(), "expert", right_0, right_1)
        left_1.close()
        with pytest.raises(PeerLost, match="attention 1"):
            reader.receive(hop(0), (0, 1))
        with pytest.raises(DeadlineExceeded, match="attention 0"):
            reader.receive(hop(0, timeout_s=0.05), (0,))
        del left_0


def test_two_ends_that_send_large_frames_to_each_other_both_come_through() -> None:
    """Each frame is many times the kernel's buffers, and both send before they receive."""
    rows = 512
    shape = make_shape(hidden_size=1024, window_rows=rows, num_micro_batches=1)
    both_in_send = threading.Barrier(2, timeout=10)

    def exchange(lines: TcpLines) -> None:
        both_in_send.wait()
        lines.send(hop(timeout_s=15.0), rows, 1)
        lines.receive(hop(timeout_s=15.0), (0,))

    with connected(buffer_bytes=4096) as (left, right), ThreadPoolExecutor(2) as pool:
        ends = lines_of(shape, "attention", left), lines_of(shape, "expert", right)
        sent = [fill(lines, shape, rows).hidden for lines in ends]
        list(pool.map(exchange, ends))
        for lines, rows_of_peer in zip(ends, reversed(sent), strict=True):
            assert torch.equal(lines.inbox(0, 0).hidden, rows_of_peer)


def test_a_peer_that_never_reads_is_a_deadline_and_one_that_ends_is_lost() -> None:
    rows = 2048
    shape = make_shape(hidden_size=1024, window_rows=rows, num_micro_batches=1)
    with connected(buffer_bytes=4096) as (left, right):
        lines = lines_of(shape, "attention", left)
        fill(lines, shape, rows)
        with pytest.raises(DeadlineExceeded, match="could not send to expert 0"):
            lines.send(hop(timeout_s=0.1), rows, 1)
        threading.Timer(0.05, right.shutdown, (socket.SHUT_RDWR,)).start()
        with pytest.raises(PeerLost, match="expert 0"):
            lines.send(hop(), rows, 1)


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

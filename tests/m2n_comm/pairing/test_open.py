"""Opening the data plane: accepted and refused peers, reasons, and no leaks."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import re
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from m2n_comm.emulate import LinkEmulation
from m2n_comm.host.frames.windows import PairLayout
from m2n_comm.host.shm import create_handles, map_handles
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.pairing import reception
from m2n_comm.pairing.addresses import Between, tune_socket
from m2n_comm.pairing.hello import Identity
from m2n_comm.waits import Waits
from tests.m2n_comm.harness import NIXL, make_shape, make_table
from tests.m2n_comm.pairing.meetings import Meeting
from topspin.errors import (
    ConfigError,
    DeadlineExceeded,
    FrameError,
    PeerLost,
    ProtocolError,
    StaleFrame,
    VersionMismatch,
)
from topspin.messages import ExpertPeer

BETWEEN = ("shm", "tcp", NIXL)


def open_fds() -> set[str]:
    """Return this process's descriptors and their targets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:
            continue
    return found


def attention() -> Identity:
    """Return the identity of attention node 0."""
    return Identity(role="attention", index=0, incarnation=1, shape=make_shape())


@pytest.fixture(params=BETWEEN)
def meeting(request: pytest.FixtureRequest) -> Any:
    """Yield a Meeting and check that it leaves no open descriptor."""
    with ThreadPoolExecutor(4) as pool:
        before = open_fds()
        made = Meeting(request.param, pool)
        yield made
        made.close()
    del made
    assert open_fds() <= before


FORMS = {
    "shm": r"unix:@topspin-[0-9a-f]{32}",
    "tcp": r"tcp:127\.0\.0\.1:\d+",
    "nixl": r"nixl:unix:@topspin-[0-9a-f]{32}",
}


def test_addresses_have_the_documented_form(meeting: Meeting) -> None:
    transport = next(each for each in FORMS if re.fullmatch(FORMS[each], meeting.listener.address))
    assert transport == meeting.transport
    meeting.close()  # and may be closed twice


def test_nodes_may_come_in_any_order(meeting: Meeting) -> None:
    expert = meeting.accept(3)
    for index in (2, 0, 1):
        meeting.connect(index)
    assert expert.result(10).registered_bytes > 0


CHANGED_SHAPES = {
    "hidden_size": 32,
    "top_k": 2,
    "num_layers": 3,
    "payload": torch.bfloat16,
    "window_rows": 9,
    "num_micro_batches": 2,
}


@pytest.mark.parametrize(
    ("meeting", "field"),
    list(zip(itertools.cycle(("shm", "tcp")), CHANGED_SHAPES, strict=False)),
    indirect=["meeting"],
)
def test_another_shape_is_refused_at_both_ends_by_name(meeting: Meeting, field: str) -> None:
    expert = meeting.accept()
    with pytest.raises(FrameError, match=f"{field} is .*, expected"):
        meeting.connect(shape=make_shape(**{field: CHANGED_SHAPES[field]}))
    with pytest.raises(FrameError, match=f"{field} is .*, expected"):
        expert.result(10)


@pytest.mark.parametrize("meeting", ["shm"], indirect=True)
def test_another_deadline_is_no_mismatch_and_the_link_travels_to_the_expert(
    meeting: Meeting,
) -> None:
    expert = meeting.accept()
    meeting.connect(shape=make_shape(deadline_s=3.0), link=LinkEmulation(latency_us=7.0, gbps=2.0))
    shaper = expert.result(10)._shapers[0]
    assert shaper is not None
    assert shaper.deliver_ns(1000, now_ns=0) == 4000 + 7000


@pytest.mark.parametrize("meeting", ["tcp"], indirect=True)
def test_another_revision_is_refused_at_both_ends(meeting: Meeting) -> None:
    expert = meeting.accept()
    with pytest.raises(VersionMismatch, match="revision is abc, expected"):
        meeting.connect(revision="abc")
    with pytest.raises(VersionMismatch, match="revision is abc, expected"):
        expert.result(10)


def test_a_past_life_is_refused_and_does_not_disturb_the_next(meeting: Meeting) -> None:
    expert = meeting.accept(2)
    with pytest.raises(StaleFrame, match="attention_incarnation is 49, expected 50"):
        meeting.connect(incarnation=49)
    with pytest.raises(StaleFrame, match="expert_incarnation is 6, expected 7"):
        meeting.connect(expert_incarnation=6)
    with pytest.raises(StaleFrame, match="attention 4 is unknown"):
        meeting.connect(4)
    meeting.connect()
    with pytest.raises(StaleFrame, match="attention 0 is unknown or connected already"):
        meeting.connect()
    meeting.connect(1)
    expert.result(10)


STRANGE = {
    "silence": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge": b"TSHS" + struct.pack("<I", 2**31),
    "empty": b"TSHS" + struct.pack("<I", 0),
    "garbage": b"TSHS" + struct.pack("<I", 6) + b"\xc1\xff\x00abc",
    "half": b"TSHS" + struct.pack("<I", 100) + b"abc",
}


@pytest.mark.parametrize(
    ("meeting", "kind"),
    list(zip(itertools.cycle(("tcp", "shm")), STRANGE, strict=False)),
    indirect=["meeting"],
)
def test_a_stranger_does_not_disturb(meeting: Meeting, kind: str) -> None:
    with meeting.stranger() as stranger:
        stranger.sendall(STRANGE[kind])
        expert = meeting.accept()
        meeting.connect()
        expert.result(10)


@pytest.mark.parametrize("meeting", ["tcp"], indirect=True)
def test_who_is_missing_and_who_was_refused_is_named(meeting: Meeting) -> None:
    with meeting.stranger() as stranger:
        stranger.sendall(STRANGE["huge"])
        expert = meeting.accept(3, timeout_s=0.5)
        meeting.connect(1)
        with pytest.raises(
            DeadlineExceeded, match=r"attention nodes \[0, 2\] did not connect; refused: .*bytes"
        ):
            expert.result(10)


@pytest.mark.parametrize("meeting", ["shm"], indirect=True)
def test_who_says_nothing_is_refused_while_the_others_are_waited_for(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "SILENCE_S", 0.05)
    with meeting.stranger() as stranger:
        expert = meeting.accept(timeout_s=0.4)
        stranger.settimeout(5.0)
        assert stranger.recv(1) == b""  # closed by the expert node before its own deadline
        with pytest.raises(DeadlineExceeded, match="refused: this host: it said nothing"):
            expert.result(10)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_refusal_by_the_second_expert_gives_back_what_the_first_sent(transport: Between) -> None:
    _refuse_at_the_second_expert(transport)
    # The errors are gone after the call; their tracebacks may be cycles that hold mappings.
    gc.collect()
    assert not [fd for fd in open_fds() if "eventfd" in fd or "topspin-m2n" in fd]


def _refuse_at_the_second_expert(transport: Between) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = Meeting(transport, pool), Meeting(transport, pool)
        accepted = first.accept()
        refusing = second.accept(index=1, timeout_s=0.5)
        peers = [
            ExpertPeer(address=first.listener.address, incarnation=7),
            ExpertPeer(address=second.listener.address, incarnation=6),
        ]
        with pytest.raises(StaleFrame):
            first.connect(experts=peers, table=make_table(make_shape(), 2))
        accepted.result(10)
        with pytest.raises(DeadlineExceeded):
            refusing.result(10)
        first.close()
        second.close()


@pytest.mark.parametrize("meeting", ["tcp"], indirect=True)
def test_an_expert_that_does_not_answer_is_a_deadline(meeting: Meeting) -> None:
    with pytest.raises(DeadlineExceeded, match="expert 0 did not answer"):
        meeting.connect(timeout_s=0.2)


def test_an_expert_that_is_gone_is_lost(meeting: Meeting) -> None:
    meeting.listener.close()
    with pytest.raises(PeerLost, match=r"expert 0: (nixl:)?(unix|tcp):"):
        meeting.connect()


def test_nobody_can_connect_once_all_are_there(meeting: Meeting) -> None:
    expert = meeting.accept()
    meeting.connect()
    expert.result(10)
    with pytest.raises(PeerLost):
        meeting.connect()


@pytest.mark.parametrize("meeting", ["tcp"], indirect=True)
def test_a_table_that_does_not_fit_closes_what_was_opened(meeting: Meeting) -> None:
    expert = meeting.accept()
    with pytest.raises(ProtocolError, match="over 2 nodes"):
        meeting.connect(table=make_table(make_shape(), 2))
    expert.result(10)


@pytest.mark.parametrize("meeting", ["tcp"], indirect=True)
def test_an_incarnation_beyond_64_bits_is_refused(meeting: Meeting) -> None:
    with pytest.raises(ConfigError, match="does not fit 64 bits"):
        meeting.connect(incarnation=2**64)


def test_connections_for_rows_are_not_paced() -> None:
    with socket.socket() as sock:
        option = socket.IPPROTO_TCP, socket.TCP_CONGESTION
        try:
            sock.setsockopt(*option, b"bbr")
        except OSError:
            pytest.skip("this kernel has no BBR, or does not allow it")
        tune_socket(sock)
        assert sock.getsockopt(*option, 16).rstrip(b"\0") in (b"cubic", b"reno")


@pytest.mark.parametrize("address", ["local", "tcp:127.0.0.1:x", "tcp:127.0.0.1:0", "unix:/tmp/x"])
def test_an_address_of_another_form_is_named(address: str) -> None:
    shape = make_shape()
    peer = ExpertPeer(address=address, incarnation=1)
    with pytest.raises(ConfigError, match=f"expert 0: '{address}'"):
        connect_attention(attention(), [peer], make_table(shape, 1), Waits(timeout_s=1.0))


def test_local_is_not_between_processes() -> None:
    with pytest.raises(ConfigError, match="local: between processes use shm, tcp, nixl or"):
        listen_expert("local")  # type: ignore[arg-type]


def test_another_user_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    with ThreadPoolExecutor(1) as pool:
        meeting = Meeting("shm", pool)
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        with pytest.raises(PeerLost, match="belongs to another user"):
            meeting.connect()
        expert = meeting.accept(timeout_s=0.3)
        with (
            meeting.stranger(),
            pytest.raises(DeadlineExceeded, match="refused: a connection of another user"),
        ):
            expert.result(10)
        meeting.close()


def test_shared_memory_of_another_size_or_that_a_peer_could_resize_is_refused() -> None:
    layout = PairLayout(make_shape())
    unsealed, handles = os.memfd_create("unsealed"), create_handles(layout)
    try:
        os.ftruncate(unsealed, layout.total_bytes)
        with pytest.raises(FrameError, match="not sealed"):
            map_handles(layout, unsealed)
        for size in (0, layout.total_bytes + mmap.PAGESIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(handles.memory, size)
        with pytest.raises(FrameError, match="bytes, expected"):
            map_handles(PairLayout(make_shape(window_rows=99)), handles.memory)
    finally:
        for fd in (unsealed, *handles):
            os.close(fd)


def test_closing_unmaps_the_windows_and_leaves_no_file() -> None:
    gc.collect()  # cycles that earlier tests left behind
    files = set(Path("/dev/shm").iterdir())
    with ThreadPoolExecutor(1) as pool:
        meeting = Meeting("shm", pool)
        expert = meeting.accept()
        meeting.connect()
        expert.result(10)
        assert Path("/proc/self/maps").read_text().count("memfd:topspin-m2n") == 2
        meeting.close()
    assert "memfd:topspin-m2n" not in Path("/proc/self/maps").read_text()
    assert set(Path("/dev/shm").iterdir()) == files

"""Pairs over tcp between nodes with keys: who is let in, and who is refused without disturbing."""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from app.cli.keys import make, rotate
from m2n_comm.host.expert_side import ExpertSide
from m2n_comm.host.frames import tcp_frames
from m2n_comm.open import connect_stage, listen_expert
from m2n_comm.pairing import reception
from m2n_comm.pairing.addresses import check_host
from m2n_comm.pairing.handshake import send_message
from m2n_comm.pairing.hello import Identity
from m2n_comm.pairing.session import Trust
from m2n_comm.waits import Waits
from tests.m2n_comm.harness import (
    make_shape,
    make_table,
    make_ticket,
)
from tests.m2n_comm.pairing.meetings import ATTENTION, EXPERT, Meeting, meeting_of, of
from topspin.errors import (
    ConfigError,
    DeadlineExceeded,
    PeerLost,
    StaleFrame,
    UntrustedPeer,
)
from topspin.messages import ExpertPeer
from topspin.processes.listening import has_ipv6
from topspin.processes.node_network import ON_ONE_HOST, NodeNetwork

GROUPS = ("attention", "expert", "gateway")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make(tmp_path / "keys", GROUPS)
    return tmp_path / "keys"


@pytest.mark.parametrize("ends", ["both", "one", "none"])
def test_nodes_with_keys_exchange_rows(
    keys: Path, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the codes of compiled code at both ends, at one, and at none."""
    made = {"both": [True] * 4, "one": [True, True, False, False], "none": [False] * 4}[ends]
    make_codes = tcp_frames.make
    monkeypatch.setattr(tcp_frames, "make", lambda each: make_codes(each) if made.pop() else None)
    with meeting_of("tcp", of(keys, "expert", "attention")) as meeting:
        expert = meeting.accept()
        attention = meeting.connect(0, of(keys, "attention", "expert"))
        meeting.check(attention, expert.result(10))
    assert made == []


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
@pytest.mark.parametrize("with_keys", [True, False])
def test_rows_travel_over_ipv6(keys: Path, with_keys: bool) -> None:
    expert, attention = NodeNetwork("::1"), ON_ONE_HOST
    if with_keys:
        expert, attention = of(keys, "expert", host="::1"), of(keys, "attention")
    with meeting_of("tcp", expert) as meeting:
        assert meeting.listener.address.startswith("tcp:[::1]:")
        accepted = meeting.accept()
        net = meeting.connect(0, attention)
        if with_keys:
            meeting.check(net, accepted.result(10))
        else:
            accepted.result(10)


def test_stages_prove_their_keys_too(keys: Path) -> None:
    shape = make_shape()
    listener = listen_expert("tcp", of(keys, "attention", "attention"))
    stage = Identity(role="expert", index=0, incarnation=EXPERT, shape=shape)
    head = Identity(role="attention", index=0, incarnation=ATTENTION, shape=shape)
    peer = ExpertPeer(address=listener.address, incarnation=EXPERT)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept_head, stage, 0, ATTENTION, Waits(timeout_s=10.0))
        with pytest.raises(UntrustedPeer):
            connect_stage(head, 0, peer, Waits(timeout_s=10.0), network=of(keys, "gateway"))
        with pytest.raises(UntrustedPeer):
            connect_stage(head, 0, peer, Waits(timeout_s=10.0))
        first = connect_stage(
            head, 0, peer, Waits(timeout_s=10.0), network=of(keys, "attention", "attention")
        )
        last = accepted.result(10)
    rows = torch.randn(3, shape.hidden_size)
    for link in (first, last):
        link.begin(make_ticket(1))
    first.send(0, rows)
    got = torch.empty_like(rows)
    last.receive(0, got)
    assert torch.equal(got, rows)
    for end in (first, last, listener):
        end.close()


def refused_then_formed(meeting: Meeting, keys: Path, intrude: Callable[[], None]) -> None:
    """Let somebody try between two nodes that connect; check that these form their pairs."""
    expert = meeting.accept(2)
    before = meeting.connect(0, of(keys, "attention"))
    intrude()
    meeting.connect(1, of(keys, "attention"))
    net = expert.result(10)
    assert isinstance(net, ExpertSide)
    meeting.check(before, net)


REFUSED_KEY = r"expert 0 at 127\.0\.0\.1:\d+: key [0-9a-f]{16}\.\.\. is not accepted here"


def test_strangers_are_refused_at_either_end_and_disturb_nobody(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an unknown key, of another group, without a key, of another life with the right one."""
    make(tmp_path / "others", GROUPS)
    with meeting_of("tcp", of(keys, "expert", "attention", "stage")) as meeting:

        def intrude() -> None:
            for network, message in (
                (of(tmp_path / "others", "attention"), REFUSED_KEY),
                (of(keys, "gateway"), REFUSED_KEY),
                (of(keys, "attention", "gateway"), REFUSED_KEY),
                (ON_ONE_HOST, r"at 127.*: a peer must prove its key first"),
            ):
                with pytest.raises(UntrustedPeer, match=message):
                    meeting.connect(1, network)
            # A refusal within a session is as trustworthy as a hello.
            with pytest.raises(StaleFrame, match="attention_incarnation is 3, expected 51"):
                meeting.connect(1, of(keys, "attention"), incarnation=3)

        refused_then_formed(meeting, keys, intrude)
    assert "refused a connection: 127.0.0.1:" in caplog.text
    for reason in ("not accepted", "must prove its key first"):
        assert reason in caplog.text


def test_an_expert_node_of_an_unknown_key_is_refused(keys: Path, tmp_path: Path) -> None:
    """Whoever listens at an expert node's address must be the one that has its key."""
    make(tmp_path / "others", GROUPS)
    # It accepts our key, which is no secret.
    public = (keys / "attention" / "attention.public").read_bytes()
    (tmp_path / "others" / "expert" / "ours.public").write_bytes(public)
    with meeting_of("tcp", of(tmp_path / "others", "expert")) as meeting:
        expert = meeting.accept(timeout_s=0.5)
        with pytest.raises(UntrustedPeer, match=REFUSED_KEY):
            meeting.connect(0, of(keys, "attention"))
        with pytest.raises(DeadlineExceeded, match=r"refused: 127\.0\.0\.1:\d+: "):
            expert.result(10)


def test_a_revoked_key_is_refused_and_no_step_of_a_rotation_disturbs(
    keys: Path, tmp_path: Path
) -> None:
    """Processes keep their directories; who has only a copy of before is shut out at the end."""
    old = tmp_path / "old"
    subprocess.run(["cp", "-a", keys, old], check=True)
    expert_keys, attention_keys = of(keys, "expert"), of(keys, "attention")
    with meeting_of("tcp", expert_keys) as meeting:
        for generation, step in enumerate(("add", "switch", "retire")):
            expert = meeting.accept(reuse=True)
            attention = meeting.connect(0, attention_keys)
            meeting.check(attention, expert.result(10), step=generation + 1)
            if step != "retire":
                expert = meeting.accept(reuse=True)
                attention = meeting.connect(0, of(old, "attention"))
                meeting.check(attention, expert.result(10))
            rotate(keys, step)

        def intrude() -> None:
            with pytest.raises(UntrustedPeer, match=REFUSED_KEY):
                meeting.connect(1, of(old, "attention"))

        refused_then_formed(meeting, keys, intrude)


def test_a_peer_with_keys_is_refused_by_one_without(keys: Path, caplog: Any) -> None:
    with meeting_of("tcp") as meeting:
        expert = meeting.accept()
        with pytest.raises(UntrustedPeer, match=r"expert 0 at 127.*: this node has no keys"):
            meeting.connect(0, of(keys, "attention"))
        meeting.connect()
        expert.result(10)
    assert "refused a connection: 127.0.0.1:" in caplog.text


def test_an_expert_node_that_answers_without_keys_is_refused(keys: Path) -> None:
    """It sends a hello where an offer of its key is due."""
    me = Identity(role="expert", index=0, incarnation=EXPERT, shape=make_shape())
    with socket.create_server(("127.0.0.1", 0)) as server, meeting_of("tcp") as meeting:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                send_message(sock, me.hello(0, ATTENTION))
                sock.recv(2**16)

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UntrustedPeer, match=r"expert 0 at 127.*: it offers no key"):
            meeting.connect(0, of(keys, "attention"), address=address)
        thread.join(10)


class Wire:
    """Somebody between an attention node and an expert node: takes connections, passes bytes on."""

    def __init__(self, address: str, change: Callable[[int, bytes], bytes]) -> None:
        """`change(number, data)` is called for what the attention node sends, message by message.

        What it returns is passed on; `taken` keeps what was sent.
        """
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._server.getsockname()[1]}"
        self._to = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._change = change
        self.taken: list[bytes] = []
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        near, _ = self._server.accept()
        far = socket.create_connection(self._to)
        back = threading.Thread(target=self._pass_back, args=(far, near), daemon=True)
        back.start()
        with near, far, contextlib.suppress(OSError):
            while message := _message(near):
                self.taken.append(message)
                far.sendall(self._change(len(self.taken) - 1, message))
            far.shutdown(socket.SHUT_RDWR)
            back.join(10)

    def _pass_back(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := far.recv(2**16):
                near.sendall(data)
            near.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.close()
        for thread in self._threads:
            thread.join(10)


def _rest(sock: socket.socket) -> bytes:
    """Return all that comes until the other end closes the connection."""
    with contextlib.suppress(ConnectionError), sock.makefile("rb") as stream:
        return stream.read()
    return b""


def _message(sock: socket.socket) -> bytes:
    """Return one message of the handshake."""
    try:
        head = sock.recv(8, socket.MSG_WAITALL)
        return head + sock.recv(int.from_bytes(head[4:], "little"), socket.MSG_WAITALL)
    except OSError:
        return b""


def test_a_bit_that_flips_in_the_handshake_is_noticed(keys: Path) -> None:
    """In the offer of keys, the proof and the hello of an attention node, and their codes."""

    def intrude() -> None:
        for number, place in itertools.product(range(3), (12, -20, -1)):

            def flip(idx: int, message: bytes, number: int = number, place: int = place) -> bytes:
                changed = bytearray(message)
                changed[place] ^= idx == number
                return bytes(changed)

            wire = Wire(meeting.listener.address, flip)
            with pytest.raises((UntrustedPeer, PeerLost)):
                meeting.connect(1, of(keys, "attention"), address=wire.address)
            wire.close()

    with meeting_of("tcp", of(keys, "expert")) as meeting:
        refused_then_formed(meeting, keys, intrude)


def test_a_replayed_handshake_forms_no_pair(keys: Path, caplog: Any) -> None:
    """All that an attention node once sent, sent again: the other end has a new key by then."""
    with meeting_of("tcp", of(keys, "expert")) as meeting:
        expert = meeting.accept(reuse=True)
        wire = Wire(meeting.listener.address, lambda _, message: message)
        net = meeting.connect(0, of(keys, "attention"), address=wire.address)
        expert.result(10)
        net.close()
        wire.close()
        assert len(wire.taken) == 3

        def intrude() -> None:
            with meeting.stranger() as sock:
                sock.sendall(b"".join(wire.taken))
                assert b"PairHello" not in _rest(sock)

        refused_then_formed(meeting, keys, intrude)
    assert "a message is not of the peer that has the key" in caplog.text


def test_who_offers_a_key_and_proves_none_is_refused(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "SILENCE_S", 0.05)
    offer = Trust(of(keys, "attention").keys).begin("attention").offer
    with meeting_of("tcp", of(keys, "expert")) as meeting:

        def intrude() -> None:
            with meeting.stranger() as sock:
                send_message(sock, offer)
                _rest(sock)

        refused_then_formed(meeting, keys, intrude)


@pytest.mark.parametrize(("keyed", "offers"), [(True, False), (True, True), (False, False)])
def test_silent_strangers_do_not_keep_a_peer_out(
    keys: Path,
    keyed: bool,
    offers: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also more of them than have room, and those who say whose key they have."""
    monkeypatch.setattr(reception, "SILENCE_S", 60.0)  # nobody's time runs out
    num_strangers = reception.MAX_PENDING + 50
    offer = Trust(of(keys, "attention").keys).begin("attention").offer
    with ExitStack() as stack:
        network = of(keys, "expert") if keyed else ON_ONE_HOST
        meeting = stack.enter_context(meeting_of("tcp", network))
        expert = meeting.accept()
        for _ in range(num_strangers):
            sock = stack.enter_context(meeting.stranger())
            with contextlib.suppress(OSError):  # it may have had to go already
                if offers:
                    send_message(sock, offer)
        meeting.connect(0, of(keys, "attention") if keyed else ON_ONE_HOST)
        expert.result(10)
    assert "it was silent, and others came" in caplog.text


class Countdown:
    """A check that says when it has been called some times."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.done = threading.Event()

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.done.set()


def test_a_slow_expert_node_does_not_end_the_pairs_with_others(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faster one knows the peer by then, and waits for its hello as long as for any peer."""
    monkeypatch.setattr(reception, "SILENCE_S", 0.1)
    table, mine = make_table(make_shape(), 2), of(keys, "expert")
    with (
        meeting_of("tcp", mine) as fast,
        meeting_of("tcp", mine) as slow,
        ThreadPoolExecutor(1) as pool,
    ):
        peers = [
            ExpertPeer(address=each.listener.address, incarnation=EXPERT) for each in (fast, slow)
        ]
        nothing_came = Countdown(3)
        first = fast.accept(check=nothing_came, table=table)
        attention = pool.submit(fast.connect, 0, of(keys, "attention"), experts=peers, table=table)
        # Each for as long as a stranger may keep silent, and longer.
        assert nothing_came.done.wait(10)
        second = slow.accept(index=1)
        for each in (attention, first, second):
            each.result(10)


def test_a_host_beyond_this_one_needs_keys_and_nixl_a_trusted_network(keys: Path) -> None:
    me = Identity(role="attention", index=0, incarnation=1, shape=make_shape())

    def dial(host: str, **others: Any) -> None:
        peer = ExpertPeer(address=f"tcp:{host}:5", incarnation=2)
        connect_stage(me, 0, peer, Waits(timeout_s=0.05), **others)

    away = "192.0.2.1"  # of no network: RFC 5737
    for host in ("0.0.0.0", "example.org", away):
        needs_keys = f"tcp: host '{host}' is not an IPv4 loopback .* nodes need keys"
        with pytest.raises(ConfigError, match=needs_keys):
            listen_expert("tcp", NodeNetwork(host))
        with pytest.raises(ConfigError, match=needs_keys):
            dial(host)
    with pytest.raises(ConfigError, match="cannot listen: Cannot assign requested address"):
        listen_expert("tcp", of(keys, "expert", host=away))
    with pytest.raises((PeerLost, DeadlineExceeded)):
        dial(away, network=of(keys, "expert"))
    with pytest.raises(ConfigError, match=f"nixl: host '{away}' is not .* nodes need keys"):
        check_host("nixl", away, NodeNetwork(trusted_network=True))
    with pytest.raises(ConfigError, match=r"nixl: .* no authentication code; set trusted_network"):
        check_host("nixl", away, of(keys, "expert"))
    check_host("nixl", away, of(keys, "expert")._replace(trusted_network=True))


@pytest.mark.slow
def test_nodes_without_keys_need_no_package_for_them() -> None:
    code = "import sys, m2n_comm.open; sys.exit('cryptography' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])

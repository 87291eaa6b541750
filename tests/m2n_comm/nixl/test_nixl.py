"""Features of nixl alone: buckets, keys, notes, checked lines, memory that outlives a net."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from m2n_comm import open as opener
from m2n_comm.net import NetShape
from m2n_comm.nixl.agent import load_nixl, row_buckets
from m2n_comm.nixl.forming import NixlForming
from m2n_comm.nixl.lines import NOTE, notes_of
from m2n_comm.open import connect_attention, listen_expert
from m2n_comm.pairing.handshake import Meeting
from m2n_comm.pairing.hello import Identity, PairMemory
from m2n_comm.waits import Waits
from tests.m2n_comm.harness import (
    HAS_NIXL,
    few_rows,
    fleet_of,
    make_shape,
    make_table,
    make_ticket,
    rally,
)
from topspin.errors import ConfigError, FrameError, PeerLost
from topspin.messages import ExpertPeer
from topspin.processes.node_network import NodeNetwork


@pytest.mark.parametrize("window_rows", [1, 2, 3, 8, 100, 256, 65536])
def test_every_number_of_rows_has_a_bucket_that_wastes_at_most_a_third(window_rows: int) -> None:
    buckets = row_buckets(window_rows)
    assert buckets[0] == 0
    assert buckets[-1] == window_rows
    assert buckets == tuple(sorted(set(buckets)))
    assert len(buckets) <= 35
    for smaller, larger in itertools.pairwise(buckets):
        # The worst frame of a bucket has one row more than the previous bucket.
        assert 3 * (larger - smaller - 1) <= larger


def test_notes_of_past_lives_are_ignored_and_others_must_be_whole() -> None:
    notes = notes_of({"old": [b"junk"], "now": [NOTE.pack(3, 9), NOTE.pack(0, 2**63)]}, {"now": 5})
    assert notes == [(5, 3, 9), (5, 0, 2**63)]
    with pytest.raises(FrameError, match="a notification of now has 3 bytes"):
        notes_of({"now": [b"abc"]}, {"now": 5})


def test_a_missing_package_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r"--transport nixl: .*pip install -e '\.\[rdma\]'"):
        load_nixl()
    with pytest.raises(ConfigError, match="--transport nixl"):
        listen_expert("nixl")


def test_expert_nodes_must_all_use_nixl_or_none() -> None:
    shape = make_shape()
    peers = [ExpertPeer(address="nixl:unix:@a", incarnation=1)]
    peers.append(ExpertPeer(address="unix:@b", incarnation=2))
    me = Identity(role="attention", index=0, incarnation=1, shape=shape)
    with pytest.raises(ConfigError, match="one transport, found nixl and shm"):
        connect_attention(me, peers, make_table(shape, 2), Waits(timeout_s=1.0))


@HAS_NIXL
def test_a_host_makes_it_the_address_of_a_handshake_over_tcp() -> None:
    listener = listen_expert("nixl", NodeNetwork("127.0.0.1"))
    assert listener.address.startswith("nixl:tcp:127.0.0.1:")
    listener.close()
    with pytest.raises(ConfigError, match="not an IPv4 loopback address"):
        listen_expert("nixl", NodeNetwork("10.0.0.1"))


@pytest.fixture
def forming() -> Iterator[NixlForming]:
    """Yield an attention node that is about to form pairs."""
    me = Identity(role="attention", index=0, incarnation=1, shape=make_shape())
    forming = NixlForming(me, Waits(timeout_s=0.0), deadline_s=0.0, one_host=True)
    yield forming
    forming.close()
    forming.close()


@HAS_NIXL
def test_memory_that_does_not_fit_is_refused(forming: NixlForming) -> None:
    me = Identity(role="attention", index=0, incarnation=1, shape=make_shape())
    hello, _ = forming.offer(0, me.hello(0, 2))
    memory = hello.memory
    assert memory is not None

    def take(offered: PairMemory | None) -> None:
        sock: Any = None  # is not reached
        forming.take(0, Meeting(sock, msgspec.structs.replace(hello, memory=offered), ()))

    with pytest.raises(FrameError, match="expert 0 offers no memory"):
        take(None)
    with pytest.raises(FrameError, match="windows of expert 0: 8 bytes, expected"):
        take(msgspec.structs.replace(memory, size_bytes=8))
    take(msgspec.structs.replace(memory, metadata=b"\0" * 40))
    with pytest.raises(FrameError, match="the peer's metadata is refused"):
        forming.prove(0)


STEPS = [make_ticket(step, m=2) for step in (1, 2, 3)]


@HAS_NIXL
def test_hosts_apart_use_tcp_and_find_dead_peers_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between hosts UCX checks its peers itself, so its shared memory is not used."""
    modes: list[bool] = []

    class Apart(NixlForming):
        def __init__(self, *args: Any, **settings: Any) -> None:
            modes.append(settings["one_host"])
            super().__init__(*args, **settings | {"one_host": False})

    monkeypatch.setattr(opener, "NixlForming", Apart)
    with fleet_of("nixl") as fleet:
        fleet.check(STEPS, few_rows)
    assert modes == [True, True]


@HAS_NIXL
def test_only_the_bucket_of_a_frame_travels() -> None:
    shape = make_shape(window_rows=64)
    with fleet_of("nixl", shape=shape) as fleet:
        inbox = fleet.experts[0].lines.inbox(0, 0).hidden
        inbox.fill_(7.0)
        outbox = fleet.attention[0].lines.outbox(0, 0).hidden
        outbox.fill_(3.0)
        assert fleet.run([make_ticket(1)], rally(few_rows, {})) == {}  # 5 rows
        assert (inbox[6:] == 7.0).all()
        assert torch.equal(inbox[:6], outbox[:6])
        assert (inbox[5] == 3.0).all()  # padding


def mapped(address: int) -> bool:
    """Say whether `address` is in a mapping of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, _, high = line.split()[0].partition("-")
        if int(low, 16) <= address < int(high, 16):
            return True
    return False


@HAS_NIXL
def test_memory_of_a_closed_net_is_never_used_for_anything_else() -> None:
    """A peer stopped during a write could still complete it, by address alone."""
    addresses = []
    for _ in range(3):
        with fleet_of("nixl") as fleet:
            fleet.check(STEPS, few_rows)
            addresses.append(fleet.attention[0].lines.inbox(0, 0).hidden.data_ptr())
        del fleet
    assert len(set(addresses)) == 3
    assert all(mapped(address) for address in addresses)


@HAS_NIXL
def test_a_peer_that_leaves_while_its_line_is_proved_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = make_shape()
    listener = listen_expert("nixl")
    left = threading.Event()

    def leave(self: NixlForming, peer: int, end: object, sock: Any) -> None:
        if self._role == "expert":
            left.set()
            raise ConnectionResetError(104, "left")
        prove(self, peer, end, sock)  # type: ignore[arg-type]

    prove = NixlForming._prove
    monkeypatch.setattr(NixlForming, "_prove", leave)
    thread = threading.Thread(target=_accept_in_vain, args=(listener, shape))
    thread.start()
    me = Identity(role="attention", index=0, incarnation=50, shape=shape)
    peer = ExpertPeer(address=listener.address, incarnation=7)
    with pytest.raises(PeerLost, match="expert 0"):
        connect_attention(me, [peer], make_table(shape, 1), Waits(timeout_s=10.0))
    thread.join(10.0)
    assert left.is_set()


def _accept_in_vain(listener: Any, shape: NetShape) -> None:
    me = Identity(role="expert", index=0, incarnation=7, shape=shape)
    with pytest.raises(Exception, match="did not connect"):
        listener.accept(me, (50,), make_table(shape, 1), Waits(timeout_s=0.5))
    listener.close()


_SURVIVOR = """
from pathlib import Path
from tests.m2n_comm import test_processes as tests
tests.test_an_expert_process_serves_and_its_death_is_noticed_at_once("nixl", False, Path())
print("survived", flush=True)
"""


@HAS_NIXL
@pytest.mark.slow
def test_a_node_outlives_its_peer_to_an_orderly_exit() -> None:
    """UCX can abort a process that destroys an endpoint with requests of a dead peer."""
    done = subprocess.run(
        [sys.executable, "-c", _SURVIVOR],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "survived\n", done.stderr
    assert done.returncode == 0, done.stderr

"""CURVE on the control plane: who is let in, who is not, and keys that change under load."""

from __future__ import annotations

import contextlib
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from app.cli.keys import make, rotate
from tests.topspin.processes.peers import Gateway, exchange, wait_for
from topspin.errors import ConfigError, PeerLost
from topspin.messages import StatsQuery
from topspin.processes.channel import (
    AsyncControlClient,
    ControlClient,
    ControlServer,
    PeerGone,
)
from topspin.processes.keys import KeyDirectory, new_secret, public_of_secret, write_file
from topspin.processes.listening import has_ipv6
from topspin.processes.secure_channel import MAX_FILES

# ZMTP 3.1: signature, version, mechanism, not as CURVE's server, filler.
GREETING_WITHOUT_KEYS = (
    b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make(tmp_path / "keys", ["scheduler", "gateway", "expert"])
    return tmp_path / "keys"


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def of(keys: Path, group: str) -> KeyDirectory:
    return KeyDirectory(keys / group, group)


@pytest.fixture
def server(keys: Path, address: str) -> Iterator[ControlServer]:
    server = ControlServer(address, keys=of(keys, "scheduler"))
    yield server
    server.close()


def test_peers_are_of_the_group_whose_key_they_have(
    keys: Path, server: ControlServer, address: str
) -> None:
    for group in ("expert", "gateway"):
        client = ControlClient(address, keys=of(keys, group))
        peer = exchange(client, server, 1)
        assert [each for each in ("expert", "gateway") if server.may_be(peer, each)] == [group]
        client.close()
        assert wait_for(server, 1) == [PeerGone(peer)]
        assert not server.may_be(peer, group)


def assert_refused(client: ControlClient | Gateway, server: ControlServer) -> None:
    """The client's connection fails, and the server hears nothing of it."""
    with contextlib.closing(client):
        client.send(StatsQuery(query_id=1))
        with pytest.raises(PeerLost, match="in the handshake: keys or users differ"):
            client.recv(10.0)
    assert server.poll(0.1) == []


def test_an_unknown_key_is_refused(
    keys: Path,
    server: ControlServer,
    address: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stranger = tmp_path / "stranger"
    shutil.copytree(keys / "expert", stranger)
    secret = new_secret()
    write_file(stranger / "expert.secret", [secret], mode=0o440)
    write_file(stranger / "expert.public", [public_of_secret(secret)], mode=0o440)
    assert_refused(ControlClient(address, keys=KeyDirectory(stranger, "expert")), server)
    assert "refused a peer whose key is not accepted" in caplog.text
    with contextlib.closing(ControlClient(address, keys=of(keys, "expert"))) as known:
        exchange(known, server, 2)


@pytest.mark.parametrize("connect", [ControlClient, Gateway])
def test_who_has_no_keys_and_who_is_not_trusted_do_not_talk(
    keys: Path, address: str, connect: type[ControlClient | Gateway]
) -> None:
    """Nor does a peer with keys to a process without, or to an expert node that listens there."""
    with contextlib.closing(ControlServer(address, keys=of(keys, "scheduler"))) as server:
        with contextlib.closing(connect(address, keys=of(keys, "gateway"))) as client:
            exchange(client, server)
        wait_for(server, 1)
        assert_refused(connect(address), server)
    for impostor in (None, of(keys, "expert")):
        with contextlib.closing(ControlServer(address, keys=impostor)) as server:
            assert_refused(connect(address, keys=of(keys, "gateway")), server)


@pytest.mark.parametrize("connect", [ControlClient, Gateway])
def test_what_is_sent_behind_a_refusal_waits_for_nobody(
    keys: Path, connect: type[ControlClient | Gateway]
) -> None:
    """The refusing server is a bare socket, so that its greeting always comes before its end.

    From a ControlServer the client often sees the end alone. libzmq connects anew then and keeps
    the queue; only a greeting of another mechanism takes it away.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", keys=of(keys, "gateway"))
        sockets = client._client if isinstance(client, Gateway) else client
        with contextlib.closing(client), server.accept()[0] as connection:
            connection.sendall(GREETING_WITHOUT_KEYS)
            assert sockets._monitor.poll(10_000)
            # The monitor has the refusal before the queue is gone: nothing has read it yet.
            while sockets._socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
                pass
            client.send(StatsQuery(query_id=1))
            with pytest.raises(PeerLost, match="in the handshake: keys or users differ"):
                client.recv(10.0)
            client.send(StatsQuery(query_id=2))


def test_bytes_that_are_no_zeromq_disturb_nobody(
    keys: Path, server: ControlServer, address: str
) -> None:
    client = ControlClient(address, keys=of(keys, "expert"))
    peer = exchange(client, server, 1)
    port = int(address.rpartition(":")[2])
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" + bytes(8) + b"\x7f" + bytes(60)):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.settimeout(10.0)
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
                while sock.recv(4096):
                    pass
    assert exchange(client, server, 2) == peer
    client.close()


def test_keys_are_rotated_under_load(keys: Path, server: ControlServer, address: str) -> None:
    """A connection outlives its key; new ones are made with the new one only."""
    old = keys.parent / "old"
    shutil.copytree(keys / "expert", old)
    first = ControlClient(address, keys=of(keys, "expert"))
    peer = exchange(first, server, 1)
    for number, step in enumerate(("add", "switch", "retire"), start=2):
        rotate(keys, step)
        # The server looks at its directory at this poll.
        server._keys_checked_s = 0.0
        assert exchange(first, server, number) == peer
        with contextlib.closing(ControlClient(address, keys=of(keys, "expert"))) as second:
            exchange(second, server, number)
        assert isinstance(wait_for(server, 1)[0], PeerGone)
    assert_refused(ControlClient(address, keys=KeyDirectory(old, "expert")), server)
    first.close()
    # With the scheduler's new key, but an own one that was revoked.
    shutil.copy(keys / "expert" / "scheduler.public", old / "scheduler.public.new")
    (old / "scheduler.public.new").replace(old / "scheduler.public")
    wait_for(server, 1)
    assert_refused(ControlClient(address, keys=KeyDirectory(old, "expert")), server)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "[::]", "example.org"])
def test_addresses_that_others_reach_need_keys(host: str) -> None:
    for kind in (ControlServer, ControlClient, AsyncControlClient):
        with pytest.raises(ConfigError, match=r"other hosts can reach it, so it needs keys"):
            kind(f"tcp://{host}:7000")


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_all_addresses_are_of_both_families(keys: Path, address: str) -> None:
    port = address.rpartition(":")[2]
    with contextlib.closing(
        ControlServer(f"tcp://[::]:{port}", keys=of(keys, "scheduler"))
    ) as all_:
        for host in ("[::1]", "127.0.0.1", "localhost"):
            client = ControlClient(f"tcp://{host}:{port}", keys=of(keys, "expert"))
            peer = exchange(client, all_)
            client.close()
            assert wait_for(all_, 1) == [PeerGone(peer)]
    with (
        contextlib.closing(ControlServer(f"tcp://[::1]:{port}")) as own,
        contextlib.closing(ControlClient(f"tcp://[::1]:{port}")) as client,
    ):
        exchange(client, own)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://:70000"])
def test_addresses_that_are_none(keys: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=r"is not tcp://HOST:PORT"):
        ControlServer(address, keys=of(keys, "scheduler"))


def test_an_address_that_is_taken(keys: Path, server: ControlServer, address: str) -> None:
    for own in (of(keys, "scheduler"), None):
        with pytest.raises(ConfigError, match="Address already in use"):
            ControlServer(address, keys=own)


def test_what_travels_is_encrypted(keys: Path, server: ControlServer) -> None:
    assert server._socket.getsockopt(zmq.MECHANISM) == zmq.CURVE


def test_there_is_room_for_strangers(keys: Path, address: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        with contextlib.closing(ControlServer(address, keys=of(keys, "scheduler"))):
            allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert allowed == (MAX_FILES if hard < 0 else min(hard, MAX_FILES))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""The control channel: messages arrive, a closed peer is noticed once, errors are typed."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.mutations import damaged
from tests.topspin.processes.peers import Gateway, Node, exchange, say, wait_for
from topspin.errors import PeerLost, SchedulerLost
from topspin.messages import (
    AddRequest,
    Hello,
    Message,
    Refused,
    SamplingParams,
    StatsQuery,
    Stop,
    encode,
)
from topspin.processes import channel
from topspin.processes.channel import (
    ControlClient,
    ControlServer,
    Heartbeat,
    Malformed,
    PeerGone,
    Received,
)


@pytest.fixture
def address() -> str:
    return f"ipc://@topspin-test-{secrets.token_hex(8)}"


@pytest.fixture
def server(address: str) -> Iterator[ControlServer]:
    server = ControlServer(address)
    yield server
    server.close()


BOTH = pytest.mark.parametrize("connect", [Node, Gateway])


@BOTH
def test_messages_travel_both_ways(
    server: ControlServer, address: str, connect: type[Node | Gateway]
) -> None:
    client = connect(address)
    exchange(client, server, 7)
    client.close()


def test_a_gateway_reads_what_came_while_it_sent(server: ControlServer, address: str) -> None:
    """Sending may use up what libzmq tells the loop."""
    gateway = Gateway(address)
    peer = exchange(gateway, server, 7)
    server.send(peer, Stop(reason="came"))
    assert select.select([gateway._client._socket], [], [], 10.0)[0]
    assert gateway._client._socket.get(zmq.EVENTS) & zmq.POLLIN
    gateway._client.send(StatsQuery(query_id=8))
    assert gateway.recv() == Stop(reason="came")
    gateway.close()


def lost_and_refused(client: Node | Gateway, address: str) -> ControlServer:
    """Have a client lose its server, and be refused by the next one, which is returned.

    libzmq reconnects by itself and sends queued messages, without a Hello.
    """
    server = ControlServer(address)
    say(client, server)
    server.close()
    server = ControlServer(address)
    peer = say(client, server, 2)
    assert server.send(peer, Refused(reason="StatsQuery", is_before_hello=True))
    client.wait_until_ready("_socket")
    return server


@BOTH
def test_a_client_that_has_lost_its_server_connects_anew(
    address: str, connect: type[Node | Gateway]
) -> None:
    """A gateway does so as a new client."""
    client = connect(address)
    server = lost_and_refused(client, address)
    try:
        for _ in range(2 if isinstance(client, Node) else 1):  # it stays lost
            lost = SchedulerLost if isinstance(client, Node) else PeerLost
            with pytest.raises(lost, match="closed the control connection"):
                client.recv(10.0)
        if isinstance(client, Node):
            client.reconnect()
            client.send(StatsQuery(query_id=3))
            received: list[Received] = []
            while not received:
                received = [each for each in server.poll(10.0) if isinstance(each, Received)]
            assert [each.message for each in received] == [StatsQuery(query_id=3)]
            assert server.send(received[0].peer, Stop(reason="test"))
            assert client.recv(10.0) == Stop(reason="test")
    finally:
        client.close()
        server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_connect(server: ControlServer, address: str) -> None:
    # Imported before the change of user, as the other user may not be allowed to read the packages.
    code = (
        "import os, sys\n"
        "from topspin.processes.channel import ControlClient\n"
        "from topspin.errors import PeerLost\n"
        "from topspin.messages import StatsQuery\n"
        "uid = int(sys.argv[2])\n"
        "if uid: os.setgid(uid); os.setuid(uid)\n"
        "client = ControlClient(sys.argv[1])\n"
        "client.send(StatsQuery(query_id=uid))\n"
        "client.recv(60.0)\n"
    )
    strangers = [
        subprocess.Popen([sys.executable, "-c", code, address, str(uid)], stderr=subprocess.PIPE)
        for uid in (65534, 0)
    ]
    try:
        stranger, friend = strangers
        # Refused at once by the kernel's credentials, while a message of our own user arrives.
        assert b"closed the control connection" in stranger.communicate(timeout=20)[1]
        (event,) = wait_for(server, 1)
        assert isinstance(event, Received)
        assert event.message == StatsQuery(query_id=0)
        assert server.poll(0.01) == []
        friend.kill()
    finally:
        for process in strangers:
            process.kill()
            process.communicate()


def test_recv_returns_none_when_nothing_comes(server: ControlServer, address: str) -> None:
    client = ControlClient(address)
    assert client.recv(0.01) is None
    client.close()


def test_recv_is_woken_by_another_thread_but_messages_come_first(
    server: ControlServer, address: str
) -> None:
    client = ControlClient(address)
    peer = say(client, server)
    waker = threading.Timer(0.05, client.wake)
    waker.start()
    assert client.recv() is None
    waker.join()
    assert server.send(peer, Stop(reason="test"))
    assert client._socket.poll(10_000)
    client.wake()
    client.wake()
    assert client.recv() == Stop(reason="test")
    assert client.recv() is None
    assert client.recv(0.001) is None
    client.close()


def test_a_closed_client_is_reported_once_after_its_messages(
    server: ControlServer, address: str
) -> None:
    client = ControlClient(address)
    client.send(StatsQuery(query_id=1))
    client.send(StatsQuery(query_id=2))
    client.close()
    events = wait_for(server, 3)
    assert [type(event) for event in events] == [Received, Received, PeerGone]
    assert len({event.peer for event in events}) == 1
    assert server.poll(0.01) == []
    assert not server.send(events[0].peer, Stop(reason="gone"))


def test_descriptor_reuse_does_not_end_the_new_peer(server: ControlServer, address: str) -> None:
    for round_idx in range(20):
        client = ControlClient(address)
        client.send(StatsQuery(query_id=round_idx))
        events = wait_for(server, 1)
        client.close()
        events += wait_for(server, 1) if len(events) < 2 else []
        assert [type(event) for event in events] == [Received, PeerGone]
        assert events[0].peer == events[1].peer


def test_a_peer_that_is_back_comes_after_its_loss(server: ControlServer, address: str) -> None:
    """Else it would find its place taken; its last messages are read all the same."""
    client = ControlClient(address)
    client.send(StatsQuery(query_id=1))
    wait_for(server, 1)
    client.send(StatsQuery(query_id=2))
    client.close()
    again = ControlClient(address)
    again.send(StatsQuery(query_id=3))
    events = wait_for(server, 3)
    again.close()
    assert [type(event) for event in events] == [Received, PeerGone, Received]
    assert events[0].peer == events[1].peer != events[2].peer


def test_a_killed_process_is_noticed_by_its_closed_connection(
    server: ControlServer, address: str
) -> None:
    code = (
        "import sys, signal; from topspin.processes.channel import ControlClient;"
        "from topspin.messages import StatsQuery;"
        "c = ControlClient(sys.argv[1]); c.send(StatsQuery(query_id=1)); signal.pause()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, address])
    wait_for(server, 1)
    process.send_signal(signal.SIGKILL)
    killed_at = time.monotonic()
    process.wait()
    (event,) = wait_for(server, 1)
    assert isinstance(event, PeerGone)
    assert time.monotonic() - killed_at < 3.0  # heartbeats would take 5 s


FROZEN = """
import os, signal, sys
from topspin.processes.channel import ControlClient, ControlServer
from topspin.messages import StatsQuery
if sys.argv[1] == "client":
    client = ControlClient(sys.argv[2])
    client.send(StatsQuery(query_id=1))
    client.recv()
else:
    server = ControlServer(sys.argv[2])
    while not (events := server.poll(None)):
        pass
    server.send(events[0].peer, StatsQuery(query_id=1))
    server.poll(0.1)
os.kill(os.getpid(), signal.SIGSTOP)
"""
QUICK = Heartbeat(50, 150)


@contextmanager
def frozen(end: str, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run one end of a connection, which freezes once it has heard the other."""
    process = subprocess.Popen([sys.executable, "-c", FROZEN, end, address])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_silent_peer_is_told_from_one_that_closed(address: str) -> None:
    server = ControlServer(address, heartbeat=QUICK)
    with frozen("client", address):
        (first,) = wait_for(server, 1)
        server.send(first.peer, StatsQuery(query_id=1))
        assert wait_for(server, 1) == [
            PeerGone(first.peer, "was silent for 0.2 s", was_silent=True)
        ]
    with frozen("client", address) as process:
        (first,) = wait_for(server, 1)
        process.kill()
        assert wait_for(server, 1) == [PeerGone(first.peer, "closed its connection")]
    server.close()


@pytest.mark.slow
@BOTH
def test_a_silent_scheduler_is_told_from_one_that_closed(
    address: str, connect: type[Node | Gateway]
) -> None:
    with frozen("server", address):
        client = connect(address, heartbeat=QUICK)
        client.send(StatsQuery(query_id=1))
        assert client.recv(30.0) == StatsQuery(query_id=1)
        with pytest.raises(PeerLost, match=r"the scheduler was silent for 0\.2 s"):
            client.recv(30.0)
        client.close()


def test_a_scheduler_that_only_listens_does_not_answer(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is frozen, for a node that comes back: no key is wrong."""
    monkeypatch.setattr(channel, "HANDSHAKE_MS", 100)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address.removeprefix("ipc://@"))
        listener.listen()
        client = ControlClient(address)
        with pytest.raises(SchedulerLost, match=r"^the scheduler did not answer for 0\.1 s$"):
            client.recv()
        client.close()


@BOTH
@pytest.mark.parametrize("last", [Stop(reason="last"), Refused(reason="revision")])
def test_a_client_reads_what_came_before_the_end_then_raises(
    address: str, last: Message, connect: type[Node | Gateway]
) -> None:
    server = ControlServer(address)
    client = connect(address)
    peer = say(client, server)
    server.send(peer, Stop(reason="first"))
    server.send(peer, last)
    server.close()
    client.wait_until_ready("_monitor")
    assert client.recv(10.0) == Stop(reason="first")
    assert client.recv(10.0) == last
    with pytest.raises(PeerLost, match="the scheduler closed the control connection"):
        client.recv(10.0)
    client.close()


SAID = [
    encode(Hello(role="expert", index=1, incarnation=2, revision="0.1.0")),
    encode(
        AddRequest(request_id="r", prompt=b"\0" * 8, sampling=SamplingParams(max_tokens=1, seed=1))
    ),
]


def test_any_frames_are_events_of_their_sender(server: ControlServer, address: str) -> None:
    """Whatever is in them, and however many; others are heard as before."""
    other = ControlClient(address)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(address)
    frames = st.lists(st.binary(max_size=40) | damaged(SAID), min_size=1, max_size=3)

    @settings(max_examples=80)
    @given(frames)
    @example([b""])
    @example([b"", b""])
    @example([b"\xc1 not msgpack"])
    @example([b"\x91" * 100_000])
    def say(said: list[bytes]) -> None:
        stranger.send_multipart(said)
        other.send(StatsQuery(query_id=7))
        events = wait_for(server, 2)
        query = StatsQuery(query_id=7)
        [heard] = [each for each in events if getattr(each, "message", None) == query]
        [event] = [each for each in events if each is not heard]
        assert isinstance(event, Received | Malformed)
        assert event.peer != heard.peer
        assert isinstance(event, Malformed) or len(said) == 1

    say()
    stranger.close(0)
    context.term()
    other.close()

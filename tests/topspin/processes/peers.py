"""Both ends of a control connection, as tests call them."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

from topspin.messages import AnyMessage, Message, StatsQuery, Stop
from topspin.processes.channel import (
    AsyncControlClient,
    ControlClient,
    ControlServer,
    Event,
    Received,
)

Ready = Literal["_socket", "_monitor"]


class Gateway:
    """A gateway's end, called as that of a node is."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._runner = asyncio.Runner()

        async def open_client() -> AsyncControlClient:
            return AsyncControlClient(*args, **settings)

        self._client = self._runner.run(open_client())

    def send(self, message: Message) -> None:
        async def send() -> None:
            self._client.send(message)

        self._runner.run(send())

    def recv(self, timeout_s: float = 10.0) -> AnyMessage:
        return self._runner.run(asyncio.wait_for(self._client.recv(), timeout_s))

    def wait_until_ready(self, name: Ready) -> None:
        """Wait until there is something to read, or the end is known; read neither."""
        assert getattr(self._client, name).poll(10_000)
        # Asking has used up what libzmq tells the loop.
        self._client._look()
        self._client._look_for_loss()

    def close(self) -> None:
        async def close() -> None:
            self._client.close()

        self._runner.run(close())
        self._runner.close()


class Node(ControlClient):
    """A node's end."""

    def wait_until_ready(self, name: Ready) -> None:
        """Wait until there is something to read, or the end is known; read neither."""
        assert getattr(self, name).poll(10_000)


def wait_for(server: ControlServer, count: int) -> list[Event]:
    """Return the next events, `count` or more."""
    events: list[Event] = []
    deadline = time.monotonic() + 10
    while len(events) < count:
        assert time.monotonic() < deadline, f"only {events}"
        events += server.poll(0.1)
    return events


def say(client: ControlClient | Gateway, server: ControlServer, number: int = 1) -> bytes:
    """Send a message to the scheduler, who hears it; returns the client's id."""
    client.send(StatsQuery(query_id=number))
    (event,) = wait_for(server, 1)
    assert isinstance(event, Received)
    assert event.message == StatsQuery(query_id=number)
    return event.peer


def exchange(client: ControlClient | Gateway, server: ControlServer, number: int = 1) -> bytes:
    """Send a message both ways; returns the client's id."""
    peer = say(client, server, number)
    assert server.send(peer, Stop(reason="test"))
    assert client.recv(10.0) == Stop(reason="test")
    return peer

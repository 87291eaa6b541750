"""Whose received bytes are read next.

Owns the order: addresses take turns, and so do the connections of one. A few turns are taken before
the event loop goes on with everything else, so that nobody's bytes, however many and from however
many connections, keep it from streams and from other addresses for long. Knows no HTTP;
server.gateway.http.protocol enters its connections.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, Protocol

TURNS_AT_ONCE: Final = 16
"""A turn starts one request, or reads a slice of one: half a millisecond at most."""


class Connection(Protocol):
    """One that has bytes to read."""

    def take_turn(self) -> None:
        """Read a little; it may enter again."""


class Turns:
    """The connections of one server that wait for their turn; belongs to its event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[Connection, None]] = OrderedDict()
        self._is_scheduled = False

    def enter(self, connection: Connection, address: str) -> None:
        """Let `connection` of `address` have a turn soon; one that waits keeps its place."""
        self._waiting.setdefault(address, OrderedDict()).setdefault(connection)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._take_turns)

    def _take_turns(self) -> None:
        try:
            for _ in range(TURNS_AT_ONCE):
                if not self._waiting:
                    break
                address, connections = self._waiting.popitem(last=False)
                connection, _ = connections.popitem(last=False)
                if connections:
                    self._waiting[address] = connections
                connection.take_turn()
        finally:
            self._is_scheduled = False
            self._schedule()

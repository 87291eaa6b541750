"""Fairness among connections: the order in which their bytes are read, and places for open ones.

Owns the order: addresses take turns, and so do the connections of one. A few turns are taken before
the event loop goes on with everything else, so that nobody's bytes, however many and from however
many connections, keep it from streams and from other addresses for long.

Owns the number of places too. A stranger can open connections, and needs no key for it: the one
that has waited longest for a request makes room, so that those who have something to ask get in.
Knows no HTTP; server.gateway.http.protocol enters its connections and tells what happens to them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, Protocol

from topspin.process import allow_open_files

TURNS_AT_ONCE: Final = 8
"""A turn starts one request, or reads a slice of one: half a millisecond at most."""

MAX_CONNECTIONS: Final = 4096
# For files, pipes, the control connection, and connections that are being closed.
_SPARE_FILES: Final = 128


class TurnTaker(Protocol):
    """One that has bytes to read."""

    def take_turn(self) -> None:
        """Read a little; it may enter again."""


class _Address:
    """The connections of an address: those that have had few turns go first, three times of four.

    So a short request does not wait for all the long ones of its address.
    """

    def __init__(self) -> None:
        self._new: OrderedDict[TurnTaker, None] = OrderedDict()
        self._others: OrderedDict[TurnTaker, None] = OrderedDict()
        self._num_turns = 0

    def __bool__(self) -> bool:
        return bool(self._new or self._others)

    def add(self, connection: TurnTaker, *, is_new: bool) -> None:
        if connection not in self._new and connection not in self._others:
            (self._new if is_new else self._others)[connection] = None

    def pop(self) -> TurnTaker:
        self._num_turns += 1
        is_others = bool(self._others) and (not self._new or self._num_turns % 4 == 0)
        connection, _ = (self._others if is_others else self._new).popitem(last=False)
        return connection


class Turns:
    """The connections of one server that wait for their turn; belongs to its event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, _Address] = OrderedDict()
        self._is_scheduled = False

    def enter(self, connection: TurnTaker, address: str, *, is_new: bool = False) -> None:
        """Let `connection` of `address` have a turn soon; one that waits keeps its place.

        `is_new`: its request has had few.
        """
        waiting = self._waiting.get(address)
        if waiting is None:
            waiting = self._waiting[address] = _Address()
        waiting.add(connection, is_new=is_new)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._take_turns)

    def _take_turns(self) -> None:
        # All are chosen before: who has had a turn lets the loop go on before its next one.
        chosen = [self._pop() for _ in range(TURNS_AT_ONCE) if self._waiting]
        loop = asyncio.get_running_loop()
        for connection in chosen:
            try:
                connection.take_turn()
            except Exception as error:
                loop.call_exception_handler({"message": "a turn failed", "exception": error})
        # Behind what the turns have scheduled: an application refuses a request by its head.
        self._is_scheduled = False
        self._schedule()

    def _pop(self) -> TurnTaker:
        address, waiting = self._waiting.popitem(last=False)
        connection = waiting.pop()
        if waiting:
            self._waiting[address] = waiting
        return connection


class Guest(Protocol):
    """One that holds a place."""

    def give_way(self) -> None:
        """Close at once."""


def allowed_connections() -> int:
    """Return how many connections this process may have: MAX_CONNECTIONS, if it may open as many.

    Raises its limit of open files for that, if the system lets it.
    """
    num_files = allow_open_files(MAX_CONNECTIONS + _SPARE_FILES)
    return max(1, min(MAX_CONNECTIONS, num_files - _SPARE_FILES))


class Room:
    """The places for connections of one server; belongs to its event loop."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._open: set[Guest] = set()
        # As an ordered set: who has waited longest is first.
        self._waiting: dict[Guest, None] = {}

    def enter(self, connection: Guest) -> bool:
        """Give a new connection a place, where it waits; False: all have requests in progress."""
        if len(self._open) >= self._num_places:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            self.leave(oldest)
            oldest.give_way()
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def note(self, connection: Guest, *, waits: bool) -> None:
        """Note whether a connection waits for a request; one that waits already keeps its turn."""
        if waits and connection in self._open:
            self._waiting.setdefault(connection)
        else:
            self._waiting.pop(connection, None)

    def leave(self, connection: Guest) -> None:
        """Take back the place of a connection, if it has one."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

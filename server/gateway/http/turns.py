"""The order in which received bytes are read.

Owns the order: addresses take turns, and so do the connections of one. A few turns are taken before
the event loop goes on with everything else, so that nobody's bytes, however many and from however
many connections, keep it from streams and from other addresses for long. Knows no HTTP;
server.gateway.http.protocol enters its connections.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, Protocol

TURNS_AT_ONCE: Final = 8
"""A turn starts one request, or reads a slice of one: half a millisecond at most."""


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
